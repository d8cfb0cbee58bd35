"""`pdpsgd train` and the ledger that it keeps of own data."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdpsgd.cli.own_ledger import announce
from pdpsgd.cli.shared import Screen
from pdpsgd.ledger import Ledger
from pdpsgd.ledger.values import Statement

SMALL = ("--steps", "6", "--batch-size", "20", "--no-report")
TABLE = ("--label", "income", "--id-column", "person", "--delta-column", "delta")


def words(result: Any) -> str:
    return " ".join(result.output.split())


def check(result: Any) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    return words(result)


def reasons(folder: str) -> list[str]:
    verdict = json.loads(Path(folder, "public/result.json").read_text())["verdict"]
    return [reason["code"] for reason in verdict["reasons"]]


def test_own_data_have_a_ledger_by_default_and_the_command_says_what_it_takes(
    run: Callable[..., Any], people: Path
) -> None:
    said = check(run("train", people, *TABLE, *SMALL, "--run-folder", "january"))
    assert "New ledger: people.ledger" in said
    assert "Run 1 in the ledger people.ledger takes, of what 120 people allow over all runs" in said
    assert "--spend all takes everything" in said
    assert said.index("Run 1 in the ledger") < said.index("Noise multiplier")  # before it starts
    assert reasons("january") == ["schema-from-data"]
    said = check(run("train", people, *TABLE, *SMALL, "--run-folder", "february", "--spend", "1 of 2"))
    assert "New ledger" not in said
    first, second = Ledger("people.ledger").runs()
    assert (first.name, second.name, second.state) == ("january", "february", "finished")
    left = [tier.mean_share_left for tier in Ledger("people.ledger").tiers()]
    assert left == pytest.approx([0.25] * 3, abs=0.01)
    assert "february" in check(run("ledger", "show"))


def test_without_a_ledger_the_verdict_says_so(run: Callable[..., Any], people: Path) -> None:
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "run", "--no-ledger"))
    assert "ledger-off" in reasons("run")
    assert not Path("people.ledger").exists()
    result = run("train", people, *TABLE, *SMALL, "--no-ledger", "--ledger", "a.ledger")
    assert "Expected --ledger (or --reservation), or --no-ledger" in words(result)


def test_benchmarks_nameless_people_and_made_up_tiers_need_none(
    run: Callable[..., Any], people: Path
) -> None:
    check(run("train", "digits", "--tiers", "1:0.5,4:0.5", *SMALL, "--run-folder", "digits"))
    images = {"inputs": np.zeros((60, 6, 6), np.uint8), "targets": np.arange(60) % 2, "classes": ["a", "b"]}
    np.savez("images.npz", **images)
    tiers = ("--tiers", "1:0.5,4:0.5", "--model", "linear")
    check(run("train", "images.npz", *tiers, *SMALL, "--run-folder", "images"))
    nameless = ("--label", "income", "--delta-column", "delta", "--one-row-per-person")
    said = check(run("train", people, *nameless, *SMALL, "--run-folder", "nameless"))
    assert "People have no ids, so no ledger is kept" in said
    assert not Path("people.ledger").exists()
    assert (reasons("digits"), reasons("images")) == ([], [])


def test_plans_and_histories_of_people_who_have_a_ledger_are_marked(
    run: Callable[..., Any], people: Path
) -> None:
    columns = ("--id-column", "person", "--delta-column", "delta", "--steps", "6", "--batch-size", "20")
    check(run("plan", people, *columns, "--json", "plan.json"))
    said = check(run("train", people, *TABLE, *SMALL, "--plan", "plan.json", "--run-folder", "alone"))
    assert "not for release. Plan from the ledger" in " ".join(said.split())
    assert "ledger-off" in reasons("alone")  # nothing counts it later
    nameless = ("--label", "income", "--delta-column", "delta", "--one-row-per-person")
    plain = ("--delta-column", "delta", "--steps", "6", "--batch-size", "20")
    check(run("plan", people, *plain, "--json", "nameless.json"))
    check(run("train", people, *nameless, *SMALL, "--plan", "nameless.json", "--run-folder", "nameless"))
    assert "ledger-off" not in reasons("nameless")  # no ledger can know them
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "january"))
    check(run("train", people, *TABLE, *SMALL, "--plan", "plan.json", "--run-folder", "beside"))
    assert "ledger-off" in reasons("beside")
    result = run("train", people, *TABLE, *SMALL, "--plan", "plan.json", "--ledger", "people.ledger")
    assert "Nothing was reserved" in words(result)  # that plan takes everything, and January took a quarter


def test_a_plan_of_the_ledger_goes_through_it(run: Callable[..., Any], people: Path) -> None:
    columns = ("--id-column", "person", "--delta-column", "delta")
    check(run("ledger", "init"))
    check(run("ledger", "enroll", people, *columns))
    small = ("--steps", "6", "--batch-size", "20")
    check(run("plan", "--ledger", "people.ledger", *small, "--json", "plan.json"))
    check(run("train", people, *TABLE, *SMALL, "--plan", "plan.json", "--run-folder", "january"))
    assert Ledger("people.ledger").runs()[0].state == "finished"
    assert "ledger-off" not in reasons("january")
    check(run("ledger", "init", "--ledger", "other.ledger"))
    result = run("train", people, *TABLE, *SMALL, "--plan", "plan.json", "--ledger", "other.ledger")
    assert "Expected a plan that was made from the ledger other.ledger" in words(result)
    result = run("train", people, *TABLE, *SMALL, "--plan", "plan.json")
    assert "plan again" in words(result)  # people have less left now


def test_the_ledger_is_the_list_of_data_without_budgets(run: Callable[..., Any], people: Path) -> None:
    columns = ("--id-column", "person", "--delta-column", "delta")
    check(run("ledger", "init", "--ledger", "a.ledger"))
    check(run("ledger", "enroll", people, *columns, "--ledger", "a.ledger"))
    kept = [line.split(",") for line in people.read_text().splitlines()]
    Path("records.csv").write_text("".join(f"{p},{age},{job},{y}\n" for p, age, job, _, _, y in kept[:100]))
    label = ("--label", "income", "--id-column", "person", "--run-folder", "run")
    check(run("train", "records.csv", *label, *SMALL, "--ledger", "a.ledger"))
    (made,) = Ledger("a.ledger").runs()
    assert made.people == 120  # with or without a record


def test_a_changed_budget_in_the_file_is_no_consent(run: Callable[..., Any], people: Path) -> None:
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "january"))
    header, first, *rest = people.read_text().splitlines()
    changed = first.split(",")
    changed[3] = "0.5"
    people.write_text("\n".join([header, ",".join(changed), *rest]) + "\n")
    result = run("train", people, *TABLE, *SMALL, "--run-folder", "february")
    assert result.exit_code == 2
    assert "pdpsgd ledger consent FILE" in words(result)
    check(run("ledger", "consent", people, "--id-column", "person", "--delta-column", "delta"))
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "february"))
    assert len(Ledger("people.ledger").person("p0").consents) == 2
    assert len(Ledger("people.ledger").person("p1").consents) == 1  # nothing changed


def test_a_network_that_cannot_be_made_costs_nothing(run: Callable[..., Any], people: Path) -> None:
    before = sorted(Path().rglob("*"))
    refused = ("train", people, *TABLE, *SMALL, "--model", "no_such_module:network")
    assert run(*refused).exit_code == 2
    assert sorted(Path().rglob("*")) == before  # not even a new ledger, or a folder for runs
    kept = Ledger.create("people.ledger")
    head = kept.head
    assert run(*refused).exit_code == 2
    assert (kept.head, len(kept), kept.runs()) == (head, 0, [])


def test_the_environment_names_the_ledger(
    run: Callable[..., Any], people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDPSGD_LEDGER", "elsewhere.ledger")
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "january", "--quiet"))
    assert Ledger("elsewhere.ledger").runs()[0].state == "finished"
    assert not Path("people.ledger").exists()


MIXING = "from torch import nn\ndef mixing(): return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))\n"


def test_what_is_refused_after_booking_leaves_neither_a_folder_nor_a_charge(
    run: Callable[..., Any], people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mixing_network.py").write_text(MIXING)
    monkeypatch.syspath_prepend(".")
    refused = ("train", people, *TABLE, *SMALL, "--model", "mixing_network:mixing", "--run-folder", "run")
    result = run(*refused)
    assert result.exit_code == 2, result.output
    assert not Path("run").exists()
    assert not Path("people.ledger").exists()  # it was made for this run
    check(run("ledger", "init"))
    ledger = Ledger("people.ledger")
    assert run(*refused).exit_code == 2
    assert (len(ledger), ledger.runs()) == (0, [])
    check(run("ledger", "enroll", people, "--id-column", "person", "--delta-column", "delta"))
    assert run(*refused).exit_code == 2
    assert [each.state for each in ledger.runs()] == ["cancelled"]  # whoever was there before stays
    assert ledger.check().passed
    made = ledger.reserve(ledger.plan(steps=6, batch_size=20))
    assert run(*refused, "--reservation", made.number).exit_code == 2
    assert not Path("run").exists()
    assert ledger.run(made.number).state == "reserved"  # made before, for later: it is still there
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "run", "--reservation", made.number))
    assert ledger.run(made.number).state == "finished"
    for state, folder in (("finished", "again"), ("-1", "damaged")):
        with contextlib.closing(sqlite3.connect("people.ledger")) as plain, plain:
            plain.execute("UPDATE runs SET state = ? WHERE number = ?", (state, made.number))
        result = run("train", people, *TABLE, *SMALL, "--run-folder", folder, "--reservation", made.number)
        assert (result.exit_code, Path(folder).exists()) == (2, False), result.output
        assert f"is '{state}': reserve a new run" in words(result)


def test_nothing_is_booked_for_a_folder_that_another_process_uses(
    run: Callable[..., Any], people: Path
) -> None:
    from pdpsgd.training.run_folder import RunFolder

    with RunFolder("run").in_use():
        result = run("train", people, *TABLE, *SMALL, "--run-folder", "run")
    assert result.exit_code == 2
    assert "Expected a run folder that is not in use" in words(result)
    assert not Path("people.ledger").exists()


def test_after_spending_all_it_is_said_how_much_is_left(run: Callable[..., Any], people: Path) -> None:
    said = " ".join(
        check(run("train", people, *TABLE, *SMALL, "--spend", "all", "--run-folder", "one")).split()
    )
    assert "Next to nothing is left for later runs on these people: up to epsilon" in said
    assert "(mean)" in said
    said = " ".join(check(run("ledger", "show")).split())
    assert "(mean)" in said


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_goes_on_says_that_it_is_not_charged_again(
    resumed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    reserved: Any = SimpleNamespace(statement=Statement(3, "march", (), 0))
    screen = Screen(quiet=False, json_file=None)
    announce(reserved, "people.ledger", "0.25", screen, resumed=resumed)
    assert ("Run 3 goes on, at no further charge." in capsys.readouterr().out) == resumed
