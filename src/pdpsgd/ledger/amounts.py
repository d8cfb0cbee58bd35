"""Amounts as integers: charges rounded up, allowances rounded down, so that sums are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.certificates import Allowance

UNIT_B = 1e-15
"""Of mu^2, and of pure epsilon."""
UNIT_D = 1e-18
UNLIMITED = 1 << 62
"""Allowed to somebody who asks for no protection."""
LARGEST = 1 << 56
"""The largest finite allowance or charge: a mu of 8.5. A charge above it counts as this, and fits nobody's promise."""


@dataclass(frozen=True, eq=False)
class Amounts:
    """One integer per person: b in 1e-15 of mu^2, d in 1e-18, e in 1e-15 of pure epsilon."""

    b: IntArray
    d: IntArray
    e: IntArray

    def __len__(self) -> int:
        return int(self.b.size)

    @classmethod
    def zeros(cls, people: int) -> Amounts:
        """Create nothing for everybody."""
        return cls(*(np.zeros(people, dtype=np.int64) for _ in range(3)))

    def left_after(self, spent: Amounts) -> Amounts:
        """Subtract what is spent; nothing is left where more was spent than is allowed now."""
        return Amounts(
            *(np.maximum(mine - theirs, 0) for mine, theirs in zip(self._all, spent._all, strict=True))
        )

    def covers(self, spent: Amounts) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each person's spending stays within this."""
        fits = [theirs <= mine for mine, theirs in zip(self._all, spent._all, strict=True)]
        return np.asarray(fits[0] & fits[1] & fits[2])

    @property
    def _all(self) -> tuple[IntArray, IntArray, IntArray]:
        return self.b, self.d, self.e


def allowed(allowance: Allowance, epsilon: FloatArray) -> Amounts:
    """Round allowances down; no limit where epsilon is infinite."""
    infinite = np.isinf(epsilon)

    def down(values: FloatArray, unit: float) -> IntArray:
        scaled = np.where(infinite, 0.0, np.minimum(np.where(infinite, 0.0, values) / unit, float(LARGEST)))
        # One unit less for the rounding of the division itself.
        return np.where(infinite, UNLIMITED, np.maximum(np.floor(scaled * (1 - 1e-15)) - 1, 0)).astype(
            np.int64
        )

    return Amounts(down(allowance.b, UNIT_B), down(allowance.d, UNIT_D), down(allowance.e, UNIT_B))


def charge(value: float, unit: float) -> int:
    """Round an amount up to whole units; nothing stays nothing."""
    if value == 0:
        return 0
    scaled = value / unit
    return LARGEST if not scaled < LARGEST else math.ceil(scaled * (1 + 1e-15)) + 1
