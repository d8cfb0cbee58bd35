"""An audit on people's own table: the run's network, list and schema."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdpsgd.cli import app


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    rng = random.Random(0)
    rows = [
        f"p{i},{rng.choice([1, 4])},{rng.random():.3f},{rng.choice('ab')},{rng.choice(['no', 'yes'])}"
        for i in range(200)
    ]
    (folder / "people.csv").write_text("person,epsilon,age,job,label\n" + "\n".join(rows) + "\n")
    how = (
        "--label",
        "label",
        "--id-column",
        "person",
        "--test-share",
        "0.2",
        "--yes",
        "--no-ledger",
        "--no-report",
    )
    done = run(
        "train",
        folder / "people.csv",
        *how,
        "--steps",
        20,
        "--batch-size",
        30,
        "--run-folder",
        folder / "run",
    )
    assert done.exit_code == 0, done.output
    return folder


def test_a_run_is_audited_on_its_own_table(place):
    few = ("--canaries", 20, "--example-canaries", 10, "--shadow-models", 4, "--seed", 1)
    done = run("audit", place / "run", "--data", place / "people.csv", *few)
    assert done.exit_code == 0, done.output
    assert (place / "run" / "private" / "audit.json").exists()  # computed from people's records
    assert "mechanism alone" not in done.output


def test_other_people_and_other_files_are_refused(place):
    text = (place / "people.csv").read_text()
    (place / "others.csv").write_text(text.replace("\np", "\nq"))
    done = run("audit", place / "run", "--data", place / "others.csv")
    assert done.exit_code == 2
    assert "none of them" in done.output
    done = run("audit", place / "run", "--data", place / "images.npz")
    assert done.exit_code == 2
    assert "the mechanism is audited alone" in " ".join(done.output.split())
