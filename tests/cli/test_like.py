"""A run can be repeated on other data: what was chosen is kept, taken again, and differences are said."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from pdpsgd.cli import app

SCHEMA = """label = "income"
classes = ["low", "high"]
id_column = "person"
confirmed = true
[columns.age]
kind = "numeric"
low = 0
high = 120
[columns.epsilon]
kind = "ignored"
"""


def write(path, people, prefix):
    rng = random.Random(prefix)
    lines = ["person,age,epsilon,income"]
    for number in range(people):
        age = rng.randint(18, 80)
        income = "high" if age + rng.gauss(0, 8) > 50 else "low"
        lines.append(f"{prefix}{number},{age},{rng.choice([1, 2, 4])},{income}")
    path.write_text("\n".join(lines) + "\n")


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def january(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, people in (("jan", 80), ("feb", 90), ("test", 40)):
        write(tmp_path / f"{name}.csv", people, name)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    made = run(
        *("train", "jan.csv", "--schema", "schema.toml", "--steps", 20, "--batch-size", 20, "--lr", 2),
        *("--test-file", "test.csv", "--yes", "--spend", "all", "--run-folder", "runs/jan"),
        *("--optimizer-option", "nesterov=false", "--weights", "0.7,0.3"),
    )
    assert made.exit_code == 0, made.output
    return tmp_path


def test_february_takes_all_of_january_but_its_data(january):
    (january / "schema.toml").unlink()  # the run's own copy is enough
    made = run("train", "feb.csv", "--like", "runs/jan", "--lr", 1, "--yes", "--run-folder", "runs/feb")
    assert made.exit_code == 0, made.output
    said = " ".join(made.output.split())
    assert "Like runs/jan, on feb.csv instead of jan.csv." in said
    assert "Differs: --learning-rate 1.0 instead of 2.0." in said
    assert said.count("Differs:") == 1
    old, new = (
        json.loads((january / "runs" / name / "private" / "command.json").read_text())
        for name in ("jan", "feb")
    )
    alone = {"run_folder", "learning_rate", "schema"}
    assert {k: v for k, v in new["options"].items() if k not in alone} == {
        k: v for k, v in old["options"].items() if k not in alone
    }
    assert old["options"]["optimizer_options"] == ["nesterov=false"]
    settings = json.loads((january / "runs" / "feb" / "public" / "settings.json").read_text())
    assert settings["learning_rate"] == 1.0
    plan = json.loads((january / "runs" / "feb" / "public" / "plan.json").read_text())
    assert sum(r["steps"] for r in plan["rounds"]) == 20


def test_a_file_that_has_changed_since_is_named(january):
    write(january / "test.csv", 50, "test")
    made = run("train", "feb.csv", "--like", "runs/jan", "--yes", "--run-folder", "runs/feb")
    assert "test.csv (--test-file) has changed since" in " ".join(made.output.split())


def test_digests_of_records_are_not_public(january):
    private = json.loads((january / "runs" / "jan" / "private" / "command.json").read_text())
    digest = private["files"]["data"]["sha256"]
    for path in (january / "runs" / "jan" / "public").iterdir():
        assert digest.encode() not in path.read_bytes(), path
    assert "versions" in private


@pytest.mark.parametrize("other", ["nowhere", "."])
def test_something_else_than_a_run_is_refused(january, other):
    made = run("train", "feb.csv", "--like", other)
    assert made.exit_code == 2
    assert "Expected the folder of a finished run with --like" in " ".join(made.output.split())
    (january / "runs" / "jan" / "private" / "command.json").unlink()
    made = run("train", "feb.csv", "--like", "runs/jan")
    assert "Expected private/command.json" in " ".join(made.output.split())


# --- two finished runs on the same test people ---------------------------------------------------------


def test_two_runs_are_compared_on_people_outside_both_lists(january):
    made = run("train", "feb.csv", "--like", "runs/jan", "--yes", "--run-folder", "runs/feb", "--no-report")
    assert made.exit_code == 0, made.output
    words = ("compare", "runs/jan", "runs/feb", "--test-file")
    found = run(*words, "test.csv", "--by", "age-band", "--json", "figures.json")
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "By accuracy" in said
    assert "paired bootstrap" in said
    page = (january / "comparison.html").read_text()
    for words_of_page in (
        "runs/jan",
        "runs/feb",
        "By tier",
        "By class",
        "paired bootstrap",
        "verdict good",
    ):
        assert words_of_page in page
    groups = json.loads((january / "figures.json").read_text())["groups"]
    assert {"all", "class", "tier"} <= {group["kind"] for group in groups}
    of_january = json.loads((january / "runs" / "jan" / "public" / "result.json").read_text())["evaluation"]
    first = {figure["name"]: figure["first"] for figure in groups[0]["figures"]}
    assert first["accuracy"] == pytest.approx(of_january["accuracy"])
    assert first["log loss"] == pytest.approx(of_january["probabilities"]["log_loss"], rel=1e-5)
    refused = run(*words, "jan.csv")
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "80 test people are on the list of runs/jan" in said
    assert "no epsilon bounds what they tell" in said
    agreed = run(*words, "jan.csv", "--yes")
    assert agreed.exit_code == 0
    assert "Do not publish these figures" in " ".join(agreed.output.split())
    page = (january / "comparison.html").read_text()
    assert "Not to be published: some test people are on a run" in page
    assert "verdict good" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("runs/jan", "test.csv"), "two folders of finished runs"),
        (("runs/jan",), "two folders of finished runs"),
        (("runs/jan", "runs/jan"), "Expected --test-file"),
        (("runs/jan", "runs/jan", "--test-file", "test.csv", "--by", "job"), "Expected a column 'job'"),
    ],
)
def test_what_cannot_be_compared_is_named(january, words, message):
    found = run("compare", *words)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def test_test_people_that_are_named_now_take_the_place_of_those_of_then(january):
    made = run(
        "train", "feb.csv", "--like", "runs/jan", "--test-share", 0.3, "--yes", "--run-folder", "runs/feb"
    )
    assert made.exit_code == 0, made.output
    said = " ".join(made.output.split())
    assert "Differs: --test-file (not given) instead of" in said
    assert "Differs: --test-share 0.3 instead of (not given)" in said


def test_two_kinds_of_test_people_at_once_are_refused(january):
    found = run("train", "feb.csv", "--schema", "schema.toml", "--test-share", 0.3, "--test-file", "test.csv")
    assert found.exit_code == 2
    assert "Expected --test-file (other people) or --test-share" in " ".join(found.output.split())


def test_two_runs_that_predict_numbers_are_compared_in_the_unit_of_the_label(january):
    for name, steps in (("jan", 10), ("feb", 40)):
        table = (january / f"{name}.csv").read_text().replace("high", "55.5").replace("low", "20")
        (january / f"{name}.csv").write_text(table)
        how = ("--label", "income", "--id-column", "person", "--task", "regression", "--steps", steps)
        more = ("--no-ledger", "--no-report", "--batch-size", 20, "--run-folder", f"runs/n-{name}")
        made = run("train", f"{name}.csv", *how, *more)
        assert made.exit_code == 0, made.output
    test = (january / "test.csv").read_text().replace("high", "55.5").replace("low", "20")
    (january / "test.csv").write_text(test)
    words = ("compare", "runs/n-jan", "runs/n-feb", "--test-file", "test.csv")
    found = run(*words, "--json", "figures.json", "--page", "numbers.html")
    assert found.exit_code == 0, found.output
    whole, *tiers = json.loads((january / "figures.json").read_text())["groups"]
    assert [figure["name"] for figure in whole["figures"]] == ["RMSE", "MAE", "R^2"]
    assert {group["kind"] for group in tiers} <= {"tier"}
    assert 0 < whole["figures"][0]["first"] < 35.5  # in the unit of the label, whose range has this width
    assert "in the unit of the label" in (january / "numbers.html").read_text()
    scored = run("predict", "runs/n-feb", "test.csv", "--columns", "none", "--quiet")
    answers = scored.stdout.split()[1:]
    assert answers
    assert all(len(each.strip("-").replace(".", "")) <= 7 for each in answers), answers
    mixed = run("compare", "runs/jan", "runs/n-feb", "--test-file", "test.csv")
    assert mixed.exit_code == 2
    assert "two models of one kind" in " ".join(mixed.output.split())


def test_a_start_that_is_taken_over_is_said(tmp_path):
    from pdpsgd.cli.earlier_run import differences
    from pdpsgd.training.run_folder import RunFolder

    record = {"data": "feb.csv", "options": {"start": "/runs/jan"}, "files": {}, "versions": {}}
    folder = RunFolder(tmp_path / "feb")
    folder.make().write_command(record)
    folder.write_result({})
    said = differences(folder.path, record)
    assert (
        f"As then: --start /runs/jan. To begin with that run's own model, give --start {folder.path}." in said
    )
    other = differences(folder.path, {**record, "options": {"start": str(folder.path)}})
    assert not any("As then" in sentence for sentence in other)
