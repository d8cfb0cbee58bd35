"""What would be charged to the wrong people, too little, or twice is refused; the ordinary request beside is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import update

from pdpsgd import Budgets, PdpsgdError, Plan
from pdpsgd.ledger import Ledger, LedgerUnavailable, log, reservations, schema, spending
from pdpsgd.ledger.charges import charges_of_plan
from pdpsgd.ledger.series import split
from pdpsgd.planning.levels import Roster
from tests.ledger.conftest import everybody_in_every_step, people

PLAN = everybody_in_every_step(["p0", "p1"], 0.1)


@pytest.fixture
def ledger(in_file: Ledger) -> Ledger:
    in_file.enroll(people(1.0, 2.0))
    return in_file


def without_ids(plan: Plan) -> Plan:
    return replace(plan, roster=Roster(np.arange(2), np.zeros(2, dtype=np.int64), named=False))


# --- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, roster=None), "a plan that knows its people"),
        (
            lambda plan: replace(plan, not_for_release="it was tried out"),
            "keeps a promise. Got .*it was tried out",
        ),
        (without_ids, "people with ids: over time"),
    ],
)
def test_a_plan_that_cannot_be_charged_is_refused(
    ledger: Ledger, change: Callable[[Plan], Plan], message: str
) -> None:
    for enter in (
        ledger.reserve,
        lambda plan: ledger.reserve_series([PLAN, plan]),
        ledger.enter_history,
    ):
        with pytest.raises(PdpsgdError, match=message):
            enter(change(PLAN))
    assert ledger.runs() == []
    assert ledger.reserve(PLAN).state == "reserved"


@pytest.mark.parametrize("number", [0, 1])
def test_a_series_has_several_runs(ledger: Ledger, number: int) -> None:
    with pytest.raises(PdpsgdError, match=f"several plans for a series. Got {number}"):
        ledger.reserve_series([PLAN] * number)
    assert len(ledger.reserve_series([PLAN] * 2)) == 2


@pytest.mark.parametrize("runs", [0, 3, 10**9])
def test_steps_that_a_series_cannot_share_are_refused(runs: int) -> None:
    whole = replace(PLAN, rounds=(replace(PLAN.rounds[0], steps=4),))
    assert [part.steps for part in split(whole, 2)] == [2, 2]
    with pytest.raises(PdpsgdError, match=f"can be shared by {runs} runs. Got 1 rounds and 4 steps"):
        split(whole, runs)
    with pytest.raises(PdpsgdError, match="Got 2 rounds and 8 steps"):
        split(replace(whole, rounds=whole.rounds * 2), 2)


def test_a_run_is_trained_by_the_plan_and_the_people_that_were_reserved(ledger: Ledger) -> None:
    held = ledger.hold(ledger.reserve(PLAN).number)
    held.check_plan(held.plan)
    louder = everybody_in_every_step(["p0", "p1"], 0.2)
    for other in (louder, everybody_in_every_step(["p0"], 0.1), everybody_in_every_step(["p0", "p9"], 0.1)):
        with pytest.raises(PdpsgdError, match="the plan and the people of run 1, as they were reserved"):
            held.check_plan(other)


# --- people -------------------------------------------------------------------------------------------------


def test_a_ledger_of_nobody_has_nothing_to_offer(in_file: Ledger) -> None:
    for ask in (in_file.offer, in_file.everybody):
        with pytest.raises(PdpsgdError, match=r"people in the ledger. There is nobody"):
            ask()
    in_file.enroll(people(1.0))
    assert len(in_file.everybody()) == 1
    in_file.offer()


@pytest.mark.parametrize("changed", [{"epsilon": [1.0, 3.0]}, {"delta": [1e-5, 1e-6]}])
def test_a_list_never_changes_what_somebody_has_allowed(
    ledger: Ledger, changed: dict[str, list[float]]
) -> None:
    given = {"epsilon": [1.0, 2.0, 4.0], "delta": [1e-5] * 3}
    other = {name: [*values, given[name][2]] for name, values in changed.items()}
    with pytest.raises(
        PdpsgdError, match=r"what people allow as the ledger has it. 'p1' allows epsilon 2 at"
    ):
        ledger.admit(Budgets(**{**given, **other}, ids=["p0", "p1", "p2"]))  # type: ignore[arg-type]
    assert len(ledger) == 2
    ledger.admit(Budgets(**given, ids=["p0", "p1", "p2"]))  # type: ignore[arg-type]
    assert len(ledger) == 3


def test_a_list_with_somebody_twice_and_more_levels_than_a_ledger_holds_are_refused(ledger: Ledger) -> None:
    (charge,) = charges_of_plan(PLAN, share_of_d=0.5)
    given = {
        "token": "a",
        "name": "",
        "numbers": np.array([0, 1]),
        "levels": np.array([0, 0]),
        "charges": [charge],
    }
    given |= {"plan": "", "people_digest": ""}
    wrong = {"numbers": np.array([1, 1])}, {"charges": [charge] * schema.NOT_THERE}
    with ledger._database.writing() as connection:
        for changed, message in zip(wrong, ("each person once", "fewer than [0-9,]+ levels"), strict=True):
            with pytest.raises(PdpsgdError, match=message):
                reservations.reserve(connection, **{**given, **changed})  # type: ignore[arg-type]
        assert reservations.reserve(connection, **given) == 1  # type: ignore[arg-type]


# --- processes ----------------------------------------------------------------------------------------------


def test_the_key_of_a_run_is_noted_by_the_process_that_has_it_and_stays(ledger: Ledger) -> None:
    run = ledger.reserve(PLAN).number
    with pytest.raises(PdpsgdError, match=f"run {run} to be running as attempt 1. It is reserved"):
        ledger.tie(run, 1, key_name="one")
    ledger.start(run)
    with pytest.raises(PdpsgdError, match=r"to be running as attempt 2. It is running, attempt 1: another"):
        ledger.tie(run, 2, key_name="one")
    ledger.tie(run, 1, key_name="one")
    ledger.tie(run, 1, key_name="one")
    with pytest.raises(PdpsgdError, match=f"Run {run} was begun before.*Got a beginning with other noise"):
        ledger.tie(run, 1, key_name="another")


def test_a_run_that_changed_meanwhile_is_not_moved(ledger: Ledger) -> None:
    run = ledger.reserve(PLAN).number
    with ledger._database.writing() as connection:
        with pytest.raises(PdpsgdError, match=f"Another process has changed run {run} at the same time"):
            reservations._move(connection, run, "finish", {"running"}, "finished", attempt=1)
        reservations._move(connection, run, "start", {"reserved"}, "running", attempt=1)
    assert ledger.run(run).state == "running"


def test_an_entry_is_not_written_over_that_of_another_process(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = log.entry_hash

    def meanwhile(*parts: object) -> str:
        moved = update(schema.ledger).values(entries=schema.ledger.c.entries + 1)
        connection.execute(moved)
        return plain(*parts)  # type: ignore[arg-type]

    head = ledger.head
    monkeypatch.setattr(log, "entry_hash", meanwhile)
    with (
        pytest.raises(LedgerUnavailable, match="at the same time; nothing was written"),
        ledger._database.writing() as connection,
    ):
        log.append(connection, "test", {})
    monkeypatch.undo()
    assert ledger.head == head
    with ledger._database.writing() as connection:
        assert log.append(connection, "test", {}) != head


def test_sums_that_pass_the_ledgers_integers_are_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [ledger.reserve(PLAN).number for _ in range(2)]
    plain = spending.charge_table

    def large(connection: object, run: int) -> object:
        table = plain(connection, run)  # type: ignore[arg-type]
        table.b[:] = [1 << 62] * len(table.b)
        return table

    with ledger._database.reading() as connection:
        spending.spent(connection, 2, ("reserved",))
        monkeypatch.setattr(spending, "charge_table", large)
        with pytest.raises(PdpsgdError, match="no longer fits into the ledger's integers"):
            spending.spent(connection, 2, ("reserved",))
    assert len(runs) == 2


# --- where ledgers are --------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"a file for SQLite, or a URL postgresql.*that cannot be read"):
        Ledger("postgresql+nothing://there/ledger")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(PdpsgdError, match=r"PostgreSQL needs a package.*pip install 'pdpsgd\[postgresql\]'"):
        Ledger("postgresql://there/ledger")
