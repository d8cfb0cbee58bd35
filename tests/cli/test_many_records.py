"""`pdpsgd train` with repeated ids: tables and images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = ("--steps", "4", "--batch-size", "12", "--yes", "--run-folder", "run")
TABLE = ("--label", "income", "--id-column", "person")


def said(result: Any) -> str:
    return " ".join(result.output.split())


@pytest.fixture
def mails(people: Path) -> Path:
    """The table of people, with a second and a third row for some."""
    header, *lines = people.read_text().splitlines()
    more = [*lines, *lines[:30], *lines[10:15]]
    people.write_text("\n".join([header, *more]) + "\n")
    return people


def test_a_table_with_repeated_ids_needs_k_and_says_so(run: Callable[..., Any], mails: Path) -> None:
    options = (*TABLE, "--delta-column", "delta", "--test-share", "0.25", *SMALL)
    refused = run("train", mails, *options)
    assert refused.exit_code == 2
    for word in ("per person", "row", "--records-per-person", "--one-row-per-person"):
        assert word in said(refused)
    result = run("train", mails, *options, "--records-per-person", "2", "--json", "f.json")
    assert result.exit_code == 0, result.output
    assert "per person, each counted once" in said(result)
    found = json.loads(Path("f.json").read_text())
    listed = len(Path("run/people/promises.csv").read_text().splitlines()) - 1
    assert listed + found["evaluation"]["people"] == 120
    assert found["evaluation"]["accuracy_per_person"] is not None


def test_a_person_whose_rows_allow_different_budgets_is_refused(run: Callable[..., Any], mails: Path) -> None:
    header, *lines = mails.read_text().splitlines()
    columns = header.split(",")
    cells = lines[-1].split(",")
    cells[columns.index("epsilon")] = "7.5"
    mails.write_text("\n".join([header, *lines[:-1], ",".join(cells)]) + "\n")
    refused = run("train", mails, *TABLE, "--delta-column", "delta", "--records-per-person", "2", *SMALL)
    assert refused.exit_code == 2
    assert "one budget per person" in said(refused)


def test_images_with_repeated_ids(run: Callable[..., Any]) -> None:
    numbers = np.random.default_rng(0)
    ids = np.repeat([f"p{i}" for i in range(40)], numbers.integers(1, 4, 40))
    np.savez(
        "images.npz",
        inputs=numbers.integers(0, 255, (len(ids), 12, 12), dtype=np.uint8),
        targets=numbers.integers(0, 2, len(ids)),
        ids=ids,
        classes=np.array(["a", "b"]),
    )
    Path("list.csv").write_text("person,epsilon\n" + "".join(f"p{i},4\n" for i in range(40)))
    options = ("--budgets", "list.csv", "--id-column", "person", "--model", "linear", *SMALL)
    refused = run("train", "images.npz", *options)
    assert refused.exit_code == 2
    assert "--records-per-person" in said(refused)
    result = run("train", "images.npz", *options, "--records-per-person", "3", "--test-share", "0.25")
    assert result.exit_code == 0, result.output
    tiers = ("--tiers", "1:0.5,2:0.5", "--records-per-person", "3", "--model", "linear", *SMALL[:-1], "other")
    result = run("train", "images.npz", *tiers)
    assert result.exit_code == 0, result.output
    assert "40" in Path("other/public/plan.json").read_text()


def test_mechanisms_are_compared_on_people_with_many_records(run: Callable[..., Any], mails: Path) -> None:
    options = (
        *TABLE,
        "--delta-column",
        "delta",
        "--test-share",
        "0.25",
        "--steps",
        "4",
        "--batch-size",
        "12",
    )
    few = ("--yes", "--mechanisms", "dp-sgd,pdp-sgd-exact", "--seeds", "1", "--json", "f.json", "--no-report")
    refused = run("compare", mails, *options, *few)
    assert refused.exit_code == 2
    assert "--records-per-person" in said(refused)
    result = run("compare", mails, *options, *few, "--records-per-person", "2")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("f.json").read_text())
    assert found["people"] + found["test_people"] == 120  # people, not their 155 records
    assert found["settings"]["training"]["records_per_person"] == 2
