from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdpsgd.cli import app


def write_people(path: Path, people: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = ["person,age,job,epsilon,income"]
    for number in range(people):
        age, job = rng.randint(18, 80), rng.choice(["nurse", "teacher", "clerk"])
        income = "high" if age + rng.gauss(0, 8) > 50 else "low"
        lines.append(f"secret-name-{number},{age},{job},{rng.choice([1, 2, 4])},{income}")
    path.write_text("\n".join(lines) + "\n")


SCHEMA = """label = "income"
classes = ["low", "high <&> rich"]
id_column = "person"
confirmed = true
[columns.age]
kind = "numeric"
low = 0
high = 120
[columns.job]
kind = "categorical"
categories = ["nurse", "teacher", "clerk"]
[columns.epsilon]
kind = "ignored"
"""


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table of 200 people whose names must not show up anywhere."""
    place = tmp_path_factory.mktemp("report")
    table = place / "people.csv"
    write_people(table, 200, seed=1)
    table.write_text(table.read_text().replace(",high\n", ",high <&> rich\n"))
    (place / "schema.toml").write_text(SCHEMA)
    folder = place / "run"
    arguments = ["train", str(table), "--schema", str(place / "schema.toml"), "--yes", "--test-share", "0.3"]
    options = ["--steps", "20", "--batch-size", "40", "--run-folder", str(folder), "--quiet"]
    options += ["--ledger", str(place / "people.ledger"), "--spend", "all"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def comparison_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("comparison")
    table, page = place / "people.csv", place / "page.html"
    write_people(table, 150, seed=2)
    arguments = [
        "compare",
        str(table),
        "--label",
        "income",
        "--id-column",
        "person",
        "--yes",
        "--test-share",
        "0.3",
    ]
    options = ["--mechanisms", "dp-sgd,pdp-sgd-exact,pdp-sgd-fixed", "--seeds", "2", "--steps", "20"]
    result = CliRunner().invoke(
        app, [*arguments, *options, "--batch-size", "40", "--page", str(page), "--quiet"]
    )
    assert result.exit_code == 0, result.output
    return page
