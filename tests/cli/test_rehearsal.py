"""A rehearsal does all of a run on made-up rows: no record is read, nothing is booked, and the page says so."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cli.test_like import SCHEMA, run, write


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "people.csv", 80, "secret-name-")
    lines = (tmp_path / "people.csv").read_text().splitlines()
    listed = [",".join((line.split(",")[0], line.split(",")[2])) for line in lines]
    (tmp_path / "list.csv").write_text("\n".join(listed) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


WORDS = ("train", "people.csv", "--schema", "schema.toml", "--steps", 20, "--batch-size", 20, "--rehearse")


def test_the_file_of_records_is_never_opened_where_the_list_is_apart(place):
    opened = []
    active = True

    def watch(event, arguments):
        if active and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)  # there is no way to remove one: it is switched off instead
    try:
        made = run(*WORDS, "--budgets", "list.csv", "--test-share", 0.3)
    finally:
        active = False
    assert made.exit_code == 0, made.output
    assert any(name.endswith("schema.toml") for name in opened)
    assert not any(name.endswith("people.csv") for name in opened)
    (
        place / "people.csv"
    ).unlink()  # polars reads by itself, unseen by the hook: so once more without the file
    again = run(*WORDS, "--budgets", "list.csv", "--run-folder", "runs/again")
    assert again.exit_code == 0, again.output


def test_nothing_is_booked_and_everything_is_marked(place):
    made = run(*WORDS, "--run-folder", "runs/jan", "--test-file", "people.csv", "--json", "figures.json")
    assert made.exit_code == 0, made.output
    assert not (place / "people.ledger").exists()
    assert not (place / "runs" / "jan").exists()  # the folder of the real run stays free
    public = place / "runs" / "jan-rehearsal" / "public"
    page = (public / "report.html").read_text()
    assert "Rehearsal on made-up rows" in page
    assert "This run is not for release" in page
    result = json.loads((public / "result.json").read_text())
    assert result["verdict"]["outcome"] == "not for release"
    assert "rehearsal" in {reason["code"] for reason in result["verdict"]["reasons"]}
    for path in (place / "runs" / "jan-rehearsal").rglob("*"):
        assert not path.is_file() or b"secret-name" not in path.read_bytes(), path
    figures = json.loads((place / "figures.json").read_text())
    assert figures["rehearsal"] is True
    assert figures["peak_memory_bytes"] is None or figures["peak_memory_bytes"] > 1e7
    assert "Rehearsed: 20 steps" in " ".join(made.output.split())


def rounds_and_levels(place, name):
    plan = json.loads((place / "runs" / name / "public" / "plan.json").read_text())
    return plan["rounds"], plan["levels"]


@pytest.mark.parametrize("more", [(), ("--no-ledger",), ("--spend", "1 of 12"), ("--test-share", 0.3)])
def test_the_plan_is_that_of_the_run(place, more):
    assert run(*WORDS, *more, "--run-folder", "runs/a").exit_code == 0
    assert not (place / "people.ledger").exists()
    real = [word for word in WORDS if word != "--rehearse"]
    assert run(*real, *more, "--yes", "--run-folder", "runs/a").exit_code == 0
    assert rounds_and_levels(place, "a-rehearsal") == rounds_and_levels(place, "a")


def test_a_second_month_is_rehearsed_with_what_is_left(place):
    real = [word for word in WORDS if word != "--rehearse"]
    assert run(*real, "--run-folder", "runs/jan").exit_code == 0
    before = run("ledger", "head").output
    made = run(*WORDS, "--run-folder", "runs/feb")
    assert "Run 2 in the ledger people.ledger would take" in " ".join(made.output.split())
    assert run("ledger", "head").output == before
    assert run(*real, "--run-folder", "runs/feb").exit_code == 0
    assert rounds_and_levels(place, "feb-rehearsal") == rounds_and_levels(place, "feb")
    assert rounds_and_levels(place, "jan") != rounds_and_levels(place, "feb")


def test_nobody_is_promised_anything_in_writing(place):
    assert run(*WORDS, "--run-folder", "runs/a").exit_code == 0
    assert not (place / "runs" / "a-rehearsal" / "people" / "promises.csv").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tiers", "1:1"), "Expected a list of people"),
        (("--resume",), "Expected --rehearse without --resume"),
        (("--records-per-person", 2), "Expected one record per person"),
    ],
)
def test_what_cannot_be_rehearsed_is_named(place, more, message):
    found = run(*WORDS, *more)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
    assert not (place / "runs").exists()


def test_without_a_schema_there_is_nothing_to_make_rows_of(place):
    found = run("train", "people.csv", "--label", "income", "--rehearse")
    assert "Expected --schema with --rehearse" in " ".join(found.output.split())
