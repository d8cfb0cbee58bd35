"""A folder with one sound file of every kind, and commands that read them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from pdpsgd.cli import app

TABLE = ("--label", "income", "--id-column", "person", "--delta-column", "delta")
SMALL = ("--steps", "2", "--batch-size", "6", "--quiet")
TRAIN = (
    "train",
    "people.csv",
    *TABLE,
    *SMALL,
    "--no-report",
    "--no-ledger",
    "--seed",
    "1",
    "--run-folder",
    "new",
)
RESUME = (*TRAIN[:-1], "begun", "--checkpoint-every", "1", "--resume")
PLAN = ("plan", "people.csv", "--id-column", "person", "--delta-column", "delta", *SMALL)
LEDGER = ("--ledger", "kept.ledger")
BOOKED = (*(word for word in TRAIN if word != "--no-ledger"), *LEDGER)
BOOKED_RESUME = (
    *(word if word != "new" else "booked" for word in BOOKED),
    "--checkpoint-every",
    "1",
    "--resume",
)
PLANNED = (*PLAN, *LEDGER, "--spend", "0.5")
AUDIT = ("--canaries", "10", "--example-canaries", "0", "--seed", "1", "--quiet")


def make_folder(folder: Path) -> None:
    """Fill a folder with one sound file of every kind."""
    rng = random.Random(3)
    lines = ["person,age,job,epsilon,delta,income"]
    for number in range(24):
        age = rng.randint(18, 80)
        income = "high" if age > 45 else "low"
        lines.append(f"p{number},{age},{rng.choice(['nurse', 'teacher'])},{number % 3 + 1},1e-5,{income}")
    (folder / "people.csv").write_text("\n".join(lines) + "\n")
    import polars

    polars.read_csv(folder / "people.csv").write_parquet(folder / "people.parquet")
    (folder / "run.toml").write_text(
        'label = "income"\nid-column = "person"\nsteps = 2\nbatch-size = 6.0\noptimizer = "sgd"\nlearning-rate = 0.5\n'
        'momentum = 0.5\nweight-decay = 0.1\nschedule = "linear"\nseed = 3\ncheckpoint-every = 1\nquiet = true\n'
        'report = false\nno-ledger = true\nrun-folder = "new"\noptimizer-option = ["nesterov=true"]\n'
    )
    arrays = {"inputs": np.zeros((8, 3, 3), dtype=np.uint8), "targets": np.arange(8) % 2, "ids": np.arange(8)}
    np.savez(folder / "images.npz", **arrays, classes=np.array(["a", "b"]))
    (folder / "list.csv").write_text("person,epsilon\n" + "".join(f"{i},{1 + i % 2}\n" for i in range(8)))
    schema = (
        "data",
        "schema",
        "people.csv",
        *TABLE[:4],
        "--epsilon-column",
        "epsilon",
        "--delta-column",
        "delta",
    )
    plan = (*PLAN, "--json", "plan.json")
    done = (*TRAIN[:-1], "done", "--test-share", "0.3", "--yes", "--evaluate-every", "1")
    for command in ((*schema, "-o", "schema.toml"), plan, done, ("audit", "done", *AUDIT)):
        _expect_success(command)
    _make_ledger(folder)
    _begin((*TRAIN[:-1], "begun", "--checkpoint-every", "1"))
    _begin(BOOKED_RESUME)
    for begun in ("begun", "booked"):
        assert (folder / begun / "private/checkpoint.journal").exists()


def _make_ledger(folder: Path) -> None:
    """Make a ledger in which one run is finished and one is reserved."""
    from pdpsgd.ledger import Ledger

    (folder / "more.csv").write_text("person,epsilon,delta\nann,1,1e-5\nbob,2,1e-6\n")
    (folder / "changes.csv").write_text("person,epsilon,delta\np1,0,1e-5\np2,4,1e-5\n")
    _expect_success(("ledger", "init", *LEDGER))
    columns = ("--id-column", "person", "--delta-column", "delta")
    _expect_success(("ledger", "enroll", "people.csv", *columns, *LEDGER))
    ledger = Ledger("kept.ledger")
    with ledger.running(ledger.plan("0.25", steps=2, batch_size=6), name="january"):
        pass
    ledger.reserve(ledger.plan("0.25", steps=2, batch_size=6), name="february")


def _begin(command: tuple[str, ...]) -> None:
    """Begin a run, and let it end after one step as if it were killed."""
    with _stopped_after(1), contextlib.suppress(_Stopped):
        CliRunner().invoke(app, command, catch_exceptions=False)


class _Stopped(BaseException):
    pass


@contextlib.contextmanager
def _stopped_after(steps: int) -> Iterator[None]:
    """Let training end, as if killed, after so many steps."""
    from pdpsgd.engine.optimizer import PrivateOptimizer

    original, left = PrivateOptimizer.step, [None] * steps

    def step(self: Any, closure: Any = None) -> Any:
        if not left:
            raise _Stopped
        left.pop()
        return original(self, closure)

    PrivateOptimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrivateOptimizer.step = original  # type: ignore[method-assign]


def _expect_success(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (command, result.output, result.exception)
