"""`pdpsgd plan`: a list of people in, a plan out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdpsgd import Plan
from pdpsgd.accounting.history import exposures_of

TIERS = ("--tiers", "1:0.34,2:0.43,3:0.23", "--people", "6000")
SMALL = ("--steps", "50", "--batch-size", "30")


def test_a_list_of_people_becomes_a_plan_that_anyone_can_verify(
    run: Callable[..., Any], people: Path
) -> None:
    result = run("plan", people, "--id-column", "person", *SMALL, "--json", "plan.json", "--verify")
    assert result.exit_code == 0, result.output
    plan = Plan.from_json(Path("plan.json").read_text())
    assert [level.epsilon for level in plan.levels] == [1, 2, 4]
    assert plan.people == 120
    assert "Verified" in result.output


def test_everything_that_the_format_fixes_is_in_the_file(run: Callable[..., Any], people: Path) -> None:
    run("plan", people, "--delta-column", "delta", *SMALL, "--json", "plan.json", "--quiet")
    made = json.loads(Path("plan.json").read_text())
    fixed = {
        "version",
        "mechanism",
        "bookkeeping",
        "accountant",
        "neighbours",
        "max_grad_norm",
        "levels",
        "rounds",
    }
    assert fixed <= made.keys()
    assert {"epsilon", "delta", "people", "proven_epsilon"} <= made["levels"][0].keys()


def test_json_on_the_screen_is_nothing_but_json(run: Callable[..., Any]) -> None:
    result = run("plan", *TIERS, *SMALL, "--json", "-")
    assert json.loads(result.stdout)["mechanism"] == "pdp-sgd-exact"


def test_quiet_is_quiet(run: Callable[..., Any]) -> None:
    result = run("plan", *TIERS, *SMALL, "--quiet")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("mechanism", ["dp-sgd", "pdp-sgd-fixed"])
def test_another_mechanism_can_be_named(run: Callable[..., Any], mechanism: str) -> None:
    assert run("plan", *TIERS, *SMALL, "--mechanism", mechanism).exit_code == 0


def test_a_second_run_gets_what_the_first_left(run: Callable[..., Any], people: Path) -> None:
    options = (people, "--id-column", "person", *SMALL)
    run("plan", *options, "--mechanism", "dp-sgd", "--json", "first.json")
    result = run("plan", *options, "--history", "first.json", "--json", "second.json")
    assert result.exit_code == 0, result.output
    second = Plan.from_json(Path("second.json").read_text())
    strictest = min(second.levels, key=lambda level: level.epsilon)
    assert all(level.history for level in second.levels)
    assert all((level.proven_epsilon or 0) <= level.epsilon for level in second.levels)
    assert second.rounds[0].sample_rates[second.levels.index(strictest)] < 0.01


def write_list(name: str, budgets: dict[str, float]) -> None:
    Path(name).write_text("person,epsilon\n" + "".join(f"{p},{e}\n" for p, e in budgets.items()))


def test_what_was_spent_is_not_attached_to_a_list_that_was_revised_since(run: Callable[..., Any]) -> None:
    then = {f"p{i}": 1.0 if i < 20 else 4.0 for i in range(40)}
    write_list("then.csv", then)
    write_list("exchanged.csv", {**then, "p0": 4.0, "p20": 1.0})
    write_list("now.csv", {**{p: e + 1 for p, e in then.items()}, "p0": 5.0, "p20": 2.0})
    options = ("--id-column", "person", "--steps", "10", "--batch-size", "5", "--quiet")
    run("plan", "then.csv", *options, "--json", "first.json")
    refused = run("plan", "exchanged.csv", *options, "--history", "first.json")
    assert refused.exit_code == 2
    assert "first.json: This plan was made for other people" in refused.output
    assert "--history-budgets" in refused.output
    matched = ("--history", "first.json", "--history-budgets", "then.csv", "--json", "second.json")
    assert run("plan", "now.csv", *options, *matched).exit_code == 0
    first, second = (Plan.from_json(Path(name).read_text()) for name in ("first.json", "second.json"))
    level = second.roster.level[second.roster.ids.tolist().index("p20")]
    assert second.levels[level].epsilon == 2.0
    assert exposures_of(second.levels[level].history) == first.history_of(
        1
    )  # what people spent who allowed 4


@pytest.mark.filterwarnings("always")
def test_a_plan_of_an_earlier_version_is_counted_with_a_warning(run: Callable[..., Any]) -> None:
    write_list("then.csv", {f"p{i}": 1.0 if i < 20 else 4.0 for i in range(40)})
    write_list("now.csv", {f"p{i}": 2.0 if i < 20 else 5.0 for i in range(40)})
    options = ("--id-column", "person", "--steps", "10", "--batch-size", "5", "--quiet")
    run("plan", "then.csv", *options, "--json", "first.json")
    older = json.loads(Path("first.json").read_text())
    del older["people_digest"]
    Path("first.json").write_text(json.dumps(older))
    result = run("plan", "now.csv", *options, "--history", "first.json")
    assert result.exit_code == 0
    assert result.output.startswith("Warning: This plan does not say for whom it was made")
    assert "plans.py" not in result.output


def test_a_plan_that_claims_too_little_is_refused(run: Callable[..., Any]) -> None:
    run("plan", *TIERS, *SMALL, "--json", "plan.json")
    made = json.loads(Path("plan.json").read_text())
    made["levels"][0]["proven_epsilon"] /= 2
    Path("plan.json").write_text(json.dumps(made))
    result = run("plan", "plan.json", "--verify")
    assert result.exit_code == 2
    assert "below the truth" in result.output


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_the_chart_is_a_file_of_the_kind_that_its_name_says(run: Callable[..., Any], kind: str) -> None:
    result = run("plan", *TIERS, *SMALL, "--chart", f"charts/plan.{kind}")
    assert result.exit_code == 0, result.output
    beginning = {"svg": b"<svg", "png": b"\x89PNG", "html": b"<!DOCTYPE html>"}[kind]
    assert Path(f"charts/plan.{kind}").read_bytes().lstrip().startswith(beginning)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "Expected a file with people's budgets"),
        (("plan", "nobody.csv"), "There is no such file"),
        (("plan", "--tiers", "1:0.5,2:0.5"), "Expected --people with --tiers"),
        (("plan", "--tiers", "1=0.5", "--people", "10"), "epsilon:share"),
        (("plan", *TIERS, "--mechanism", "magic"), "Got mechanism='magic'"),
        (("plan", *TIERS, "--chart", "plan.gif"), ".svg, .png or .html"),
        (("plan", *TIERS, "--weights", "0.7"), "w1,w2"),
        (("plan", "plan.json"), "Expected a plan (JSON)"),
        (("plan", *TIERS, "--history-budgets", "people.csv"), "Expected"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(
    run: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_errors_name_the_file_and_the_row(run: Callable[..., Any], people: Path) -> None:
    people.write_text(people.read_text().replace("p7,", "p6,"))
    result = run("plan", people, "--id-column", "person")
    assert "people.csv, row 9" in " ".join(result.output.split())


def test_planning_never_loads_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pdpsgd.cli import app\n"
        f"app({['plan', *TIERS, *SMALL, '--quiet']!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
