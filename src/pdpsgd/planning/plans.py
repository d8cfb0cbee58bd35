"""The plan: what training does to whom, fixed before any data is touched, and what each person spends.

A plan is a plain, frozen value computed from public things only (the list of people, what each of them
allows, and public settings). Training executes it; anyone can read it as JSON and check it with
`Plan.verify`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd._typing import IntArray
from pdpsgd.accounting.history import Past
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.budgets.files import LARGE, read_text
from pdpsgd.errors import PdpsgdError, check_one_of, check_positive, fail, warn
from pdpsgd.planning.levels import Roster, assign, match_ids, people_digest
from pdpsgd.planning.rounds import Level, Round, check_level, check_round

if TYPE_CHECKING:
    from pdpsgd.planning.verification import Verification

SOUND = "sound"
NEIGHBOURS = "add-or-remove"


_PROVEN: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class LedgerMark:
    """The ledger whose people a plan is for: its id, and the number of the run once it is reserved there."""

    id: str
    run: int | None = None


@dataclass(frozen=True)
class Plan:
    """A whole training run, as far as privacy is concerned.

    Guarantee: unless it is marked `not_for_release`, and with an accountant that proves, a run that executes
    this plan on the plan's people satisfies (epsilon_l, delta_l)-DP towards every person of every level l,
    under adding or removing that person's record (see docs/promise.md). `verify` recomputes this with an
    accountant that shares no code with the one that computed the plan.
    """

    mechanism: str
    levels: tuple[Level, ...]
    rounds: tuple[Round, ...]
    accountant: str = "pld"
    bookkeeping: str = SOUND
    neighbours: str = NEIGHBOURS
    max_grad_norm: float = 1.0
    not_for_release: str | None = None
    """Why the plan does not keep its promise, as a sentence; its files then are not public either."""
    history_fixed: bool = False
    """Whether the plan was fixed before any result of the earlier plans that it counts was seen."""
    counted: tuple[str, ...] = ()
    """The identities of all earlier plans that are counted in the levels' histories, each as often as it was run."""
    ledger: LedgerMark | None = None
    """The ledger that the plan's budgets come from; a run that is not entered there is not for release."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    roster: Roster | None = field(default=None, compare=False, repr=False)
    stated_people: str | None = field(default=None, compare=False, repr=False)
    """What the plan's file says of its people, where the plan does not know them: see `people_digest`."""

    def __post_init__(self) -> None:
        _check_structure(self)

    @property
    def steps(self) -> int:
        """The number of steps of the whole plan."""
        return sum(r.steps for r in self.rounds)

    @property
    def people(self) -> int:
        """The number of people on the list, used or not."""
        return sum(level.people for level in self.levels)

    @property
    def filtered_round(self) -> int | None:
        """The index of the round in which a filter ends people's spending at their limits; None without one."""
        return next((i for i, r in enumerate(self.rounds) if r.spending_limits is not None), None)

    def history_of(self, level: int) -> Past:
        """Return all that a person of this level is exposed to: earlier plans, then this plan's rounds."""
        return self.levels[level].history + tuple(r.exposure(level) for r in self.rounds)

    def prefix(self, steps: int) -> Plan:
        """Return the first `steps` steps of the plan; proven figures are dropped because they no longer fit."""
        rounds, left = [], steps
        for r in self.rounds:
            if left > 0:
                rounds.append(replace(r, steps=min(r.steps, left)))
                left -= r.steps
        levels = tuple(replace(level, proven_epsilon=None) for level in self.levels)
        return replace(self, rounds=tuple(rounds), levels=levels)

    def round_of_step(self, step: int) -> int:
        """Return the index of the round to which the step (counted from 0 over the whole plan) belongs."""
        for index, r in enumerate(self.rounds):
            if step < r.steps:
                return index
            step -= r.steps
        fail(f"Expected a step below the plan's {self.steps} steps. Got {self.steps + step}.")

    @cached_property
    def digest(self) -> str:
        """A fingerprint of everything the plan says; whether it is for the same people says `people_digest`."""
        from pdpsgd.planning.plan_json import write

        roster = self._roster_to_write()
        text = write(**self._fields(), roster=None if roster is None else replace(roster, named=True))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def identity(self) -> str:
        """A fingerprint of the plan and who is on which level, the same whether or not the plan knows its people."""
        alone = replace(self, roster=None, stated_people=None)
        return hashlib.sha256(f"{alone.digest} {self.people_digest}".encode()).hexdigest()

    @cached_property
    def people_digest(self) -> str | None:
        """A public fingerprint of who is on which level; None if the plan does not say for whom it was made.

        Of ids and levels, in any order of people, or, without ids, of the levels in the list's order. A plan
        that is not for release is not public, and has none.
        """
        if self.not_for_release is not None:
            return None
        return self.stated_people if self.roster is None else people_digest(self.roster)

    def level_of_person(self, budgets: Budgets) -> IntArray:
        """Return the level of each person of `budgets`; refuses people for whom the plan was not computed."""

        return level_of_person(self, budgets)

    def people_with_nothing_left(self) -> list[object]:
        """Return the ids of people whom no round samples: they allow nothing, or earlier runs have spent it."""
        if self.roster is None:
            fail("This plan does not know its people: attach them with plan.with_people(budgets).")
        unused = [all(r.exposure(i).costs_nothing for r in self.rounds) for i in range(len(self.levels))]
        ids: list[object] = self.roster.ids[np.array(unused)[self.roster.level]].tolist()
        return ids

    def with_people(self, budgets: Budgets) -> Plan:
        """Return the same plan, knowing which person is on which level (needed to count it as history later).

        `budgets` are those that the plan was made for. Others are refused, as far as the plan says for whom it was
        made (files of earlier versions do not: a warning says so).
        """
        people = Roster(budgets.ids, self.level_of_person(budgets), budgets.named)
        is_checked = any(level.history for level in self.levels)  # by level_of_person
        if self.roster is None and not is_checked:
            check_same_people(self, people)
        return replace(self, roster=people)

    @property
    def is_proven_here(self) -> bool:
        """Whether this process has computed or verified these levels and rounds (a changed copy is another plan)."""
        return self._content in _PROVEN

    def remember_proof(self) -> Plan:
        """Remember that the plan was just proven or verified, and return it."""
        _PROVEN.add(self._content)
        return self

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        """All that a proof depends on: compared as it is, as numbers that differ may have the same hash."""
        levels = tuple((x.epsilon, x.delta, x.proven_epsilon, x.history) for x in self.levels)
        exposures = tuple(tuple(r.exposure(index) for index in range(len(levels))) for r in self.rounds)
        return levels, exposures, self.bookkeeping, self.not_for_release, self.neighbours

    def _fields(self) -> dict[str, Any]:
        """What the plan's file says, apart from who its people are."""
        names = (
            "mechanism",
            "bookkeeping",
            "accountant",
            "neighbours",
            "max_grad_norm",
            "levels",
            "rounds",
            "notes",
        )
        mark = None if self.ledger is None else (self.ledger.id, self.ledger.run)
        fields = {name: getattr(self, name) for name in (*names, "not_for_release", "history_fixed")}
        return {**fields, "counted": self.counted, "ledger": mark}

    def _roster_to_write(self) -> Roster | None:
        """The roster, where (epsilon, delta) alone do not say who is on which level."""
        budgets = {(level.epsilon, level.delta) for level in self.levels}
        is_needed = len(budgets) < len(self.levels) or self.not_for_release is not None
        return self.roster if is_needed else None

    def verify(self) -> Verification:
        """Recompute every level's epsilon with an independent accountant.

        Raises:
            PromiseBroken: the rounds cost a level more than it is promised, or than the plan claims.
            PdpsgdError: the plan is not for release, so that there is no promise to verify.
        """
        from pdpsgd.planning.certificate_check import check_claims
        from pdpsgd.planning.verification import verify

        if self.not_for_release is not None:
            fail(
                f"Expected a plan that keeps a promise, to verify it. Got one not for release: {self.not_for_release}"
            )
        found = verify(self.levels, self.rounds)
        if self.accountant == "certificate":
            check_claims(self.levels, self.rounds)
        self.remember_proof()
        return found

    def to_json(self, *, indent: int | None = 1) -> str:
        """Write the plan as JSON, in the published format."""
        from pdpsgd.planning.plan_json import write

        return write(
            **self._fields(), roster=self._roster_to_write(), people_digest=self.people_digest, indent=indent
        )

    @classmethod
    def from_json(cls, text: str, *, verify: bool = True) -> Plan:
        """Read a plan from JSON; refuses what is inconsistent or claims less than the truth (`verify`).

        A plan that is not for release claims nothing and is read without being verified.
        """
        from pdpsgd.planning.plan_json import read

        fields = read(text)
        mark = fields.pop("ledger")
        plan = cls(**fields, ledger=None if mark is None else LedgerMark(*mark))
        if plan.stated_people is not None and plan.people_digest not in (None, plan.stated_people):
            fail("Expected people whose digest is people_digest. Got others: one of the two was changed.")
        if verify and plan.not_for_release is None:
            plan.verify()
        return plan

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Plan:
        """Read a plan from a JSON file as `from_json` does; errors name the file."""
        text = read_text(path, "a plan (JSON)", most=LARGE)
        try:
            return cls.from_json(text, verify=verify)
        except PdpsgdError as error:
            raise type(error)(f"{path}: {error}") from error

    def table(self) -> str:
        """Show promised, proven, used, sampling rate and number of people per level, as text."""
        from pdpsgd.planning.plan_table import render, table

        laid_out = table(
            self.mechanism,
            self.levels,
            self.rounds,
            accountant=self.accountant,
            of_ledger=self.ledger is not None,
        )
        return render(laid_out, self.summary())

    def summary(self) -> list[str]:
        """Say what belongs under the table: noise multipliers, what stays unused, notes."""
        from pdpsgd.planning.plan_table import summary

        mark = [] if self.not_for_release is None else [f"Not for release. {self.not_for_release}"]
        of_ledger = self.ledger is not None
        said = summary(self.levels, self.rounds, accountant=self.accountant, of_ledger=of_ledger)
        return [*said, *mark, *self.notes]


def _check_structure(plan: Plan) -> None:
    if plan.bookkeeping != SOUND and plan.not_for_release is None:
        fail(
            f"Expected bookkeeping {SOUND!r}, or a plan whose not_for_release says why it is another. "
            f"Got {plan.bookkeeping!r}."
        )
    if plan.not_for_release is not None and any(x.proven_epsilon is not None for x in plan.levels):
        fail("Expected no proven_epsilon in a plan that is not for release. Got one.")
    check_one_of((NEIGHBOURS,), neighbours=plan.neighbours)
    check_positive(max_grad_norm=plan.max_grad_norm)
    if not plan.levels:
        fail("Expected at least one level in the plan. Got none.")
    for index, level in enumerate(plan.levels):
        check_level(f"levels[{index}]", level)
    for index, r in enumerate(plan.rounds):
        check_round(f"rounds[{index}]", r, plan.levels)
    if sum(r.spending_limits is not None for r in plan.rounds) > 1:
        fail("Expected spending_limits in at most one round of a plan. Got several such rounds.")


def level_of_person(plan: Plan, budgets: Budgets) -> IntArray:
    """Return the plan's level for each person; refuses people for whom the plan was not made."""
    epsilon = np.array([level.epsilon for level in plan.levels])
    delta = np.array([level.delta for level in plan.levels])
    if plan.roster is not None:
        index = match_ids(plan.roster, budgets)
    elif len(set(zip(epsilon.tolist(), delta.tolist(), strict=True))) == epsilon.size:
        index = assign(epsilon, delta, budgets)
        if any(level.history for level in plan.levels):
            # Somebody with another budget than before has another history than the level they are on now.
            check_same_people(plan, Roster(budgets.ids, index, budgets.named))
    else:
        fail(
            "This plan has several levels with the same budget: its roster says who is on which, and is missing."
        )
    lost = (index < 0) | (epsilon[index] > budgets.epsilon) | (delta[index] > budgets.delta)
    if lost.any():
        person = int(lost.argmax())
        fail(
            f"This plan was made for other people: nobody on it allows as little as person {budgets.ids[person]} "
            f"(epsilon={budgets.epsilon[person]:g}, delta={budgets.delta[person]:g})."
        )
    counted = np.bincount(index, minlength=epsilon.size)
    planned = np.array([level.people for level in plan.levels])
    if not np.array_equal(counted, planned):
        level = int((counted != planned).argmax())
        fail(
            f"This plan was made for other people: it has {planned[level]:,} at epsilon={epsilon[level]:g}, "
            f"these budgets {counted[level]:,}. Where people are set aside to test on, plan with the same --test-share."
        )
    return index


def check_same_people(plan: Plan, people: Roster) -> None:
    """Refuse people of whom the plan's digest says that they are not those it was made for, each on their level."""
    stated = plan.people_digest
    if stated is None:
        if len(plan.levels) > 1:
            warn(
                "This plan does not say for whom it was made: whether these are the same people, with the budgets that "
                "they had then, cannot be told. Attach the list exactly as it was.",
            )
        return
    if stated.startswith("ids:") and not people.named:
        fail(
            "This plan was made for people with ids, and these have none: who is who cannot be told. "
            "Give the ids of the people."
        )
    by_place = Roster(people.ids, people.level, named=False)
    if stated != people_digest(people if stated.startswith("ids:") else by_place):
        what = "ids" if people.named else "order"
        fail(
            f"This plan was made for other people than these {people.level.size:,}, or some of them allowed "
            f"something else then: {what} and levels do not have the digest that the plan states. What they spent "
            "can be told from the list that it was made for only."
        )
