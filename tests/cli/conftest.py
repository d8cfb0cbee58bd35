from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdpsgd.cli import app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a command in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """A table of 120 people with budgets, a label, and a column of each kind."""
    rng = random.Random(3)
    lines = ["person,age,job,epsilon,delta,income"]
    for number in range(120):
        age, job = rng.randint(18, 80), rng.choice(["nurse", "teacher"])
        income = "high" if age > 50 else "low"
        lines.append(f"p{number},{age},{job},{rng.choice([1, 2, 4])},1e-5,{income}")
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def command() -> Callable[..., subprocess.Popen[str]]:
    """Start a command as a process of its own."""

    def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pdpsgd", *map(str, arguments)],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )

    return start
