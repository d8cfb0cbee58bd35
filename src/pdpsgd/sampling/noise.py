"""Randomness for those who expect an attacker: cryptographic words, and noise not betrayed by its last bits.

Words come from AES-256 in counter mode (the `cryptography` package, installed with `pdpsgd[secure]`) or,
where that is missing, from SHAKE-256 of the standard library, some twelve times slower. To tell either from
uniform words is to break it.

Noise made in floating point has holes: some sums cannot come from some gradients, whatever the noise, so
the last bits of a noised sum can tell gradients apart (Mironov, "On significance of the least significant
bits for differential privacy", CCS 2012). Two things are done about it. Each number is the sum of four
draws, whose possible values are too many and too dense to search (Holohan and Braghin, "Secure random
sampling in differential privacy", arXiv:2107.10138). And the noised sum, worked out in float64, is rounded
to a public grid, a thousand times finer than the noise, which removes the bits in which holes would show.
This is mitigation, not proof: nothing here bounds what the remaining difference from a true Gaussian adds
to delta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.sampling.generators import BitGenerator

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    import torch


DRAWS = 4
GRID_BITS = 10


def add_secure_noise_(
    tensors: Sequence[torch.Tensor], standard_deviation: float, generator: BitGenerator
) -> None:
    """Add Gaussian noise to the tensors, in place, and round the result to the public grid.

    Guarantee: rounding is the same for all data, so it takes nothing from the privacy of the noised sum, and
    each element's noise is Gaussian of this standard deviation, up to the rounding of float64 and of the grid
    (which adds 1e-7 of the variance). See the module for what is and is not proven.
    """
    import torch

    grid = grid_of(standard_deviation)
    for block in blocks(tensors, size=2**14):
        sizes = [tensor.numel() for tensor in block]
        noise = normals(generator, sum(sizes)).mul_(standard_deviation)
        for tensor, part in zip(block, torch.split(noise, sizes), strict=True):
            noised = tensor.to("cpu", torch.float64) + part.view(tensor.shape)
            tensor.copy_(noised.div_(grid).round_().mul_(grid))


def grid_of(standard_deviation: float) -> float:
    """The step of the public grid: the power of two that is 2^-10 to 2^-11 standard deviations.

    Exact in float32 out to 2^13 standard deviations, where float32 itself becomes the coarser grid.

    >>> grid_of(1.0), grid_of(1.5)
    (0.0009765625, 0.0009765625)
    """
    _, exponent = math.frexp(standard_deviation)
    return math.ldexp(1.0, exponent - 1 - GRID_BITS)


def normals(generator: BitGenerator, count: int) -> torch.Tensor:
    """Standard normal numbers: each half the sum of four, by Box and Muller from 53-bit uniforms."""
    import torch

    half = (count + 1) // 2
    words = generator.random_raw(2 * DRAWS * half) >> np.uint64(11)
    uniforms = torch.from_numpy(words.astype(np.float64)).add_(0.5).mul_(2.0**-53)
    uniform, turn = uniforms.view(2, DRAWS, half)
    radius = uniform.log_().mul_(-2.0 / DRAWS).sqrt_()
    angle = turn.mul_(2 * math.pi)
    return torch.cat(((radius * angle.cos()).sum(0), (radius * angle.sin()).sum(0)))[:count]


def blocks(tensors: Sequence[torch.Tensor], *, size: int = 2**16) -> Iterator[list[torch.Tensor]]:
    """All elements of the tensors in order, as lists of views with at most `size` elements together.

    Small tensors share a block, so that noise is made in one go; large ones are cut, so that the memory for
    it is bounded and stays in the cache. A large tensor that is not contiguous is a block of its own.
    """
    block: list[torch.Tensor] = []
    room = size
    for tensor in tensors:
        cut = tensor.numel() > size and tensor.is_contiguous()
        flat = tensor.view(-1) if cut else tensor
        for piece in [flat[at : at + size] for at in range(0, len(flat), size)] if cut else [tensor]:
            if block and piece.numel() > room:
                yield block
                block, room = [], size
            block.append(piece)
            room -= piece.numel()
    if block:
        yield block


_KEPT_BLOCKS = 16


_BLOCK = 2**16


_AHEAD = 8


def _is_small(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are one block, here, of no more than single precision."""
    import torch

    alike = all(tensor.device.type == "cpu" and tensor.dtype != torch.float64 for tensor in tensors)
    return alike and sum(tensor.numel() for tensor in tensors) <= _BLOCK


class _NoiseBlock:
    """Makes normal numbers in the shapes of some tensors, for some steps; keeps its memory for the next time."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, steps: int) -> None:
        import torch

        sizes = [tensor.numel() for tensor in tensors]
        self._half = (sum(sizes) + 1) // 2
        self._angle, self._uniform, self._extra = torch.empty(3, steps, self._half)
        self._low_bits = torch.empty(steps, self._half, dtype=torch.int32)
        self._smallest = torch.tensor(2.0**-40)
        self._pairs = torch.empty(steps, 2, self._half)
        self._parts = [
            [
                part.view(tensor.shape)
                for part, tensor in zip(torch.split(row.view(-1)[: sum(sizes)], sizes), tensors, strict=True)
            ]
            for row in self._pairs
        ]

    def make(self, generators: Sequence[BitGenerator]) -> list[list[torch.Tensor]]:
        """Independent standard normal numbers by Box and Muller, valid until the next call: two from a word.

        For each step from a generator of its own. Of a word's 64 bits, 24 are the angle and 39 the radius. A
        float keeps the leading bits of a small number, so 39 bits reach sqrt(2 * 40 * ln 2) = 7.4 standard
        deviations. The customary 24 bits end at 5.8, and a record that moves the sum past the end gives itself
        away: at a noise multiplier of 0.6 that has a chance of 2e-5 each time it is drawn, against 4e-9 here.
        """
        import torch

        rows = np.stack([generator.random_raw(self._half) for generator in generators])
        words = torch.from_numpy(rows.view(np.int32))
        first, second = words[:, : self._half], words[:, self._half :]
        extra = self._extra.copy_(torch.bitwise_and(first, 0xFF, out=self._low_bits))
        angle = self._angle.copy_(first.bitwise_and_(~0xFF)).mul_(math.pi / 2**31)
        uniform = self._uniform.copy_(second.bitwise_and_(0x7FFFFFFF)).add_(extra, alpha=2.0**-8)
        torch.add(self._smallest, uniform, alpha=2.0**-31, out=uniform)
        radius = uniform.log_().mul_(-2.0).sqrt_()
        torch.cos(angle, out=self._pairs[:, 0])
        torch.sin(angle, out=self._pairs[:, 1])
        self._pairs.mul_(radius[:, None])
        return self._parts


def _add_fine_noise_(tensor: torch.Tensor, standard_deviation: float, generator: BitGenerator) -> None:
    """Noise for float64: coarser numbers would leave the sum's last bits as they are, to be read off."""

    for (piece,) in blocks([tensor]):
        noise = normals(generator, piece.numel()).view(piece.shape)
        piece.add_(noise, alpha=standard_deviation)


def _add_noise_on_device_(
    tensors: Sequence[torch.Tensor], standard_deviation: float, generator: BitGenerator
) -> None:
    import torch

    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device)
            generators[tensor.device].manual_seed(int(generator.random_raw(1)[0]))
        precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        noise = torch.empty(tensor.shape, dtype=precision, device=tensor.device)
        tensor.add_(noise.normal_(0.0, standard_deviation, generator=generators[tensor.device]))
