"""Who is in the batch of a step: exact Poisson sampling, each level at its own rate, at a cost that does not grow with n.

Everybody of a level is drawn independently at the level's rate. That is the same as drawing how many (a binomial
number) and then which (that many distinct members, all equally likely), which costs as much as the batch is large.
Levels of similar rate are drawn together at the highest rate among them, and the drawn are kept with probability
(own rate / highest rate): "thinning". It makes 256 levels as cheap as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.plan import Plan
    from pdpsgd.randomness import BitGenerator, RandomSource, WordArray

IntArray = npt.NDArray[np.int64]


class PoissonSampler:
    """Draws the batches of a plan.

    With `world_size` > 1 this rank draws among its own people only (person p with p % world_size == rank); the union
    over all ranks is the Poisson sample.

    Guarantee: given the round's participants, everybody is drawn at every step independently of everybody else and of
    all other steps, with the chance `sample_rates[level]` of the plan; who participates is drawn once a round with the
    chance `participation[level]`. The words of `source` are taken to be uniform. Chances of 0 and 1 are exact; others
    are rounded down to a multiple of 2^-63, and the number drawn has its binomial probabilities to within 2^-64 each,
    so that nobody's rate is above the plan's by as much as 2^-60.

    Who was drawn, and how many, is sensitive: it must not be shown.
    """

    def __init__(
        self,
        plan: Plan,
        level_of_person: npt.NDArray[np.integer],
        source: RandomSource,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        level_of_person = np.asarray(level_of_person)
        _check_people(plan, level_of_person)
        if not 0 <= rank < world_size:
            fail(f"Expected 0 <= rank < world_size. Got rank={rank!r}, world_size={world_size!r}.")
        self._plan = plan
        self._source = source
        self._rank = rank
        self._people = _group_by_level(level_of_person, len(plan.levels), rank, world_size)
        self._round = -1
        self._bands: tuple[_Band, ...] = ()
        self._members = self._people.members

    def draw(self, step: int) -> IntArray:
        """Positions, in the list of people, of those drawn at the step (counted from 0 over the whole plan).

        A function of the key and the step alone: drawing a step again gives the same people. In no particular order;
        nobody twice; an empty array where nobody was drawn.
        """
        if not 0 <= step < len(self):
            fail(f"Expected 0 <= step < {len(self)}, the plan's steps. Got step={step!r}.")
        self._enter_round(self._plan.round_of_step(step))
        words = self._source.draw_generator(step=step, rank=self._rank)
        return self._members[_draw(self._bands, words)].astype(np.int64)

    def __len__(self) -> int:
        return self._plan.steps

    def _enter_round(self, index: int) -> None:
        if index == self._round:
            return
        r = self._plan.rounds[index]
        people = self._people
        if any(chance < 1 for chance in r.participation):
            words = self._source.round_generator(round=index, rank=self._rank)
            people = people.only(_draw(_bands(people.sizes, r.participation), words))
        self._members = people.members
        self._bands = _bands(people.sizes, r.sample_rates)
        self._round = index


@dataclass(frozen=True)
class _People:
    """Positions of people in the list, sorted by level; level l has members[starts[l] : starts[l + 1]]."""

    members: npt.NDArray[np.integer]
    starts: IntArray

    @property
    def sizes(self) -> IntArray:
        return np.diff(self.starts)

    def only(self, chosen: IntArray) -> _People:
        """The people at these places of `members`."""
        chosen = np.sort(chosen)
        return _People(self.members[chosen], np.searchsorted(chosen, self.starts))


def _group_by_level(
    level_of_person: npt.NDArray[np.integer], levels: int, rank: int, world_size: int
) -> _People:
    mine = level_of_person[rank::world_size]
    order = np.argsort(mine.astype(np.uint16 if levels <= 2**16 else np.int64), kind="stable")
    kind = np.int32 if len(level_of_person) < 2**31 else np.int64
    members = (order * world_size + rank).astype(kind)
    return _People(members, np.concatenate(([0], np.cumsum(np.bincount(mine, minlength=levels)))))


def _check_people(plan: Plan, level_of_person: npt.NDArray[np.integer]) -> None:
    if level_of_person.ndim != 1 or not np.issubdtype(level_of_person.dtype, np.integer):
        fail(
            "Expected level_of_person to be a one-dimensional array of whole numbers. "
            f"Got shape {level_of_person.shape} of {level_of_person.dtype}."
        )
    if len(level_of_person) and not 0 <= level_of_person.min() <= level_of_person.max() < len(plan.levels):
        worst = level_of_person.max() if level_of_person.max() >= len(plan.levels) else level_of_person.min()
        fail(f"Expected level_of_person in 0 ... {len(plan.levels) - 1}, the plan's levels. Got {worst}.")
    found = np.bincount(level_of_person, minlength=len(plan.levels))
    for index, level in enumerate(plan.levels):
        if found[index] != level.people:
            fail(f"Expected {level.people} people of level {index}, as in the plan. Got {found[index]}.")


# --- bands: levels drawn together ------------------------------------------------------------------------------------

# What a step costs, in units of one proposed person: a band's fixed work, and looking at one person of a mask.
_BAND_COST = 500.0
_MASK_COST = 0.15


@dataclass(frozen=True)
class _Band:
    """Levels drawn together. A place in the band is a number below ends[-1]; level k of it has places up to ends[k].

    `shifts` turn a place of level k into a place among all members. `keep` are 63-bit thresholds: of a mask, the chance
    to be drawn (then `counts` is None); else the chance that somebody proposed at the highest rate is kept, or None
    where the band has one rate only.
    """

    ends: IntArray
    shifts: IntArray
    keep: WordArray | None
    counts: _CountTable | None


def _bands(sizes: IntArray, rates: Sequence[float]) -> tuple[_Band, ...]:
    used = [level for level in np.argsort(rates, kind="stable") if sizes[level] > 0 and rates[level] > 0]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    bands = []
    for part in _cheapest_split(sizes[used].astype(float), np.asarray(rates)[used]):
        levels = used[part]
        own = [Fraction(rates[level]) for level in levels]
        highest = own[-1]
        ends = np.cumsum(sizes[levels])
        shifts = starts[levels] - (ends - sizes[levels])
        if highest > _MASK_COST:
            bands.append(_Band(ends, shifts, _thresholds(own), None))
        else:
            keep = None if own[0] == highest else _thresholds([rate / highest for rate in own])
            bands.append(_Band(ends, shifts, keep, _CountTable.of(int(ends[-1]), highest)))
    return tuple(bands)


def _cheapest_split(sizes: npt.NDArray[np.float64], rates: npt.NDArray[np.float64]) -> Iterator[slice]:
    """Cut levels, sorted by rate, into bands at the lowest expected cost of a step (by dynamic programming)."""
    levels = len(sizes)
    people = np.concatenate(([0.0], np.cumsum(sizes)))
    best = np.zeros(levels + 1)
    first = np.zeros(levels + 1, dtype=int)
    for end in range(1, levels + 1):
        per_person = min(rates[end - 1], _MASK_COST)
        costs = best[:end] + _BAND_COST + (people[end] - people[:end]) * per_person
        first[end] = np.argmin(costs)
        best[end] = costs[first[end]]
    while levels:
        yield slice(first[levels], levels)
        levels = first[levels]


def _thresholds(chances: Sequence[Fraction]) -> WordArray:
    # Rounded down: nobody is drawn more often than planned. A chance of 1 is 2^63, above every 63-bit word.
    return np.array([int(chance * 2**63) for chance in chances], dtype=np.uint64)


def _draw(bands: Sequence[_Band], words: BitGenerator) -> IntArray:
    parts = [_draw_band(band, words) for band in bands]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _draw_band(band: _Band, words: BitGenerator) -> IntArray:
    people = int(band.ends[-1])
    if band.counts is None:
        assert band.keep is not None
        limits = np.repeat(band.keep, np.diff(band.ends, prepend=0))
        places = np.flatnonzero(_accepted(words, limits))
        level = np.searchsorted(band.ends, places, side="right")
        return places + band.shifts[level]
    places = _distinct(words, people, band.counts.draw(words))
    if len(band.ends) == 1:
        return places + band.shifts[0]
    level = np.searchsorted(band.ends, places, side="right")
    if band.keep is not None:
        kept = _accepted(words, band.keep[level])
        places, level = places[kept], level[kept]
    return places + band.shifts[level]


def _accepted(words: BitGenerator, limits: WordArray) -> npt.NDArray[np.bool_]:
    return (words.random_raw(len(limits)) >> np.uint64(1)) < limits


# --- how many, and which ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CountTable:
    """The binomial distribution as a table: lowest + k is drawn where the word is in [limits[k - 1], limits[k]).

    numpy's own binomial numbers are not exact (their rejection step uses a Stirling series with two digits of a
    coefficient exchanged), so the probabilities are worked out in whole numbers here, once a round.
    """

    lowest: int
    limits: WordArray

    @classmethod
    def of(cls, people: int, rate: Fraction) -> _CountTable:
        """The table for `people` draws at `rate`, from the mode outwards by the ratio of neighbouring probabilities."""
        yes, no = rate.numerator, rate.denominator - rate.numerator
        mode = min(people, (people + 1) * yes // rate.denominator)
        unit, least = 1 << 192, 1 << 96
        upper, lower = [unit], []
        for count in range(mode, people):
            upper.append(upper[-1] * (people - count) * yes // ((count + 1) * no))
            if upper[-1] < least:
                break
        weight = unit
        for count in range(mode, 0, -1):
            weight = weight * count * no // ((people - count + 1) * yes)
            lower.append(weight)
            if weight < least:
                break
        weights = lower[::-1] + upper
        total, sum_so_far, limits = sum(weights), 0, []
        for weight in weights[:-1]:
            sum_so_far += weight
            # Rounded up, which makes smaller counts likelier, never larger ones.
            limits.append(min(-(-(sum_so_far << 64) // total), 2**64 - 1))
        return cls(mode - len(lower), np.array(limits, dtype=np.uint64))

    def draw(self, words: BitGenerator) -> int:
        """How many are drawn."""
        return self.lowest + int(np.searchsorted(self.limits, words.random_raw(1)[0], side="right"))


def _distinct(words: BitGenerator, people: int, count: int) -> IntArray:
    """`count` distinct numbers below `people`, every set of them equally likely, in ascending order.

    Uniform numbers are drawn one after the other until `count` different ones were seen. No number is special, so
    every set is equally likely; and as many are drawn at a time as are missing, so that none has to be given back.
    """
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < count:
        more = _below(words, people, count - len(chosen))
        chosen = np.unique(np.concatenate((chosen, more)) if len(chosen) else more)
    return chosen


def _below(words: BitGenerator, limit: int, count: int) -> IntArray:
    """At most `count` uniform numbers below `limit`; words in the last, incomplete stretch are thrown away."""
    raw = words.random_raw(count)
    complete = 2**64 // limit * limit
    if complete < 2**64:
        raw = raw[raw < np.uint64(complete)]
    return (raw % np.uint64(limit)).astype(np.int64)
