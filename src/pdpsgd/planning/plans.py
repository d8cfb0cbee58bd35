"""The plan: what will be done to whom, fixed before any data is touched, and what each person will have
spent.

A plan is a plain, frozen value computed from public things only (the list of people, what each of them
allows, and public settings). Training executes it; anyone can read it as JSON and check it with
`Plan.verify`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.accounting.history import Exposure, History
from pdpsgd.errors import check_one_of, check_positive, fail

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets, IntArray
    from pdpsgd.planning.levels import Roster
    from pdpsgd.planning.verification import Verification

BOOKKEEPINGS = ("sound", "as-published")
NEIGHBOURS = "add-or-remove"


@dataclass(frozen=True)
class Level:
    """People who are treated alike: a budget that is at most what each of them allows.

    `proven_epsilon` is what the plan's rounds cost them at `delta`, together with `history` (earlier plans on
    the same people); None where nothing is proven. The last three belong to as-published bookkeeping: what
    the paper would claim, and the larger epsilon that is provable for it, at a larger delta.
    """

    epsilon: float
    delta: float
    people: int
    proven_epsilon: float | None = None
    history: History = ()
    claimed_epsilon: float | None = None
    provable_epsilon: float | None = None
    provable_delta: float | None = None


@dataclass(frozen=True)
class Round:
    """Steps taken under the same noise and the same rates; the tuples follow the plan's levels."""

    steps: int
    noise_multiplier: float
    expected_batch_size: float
    participation: tuple[float, ...]
    sample_rates: tuple[float, ...]
    clip_scales: tuple[float, ...]
    threshold: float | None = None
    fresh_model: bool = False

    def exposure(self, level: int) -> Exposure:
        """What a person of this level is exposed to in this round.

        Noise of standard deviation sigma * C against a gradient of norm at most C_l is a noise multiplier of
        sigma * C / C_l for that person.
        """
        scale = self.clip_scales[level]
        sigma = self.noise_multiplier / scale if scale > 0 else math.inf
        return Exposure(
            self.participation[level], self.sample_rates[level] if scale > 0 else 0.0, sigma, self.steps
        )


_PROVEN: set[int] = set()


@dataclass(frozen=True)
class Plan:
    """A whole training run, as far as privacy is concerned.

    Guarantee: with bookkeeping `sound` and an accountant that proves, a run that executes this plan on the
    plan's people satisfies (epsilon_l, delta_l)-DP towards every person of every level l, under adding or
    removing that person's record (see docs/promise.md). `verify` re-derives this with an accountant that
    shares no code with the one that made the plan.
    """

    mechanism: str
    levels: tuple[Level, ...]
    rounds: tuple[Round, ...]
    accountant: str = "pld"
    bookkeeping: str = "sound"
    neighbours: str = NEIGHBOURS
    max_grad_norm: float = 1.0
    notes: tuple[str, ...] = field(default=(), compare=False)
    roster: Roster | None = field(default=None, compare=False, repr=False)
    stated_people: str | None = field(default=None, compare=False, repr=False)
    """What the plan's file says of its people, where the plan does not know them: see `people_digest`."""

    def __post_init__(self) -> None:
        _check_structure(self)

    @property
    def steps(self) -> int:
        """How many steps the whole plan takes."""
        return sum(r.steps for r in self.rounds)

    @property
    def people(self) -> int:
        """How many people are on the list, whether they are used or not."""
        return sum(level.people for level in self.levels)

    @property
    def sensitive(self) -> bool:
        """Whether the plan itself tells who was drawn (as-published bookkeeping) and must not be
        published."""
        return self.bookkeeping == "as-published"

    def history_of(self, level: int) -> History:
        """All that a person of this level is exposed to: earlier plans, then this plan's rounds."""
        return self.levels[level].history + tuple(r.exposure(level) for r in self.rounds)

    def prefix(self, steps: int) -> Plan:
        """The plan cut off after so many steps; proven figures are dropped because they no longer fit."""
        rounds, left = [], steps
        for r in self.rounds:
            if left > 0:
                rounds.append(replace(r, steps=min(r.steps, left)))
                left -= r.steps
        levels = tuple(replace(level, proven_epsilon=None) for level in self.levels)
        return replace(self, rounds=tuple(rounds), levels=levels)

    def round_of_step(self, step: int) -> int:
        """Index of the round to which the step (counted from 0 over the whole plan) belongs."""
        for index, r in enumerate(self.rounds):
            if step < r.steps:
                return index
            step -= r.steps
        fail(f"Expected a step below the plan's {self.steps} steps. Got {self.steps + step}.")

    @cached_property
    def digest(self) -> str:
        """A fingerprint of everything the plan says; whether it is for the same people says `people_digest`."""
        from pdpsgd.planning.plan_json import plan_to_json

        return hashlib.sha256(plan_to_json(self, whose=False).encode()).hexdigest()

    @cached_property
    def people_digest(self) -> str | None:
        """A public fingerprint of who is on which level; None if the plan does not say for whom it was made.

        Of ids and levels, in whatever order people are listed, or, without ids, of the levels in the list's order.
        An as-published plan, which is not public, has none.
        """
        from pdpsgd.planning.levels import people_digest

        if self.sensitive:
            return None
        return self.stated_people if self.roster is None else people_digest(self.roster)

    def level_of_person(self, budgets: Budgets) -> IntArray:
        """The level of each person of `budgets`, in their order; refuses people the plan was not made for."""
        from pdpsgd.planning.levels import level_of_person

        return level_of_person(self, budgets)

    def people_with_nothing_left(self) -> list[object]:
        """Ids of the people whom no round draws: they allow nothing, or earlier runs have spent it."""
        if self.roster is None:
            fail("This plan does not know its people: attach them with plan.with_people(budgets).")
        unused = [all(r.exposure(i).costs_nothing for r in self.rounds) for i in range(len(self.levels))]
        ids: list[object] = self.roster.ids[np.array(unused)[self.roster.level]].tolist()
        return ids

    def with_people(self, budgets: Budgets) -> Plan:
        """The same plan, knowing which person is on which level (needed to count it as history later).

        `budgets` are those that the plan was made for. Others are refused, as far as the plan says for whom it was
        made (files of earlier versions do not: a warning says so).
        """
        from pdpsgd.planning.levels import Roster, check_same_people

        people = Roster(budgets.ids, self.level_of_person(budgets), budgets.named)
        is_checked = any(level.history for level in self.levels)  # by level_of_person
        if self.roster is None and not is_checked:
            check_same_people(self, people)
        return replace(self, roster=people)

    @property
    def is_proven_here(self) -> bool:
        """Whether this process has made or verified just these levels and rounds: a changed copy is another plan."""
        return self._content in _PROVEN

    def remember_proof(self) -> Plan:
        """The plan itself, which was just proven or verified."""
        _PROVEN.add(self._content)
        return self

    @cached_property
    def _content(self) -> int:
        """A fingerprint of all that a proof depends on."""
        levels = tuple((x.epsilon, x.delta, x.proven_epsilon, x.history) for x in self.levels)
        exposures = tuple(tuple(r.exposure(index) for index in range(len(levels))) for r in self.rounds)
        return hash((levels, exposures, self.bookkeeping, self.neighbours))

    def verify(self) -> Verification:
        """Re-derive every level's epsilon with an independent accountant; raises if any promise is broken."""
        from pdpsgd.planning.verification import verify

        found = verify(self)
        self.remember_proof()
        return found

    def to_json(self, *, indent: int | None = 1) -> str:
        """The plan as JSON, in the published format."""
        from pdpsgd.planning.plan_json import plan_to_json

        return plan_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str, *, verify: bool = True) -> Plan:
        """A plan from JSON; refuses what is inconsistent or claims less than the truth (`verify`)."""
        from pdpsgd.planning.plan_json import plan_from_json

        plan = plan_from_json(text)
        if verify:
            plan.verify()
        return plan

    def table(self) -> str:
        """The plan for people: promised, proven, used, rate and number of people per level."""
        from pdpsgd.planning.plan_table import render

        return render(self)


def _check_structure(plan: Plan) -> None:
    check_one_of(BOOKKEEPINGS, bookkeeping=plan.bookkeeping)
    check_one_of((NEIGHBOURS,), neighbours=plan.neighbours)
    check_positive(max_grad_norm=plan.max_grad_norm)
    if not plan.levels:
        fail("Expected at least one level in the plan. Got none.")
    for index, level in enumerate(plan.levels):
        _check_level(f"levels[{index}]", level)
    for index, r in enumerate(plan.rounds):
        _check_round(f"rounds[{index}]", r, plan.levels)


def _check_level(place: str, level: Level) -> None:
    if not level.epsilon >= 0:
        fail(f"Expected {place}.epsilon >= 0 (or inf). Got {level.epsilon!r}.")
    if not 0 <= level.delta < 1:
        fail(f"Expected 0 <= {place}.delta < 1. Got {level.delta!r}.")
    if level.people < 0:
        fail(f"Expected {place}.people >= 0. Got {level.people!r}.")
    if level.proven_epsilon is not None and not level.proven_epsilon >= 0:
        fail(f"Expected {place}.proven_epsilon >= 0 or null. Got {level.proven_epsilon!r}.")


def _check_round(place: str, r: Round, levels: tuple[Level, ...]) -> None:
    if r.steps < 1:
        fail(f"Expected {place}.steps >= 1. Got {r.steps!r}.")
    check_positive(**{f"{place}.noise_multiplier": r.noise_multiplier})
    check_positive(**{f"{place}.expected_batch_size": r.expected_batch_size})
    for name in ("participation", "sample_rates", "clip_scales"):
        values = getattr(r, name)
        if len(values) != len(levels):
            fail(
                f"Expected {place}.{name} to have one value for each of the {len(levels)} levels. Got {len(values)}."
            )
        highest = math.inf if name == "clip_scales" else 1.0
        for index, value in enumerate(values):
            if not (0 <= value <= highest and math.isfinite(value)):
                accepted = "[0, 1]" if highest == 1 else "[0, inf)"
                fail(f"Expected {place}.{name}[{index}] in {accepted}. Got {value!r}.")
    for index, level in enumerate(levels):
        if (level.epsilon == 0 or level.delta == 0) and not r.exposure(index).costs_nothing:
            fail(
                f"Expected {place} never to draw level {index}, whose people allow epsilon={level.epsilon!r} at "
                f"delta={level.delta!r}: nothing. Got sample rate {r.sample_rates[index]!r}."
            )
    drawn = math.fsum(level.people * r.participation[i] * r.sample_rates[i] for i, level in enumerate(levels))
    if not np.isclose(drawn, r.expected_batch_size, rtol=1e-6, atol=1e-9):
        fail(
            f"Expected {place}.expected_batch_size to be the people times their rates, {drawn!r}. "
            f"Got {r.expected_batch_size!r}."
        )
