"""Canaries: people added to the list so that the auditor knows, and can guess, whether their records were used.

Each canary joins a level of the plan and has its record or not by a fair coin; without it, it keeps its place
on the list and is drawn like anyone. Rates, noise and steps stay those of the plan, so what is proven for
each level stays true; only the list, and with it the public divisor, grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import BoolArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.plans import Plan

NO_RECORD = -1


@dataclass(frozen=True)
class Tier:
    """Levels that are looked at together, and what is promised and proven to people on them.

    A tier of several levels is judged by the largest of each: a canary of a smaller level is promised less,
    so the theorem holds for it all the more.
    """

    name: str
    levels: tuple[int, ...]
    promised: float
    proven: float | None
    delta: float


@dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries on an extended list: the plan with them on it, the level, tier and coin of each.

    Sensitive only within an audit: the coins are what the attack has to guess. Canaries stand behind
    everybody else.
    """

    plan: Plan
    tiers: tuple[Tier, ...]
    level: IntArray
    tier: IntArray
    has_record: BoolArray

    def __len__(self) -> int:
        return int(self.level.size)

    @property
    def others(self) -> int:
        """The number of people on the list who are not canaries."""
        return self.plan.people - len(self)

    def record_of_person(self, records_of_others: npt.ArrayLike | None = None) -> IntArray:
        """Return the record of everybody on the list: the others' first, then one for each canary that has one.

        Without `records_of_others`, nobody else supplied a record.
        """
        if records_of_others is None:
            others = np.full(self.others, NO_RECORD, dtype=np.int64)
        else:
            others = np.asarray(records_of_others, dtype=np.int64)
        first = int(others.max(initial=NO_RECORD)) + 1
        own = np.where(self.has_record, first + np.cumsum(self.has_record) - 1, NO_RECORD)
        return np.concatenate([others, own])


def tiers_of(plan: Plan, *, at_most: int = 5) -> tuple[Tier, ...]:
    """Return the plan's levels as tiers: each epsilon its own if they are few, else adjacent ones together.

    Levels that are never drawn, or ask for no protection, have nothing to audit and are in no tier.
    """
    usable = [
        index
        for index, level in enumerate(plan.levels)
        if level.people > 0 and math.isfinite(level.epsilon) and not _never_drawn(plan, index)
    ]
    if not usable:
        fail("Expected a plan that draws somebody at a finite epsilon. Got none such level.")
    epsilons = sorted({plan.levels[index].epsilon for index in usable})
    parts = np.array_split(np.array(epsilons), min(at_most, len(epsilons)))
    return tuple(
        _tier(
            plan,
            name,
            tuple(index for index in usable if part[0] <= plan.levels[index].epsilon <= part[-1]),
        )
        for name, part in zip(_names(parts), parts, strict=True)
    )


def add_canaries(
    plan: Plan,
    per_tier: int,
    generator: np.random.Generator,
    *,
    tiers: Sequence[Tier] | None = None,
    level_of_person: npt.ArrayLike | None = None,
) -> Canaries:
    """Add this many canaries per tier to the plan's list, with a fair coin for each one's record.

    Guarantee: the coins are independent and fair, rates, noise and clipping norms of every level are the
    plan's, so the run is (epsilon_l, delta_l)-DP towards each canary of level l exactly as the plan proves it
    for its people.
    """
    if per_tier < 1:
        fail(f"Expected at least one canary a tier. Got per_tier={per_tier!r}.")
    chosen = tuple(tiers_of(plan) if tiers is None else tiers)
    level = np.concatenate([np.resize(np.array(tier.levels), per_tier) for tier in chosen])
    added = np.bincount(level, minlength=len(plan.levels))
    levels = tuple(
        replace(old, people=old.people + int(more)) for old, more in zip(plan.levels, added, strict=True)
    )
    rounds = tuple(
        replace(
            r,
            expected_batch_size=math.fsum(
                level_.people * pi * q
                for level_, pi, q in zip(levels, r.participation, r.sample_rates, strict=True)
            ),
        )
        for r in plan.rounds
    )
    others = _levels_of_others(plan, level_of_person)
    everybody = np.concatenate([others, level]).astype(np.int64)
    extended = replace(
        plan, levels=levels, rounds=rounds, roster=Roster(np.arange(everybody.size), everybody)
    )
    return Canaries(
        plan=extended,
        tiers=chosen,
        level=level.astype(np.int64),
        tier=np.repeat(np.arange(len(chosen)), per_tier),
        has_record=generator.random(level.size) < 0.5,
    )


def _levels_of_others(plan: Plan, level_of_person: npt.ArrayLike | None) -> IntArray:
    if level_of_person is not None:
        return np.asarray(level_of_person, dtype=np.int64)
    if plan.roster is not None:
        return plan.roster.level
    return np.repeat(np.arange(len(plan.levels)), [level.people for level in plan.levels])


def _never_drawn(plan: Plan, level: int) -> bool:
    return all(r.exposure(level).costs_nothing for r in plan.rounds)


def _tier(plan: Plan, name: str, members: tuple[int, ...]) -> Tier:
    levels = sorted((plan.levels[index] for index in members), key=lambda level: level.epsilon)
    proven = [level.proven_epsilon for level in levels if level.proven_epsilon is not None]
    return Tier(
        name=name,
        levels=members,
        promised=levels[-1].epsilon,
        proven=max(proven) if len(proven) == len(levels) else None,
        delta=max(level.delta for level in levels),
    )


def _names(parts: list[npt.NDArray[np.float64]]) -> list[str]:
    """Return epsilon or its range for each tier, in as few digits as tell them apart."""
    for digits in range(3, 18):
        ends = [(f"{part[0]:.{digits}g}", f"{part[-1]:.{digits}g}") for part in parts]
        names = [low if low == high else f"{low} to {high}" for low, high in ends]
        if len(set(names)) == len(names):
            break
    return names
