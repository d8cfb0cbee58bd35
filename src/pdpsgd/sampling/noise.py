"""Gaussian noise that survives finite precision: sums become integers, noise is added exactly, on a public grid.

Noise added in floating point has holes: some sums cannot come from some gradients, so the last bits of a noised sum
can tell gradients apart (Mironov, "On significance of the least significant bits for differential privacy", CCS 2012).
Here a sum is rounded to integer multiples of a public unit first (`quantize`), so that all later arithmetic is exact:
ranks add integers, noise is an integer, and the noised total is rounded to a public grid, a thousand times finer than
the noise. With exact Gaussian noise this is post-processing of the Gaussian mechanism. What the finite precision of the
noise itself adds is bounded in "Noise in finite precision" in `docs/theory.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pdpsgd.errors import fail
from pdpsgd.sampling import grid
from pdpsgd.sampling.grid import UNIT_BITS, Scale, unit_of
from pdpsgd.sampling.native import calls, dispatch
from pdpsgd.sampling.words import BitGenerator

if TYPE_CHECKING:
    import torch

# In clipping norms: no sum of fewer sampled people reaches it in any element, and 256 ranks may add theirs.
LARGEST_SUM = 2**22


def rounding_charge(numbers: int) -> float:
    """Return by how much, in clipping norms, `quantize` can move two neighboring sums further apart.

    >>> rounding_charge(2**16) == 2.0**8 * 2.0**-32
    True
    """
    return math.sqrt(numbers) * 2.0**-UNIT_BITS


def quantize(
    sums: Sequence[torch.Tensor], *, clipping_norm: float, out: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Round sums of clipped gradients to integer multiples of a public unit, 2^-32 clipping norms or a little less.

    Args:
        sums: Floating-point tensors, best of float64: the clipped sum of this rank.
        clipping_norm: The plan's clipping norm C, public.
        out: Where to write the results: contiguous tensors of int64 in the same shapes, on the same devices. It may
            be the memory of sums of float64 (`total.view(torch.int64)`). By default new tensors.

    Returns:
        `out`, or the new tensors. Ranks add theirs: exactly, in any order.

    Raises:
        PdpsgdError: If an element is not finite, or of 2^22 clipping norms or more. Clipped gradients of fewer than
            4,194,304 sampled people cannot do that, so that for those a refusal tells nothing about anybody.

    Guarantee: the scaling is by a power of two, so exact, and every element moves by at most half a unit. So for sums
    of d numbers altogether whose distance is at most x C, the results, times the unit, have a distance of at most
    (x + `rounding_charge(d)`) C = (x + sqrt(d) 2^-32) C. Clip that much below the norm that the noise is for.
    """
    import torch

    unit = unit_of(clipping_norm)
    largest = LARGEST_SUM * clipping_norm / unit
    code, quantized = dispatch.library(), list(out or [])
    for place, total in enumerate(sums):
        if not total.is_floating_point():
            fail(f"Expected sums[{place}] to hold floating-point numbers. Got {total.dtype}.")
        if out is None:
            quantized.append(torch.empty(total.shape, dtype=torch.int64, device=total.device))
        if has_plain_numbers(total) and has_plain_memory(quantized[place]):
            if code is not None:
                flat, into = total.detach().view(-1), quantized[place].view(-1)
                good = calls.quantize(code, flat, into, unit=unit, largest=largest)
            else:
                good = grid.quantize(
                    memory_of(total), memory_of(quantized[place]), unit=unit, largest=largest
                )
        else:
            rounded = total.detach().to(torch.float64).div(unit).round_()
            good = _is_within(rounded, largest)
            if good:
                quantized[place].copy_(rounded)
        if not good:  # the value is private: it is not shown
            fail(
                f"Expected every element of sums[{place}] to be finite and below {LARGEST_SUM:,} clipping norms "
                f"(clipping_norm={clipping_norm!r}), as sums of clipped gradients are. Got another one."
            )
    return quantized


def _is_within(numbers: torch.Tensor, largest: float) -> bool:
    """Tell whether all numbers are finite and below the largest."""
    if numbers.numel() == 0:
        return True
    lowest, highest = numbers.aminmax()  # not a number, if one is
    return bool((lowest > -largest) & (highest < largest))


def has_plain_numbers(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is float32 or float64 numbers one after the other in this process's memory."""
    import torch

    return tensor.dtype in (torch.float32, torch.float64) and has_plain_memory(tensor) and not tensor.is_neg()


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is one number after the other in this process's memory."""
    import torch

    return tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()


def memory_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor that has plain memory, as a flat array."""
    array: npt.NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return array.reshape(-1)


def add_noise(
    total: torch.Tensor, noised: torch.Tensor, scale: Scale, words: BitGenerator, further: BitGenerator
) -> None:
    """Do what `grid.add_noise` does, by compiled code where there is some; both are flat, and in this memory."""
    if isinstance(words, calls.AesWords) and isinstance(further, calls.AesWords):
        calls.add_noise(total, noised, scale, words, further)
    else:
        grid.add_noise(total.numpy(), noised.numpy(), scale, words, further)
