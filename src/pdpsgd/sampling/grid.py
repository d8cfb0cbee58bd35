"""Sums as integers of a public unit, and noised sums on a public grid: the figures, and the arithmetic in numpy."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import IntArray
from pdpsgd.errors import check_positive, fail
from pdpsgd.sampling.box_muller import GROUP, fill
from pdpsgd.sampling.words import BitGenerator

UNIT_BITS = 32  # the unit is 2^-32 clipping norms, or down to half of it
GRID_BITS = 10  # the grid's step is 2^-10 standard deviations, or down to half of it
LARGEST_NOISE_MULTIPLIER = 2**22
BLOCK = 2**15  # numbers whose noise is made at a time: memory is bounded, and stays in the cache


@lru_cache(typed=True)
def unit_of(clipping_norm: float) -> float:
    """Return the unit of integer sums: the power of two in (2^-33, 2^-32] clipping norms.

    >>> unit_of(1.0) == unit_of(1.5) == 2.0**-32
    True
    """
    check_positive(clipping_norm=clipping_norm)
    _, exponent = math.frexp(clipping_norm)
    return math.ldexp(1.0, exponent - 1 - UNIT_BITS)


@dataclass(frozen=True)
class Scale:
    """The public figures of a release: noise and grid in units, and the grid's step as a number.

    Noise has a standard deviation of `deviation` units; the grid's step is 2^`shift` units, which is `step`.
    """

    deviation: float
    shift: int
    step: float

    @classmethod
    @lru_cache(typed=True)
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
    total: IntArray,
    noised: npt.NDArray[np.floating],
    scale: Scale,
    words: BitGenerator,
    further: BitGenerator,
) -> None:
    """Add noise to integers, round to the grid, and write the results as floating-point numbers.

    Args:
        total: One-dimensional, in units.
        noised: Where results go, of float32 or float64, of the same length.
        scale: Noise and grid.
        words: The step's words; as many as numbers are read, up to a multiple of 16.
        further: The step's words that continue a radius.
    """
    for start in range(0, len(total), BLOCK):
        part = total[start : start + BLOCK]
        made = _workspace.take(-(-len(part) // GROUP) * GROUP)
        fill(made, words, further, scale=scale.deviation)
        add(part, noised[start : start + BLOCK], scale, made[: len(part)])


def add(
    total: IntArray, noised: npt.NDArray[np.floating], scale: Scale, noise: npt.NDArray[np.float64]
) -> None:
    """Do what `add_noise` does with noise that was made before; its memory is used up."""
    half, shift, step = (np.array(some) for some in ((1 << scale.shift) >> 1, scale.shift, scale.step))
    moved = noise.view(np.int64)
    _round(noise, moved, are_small=scale.deviation < _FLOATS_END / 64)  # none is beyond 36 deviations
    np.add(moved, total, moved)
    np.add(moved, half, moved)
    np.right_shift(moved, shift, moved)  # floor(x / step + 1/2): the same for all multiples of the step
    np.copyto(noise, moved)
    np.multiply(noise, step, noise)
    np.copyto(noised, noise, casting="same_kind")


def quantize(sums: npt.NDArray[np.floating], multiples: IntArray, *, unit: float, largest: float) -> bool:
    """Write float32 or float64 numbers in units, a power of two; tell whether all are below the largest.

    All are one-dimensional; the multiples may be in the memory of float64 sums. They are of no use if one is too large.
    """
    for start in range(0, len(sums), BLOCK):
        part, into = sums[start : start + BLOCK], multiples[start : start + BLOCK]
        farthest = max(-float(part.min()), float(part.max())) / unit
        if not farthest < largest:
            return False
        numbers = into.view(np.float64)
        np.multiply(part, 1 / unit, numbers, dtype=np.float64)
        _round(numbers, into, are_small=farthest < _FLOATS_END)
    return True


# Floating-point numbers from 2^52 to 2^53 are whole numbers, and so are their bits, beginning with those of 2^52.
_FLOATS_END = 2.0**51
_MIDDLE = np.array(1.5 * 2.0**52)
_MIDDLE_BITS = _MIDDLE.view(np.int64)


def _round(numbers: npt.NDArray[np.float64], integers: IntArray, *, are_small: bool) -> None:
    """Write the nearest integers into the numbers' memory, of two the even one; small ones are below 2^51."""
    if are_small:
        np.add(numbers, _MIDDLE, numbers)
        np.subtract(integers, _MIDDLE_BITS, integers)
    else:
        np.copyto(integers, np.rint(numbers, numbers), casting="unsafe")


class _Workspace(threading.local):
    """Memory for the numbers of a block, kept: asking the system for it anew takes longer than the arithmetic."""

    def __init__(self) -> None:
        self._numbers = np.empty(0)

    def take(self, numbers: int) -> npt.NDArray[np.float64]:
        """Return an array of numbers."""
        if len(self._numbers) < numbers:
            self._numbers = np.empty(numbers)
        return self._numbers[:numbers]


_workspace = _Workspace()
