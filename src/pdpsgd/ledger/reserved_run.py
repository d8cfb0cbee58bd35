"""`ReservedRun`: a run of a ledger, in the hands of the process that trains it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError, fail, warn
from pdpsgd.ledger.database import LedgerUnavailable
from pdpsgd.ledger.values import Begun, Run, Statement
from pdpsgd.planning.levels import ranges_by_level
from pdpsgd.planning.plans import Plan

SECONDS_BETWEEN_CHECKS = 2.0
"""How long a process that was replaced may go on at most; its steps are those of the process that replaced it."""


class Book(Protocol):
    """What a ledger does for a run that is in training."""

    @property
    def id(self) -> str: ...  # noqa: D102
    def run(self, number: int) -> Run: ...  # noqa: D102
    def begin(self, run: int) -> Begun: ...  # noqa: D102
    def finish(self, run: int, attempt: int) -> None: ...  # noqa: D102
    def kill(self, run: int, attempt: int) -> None: ...  # noqa: D102
    def cancel(self, run: int) -> None: ...  # noqa: D102
    def undo(self, since: str, run: int | None = None) -> bool: ...  # noqa: D102
    def check_attempt(self, run: int, attempt: int) -> None: ...  # noqa: D102
    def tie(self, run: int, attempt: int, *, key_name: str) -> None: ...  # noqa: D102
    def statement(self, run: int) -> Statement: ...  # noqa: D102
    def consents_of(self, run: int) -> Budgets: ...  # noqa: D102


class ReservedRun:
    """A reservation under which this process trains: `make_private(reservation=...)`, `fit(reservation=...)`.

    Guarantee: `begin` has committed the run as running, under the consents of that moment, before it returns; nobody
    else trains under the same attempt. The charge was fixed when the run was reserved, and nothing here changes it.

    Args:
        book: the ledger.
        run: the run, reserved in it.
        plan: the plan that was reserved, with its people.
        watches: whether this process moves the run's state; False on all ranks but the first.
    """

    def __init__(self, book: Book, run: Run, plan: Plan, *, watches: bool = True) -> None:
        self.book = book
        self.plan = plan
        self.number, self.name = run.number, run.name
        self.state, self.attempt = run.state, run.attempt
        self.in_order_of_records = False
        """Whether the plan's people stand in the order of somebody's records, not in that of the ledger."""
        self.cancels = True
        """Whether an error before the start cancels the reservation; not so for one that was made for later."""
        self.enrolled_after: str | None = None
        """The head before people were enrolled for this run, who are forgotten if it is cancelled."""
        self._watches = watches
        self._begun = False
        self._statement: Statement | None = None
        self._promises: Budgets | None = None
        self._allowed_by_level: list[tuple[float, float]] | None = None
        self._head = ""
        self._checked = time.monotonic()
        self._warned = False

    @property
    def ledger_id(self) -> str:
        """The id of the ledger."""
        return self.book.id

    @property
    def begun(self) -> bool:
        """Whether this process has begun the run, so that it may read records."""
        return self._begun

    @property
    def statement(self) -> Statement:
        """What the run takes of what its people allow over all runs."""
        if self._statement is None:
            self._statement = self.book.statement(self.number)
        return self._statement

    def check_plan(self, plan: Plan) -> None:
        """Refuse to train by another plan, or on other people, than was reserved."""
        reserved = self.plan
        same = (
            [r.exposure(i) for r in plan.rounds for i in range(len(plan.levels))]
            == [r.exposure(i) for r in reserved.rounds for i in range(len(reserved.levels))]
            and len(plan.levels) == len(reserved.levels)
            and plan.people_digest == reserved.people_digest
        )
        if not same:
            fail(
                f"Expected the plan and the people of run {self.number}, as they were reserved in the ledger. Got "
                "others: train by reservation.plan, or reserve this plan."
            )

    def begin(self, *, watches: bool = True) -> None:
        """Start the run, or take it over if it was started before; to be called before any record is read.

        On all ranks but the first, `watches` is False: one process moves the state of a run.

        Raises:
            PdpsgdError: Nobody would move its state: it would be trained while it can still be cancelled.
        """
        if self._begun:
            return
        if watches and not self._watches:
            fail(
                f"Expected run {self.number} from Ledger.hold(watches=True), in the only process, or the first. Got "
                "watches=False: the ledger would not know that the run has begun."
            )
        self._watches = self._watches and watches
        if self._watches:
            begun = self.book.begin(self.number)
            self.attempt, self._statement = begun.attempt, begun.statement
            self._promises, self._head = begun.promises, begun.head
        self.state, self._begun = "running", True
        self._checked = time.monotonic()

    def check(self, *, now: bool = False) -> None:
        """Stop this process if another one has taken the run over; asks the ledger every few seconds.

        A ledger out of reach does not stop a run that is charged already: it is asked again.
        """
        if not (self._watches and self._begun and self.state == "running"):
            return
        if not now and time.monotonic() - self._checked < SECONDS_BETWEEN_CHECKS:
            return
        self._checked = time.monotonic()
        try:
            self.book.check_attempt(self.number, self.attempt)
        except LedgerUnavailable as error:
            if not self._warned:
                warn(f"{error} The run is charged, and goes on.")
            self._warned = True

    def tie(self, key_name: str) -> None:
        """Say by which key noise is about to be given out; refused if other noise was given out for the same charge."""
        if self._watches and self._begun:
            self.book.tie(self.number, self.attempt, key_name=key_name)

    def finish(self) -> None:
        """End the run, if it has not ended; it stays charged in full."""
        if self._watches and self._begun and self.state != "finished":
            self.book.finish(self.number, self.attempt)
        self.state = "finished"

    def give_up(self) -> None:
        """End the run after an error: cancelled if it has not begun, else killed, charged and free to be resumed.

        One that has not begun and is not `cancels` stays reserved.
        """
        if not self._watches or self.state in ("finished", "killed", "cancelled"):
            return
        # The error that led here is what the user must see; what cannot be told to the ledger stays charged.
        with suppress(PdpsgdError):
            if self._begun:
                self.book.kill(self.number, self.attempt)
                self.state = "killed"
            elif self.cancels and self.book.run(self.number).state == "reserved":
                self.book.cancel(self.number)
                self.state = "cancelled"
                if self.enrolled_after is not None:
                    self.book.undo(self.enrolled_after, self.number)

    @property
    def taken_back(self) -> bool:
        """Whether nothing was begun under the reservation, and nothing of it is left to this process."""
        return not self._begun and (
            self.state == "cancelled" or (self.state == "reserved" and not self.cancels)
        )

    def promises(self) -> Budgets:
        """Return what the people on the run's list allowed over all runs when it began."""
        return self.book.consents_of(self.number) if self._promises is None else self._promises

    def description(self) -> dict[str, Any]:
        """Describe the reservation for the files of a run: public, from consents and charges alone."""
        return {
            "id": self.ledger_id,
            "run": self.number,
            "attempt": self.attempt,
            "head": self._head,
            "above_consent": self.statement.above_consent,
            "withdrawn": self.statement.withdrawn,
            "changed": self.statement.changed,
            "tiers": [asdict(tier) for tier in self.statement.tiers],
            "levels": [{"allows": list(each)} for each in self.allowed_by_level()],
        }

    def allowed_by_level(self) -> list[tuple[float, float]]:
        """Return the least and the most that people of each level of the plan allow over all runs."""
        if self._allowed_by_level is None:
            assert self.plan.roster is not None  # a reserved plan knows its people
            self._allowed_by_level = ranges_by_level(self.plan.roster, self.promises(), len(self.plan.levels))
        return self._allowed_by_level
