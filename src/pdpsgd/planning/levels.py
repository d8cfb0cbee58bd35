"""Levels: people with similar budgets share one, which is at most what each of them allows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdpsgd._typing import BoolArray, FloatArray, IdArray, IntArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Past
from pdpsgd.budgets.budgets import WRITTEN_ALIKE, Budgets, as_read
from pdpsgd.errors import check_positive, fail, shown
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.planning.splitting import Group, last_at_most, split

MAX_LEVELS = 256
MAX_DELTAS = 8
SMALLEST_EPSILON = 1e-9
"""Whoever allows less is never used: no rate is that small."""


@dataclass(frozen=True, eq=False)
class Levels:
    """Budgets rounded down to few values, and what people were exposed to before.

    Guarantee: every person's level has an epsilon and a delta that are both at most the person's own, so
    whoever keeps the promise to the levels keeps it to the people.
    """

    epsilon: FloatArray
    delta: FloatArray
    people: FloatArray
    histories: tuple[Past, ...]

    def __len__(self) -> int:
        return int(self.epsilon.size)

    def usable(self) -> BoolArray:
        """Return which levels allow anything at all."""
        return (self.epsilon > 0) & (self.delta > 0)

    def only(self, chosen: IntArray) -> Levels:
        """Return some of the levels."""
        histories = tuple(self.histories[i] for i in chosen.tolist())
        return Levels(self.epsilon[chosen], self.delta[chosen], self.people[chosen], histories)

    def up_to(self, epsilon: FloatArray) -> Levels:
        """Return the same people with smaller budgets."""
        return replace(self, epsilon=epsilon)

    def after(self, rounds: Sequence[Round]) -> Levels:
        """Return the same people, who were exposed to these rounds as well."""
        histories = tuple(h + tuple(r.exposure(i) for r in rounds) for i, h in enumerate(self.histories))
        return replace(self, histories=histories)

    def spent(self, by: Accountant) -> FloatArray:
        """Return what each level has spent before."""
        return np.array(by.epsilons(self.histories, self.delta.tolist()))

    def round(
        self,
        steps: int,
        noise_multiplier: float,
        sample_rates: FloatArray,
        *,
        participation: FloatArray | None = None,
        clip_scales: FloatArray | None = None,
        spending_limits: FloatArray | None = None,
    ) -> Round:
        """Make a round of a plan for these levels, with its expected batch size.

        Args:
            steps: number of steps.
            noise_multiplier: of every step.
            sample_rates: sampling rate per level.
            participation: probability per level of being in the round; 1 by default.
            clip_scales: clipping norm per level, relative to C; 1 by default.
            spending_limits: with a filter, the most that a person of a level spends in the round.

        Returns:
            The round.
        """
        ones = np.ones_like(sample_rates)
        participation = ones if participation is None else participation
        return Round(
            steps=int(steps),
            noise_multiplier=float(noise_multiplier),
            expected_batch_size=float(self.people @ (participation * sample_rates)),
            participation=tuple(participation.tolist()),
            sample_rates=tuple(sample_rates.tolist()),
            clip_scales=tuple((ones if clip_scales is None else clip_scales).tolist()),
            spending_limits=None if spending_limits is None else tuple(spending_limits.tolist()),
        )

    def unproven(self) -> tuple[Level, ...]:
        """Return the levels as a plan holds them, before anything is proven."""
        columns = zip(self.epsilon, self.delta, self.people, self.histories, strict=True)
        return tuple(Level(float(e), float(d), int(n), None, h) for e, d, n, h in columns)


@dataclass(frozen=True, eq=False)
class Roster:
    """Which person is on which level: ids, and the level of each."""

    ids: IdArray
    level: IntArray
    named: bool = True


def make_levels(budgets: Budgets, max_levels: int = MAX_LEVELS) -> tuple[Levels, IntArray]:
    """Put people on at most `max_levels` levels, where the people are, losing as little epsilon as possible.

    Few distinct deltas are kept as they are, many are rounded down to at most eight; then the budgets of each
    delta are split, until the average loss is below half a percent or the levels are used up.

    Returns:
        The levels, and the level of each person.

    >>> levels, of_person = make_levels(Budgets([0.5, 0.5, 2.0, 0.0]))
    >>> levels.epsilon.tolist(), levels.people.tolist(), of_person.tolist()
    ([0.0, 0.5, 2.0], [1.0, 2.0, 1.0], [1, 1, 2, 0])
    """
    check_positive(max_levels=max_levels)
    deltas = _round_down(budgets.delta, _delta_levels(budgets.delta, min(MAX_DELTAS, max_levels)))
    never = (budgets.epsilon < SMALLEST_EPSILON) | (_each(deltas) == 0)
    groups: list[Group] = []
    fixed: list[tuple[float, float]] = [(0.0, float(deltas[never].min()))] if never.any() else []
    for delta in _distinct(deltas)[_distinct(deltas) > 0]:
        epsilons = _where(~never & (_each(deltas) == delta), budgets.epsilon)
        finite = _where(np.isfinite(epsilons), epsilons)
        if finite.size < epsilons.size:
            fixed.append((np.inf, float(delta)))
        if finite.size:
            groups.append(Group.of(finite, float(delta)))
    room = max_levels - len(fixed)
    if room < len(groups):
        fail(f"Expected max_levels >= {len(groups) + len(fixed)} for these budgets. Got {max_levels}.")
    lowest = [(float(group.epsilons[0]), group.delta) for group in split(groups, room)]
    epsilon, delta_column = np.array(sorted(fixed + lowest, key=lambda level: (level[1], level[0]))).T
    index = assign(epsilon, delta_column, budgets)
    people = np.bincount(index, minlength=epsilon.size).astype(float)
    return Levels(epsilon, delta_column, people, ((),) * epsilon.size), index


def average_loss(kept: FloatArray, asked: FloatArray) -> float:
    """Return the mean share of epsilon that people give up because their level has less than they allow."""
    counted = (asked >= SMALLEST_EPSILON) & (kept > 0) & np.isfinite(asked)
    if counted.all():
        return float(1 - np.mean(kept / asked))
    return float(1 - np.mean(kept[counted] / asked[counted])) if counted.any() else 0.0


def assign(epsilon: FloatArray, delta: FloatArray, budgets: Budgets) -> IntArray:
    """Return the level of each person: the largest delta that is at most theirs, then the largest such epsilon.

    The rule needs the levels and the person's own budget only, so that anyone can find their level in a
    published plan.
    """
    index = np.full(len(budgets), -1, dtype=np.int64)
    # People whose epsilon or delta is 0 are all on the one level that is never sampled.
    never = (budgets.epsilon < SMALLEST_EPSILON) | (_round_down(budgets.delta, np.unique(delta)) == 0)
    unused = np.flatnonzero(epsilon == 0)
    index[never] = unused[0] if unused.size else -1
    used = np.flatnonzero(epsilon > 0)
    person_delta = _round_down(budgets.delta, np.unique(delta[used])) if used.size else np.zeros(len(budgets))
    if (
        used.size == epsilon.size
        and np.all(delta == delta[0])
        and (np.diff(epsilon) > 0).all()
        and not never.any()
    ):
        return last_at_most(epsilon, budgets.epsilon)
    for value in np.unique(person_delta[~never]):
        members = np.flatnonzero(~never & (person_delta == value))
        level = used[delta[used] == value]
        order = np.argsort(epsilon[level])
        place = last_at_most(epsilon[level][order], budgets.epsilon[members])
        index[members] = np.where(place >= 0, level[order][place], -1)
    return index


def people_digest(roster: Roster) -> str:
    """Return a public fingerprint of who is on which level: by id, in any order, or by place without ids."""
    if not roster.named:
        return f"places:{hashlib.sha256(roster.level.astype('<i8').tobytes()).hexdigest()}"
    order = np.argsort(roster.ids, kind="stable")  # (not polars, which may hang in a process that was forked)
    digest = hashlib.sha256(_kind(roster.ids).encode())
    for start in range(0, len(order), 2**16):  # of millions, some at a time
        names = roster.ids[order[start : start + 2**16]].tolist()
        digest.update("".join(f"\0{name}" for name in names).encode())
    digest.update(roster.level[order].astype("<i8").tobytes())
    return f"ids:{digest.hexdigest()}"


def match_ids(roster: Roster, budgets: Budgets) -> IntArray:
    """Return the roster's level for each person of `budgets`, by id; -1 for people it does not know."""
    if _kind(roster.ids) != _kind(budgets.ids):
        # Silently, 7 and "7" would be two people, and what one of them has spent would be forgotten.
        fail(
            f"Expected ids of the same kind to match people by: {_kind(roster.ids)} like {roster.ids[0]!r} there, "
            f"{_kind(budgets.ids)} like {budgets.ids[0]!r} here."
        )
    if np.array_equal(roster.ids, budgets.ids):
        return roster.level
    if roster.named != budgets.named:
        there, here = ("ids", "no ids")[:: 1 if roster.named else -1]
        fail(
            f"Expected people with ids on both lists, or without ids on both, to match them. Got {there} there and "
            f"{here} here: somebody's id is not their place on a list."
        )
    known, asked = roster.ids, budgets.ids
    if known.dtype != asked.dtype and known.dtype.kind not in "US":
        # Numbers of different widths or signs: as Python numbers they compare exactly, in numpy they become floats.
        known, asked = known.astype(object), asked.astype(object)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], asked), order.size - 1)
    found = known[order][place] == asked
    _check_written_alike(known, asked[~found])
    return np.where(found, roster.level[order][place], -1)


def _check_written_alike(known: IdArray, unknown: IdArray) -> None:
    """Refuse people who are known, but are written otherwise: what they have spent would be forgotten."""
    new, old = as_read(unknown), as_read(known)
    if new is None and old is None:
        return
    place = {name: index for index, name in enumerate((known if old is None else old).tolist())}
    for name, read in zip(unknown.tolist(), (unknown if new is None else new).tolist(), strict=True):
        if read in place:
            fail(
                f"Expected one way to write each id. Got {shown(str(name))} here and "
                f"{shown(str(known[place[read]]))} there, which {WRITTEN_ALIKE}: what this person has spent there "
                "would be forgotten. Correct the list."
            )


def _kind(ids: IdArray) -> str:
    """Whether ids are numbers or text, as far as that can be seen."""
    if ids.dtype.kind == "O":
        kinds = {"text" if isinstance(value, str) else "numbers" for value in ids}
        return kinds.pop() if len(kinds) == 1 else "mixed ids"
    return "text" if ids.dtype.kind in "US" else "numbers"


def _each(values: FloatArray) -> FloatArray:
    """Return everybody's value, or only one if it is known to be the same for all (a broadcast array)."""
    return values[:1] if values.strides == (0,) else values


def _distinct(values: FloatArray) -> FloatArray:
    """Return the sorted distinct values."""
    return np.unique(_each(values))


def _where(chosen: BoolArray, values: FloatArray) -> FloatArray:
    """Return the chosen values; all of them without copying millions."""
    return values if chosen.all() else values[chosen]


def _delta_levels(delta: FloatArray, most: int) -> FloatArray:
    values = _distinct(delta)
    if values.size <= most:
        return values
    positive = delta[delta > 0]
    chosen = np.quantile(positive, np.linspace(0, 1, most, endpoint=False), method="lower")
    return np.unique(np.append(chosen, 0.0 if positive.size < delta.size else chosen[0]))


def _round_down(values: FloatArray, to: FloatArray) -> FloatArray:
    if values.strides == (0,) and values.size:
        return np.broadcast_to(_round_down(values[:1].copy(), to), values.shape)
    place = np.searchsorted(to, values, side="right") - 1
    return np.where(place >= 0, to[np.maximum(place, 0)], 0.0)


def ranges_by_level(roster: Roster, budgets: Budgets, levels: int) -> list[tuple[float, float]]:
    """Find the least and the most epsilon that people of each level allow, over all runs where a ledger counts them.

    Args:
        roster: Who is on which level.
        budgets: What the same people allow.
        levels: The number of levels.

    Returns:
        A pair per level; (0, 0) where nobody is on it.
    """
    place = match_ids(roster, budgets)
    known = place >= 0
    least, most = np.full(levels, np.inf), np.zeros(levels)
    np.minimum.at(least, place[known], budgets.epsilon[known])
    np.maximum.at(most, place[known], budgets.epsilon[known])
    filled = np.isin(np.arange(levels), place)
    return [(float(low), float(high)) for low, high in zip(np.where(filled, least, 0.0), most, strict=True)]
