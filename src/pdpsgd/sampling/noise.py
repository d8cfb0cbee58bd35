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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd._typing import IntArray
from pdpsgd.errors import check_positive, fail
from pdpsgd.sampling import box_muller
from pdpsgd.sampling.generators import BitGenerator

if TYPE_CHECKING:
    import torch

UNIT_BITS = 32  # the unit is 2^-32 clipping norms, or up to half of it
GRID_BITS = 10  # the grid's step is 2^-10 standard deviations, or up to half of it
# In clipping norms: no sum of fewer sampled people reaches it in any element, and 2^8 ranks may add theirs.
LARGEST_SUM = 2**22
LARGEST_NOISE_MULTIPLIER = 2**22
_BLOCK = 2**14  # numbers whose noise is made at a time: memory is bounded, and stays in the cache


def unit_of(clipping_norm: float) -> float:
    """Return the unit of integer sums: the power of two in (2^-33, 2^-32] clipping norms.

    >>> unit_of(1.0) == unit_of(1.5) == 2.0**-32
    True
    """
    check_positive(clipping_norm=clipping_norm)
    _, exponent = math.frexp(clipping_norm)
    return math.ldexp(1.0, exponent - 1 - UNIT_BITS)


def rounding_charge(numbers: int) -> float:
    """Return by how much, in clipping norms, `quantize` can move two neighboring sums further apart.

    >>> rounding_charge(2**16) == 2.0**8 * 2.0**-32
    True
    """
    return math.sqrt(numbers) * 2.0**-UNIT_BITS


def quantize(sums: Sequence[torch.Tensor], *, clipping_norm: float) -> list[torch.Tensor]:
    """Round sums of clipped gradients to integer multiples of a public unit, 2^-32 clipping norms or a little less.

    Args:
        sums: Floating-point tensors, best of float64: the clipped sum of this rank.
        clipping_norm: The plan's clipping norm C, public.

    Returns:
        Tensors of int64 in the same shapes, on the same devices. Ranks add theirs: exactly, in any order.

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
    quantized = []
    for place, total in enumerate(sums):
        if not total.is_floating_point():
            fail(f"Expected sums[{place}] to hold floating-point numbers. Got {total.dtype}.")
        multiples = total.to(torch.float64).div(unit).round_()
        if not bool((multiples.abs() < largest).all()):
            # The value is private: it is not shown.
            fail(
                f"Expected every element of sums[{place}] to be finite and below {LARGEST_SUM:,} clipping norms "
                f"(clipping_norm={clipping_norm!r}), as sums of clipped gradients are. Got another one."
            )
        quantized.append(multiples.to(torch.int64))
    return quantized


@dataclass(frozen=True)
class Scale:
    """The public figures of a release: noise and grid in units, and the grid's step as a number.

    Noise has a standard deviation of `deviation` units; the grid's step is 2^`shift` units, which is `step`.
    """

    deviation: float
    shift: int
    step: float

    @classmethod
    def of(cls, *, clipping_norm: float, noise_multiplier: float) -> Scale:
        """Return the figures for noise of standard deviation noise_multiplier * clipping_norm, never less.

        >>> Scale.of(clipping_norm=1.0, noise_multiplier=1.0).step == 2.0**-10
        True
        """
        check_positive(noise_multiplier=noise_multiplier)
        if noise_multiplier > LARGEST_NOISE_MULTIPLIER:
            fail(
                f"Expected noise_multiplier <= {LARGEST_NOISE_MULTIPLIER:,}. "
                f"Got noise_multiplier={noise_multiplier!r}."
            )
        unit = unit_of(clipping_norm)
        deviation = math.nextafter(noise_multiplier * (clipping_norm / unit), math.inf)
        _, exponent = math.frexp(deviation)
        shift = max(0, exponent - 1 - GRID_BITS)
        return cls(deviation, shift, math.ldexp(unit, shift))


def add_noise(
    total: IntArray, noised: np.ndarray, scale: Scale, words: BitGenerator, further: BitGenerator
) -> None:
    """Add noise to integers, round to the grid, and write the results as floating-point numbers.

    Args:
        total: One-dimensional, in units.
        noised: Where results go, of float32 or float64, of the same length.
        scale: Noise and grid.
        words: The step's words; as many as numbers are read, up to a multiple of 16.
        further: The step's words that continue a radius.
    """
    half = (1 << scale.shift) >> 1
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        noise = box_muller.normals(words, further, len(part), scale=scale.deviation)
        moved = np.rint(noise, out=noise).astype(np.int64)
        moved += part
        moved += half
        moved >>= scale.shift  # floor(x / step + 1/2): the same for all multiples of the step
        noised[start : start + _BLOCK] = moved.astype(np.float64) * scale.step
