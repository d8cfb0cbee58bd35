"""What a run has cost each person by the norms of their own gradients: running sums, and epsilon afterwards. Sensitive.

Individual privacy accounting (Yu et al. 2022, arXiv:2206.02617): a step in which person i's clipped gradient has norm h
costs i what a step with clipping norm h would. What comes out speaks of the run that happened, promises nothing, and is
itself computed from records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.gaussian import for_distinct, gaussian_epsilon
from pdpsgd.accounting.rdp import renyi_of_step
from pdpsgd.accounting.theorems import epsilon_from_renyi, epsilon_from_renyi_as_published

ORDERS: tuple[int, ...] = (
    *range(2, 17),
    *range(18, 33, 2),
    *(40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048),
)
"""Renyi orders that sums are kept at: few, because there is a sum for every person and order."""
FINENESS = 64
"""Below a sampling rate of 1, norms are rounded up to multiples of this part of the clipping norm."""
UNITS = 2**20
"""At rate 1, norms over noise are rounded up to multiples of 2^-20, and squares add up exactly."""
DECIMALS = 4
"""An epsilon is rounded up to this many decimals."""
AT_ONCE = 2**15


@dataclass(frozen=True, eq=False)
class Share:
    """What the levels give to each step of a round: rates, clipping norms as parts of C, noise and number of steps."""

    rates: FloatArray
    scales: FloatArray
    noise_multiplier: float
    steps: int

    def renyi(self, norms: FloatArray | float = 1.0) -> FloatArray:
        """Return rho of one step at each order where each level's gradients have this part of its clipping norm.

        Guarantee: an upper bound in both directions (see `renyi_of_step`).
        """
        found = np.zeros((self.rates.size, len(ORDERS)))
        reach = self.scales * norms
        for scale in np.unique(reach[(reach > 0) & (self.rates > 0)]):
            at = np.flatnonzero((reach == scale) & (self.rates > 0))
            found[at] = renyi_of_step(self.rates[at], self.noise_multiplier / float(scale), ORDERS)
        return found


def is_exact(shares: Sequence[Share]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell for which levels all is Gaussian: each step is taken with everybody, or with nobody, of the level."""
    rates = np.array([share.rates for share in shares])
    exact: np.ndarray[tuple[int], np.dtype[np.bool_]] = ((rates == 0) | (rates == 1)).all(axis=0)
    return exact


class IndividualSums:
    """Running sums of what each person's gradients cost; the same memory however many steps there are.

    For whoever is in every step, the sum of squared norms over noise; for others, at each Renyi order, by how much
    their steps cost less than they would at their clipping norm. A step in which somebody was not sampled has no norm,
    so it counts in full.
    """

    def __init__(self, shares: Sequence[Share], level_of_person: IntArray) -> None:
        people = len(level_of_person)
        self.shares = tuple(shares)
        self.level_of_person = level_of_person
        self.exact = is_exact(shares)
        self.squares = np.zeros(people, dtype=np.int64)
        self.seen = np.zeros(people, dtype=np.int64)
        sampled = not self.exact[level_of_person].all()
        self.saved = np.zeros((people if sampled else 0, len(ORDERS)))
        self._savings: dict[tuple[int, int], FloatArray] = {}

    def add(self, index: int, people: IntArray, norms: FloatArray) -> None:
        """Add a step of a round: these people were sampled, with clipped gradients of these norms (as parts of C)."""
        share, levels = self.shares[index], self.level_of_person[people]
        self.seen[people] += 1
        exact = self.exact[levels]
        units = np.ceil(norms[exact] / share.noise_multiplier * UNITS).astype(np.int64)
        self.squares[people[exact]] += units**2
        people, levels, norms = people[~exact], levels[~exact], norms[~exact]
        parts = norms / np.maximum(share.scales[levels], 1e-300)
        rounded = np.minimum(np.ceil(parts * FINENESS), FINENESS).astype(np.int64)
        for part in np.unique(rounded).tolist():
            at = rounded == part
            self.saved[people[at]] += self._saving(index, part)[levels[at]]

    def _saving(self, index: int, part: int) -> FloatArray:
        """By how much a step costs each level less at this part of its clipping norm; at each order."""
        if (index, part) not in self._savings:
            share = self.shares[index]
            less = share.renyi() - share.renyi(part / FINENESS)
            self._savings[index, part] = np.maximum(less, 0.0)
        return self._savings[index, part]

    def epsilons(self, deltas: FloatArray) -> IndividualEpsilons:
        """Compute what the run has cost each person, where each level has this delta."""
        whole = np.sum([share.steps * share.renyi() for share in self.shares], axis=0)
        steps = sum(share.steps for share in self.shares)
        found = [np.zeros(len(self.level_of_person)) for _ in range(4)]
        for start in range(0, len(self.level_of_person), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            for column, values in zip(found, self._epsilons_of(part, deltas, whole, steps), strict=True):
                column[part] = values
        return IndividualEpsilons(*(round_up(column) for column in found))

    def _epsilons_of(
        self, part: slice, deltas: FloatArray, whole: FloatArray, steps: int
    ) -> list[FloatArray]:
        levels = self.level_of_person[part]
        delta, exact = deltas[levels], self.exact[levels]
        mu = np.sqrt(self.squares[part].astype(float)) / UNITS
        curve = estimated = np.outer(mu**2 / 2, ORDERS)
        if len(self.saved):
            saved, seen = self.saved[part], self.seen[part, None]
            curve = np.where(exact[:, None], curve, np.maximum(whole[levels] - saved, 0.0))
            as_seen = np.maximum(whole[levels] - saved * (steps / np.maximum(seen, 1)), 0.0)
            estimated = np.where(exact[:, None], curve, np.where(seen > 0, as_seen, np.nan))
        by_paper, tighter, estimate = (
            _smallest(convert, rho, delta)
            for convert, rho in (
                (epsilon_from_renyi_as_published, curve),
                (epsilon_from_renyi, curve),
                (epsilon_from_renyi, estimated),
            )
        )
        gaussian = for_distinct(gaussian_epsilon, mu, delta)
        best = np.where(exact, gaussian, np.minimum(by_paper, tighter))
        return [best, by_paper, tighter, np.where(exact, gaussian, estimate)]


@dataclass(frozen=True, eq=False)
class IndividualEpsilons:
    """What a run has cost each person, at their delta; rounded up. Sensitive, every number of it."""

    at_most: FloatArray
    """By the norms that occurred; steps in which the person was not sampled count at the clipping norm. Exact for
    whoever is in every step, else by the better conversion."""
    by_paper: FloatArray
    """The same by the paper's conversion from individual RDP (its Theorem 4)."""
    tighter: FloatArray
    """The same by that of Canonne, Kamath and Steinke (2020)."""
    estimate: FloatArray
    """Where also the other steps count as those that were seen do on average; no bound. NaN: never sampled."""


def round_up(values: FloatArray) -> FloatArray:
    """Round up to `DECIMALS`.

    >>> round_up(np.array([0.0, 1.00001, 2.5])).tolist()
    [0.0, 1.0001, 2.5]
    """
    return np.ceil(np.round(values * 10**DECIMALS, 6)) / 10**DECIMALS


def _smallest(convert: Callable[..., FloatArray], rho: FloatArray, delta: FloatArray) -> FloatArray:
    if not rho.size:
        return np.zeros(len(rho))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: FloatArray = np.min(convert(np.array(ORDERS), rho, delta[:, None]), axis=1)
    return np.where((rho == 0).all(axis=1), 0.0, found)
