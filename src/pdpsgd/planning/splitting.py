"""Splits budgets into few levels, where the people are, so that little epsilon is lost; and finds everybody's level."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import FloatArray, IntArray

AVERAGE_LOSS = 0.0049
"""Levels are added until people give up less than this share of their epsilon on average."""
FINEST_BINS = 1 << 16
SOME = 1 << 16
"""Of millions, so many people at a time: their numbers stay in the cache."""
LEAST = 2.0**-1000
"""Numbers from here on have all their bits."""


@dataclass(frozen=True)
class Group:
    """Sorted distinct budgets of one delta that would share the smallest of them as their level.

    `count` and `inverse` are running sums of people and of people/epsilon, with a leading 0, so that the loss
    of any segment i..j is count - epsilon_i * inverse, in constant time.
    """

    epsilons: FloatArray
    count: FloatArray
    inverse: FloatArray
    delta: float

    @classmethod
    def of(cls, epsilons: FloatArray, delta: float) -> Group:
        """Return the group of people with these budgets."""
        if epsilons.size > FINEST_BINS and np.unique(epsilons[:FINEST_BINS]).size > FINEST_BINS // 4:
            # Practically all different: bins of equal ratio, each at its lower edge, so fine that what they lose
            # does not matter, and no need to sort millions of people.
            low, high = float(epsilons.min()), float(epsilons.max())
            width = max(np.log(high / low) / (FINEST_BINS - 1), 1e-12)
            counts, weights = np.zeros(FINEST_BINS, dtype=np.int64), np.zeros(FINEST_BINS)
            for some in np.split(epsilons, range(SOME, epsilons.size, SOME)):
                place = (np.log(some / low) / width).astype(np.int64)
                counts += np.bincount(place, minlength=FINEST_BINS)
                weights += np.bincount(place, weights=1 / some, minlength=FINEST_BINS)
            values = low * np.exp(width * np.arange(FINEST_BINS)) * (1 - 1e-12)
            filled = counts > 0
            values, counts, weights = values[filled], counts[filled], weights[filled]
        else:
            values, counts = np.unique(epsilons, return_counts=True)
            weights = counts / values
        return cls(values, np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(weights)), delta)

    @property
    def loss(self) -> float:
        """Sum over people of the share of epsilon that they give up."""
        return float(
            (self.count[-1] - self.count[0]) - self.epsilons[0] * (self.inverse[-1] - self.inverse[0])
        )

    def halves(self) -> tuple[Group, Group]:
        """The two parts that together lose least."""
        right = (self.count[-1] - self.count[1:-1]) - self.epsilons[1:] * (
            self.inverse[-1] - self.inverse[1:-1]
        )
        left = (self.count[1:-1] - self.count[0]) - self.epsilons[0] * (self.inverse[1:-1] - self.inverse[0])
        cut = int(np.argmin(left + right)) + 1
        return (
            Group(self.epsilons[:cut], self.count[: cut + 1], self.inverse[: cut + 1], self.delta),
            Group(self.epsilons[cut:], self.count[cut:], self.inverse[cut:], self.delta),
        )


def split(groups: list[Group], room: int) -> list[Group]:
    """Split groups into at most so many, so that they lose little enough: the fewest of two ways."""
    halved = _halved(groups, room)
    people = sum(group.count[-1] for group in groups)
    if sum(group.epsilons.size for group in groups) <= room:
        return halved
    most = room - len(groups) + 1
    if _loss(halved) > AVERAGE_LOSS * people:
        return min(halved, _evenly(groups, most), key=_loss)
    best, fewest, most = halved, 1, min(len(halved), most)
    while fewest <= most:
        number = (fewest + most) // 2
        even = _evenly(groups, number)
        good = _loss(even) <= AVERAGE_LOSS * people
        fewest, most = (fewest, number - 1) if good else (number + 1, most)
        best = even if good and len(even) < len(best) else best
    return best


def _loss(groups: list[Group]) -> float:
    return sum(group.loss for group in groups)


def _evenly(groups: list[Group], number: int) -> list[Group]:
    """Split at equal sums of sqrt(people per epsilon, over epsilon), where levels lie best if budgets lie smoothly.

    A level of width w loses about w/2 per epsilon and person; the sum of that over levels, for a given number of them,
    is least where w^2 times people per epsilon, over epsilon, is the same for all. `number` parts, and up to one more
    for each further group.
    """
    weights = []
    for group in groups:
        widths = np.diff(group.epsilons, append=2 * group.epsilons[-1] - group.epsilons[-2:][0])
        weights.append(np.sqrt(np.diff(group.count) * widths / group.epsilons))
    each = math.fsum(weight.sum() for weight in weights) * (1 + 1e-12) / number
    parts = []
    for group, weight in zip(groups, weights, strict=True):
        before = np.cumsum(weight) - weight
        cuts = np.flatnonzero(np.diff(np.floor(before / each if each else before))) + 1
        for start, end in itertools.pairwise([0, *cuts.tolist(), group.epsilons.size]):
            columns = group.epsilons[start:end], group.count[start : end + 1], group.inverse[start : end + 1]
            parts.append(Group(*columns, group.delta))
    return parts


def _halved(groups: list[Group], room: int) -> list[Group]:
    """Split in two, again and again, where most is lost."""
    people = sum(group.count[-1] for group in groups)
    each_its_own = sum(group.epsilons.size for group in groups) <= room
    loss_allowed = 0.0 if each_its_own else AVERAGE_LOSS * people
    heap = [(-group.loss, i, group) for i, group in enumerate(groups)]
    heapq.heapify(heap)
    loss, made = -sum(entry[0] for entry in heap), len(heap)
    while made < room and loss > loss_allowed:
        worst, _, group = heap[0]
        if group.epsilons.size == 1:
            break
        low, high = group.halves()
        heapq.heapreplace(heap, (-low.loss, 2 * made, low))
        heapq.heappush(heap, (-high.loss, 2 * made + 1, high))
        loss += worst + low.loss + high.loss
        made += 1
    return [group for _, _, group in heap]


def last_at_most(values: FloatArray, asked: FloatArray) -> IntArray:
    """Return for each number the place of the last of sorted values that is at most it, or -1; fast for millions.

    A table has the place for numbers whose bits end in 42 zeros: 0.1 % apart. What it says for the last of them below a
    number is never too far; few values lie between two of them, and what is beyond the next value still is looked up.
    """
    if asked.size < SOME or not LEAST <= values[0] <= values[-1] < np.inf:
        return np.searchsorted(values, asked, side="right") - 1
    first, last = (values[[0, -1]].view(np.int64) >> 42).tolist()
    starts = (np.arange(first - 1, last + 1) << 42).view(np.float64)
    table, following = np.searchsorted(values, starts, side="right") - 1, np.append(values, np.nan)
    places = np.empty(asked.size, dtype=np.int64)
    for start in range(0, asked.size, SOME):
        some = np.ascontiguousarray(asked[start : start + SOME])
        place = table[np.clip((some.view(np.int64) >> 42) - (first - 1), 0, table.size - 1)]
        place += some >= following[place + 1]
        further = np.flatnonzero(some >= following[place + 1])
        place[further] = np.searchsorted(values, some[further], side="right") - 1
        places[start : start + SOME] = place
    return places
