"""`pdpsgd ledger`: every command, as text and as JSON."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdpsgd import Budgets
from pdpsgd.cli.shared import Screen
from pdpsgd.ledger import Ledger


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = ["person,epsilon", *(f"p{i},{(1, 2, 3)[i % 3]}" for i in range(60))]
    (tmp_path / "people.csv").write_text("\n".join(rows) + "\n")
    assert run("ledger", "init").exit_code == 0
    assert "60 in all" in run("ledger", "enroll", "people.csv").output
    return tmp_path / "people.ledger"


def figures(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_year_from_the_command_line(place: Path, run: Callable[..., Any]) -> None:
    planned = figures(
        run("plan", "--ledger", "people.ledger", "--steps", "10", "--batch-size", "10", "--json", "-")
    )
    assert planned["accountant"] == "certificate"
    assert "may be chosen after results of earlier ones: that costs up to" in " ".join(planned["notes"])
    ledger = Ledger(place)
    made = ledger.reserve(ledger.plan(steps=10, batch_size=10), name="January")
    (row,) = figures(run("ledger", "runs", "--json", "-"))
    assert (row["name"], row["state"], row["people"]) == ("January", "reserved", 60)
    told = figures(run("ledger", "show", "--json", "-"))
    assert [tier["people"] for tier in told["tiers"]] == [20, 20, 20]
    assert told["over_time"][0]["share_left"] == pytest.approx(0.75, abs=0.01)
    assert [tier["share_left"] for tier in told["over_time"][0]["by_tier"]] == pytest.approx(
        [0.75] * 3, abs=0.01
    )
    assert "January" in run("ledger", "show", "--chart", "ledger.svg").output
    assert Path("ledger.svg").read_text().startswith("<svg")
    person = figures(run("ledger", "show", "p1", "--json", "-"))
    assert person["epsilon"] == 2
    assert 0 < person["spent_epsilon"] < 2
    assert "p1 allows epsilon 2" in run("ledger", "show", "p1").output
    assert figures(run("ledger", "cancel", str(made.number), "--json", "-"))["state"] == "cancelled"
    assert "nobody is charged for it" in run("ledger", "cancel", str(made.number)).output.replace("\n", " ")
    assert figures(run("ledger", "check", "--json", "-"))["passed"]
    head = figures(run("ledger", "head", "--json", "-"))["head"]
    assert run("ledger", "check", "--quick", "--head", head).exit_code == 0
    assert run("ledger", "check", "--quick", "--head", "0123").exit_code == 1


def test_changes_and_who_is_out(place: Path, run: Callable[..., Any]) -> None:
    ledger = Ledger(place)
    number = ledger.reserve(ledger.plan("all", steps=10, batch_size=10)).number
    ledger.finish(number, ledger.start(number))
    Path("changes.csv").write_text("person,epsilon\np1,0.5\np2,4\n")
    found = figures(run("ledger", "consent", "changes.csv", "--json", "-"))
    assert (found["changed"], found["out"]) == (2, ["p1"])
    assert "no: spent before it was lowered" in run("ledger", "show", "p1").output.replace("\n", " ")
    Path("withdrawn.csv").write_text("person,epsilon\np4,0\n")
    told = run("ledger", "consent", "withdrawn.csv").output
    assert "p4: withdrawn. Out from now on" in told.replace("\n", " ")
    assert "more was spent" not in told


def test_few_of_many_who_are_out_are_named(place: Path, run: Callable[..., Any]) -> None:
    ledger = Ledger(place)
    ledger.finish(1, ledger.start(ledger.reserve(ledger.plan(steps=10, batch_size=10)).number))
    Path("changes.csv").write_text("person,epsilon\n" + "".join(f"p{i},0\n" for i in range(30)))
    told = run("ledger", "consent", "changes.csv").output.replace("\n", " ")
    assert told.count(": withdrawn.") == 20
    assert "for 10 more; --json FILE names them all" in told


def test_names_steer_no_terminal_and_mark_up_no_table(place: Path, run: Callable[..., Any]) -> None:
    """An id that clears the screen is shown as it is; a run called [/b] ended the command with a traceback."""
    ledger = Ledger(place)
    ledger.enroll(Budgets([1.0, 1.0], ids=["\x1b[2Jann", "\u9673 [b]"]))
    ledger.reserve(ledger.plan(steps=10, batch_size=10), name="\x1b[31mjan [/b]")
    told = run("ledger", "runs").output
    assert "\\x1b[31mjan [/b]" in told
    told += run("ledger", "show", "\x1b[2Jann").output + run("ledger", "show", "\u9673 [b]").output
    assert "\\x1b[2Jann allows epsilon 1" in told
    assert "\u9673 [b] allows epsilon 1" in told
    assert "\x1b" not in told


def test_a_run_that_was_left_running_says_how_it_goes_on(place: Path, run: Callable[..., Any]) -> None:
    ledger = Ledger(place)
    number = ledger.reserve(ledger.plan(steps=10, batch_size=10)).number
    attempt = ledger.start(number)
    assert "--resume" in run("ledger", "runs").output
    ledger.finish(number, attempt)
    assert "--resume" not in run("ledger", "runs").output


def test_what_was_edited_ends_with_1(place: Path, run: Callable[..., Any]) -> None:
    with sqlite3.connect(place) as connection:
        connection.execute("UPDATE consents SET epsilon = 9 WHERE person = 3")
    connection.close()
    result = run("ledger", "check")
    assert result.exit_code == 1
    assert "FOUND: Consents of entry 2" in result.output


def test_mistakes_end_with_a_sentence(place: Path, run: Callable[..., Any]) -> None:
    for words, message in [
        (("ledger", "init"), "is there already"),
        (("ledger", "show", "eve"), "'eve' is not enrolled"),
        (("ledger", "cancel", "3"), "There is no run 3"),
        (("ledger", "runs", "--ledger", "nowhere"), "make one with pdpsgd ledger init"),
        (("ledger", "enroll", "people.csv"), "Expected people who are not in the ledger yet"),
        (("plan", "people.csv", "--ledger", "people.ledger"), "Expected --ledger without a list"),
        (("plan", "--ledger", "people.ledger", "--spend", "much"), "Expected what a run may spend"),
    ]:
        result = run(*words)
        assert result.exit_code == 2, words
        assert message in " ".join(result.output.split()), (words, result.output)


def test_old_runs_are_entered_with_their_people(place: Path, run: Callable[..., Any]) -> None:
    settings = ("--id-column", "person", "--steps", "10", "--batch-size", "5", "--json", "old.json")
    assert run("plan", "people.csv", *settings).exit_code == 0
    assert run("ledger", "init", "--ledger", "new.ledger").exit_code == 0
    options = ("--ledger", "new.ledger", "--history", "old.json", "--json", "-")
    found = figures(run("ledger", "enroll", "people.csv", *options))
    assert [run["state"] for run in found["entered"]] == ["finished"]
    assert Ledger("new.ledger").person("p1").spent_epsilon > 1.5


def test_a_reserved_run_and_a_series_are_trained_by_number(place: Path, run: Callable[..., Any]) -> None:
    small = ("--steps", "5", "--batch-size", "10")
    said = run("plan", "--ledger", "people.ledger", "--reserve", "January", *small).output
    assert "Reserved: run 1 (January), charged to 60 people" in " ".join(said.split())
    said = run("plan", "--ledger", "people.ledger", "--reserve", "spring", "--series", "2", *small).output
    assert "--reservation 3" in said
    assert "--reservation 4" in said
    rows = ["person,age,income", *(f"p{i},{20 + i},{('low', 'high')[i % 2]}" for i in range(60))]
    Path("records.csv").write_text("\n".join(rows) + "\n")
    options = ("--label", "income", "--id-column", "person", "--no-report", "--quiet")
    for number in (1, 4):
        folder = ("--reservation", number, "--run-folder", f"run-{number}")
        done = run("train", "records.csv", *options, *folder)
        assert done.exit_code == 0, done.output
    assert [one.state for one in Ledger(place).runs()] == ["finished", "running", "reserved", "finished"]
    assert figures(run("ledger", "check", "--json", "-"))["passed"]
    assert (
        "Expected --reserve NAME" in run("plan", "--ledger", "people.ledger", "--series", "2", *small).output
    )


@pytest.mark.parametrize(("after", "shown"), [(0.0, True), (3600.0, False)])
def test_a_check_shows_how_far_it_is_once_it_takes_long(
    after: float, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Screen(quiet=False, json_file=None).bars(after=after) as tell:
        assert tell is not None
        tell("certificates", 1, 3)
    assert ("certificates" in capsys.readouterr().err) == shown
