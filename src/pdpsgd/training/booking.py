"""From a ledger to a reserved run: who is new, what may be spent, the plan, the charge; and back after a crash.

A run folder notes the token of its reservation before the reservation is made. So a process that is killed at any
moment leaves either no reservation, or one that the next process finds by that token and goes on under.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pdpsgd.engine.distributed import Ranks
from pdpsgd.errors import PdpsgdError, fail, shown
from pdpsgd.ledger import Ledger, LedgerUnavailable, ReservedRun
from pdpsgd.planning.levels import Roster, match_ids

if TYPE_CHECKING:
    import torch

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.options import TrainingOptions
    from pdpsgd.training.run_folder import RunFolder


def book(
    ledger: Ledger,
    *,
    budgets: Budgets | None,
    options: TrainingOptions,
    plan: Plan | None = None,
    folder: RunFolder | None = None,
    number: int | None = None,
    device: torch.device | None = None,
    agree: Callable[[Plan], None] | None = None,
) -> ReservedRun:
    """Reserve a run in a ledger, or find the one that a run folder belongs to.

    Args:
        ledger: The ledger of these people.
        budgets: The public list of people, with what each allows over all runs. Whoever is new is enrolled, and
            whoever is known must allow the same there. None: everybody in the ledger.
        options: How to plan, and what share of what people have left to spend.
        plan: A ready plan that was made from this ledger, instead of a new one.
        folder: The run folder; a run that was reserved for it is taken up again.
        number: A run that is reserved already.
        device: Where the model is, for a run of several processes.
        agree: Is shown the plan of a new run before it is reserved; if it raises an error, nothing is.

    Returns:
        The run, reserved and charged; `begin` starts it.

    Raises:
        PdpsgdError: If somebody does not allow the run, or the folder belongs to another one. Nothing is reserved then.
    """
    ranks = Ranks.join(device=device)
    found: tuple[int | None, bool, str] = (None, False, "")
    before = None
    if ranks.first:
        try:
            before = ledger.head
            with _forgotten_if_refused(ledger, before):
                found = (*_book(ledger, budgets, options, plan, folder, number, agree), "")
        except PdpsgdError as error:
            if ranks.world_size == 1:
                raise
            found = (None, False, str(error))
    run, is_new, refused = ranks.broadcast_object(found)
    if run is None:
        fail(refused)
    try:
        held = ledger.hold(run, watches=ranks.first)
        held.cancels, held.enrolled_after = number is None, before
        put_in_order_of(budgets, held)
    except PdpsgdError:
        if is_new and ranks.first:
            _take_back(ledger, run, folder, cancels=number is None, before=before)
        raise
    return held


@contextmanager
def _forgotten_if_refused(ledger: Ledger, before: str) -> Iterator[None]:
    """Forget people who were enrolled in this block if it ends with an error."""
    try:
        yield
    except BaseException:
        with suppress(PdpsgdError):
            ledger.undo(before)
        raise


@contextmanager
def under(reservation: ReservedRun | None, folder: RunFolder | None) -> Iterator[None]:
    """Finish a run at the end of the block; after an error it is cancelled if it has not begun, else killed."""
    if reservation is None:
        yield
        return
    with given_up_after_errors(reservation, folder):
        yield
    reservation.finish()


@contextmanager
def given_up_after_errors(reservation: ReservedRun, folder: RunFolder | None) -> Iterator[None]:
    """Give a run up after an error; of one that has not begun nothing stays in its folder."""
    try:
        yield
    except BaseException:
        reservation.give_up()
        if folder is not None and reservation.taken_back:
            folder.forget_reservation()
        raise


def settle(ledger: Ledger, folder: RunFolder) -> None:
    """Finish a run in the ledger whose process was killed after it had written its last file."""
    note = folder.read_reservation()
    if note is None or not folder.finished or note["ledger"] != ledger.id:
        return
    run = ledger.find(note["token"])
    if run is not None and run.state == "running":
        ledger.finish(run.number, run.attempt)


def put_in_order_of(budgets: Budgets | None, reservation: ReservedRun) -> None:
    """Put the people of a reserved plan in the order of this list: without ids, records are matched by place."""
    if budgets is None:
        return
    assert reservation.plan.roster is not None
    if not budgets.named:
        fail("Expected people with ids: over time, a place on a list says nothing about who somebody is.")
    same_number = len(budgets) == len(reservation.plan.roster.ids)
    levels = match_ids(reservation.plan.roster, budgets) if same_number else None
    if levels is None or (levels < 0).any():
        fail(
            "Expected the people whom the run was reserved for. Got another list: give the one it was begun with."
        )
    reservation.plan = replace(reservation.plan, roster=Roster(budgets.ids, levels, budgets.named))
    reservation.in_order_of_records = True


def _book(
    ledger: Ledger,
    budgets: Budgets | None,
    options: TrainingOptions,
    plan: Plan | None,
    folder: RunFolder | None,
    number: int | None,
    agree: Callable[[Plan], None] | None,
) -> tuple[int, bool]:
    """Return the run, and whether it is new to the folder."""
    known = None if folder is None else _known(ledger, folder)
    if known is not None:
        return known, False
    if number is not None:
        named = ledger.run(number)
        if named.state not in ("reserved", "running", "killed"):
            fail(
                f"Expected a run that is reserved, or that was begun and has not ended. Run {number} of the ledger "
                f"{ledger.place} is {shown(named.state)}: reserve a new run."
            )
        if folder is not None:
            folder.write_reservation(ledger.id, named.token)
        return number, True
    if options.accountant not in (None, "certificate") or "history" in options.plan_options:
        fail(
            "Expected a ledger without an accountant and without a history: runs of a ledger are counted by "
            "certificates, and what was spent before stands in it. Got both."
        )
    if budgets is not None and not budgets.named:
        fail("Expected people with ids: over time, a place on a list says nothing about who somebody is.")
    if budgets is not None:
        ledger.admit(budgets)
    offer = ledger.offer(options.spend, people=None if budgets is None else budgets.ids).budgets
    if not (offer.epsilon > 0).any():
        fail(
            f"Expected people who have something left in the ledger {ledger.place}. Got {len(offer):,} who have not: "
            "earlier runs have spent it, or they allow nothing (pdpsgd ledger show). They may allow more "
            "(pdpsgd ledger consent)."
        )
    if plan is None:
        made = ledger.mark(options.changed(accountant="certificate").plan_or(None, offer))
    else:
        made = _checked(plan, ledger, budgets, offer, options)
    if agree is not None:
        agree(made)
    token = secrets.token_hex(16)
    if folder is not None:
        folder.make().write_reservation(ledger.id, token)
    name = "" if folder is None else folder.path.name
    try:
        return ledger.reserve(made, name=name, token=token).number, True
    except PdpsgdError as error:
        if folder is not None and not (isinstance(error, LedgerUnavailable) and error.may_be_written):
            folder.forget_reservation()
        raise


def _take_back(
    ledger: Ledger, run: int, folder: RunFolder | None, *, cancels: bool, before: str | None
) -> None:
    """Undo a booking that cannot be used; where the ledger cannot be told, the folder keeps the note of it."""
    with suppress(PdpsgdError):
        if cancels:
            ledger.cancel(run)
            if before is not None:
                ledger.undo(before, run)
        if folder is not None:
            folder.forget_reservation()


def _known(ledger: Ledger, folder: RunFolder) -> int | None:
    """Find the run that was reserved for this folder and has not ended."""
    note = folder.read_reservation()
    if note is None:
        if folder.begun:
            fail(
                f"Expected a run that was begun with a ledger in {str(folder.path)!r}. It was begun without: go on "
                "without (--no-ledger, or no ledger=...)."
            )
        return None
    if note["ledger"] != ledger.id:
        fail(
            f"Expected the ledger that the run in {str(folder.path)!r} was reserved in. Got another one, "
            f"{ledger.place}."
        )
    run = ledger.find(note["token"])
    if run is None or run.state == "cancelled":
        if folder.begun:
            fail(
                f"Expected the run that was begun in {str(folder.path)!r} in the ledger {ledger.place}. It is not "
                "there, by the token in private/reservation.json: the note or the ledger is another one than then."
            )
        return None
    if run.state == "finished":
        fail(
            f"Run {run.number}, to which {str(folder.path)!r} belongs, is finished: take another run folder."
        )
    return run.number


def _checked(
    plan: Plan, ledger: Ledger, budgets: Budgets | None, offer: Budgets, options: TrainingOptions
) -> Plan:
    """Check that a ready plan does not belong to another ledger, and find its people."""
    plan = options.plan_or(plan, offer)
    if plan.ledger is not None and plan.ledger.id != ledger.id:
        fail(
            f"Expected a plan that was made from the ledger {ledger.place}. Got one that was made from another: name "
            "that one (--ledger), or plan again."
        )
    if plan.ledger is None and plan.roster is None and budgets is not None:
        return plan.with_people(budgets)  # a plan of its own; the ledger charges what it costs
    if plan.roster is not None:
        return plan
    try:
        return plan.with_people(offer)
    except PdpsgdError as error:
        fail(
            f"{error} Somebody has spent or changed what they allow since the plan was made, or it was made with "
            "another --spend: plan again."
        )
