"""Sums as integers of a public unit, and noised sums on a public grid: the figures, and the arithmetic in numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import IntArray
from pdpsgd.errors import check_positive, fail
from pdpsgd.sampling.box_muller import normals
from pdpsgd.sampling.words import BitGenerator

UNIT_BITS = 32  # the unit is 2^-32 clipping norms, or down to half of it
GRID_BITS = 10  # the grid's step is 2^-10 standard deviations, or down to half of it
LARGEST_NOISE_MULTIPLIER = 2**22
_BLOCK = 2**15  # numbers whose noise is made at a time: memory is bounded, and stays in the cache


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
    half = (1 << scale.shift) >> 1
    room = np.empty(min(len(total), _BLOCK), dtype=np.int64)
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        noise = normals(words, further, len(part), scale=scale.deviation)
        np.copyto(moved := room[: len(part)], np.rint(noise, out=noise), casting="unsafe")
        moved += part
        moved += half
        moved >>= scale.shift  # floor(x / step + 1/2): the same for all multiples of the step
        np.copyto(noise, moved)
        noise *= scale.step
        noised[start : start + _BLOCK] = noise
