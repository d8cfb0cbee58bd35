"""Who is in the batch of a step: exact Poisson sampling, a rate for each level, at a cost independent of n.

Everybody of a level is sampled independently at the level's rate. That is the same as sampling how many (a binomial
number) and then which (that many distinct members, all equally likely), which costs as much as the batch is large.
Levels of similar rates are sampled together at the highest of them, and each one is kept with probability own rate /
highest rate. This "thinning" makes 256 levels nearly as cheap as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import AnyIntArray, IntArray, WordArray
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
    from pdpsgd.sampling.source import RandomSource
    from pdpsgd.sampling.words import BitGenerator

_MOST_AHEAD = 16
_PEOPLE_AHEAD = 4096


def steps_at_once(expected: float) -> int:
    """Return for how many steps, each of so many people, batches are made ready at once.

    >>> steps_at_once(64.0), steps_at_once(1024.0), steps_at_once(1e6)
    (16, 4, 1)
    """
    return max(1, min(_MOST_AHEAD, int(_PEOPLE_AHEAD / max(expected, 1.0))))


class PoissonSampler:
    """The batches of a plan.

    With `world_size` > 1 this rank samples among its own people only (person p with p % world_size == rank);
    the union over all ranks is the Poisson sample.

    Guarantee: who takes part in a round is sampled once, each person on their own, with probability
    `participation[level]`; at every step of the round each participant is sampled, independently of all others and of
    all other steps, with probability `sample_rates[level]`. Probabilities of 0 and 1 are exact; others are rounded down
    to multiples of 2^-63, which costs nobody anything, as a lower rate costs less. A number of people sampled has its
    binomial probability to within 2^-127: over 10^6 steps with 10^4 likely numbers, less than 1e-28 in total variation.
    This takes the words of `source` to be uniform.

    Who was sampled, and how many, is sensitive: never show it.
    """

    def __init__(
        self,
        plan: Plan,
        level_of_person: AnyIntArray,
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
        self._people = _sort_by_level(level_of_person, len(plan.levels), rank, world_size)
        self._round_ends = tuple(accumulate(r.steps for r in plan.rounds))
        self._round: int | None = None
        self._participants = self._people
        self._bands: tuple[_Band, ...] = ()
        self._ahead: dict[int, IntArray] = {}

    def draw(self, step: int) -> IntArray:
        """Return the positions, in the list of people, of those sampled at the step (from 0, over the whole plan).

        A function of the key and the step alone: asking again gives the same people. In no particular order, nobody
        twice; an empty array where nobody was sampled.
        """
        if not 0 <= step < len(self):
            fail(f"Expected 0 <= step < {len(self)}, the plan's steps. Got step={step!r}.")
        if step not in self._ahead:
            # Small batches are sampled for some steps at once: between training steps, everything is out of the cache.
            index = bisect_right(self._round_ends, step)
            self._enter_round(index)
            several = steps_at_once(self._plan.rounds[index].expected_batch_size)
            self._ahead = {
                number: self._draw(number)
                for number in range(step, min(step + several, self._round_ends[index]))
            }
        return self._ahead.pop(step)

    def forget(self) -> None:
        """Drop what was sampled ahead."""
        self._ahead.clear()

    def _draw(self, step: int) -> IntArray:
        generator = self._source.draw_generator(step=step, rank=self._rank)
        return self._participants.members.take(_draw(self._bands, generator)).astype(np.int64)

    def __len__(self) -> int:
        return self._round_ends[-1] if self._round_ends else 0

    def _enter_round(self, index: int) -> None:
        if index == self._round:
            return
        r = self._plan.rounds[index]
        people = self._people
        if any(probability < 1 for probability in r.participation):
            generator = self._source.round_generator(round=index, rank=self._rank)
            people = people.only(_draw(_bands(people.sizes, r.participation), generator))
        self._participants = people
        self._bands = _bands(people.sizes, r.sample_rates)
        self._round = index


@dataclass(frozen=True)
class _People:
    """Positions of people in the list, sorted by level: level l has members[starts[l] : starts[l + 1]]."""

    members: AnyIntArray
    starts: IntArray

    @property
    def sizes(self) -> IntArray:
        return np.diff(self.starts)

    def only(self, chosen: IntArray) -> _People:
        """The people at these places of `members`."""
        chosen = np.sort(chosen)
        return _People(self.members[chosen], np.searchsorted(chosen, self.starts))


def _sort_by_level(level_of_person: AnyIntArray, levels: int, rank: int, world_size: int) -> _People:
    mine = level_of_person[rank::world_size]
    # 16-bit numbers are sorted by counting; 32-bit positions keep a list of ten million people at 40 MB.
    order = np.argsort(mine.astype(np.uint16 if levels <= 2**16 else np.int64), kind="stable")
    position = np.int32 if len(level_of_person) < 2**31 else np.int64
    members: AnyIntArray = (order * world_size + rank).astype(position)
    return _People(members, np.concatenate(([0], np.cumsum(np.bincount(mine, minlength=levels)))))


def _check_people(plan: Plan, level_of_person: AnyIntArray) -> None:
    if level_of_person.ndim != 1 or not np.issubdtype(level_of_person.dtype, np.integer):
        fail(
            "Expected level_of_person to be a one-dimensional array of whole numbers. "
            f"Got shape {level_of_person.shape} of {level_of_person.dtype}."
        )
    lowest, highest = (level_of_person.min(), level_of_person.max()) if len(level_of_person) else (0, 0)
    if lowest < 0 or highest >= len(plan.levels):
        wrong = lowest if lowest < 0 else highest
        fail(f"Expected level_of_person in 0 ... {len(plan.levels) - 1}, the plan's levels. Got {wrong}.")
    found = np.bincount(level_of_person, minlength=len(plan.levels))
    for index, level in enumerate(plan.levels):
        if found[index] != level.people:
            fail(f"Expected {level.people} people on level {index}, as in the plan. Got {found[index]}.")


# --- bands: levels drawn together --------------------------------------------------------------------------

# What a step costs, in units of one person proposed: the fixed work of a band, and one person under a mask.
_BAND_COST = 500.0
_MASK_COST = 0.15


@dataclass(frozen=True)
class _Band:
    """Levels drawn together, at the highest of their rates or, where that is high, by a mask over everybody.

    The band's people have places 0, 1, ...; those of its k-th level end before `ends[k]`, and a place plus
    `shifts[k]` is a place among all members. `limits` are probabilities in units of 2^-63: under a mask
    (`counts` is None) that of being sampled, else that of being kept (None: everybody is).
    """

    ends: IntArray
    shifts: IntArray
    limits: WordArray | None
    counts: _CountTable | None

    def draw(self, generator: BitGenerator) -> IntArray:
        """Places, among all members, of those drawn."""
        places: IntArray
        if self.counts is None:
            assert self.limits is not None
            of_everybody = np.repeat(self.limits, np.diff(self.ends, prepend=0))
            places = np.flatnonzero(_below_limits(generator, of_everybody))
        else:
            places = _distinct(generator, int(self.ends[-1]), self.counts.draw(generator))
        if len(self.ends) == 1:
            return places + self.shifts
        level: IntArray = self.ends.searchsorted(places, side="right")
        if self.counts is not None and self.limits is not None:
            kept = _below_limits(generator, self.limits.take(level))
            places, level = places[kept], level[kept]
        return places + self.shifts.take(level)


def _draw(bands: Sequence[_Band], generator: BitGenerator) -> IntArray:
    drawn = [band.draw(generator) for band in bands]
    return np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)


def _bands(sizes: IntArray, rates: Sequence[float]) -> tuple[_Band, ...]:
    """Bands of all levels that have people and a rate above 0, for the lowest expected cost of a step."""
    by_rate = [level for level in np.argsort(rates, kind="stable") if sizes[level] > 0 and rates[level] > 0]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    bands = []
    for part in _cheapest_split(sizes[by_rate], np.asarray(rates)[by_rate]):
        levels = by_rate[part]
        exact = [Fraction(rates[level]) for level in levels]
        highest = exact[-1]
        ends = np.cumsum(sizes[levels])
        shifts = starts[levels] - (ends - sizes[levels])
        if highest > _MASK_COST:
            band = _Band(ends, shifts, _limits(exact), counts=None)
        else:
            limits = None if exact[0] == highest else _limits([rate / highest for rate in exact])
            band = _Band(ends, shifts, limits, counts=_CountTable.of(int(ends[-1]), highest))
        bands.append(band)
    return tuple(bands)


def _cheapest_split(sizes: IntArray, rates: npt.NDArray[np.float64]) -> Iterator[slice]:
    """Cut levels, sorted by rate, into bands at the lowest expected cost of a step: dynamic programming."""
    ends = np.append(0, np.flatnonzero(np.diff(rates, append=np.inf)) + 1)  # never between equal rates
    people = np.append(0, np.cumsum(sizes))[ends]
    cost = np.zeros(len(ends))
    first = np.zeros(len(ends), dtype=int)
    for end in range(1, len(ends)):
        per_person = min(rates[ends[end] - 1], _MASK_COST)
        costs = cost[:end] + _BAND_COST + (people[end] - people[:end]) * per_person
        first[end] = np.argmin(costs)
        cost[end] = costs[first[end]]
    end = len(ends) - 1
    while end > 0:
        yield slice(ends[first[end]], ends[end])
        end = first[end]


def _limits(probabilities: Sequence[Fraction]) -> WordArray:
    # Rounded down, so that nobody is sampled more often than planned. A probability of 1 is above all 63-bit words.
    return np.array([int(probability * 2**63) for probability in probabilities], dtype=np.uint64)


def _below_limits(generator: BitGenerator, limits: WordArray) -> npt.NDArray[np.bool_]:
    return (generator.random_raw(len(limits)) >> np.uint64(1)) < limits


# --- how many, and which -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CountTable:
    """A binomial distribution: `lowest` + k is sampled by numbers of 128 bits from limits[k - 1] up to below limits[k].

    A first word nearly always decides; where it equals the upper half of a limit, a second one is compared with the
    lower half.

    The binomial numbers of numpy before 2.5 are not exact (two errors in a Stirling series, numpy#31238),
    and no rejection in floating point is to 2^-53. So the probabilities are worked out once, in whole
    numbers.
    """

    lowest: int
    upper: WordArray
    lower: WordArray

    @classmethod
    def of(cls, people: int, rate: Fraction) -> _CountTable:
        """Return the table of how many of `people` are sampled, worked out from the likeliest number outwards."""
        yes, no = rate.numerator, rate.denominator - rate.numerator
        likeliest = min(people, (people + 1) * yes // rate.denominator)
        unit, negligible = 1 << 256, 1 << 112
        above = [unit]
        for count in range(likeliest, people):
            above.append(above[-1] * (people - count) * yes // ((count + 1) * no))
            if above[-1] < negligible:
                break
        below = [unit]
        for count in range(likeliest, 0, -1):
            below.append(below[-1] * count * no // ((people - count + 1) * yes))
            if below[-1] < negligible:
                break
        weights = below[:0:-1] + above
        total, so_far, limits = sum(weights), 0, []
        for weight in weights[:-1]:
            so_far += weight
            limit = -(-(so_far << 128) // total)  # rounded up: smaller numbers, if any, become likelier
            if limit >= 2**128:
                break
            limits.append(divmod(limit, 2**64))
        upper, lower = np.array(limits, dtype=np.uint64).reshape(-1, 2).T
        return cls(likeliest - len(below) + 1, upper.copy(), lower.copy())

    def draw(self, generator: BitGenerator) -> int:
        """Return how many are sampled."""
        word = generator.random_raw(1)[0]
        place = int(self.upper.searchsorted(word))
        if place < len(self.upper) and self.upper[place] == word:
            equal = self.lower[place : int(self.upper.searchsorted(word, side="right"))]
            place += int(equal.searchsorted(generator.random_raw(1)[0], side="right"))
        return self.lowest + place


def _distinct(generator: BitGenerator, people: int, count: int) -> IntArray:
    """`count` distinct numbers below `people`, every such set equally likely, in ascending order.

    Uniform numbers are drawn until `count` different ones were seen. No number is special in that, so every
    set is equally likely. As many are drawn at a time as are missing, so that there is never one too many.
    """
    chosen = np.sort(_uniform_below(generator, people, count))
    while True:
        first_seen = np.empty(len(chosen), dtype=np.bool_)
        first_seen[:1] = True
        np.not_equal(chosen[1:], chosen[:-1], out=first_seen[1:])
        if len(chosen) == count and first_seen.all():
            return chosen
        chosen = chosen[first_seen]
        more = _uniform_below(generator, people, count - len(chosen))
        chosen = np.sort(np.concatenate((chosen, more)))


def _uniform_below(generator: BitGenerator, limit: int, count: int) -> IntArray:
    """At most `count` uniform numbers below `limit`: words of an incomplete last stretch are thrown away."""
    words = generator.random_raw(count)
    incomplete = 2**64 % limit
    if incomplete:
        words = words[words < np.uint64(2**64 - incomplete)]
    return (words % np.uint64(limit)).view(np.int64)
