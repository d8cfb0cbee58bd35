"""What a refused command wrote is taken back; what anybody else wrote, or a run that has started, never is."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger
from tests.ledger.conftest import everybody_in_every_step, people


def reserve(ledger: Ledger, mu: float = 0.1) -> int:
    return ledger.reserve(everybody_in_every_step(["p0", "p1"], mu)).number


def test_people_and_a_run_that_never_started_are_taken_back(ledger: Ledger) -> None:
    before = ledger.head
    ledger.enroll(people(1, 2))
    run = reserve(ledger)
    ledger.cancel(run)
    assert ledger.undo(before, run)
    assert (ledger.head, len(ledger), ledger.runs()) == (before, 0, [])
    assert ledger.check().passed
    ledger.enroll(people(3, 3))  # as if nothing had been
    assert reserve(ledger) == run
    assert ledger.check().passed


def test_ids_of_another_kind_may_follow(ledger: Ledger) -> None:
    before = ledger.head
    ledger.enroll(people(1, 2))
    assert ledger.undo(before)
    from pdpsgd.budgets.budgets import Budgets

    assert ledger.enroll(Budgets([1.0, 2.0], ids=np.array([7, 8]))) == 2


def test_a_run_that_has_started_is_never_taken_back(ledger: Ledger) -> None:
    before = ledger.head
    ledger.enroll(people(1, 2))
    run = reserve(ledger)
    ledger.begin(run)
    head = ledger.head
    assert not ledger.undo(before, run)
    ledger.kill(run, 1)
    assert not ledger.undo(before, run)
    assert ledger.head != head
    assert ledger.person("p0").spent_epsilon > 0


def test_what_another_process_wrote_in_between_stays_and_so_does_everything(ledger: Ledger) -> None:
    before = ledger.head
    ledger.enroll(people(1, 2))
    others = reserve(ledger)
    mine = reserve(ledger, 0.05)
    ledger.cancel(mine)
    assert not ledger.undo(before, mine)
    ledger.cancel(others)
    assert not ledger.undo(before, mine)
    assert len(ledger.runs()) == 2


def test_somebody_elses_cancelled_run_is_not_taken_for_mine(ledger: Ledger) -> None:
    before = ledger.head
    ledger.enroll(people(1, 2))
    others = reserve(ledger)
    ledger.cancel(others)
    assert not ledger.undo(before)
    assert not ledger.undo(before, others + 1)
    assert not ledger.undo("f" * 64, others)  # a head that this ledger never had


@pytest.mark.parametrize("series", [False, True])
def test_people_who_were_taken_back_before_the_lock_are_not_charged_under_numbers_of_others(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, series: bool
) -> None:
    """Who is who is looked up before the lock; what a refused command takes back meanwhile gets its numbers anew."""
    ledger.enroll(people(1, 1))
    before = ledger.head
    ledger.enroll(people(1, 1, first=10))
    mine, writing = Ledger(ledger._database.url), ledger._database.writing

    def late() -> object:
        assert ledger.undo(before)
        ledger.enroll(people(1, 1, first=20))
        return writing()

    monkeypatch.setattr(mine._database, "writing", late)
    plan = everybody_in_every_step(["p10", "p11"], 0.1)
    with pytest.raises(PdpsgdError, match="'p10' is not one of them"):
        _ = mine.reserve_series([plan, plan]) if series else mine.reserve(plan)
    assert ledger.person("p20").spent_epsilon == 0
    monkeypatch.undo()
    assert mine.reserve(everybody_in_every_step(["p20", "p21"], 0.1)).people == 2


def test_beginning_is_all_or_nothing(in_file: Ledger) -> None:
    in_file.enroll(people(1, 2))
    run = reserve(in_file)
    with sqlite3.connect(in_file.place) as plain:
        plain.execute("UPDATE charges SET mu = ?", (b"bytes",))
    head = in_file.head
    with pytest.raises(PdpsgdError, match="damaged or edited; nothing was written"):
        in_file.begin(run)
    assert (in_file.head, in_file.run(run).state) == (head, "reserved")


def test_nothing_is_written_behind_a_log_that_was_cut_off(in_file: Ledger) -> None:
    in_file.enroll(people(1, 2))
    with sqlite3.connect(in_file.place) as plain:
        plain.execute("DELETE FROM log WHERE entry = 2")
    with pytest.raises(PdpsgdError, match=r"Expected entry 2 as the last of its log.*Got entry 1"):
        reserve(in_file)


@pytest.mark.parametrize("column", ["people.id", "runs.plan", "runs.attempt", "charges.mu"])
def test_bytes_in_a_column_of_something_else_are_damage_that_is_named(in_file: Ledger, column: str) -> None:
    in_file.enroll(people(1, 2))
    run = reserve(in_file)
    table, name = column.split(".")
    with sqlite3.connect(in_file.place) as plain:
        plain.execute(f"UPDATE {table} SET {name} = x'ff00' WHERE rowid = 1")
    use = in_file.hold if column == "runs.plan" else in_file.begin  # beginning does not read the plan
    with pytest.raises(PdpsgdError, match="damaged or edited") as refused:
        use(run)
    assert table in str(refused.value)
    assert name in str(refused.value)


def test_a_ledger_that_nobody_used_can_go_and_no_other(in_file: Ledger, tmp_path: Path) -> None:
    in_file.enroll(people(1))
    assert not in_file.remove_if_unused()
    assert len(in_file) == 1
    unused = Ledger.create(tmp_path / "unused.ledger")
    assert unused.remove_if_unused()
    assert not list(tmp_path.glob("unused*"))


def test_whoever_waits_for_a_ledger_that_goes_away_is_told_so(in_file: Ledger) -> None:
    """The other process had the file open: what it writes must not vanish with it."""
    other, told = Ledger(in_file.place), []
    with in_file._database.writing() as connection:
        from pdpsgd.ledger.undoing import give_back

        def enroll() -> None:
            try:
                other.enroll(people(1))
            except PdpsgdError as error:
                told.append(str(error))

        waiting = threading.Thread(target=enroll)
        waiting.start()
        assert give_back(connection)
    in_file._database.remove()
    waiting.join(60)
    assert len(told) == 1


def test_people_whom_another_process_enrolled_are_not_taken_back(in_file: Ledger) -> None:
    """A command that had enrolled nobody itself took back whom another had enrolled since it began."""
    before = in_file.head
    Ledger(in_file.place).enroll(people(1, 2))
    assert not in_file.undo(before)
    run = reserve(in_file)
    in_file.cancel(run)
    assert not in_file.undo(before, run)
    assert len(in_file) == 2
    assert in_file.check().passed


def test_own_people_are_taken_back_and_those_whom_another_process_enrolled_before_stay(
    in_file: Ledger,
) -> None:
    before = in_file.head
    Ledger(in_file.place).enroll(people(1, 2))
    others = in_file.head
    from pdpsgd.budgets.budgets import Budgets

    in_file.enroll(Budgets([1.0], ids=["mine"]))
    run = reserve(in_file)
    in_file.cancel(run)
    assert in_file.undo(before, run)
    assert (in_file.head, len(in_file), in_file.runs()) == (others, 2, [])
    assert not in_file.undo(before, run)  # once
    assert in_file.check().passed


def test_own_people_stay_once_another_process_has_written_after_them(in_file: Ledger) -> None:
    from pdpsgd.budgets.budgets import Budgets

    before = in_file.head
    in_file.enroll(people(1, 2))
    Ledger(in_file.place).enroll(Budgets([1.0], ids=["another"]))
    assert not in_file.undo(before)
    assert len(in_file) == 3
