"""Nothing that is published depends on a record that was never sampled, nor on anything but the noised sums.

Non-interference: a key under which somebody is never sampled; with their record, with another one, and without, every
byte that may be published is the same. Replay: all records are others, and the noised sums that were recorded before
are released again: every byte is the same, so that the sums are the only way from records to what is published.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import Dataset
from typer.testing import CliRunner

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.budgets.readers import read_columns
from pdpsgd.cli import app
from pdpsgd.engine.noising import Injecting, Recording, released_by
from pdpsgd.ledger import ledger, log
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training import booking, progress, trainer
from pdpsgd.training.fitting import TrainingResult

SEED = 5


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a run takes is no secret that the promise is about."""
    for module in (trainer, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture(autouse=True)
def known_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a new ledger, its times and its tokens are drawn, and tell nothing of records."""
    monkeypatch.setattr(ledger, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)))
    monkeypatch.setattr(log, "now", lambda: "2030-01-01T00:00:00+00:00")
    monkeypatch.setattr(booking, "secrets", SimpleNamespace(token_hex=lambda size: "0" * size))


def never_sampled(plan: Plan, budgets: Budgets) -> list[Any]:
    """Those whom no step samples under the key of `SEED`."""
    sampler = PoissonSampler(plan, plan.level_of_person(budgets), RandomSource.from_seed(SEED))
    sampled = {int(person) for step in range(plan.steps) for person in sampler.draw(step)}
    return [name for place, name in enumerate(budgets.ids.tolist()) if place not in sampled]


def published(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted((folder / "public").rglob("*")) if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


def told(result: TrainingResult) -> dict[str, Any]:
    """Everything that the result object says; the folder's name is the caller's."""
    weights = {name: value.clone() for name, value in result.model.state_dict().items()}
    return {
        "summary": json.dumps(result.to_dict(), sort_keys=True, default=str),
        "history": json.dumps(result.history),
        "settings": json.dumps(result.settings),
        "spent": result.spent,
        "model": safetensors.torch.save(weights),
        "left in the model": [name for name, p in result.model.named_parameters() if p.grad is not None],
    }


# --- fit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Records and whose they are, as tensors or as a dataset."""

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: list[Any]

    def without(self, name: Any) -> Records:
        kept = [place for place, other in enumerate(self.ids) if other != name]
        return Records(self.inputs[kept], self.targets[kept], [self.ids[place] for place in kept])

    def changed(self, name: Any) -> Records:
        inputs, targets, place = self.inputs.clone(), self.targets.clone(), self.ids.index(name)
        inputs[place] = -1e6
        targets[place] = (targets[place] + 1) % 3
        return replace(self, inputs=inputs, targets=targets)


class Items(Dataset[Any]):
    """The same records behind `__getitem__`, so that nothing knows they are tensors."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.records.inputs[index], self.records.targets[index]


@pytest.fixture
def train(problem: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train on records, in a folder of its own, and give back all that is public."""
    plan = problem.plan(steps=(2, 2))
    numbers: Iterator[int] = iter(range(100))

    def run(records: Records, *, as_items: bool = False, interrupted: bool = False) -> dict[str, Any]:
        folder = tmp_path / str(next(numbers)) / "run"
        options: dict[str, Any] = {
            "data": Items(records) if as_items else (records.inputs, records.targets),
            "plan": plan,
            "record_ids": records.ids,
            "test_data": problem.test,
            "test_tiers": problem.test_tiers,
            "evaluate_every": 1,
            "checkpoint_every": 1,
            "seed": SEED,
            "run_folder": folder,
            "max_physical_batch_size": 16,
        }
        if interrupted:
            with pytest.raises(Crash):
                problem.fit(**options, schedule=crash_at(0.6))
            options |= {"resume": True, "schedule": crash_at(2.0)}
        result = problem.fit(**options)
        return {**published(folder), **told(replace(result, run_folder=None))}

    run.plan = plan  # type: ignore[attr-defined]
    return run


class Crash(Exception):
    """The machine goes down."""


def crash_at(share: float) -> Callable[[float], float]:
    def schedule(done: float) -> float:
        if done > share:
            raise Crash
        return 1.0 - 0.5 * done

    return schedule


def records_of(problem: Any) -> Records:
    return Records(problem.inputs, problem.targets, problem.budgets.ids.tolist())


@pytest.mark.parametrize("interrupted", [False, True], ids=["in one go", "resumed"])
@pytest.mark.parametrize("as_items", [False, True], ids=["tensors", "dataset"])
def test_fit_publishes_nothing_of_a_record_that_was_never_sampled(problem, train, as_items, interrupted):
    records = records_of(problem)
    unseen = never_sampled(train.plan, problem.budgets)
    assert len(unseen) > 3
    how = {"as_items": as_items, "interrupted": interrupted}
    before = train(records, **how)
    for name in (unseen[0], unseen[-1]):
        assert train(records.changed(name), **how) == before
        assert train(records.without(name), **how) == before


def test_the_test_would_see_a_record_that_was_sampled(problem, train):
    records = records_of(problem)
    seen = next(n for n in records.ids if n not in never_sampled(train.plan, problem.budgets))
    before = train(records)
    differing = {name for name, value in train(records.changed(seen)).items() if value != before[name]}
    assert {"model.safetensors", "model"} <= differing


@pytest.mark.parametrize("interrupted", [False, True], ids=["in one go", "resumed"])
@pytest.mark.parametrize("as_items", [False, True], ids=["tensors", "dataset"])
def test_fit_publishes_nothing_but_what_follows_from_the_noised_sums(problem, train, as_items, interrupted):
    how = {"as_items": as_items, "interrupted": interrupted}
    recorded = Recording()
    with released_by(recorded):
        before = train(records_of(problem), **how)
    others = Records(torch.rand(100, 5) * 3 - 7, torch.randint(0, 3, (100,)), problem.budgets.ids.tolist())
    with released_by(Injecting(recorded.noised)):
        assert train(others, **how) == before
        assert train(others.without("p3").without("p77"), **how) == before


# --- the command ------------------------------------------------------------------------------------------

SCHEMA = """
label = "income"
classes = ["low", "high"]
id_column = "person"
confirmed = true
[columns.age]
kind = "numeric"
low = 0
high = 120
[columns.job]
kind = "categorical"
categories = ["nurse", "teacher"]
"""


@dataclass(frozen=True)
class Command:
    """`pdpsgd train` on files in the working directory: how to write them, and what to call it with."""

    arguments: tuple[str, ...]
    write: Callable[[dict[str, Any]], None]
    rows: dict[str, Any]
    other: Callable[[str], Any]


def budgets() -> Budgets:
    names = [f"p{number}" for number in range(120)]
    return Budgets([(0.0, 1.0, 2.0, 4.0)[number % 4] for number in range(120)], ids=names)


def write_list() -> None:
    listed = budgets()
    rows = zip(listed.ids.tolist(), listed.epsilon.tolist(), strict=True)
    Path("list.csv").write_text("person,epsilon\n" + "".join(f"{name},{value}\n" for name, value in rows))


def a_table() -> Command:
    rng = random.Random(3)
    ages = {name: rng.randint(18, 80) for name in budgets().ids.tolist()}
    rows = {
        name: f"{age},{rng.choice(['nurse', 'teacher'])},{'high' if age > 50 else 'low'}"
        for name, age in ages.items()
    }

    def write(rows: dict[str, Any]) -> None:
        Path("schema.toml").write_text(SCHEMA)
        lines = (f"{name},{row}" for name, row in rows.items())
        Path("people.csv").write_text("\n".join(["person,age,job,income", *lines]) + "\n")

    def other(row: str) -> str:
        return "7000,astronaut,high" if row.endswith("low") else "-5,,low"

    return Command(("people.csv", "--schema", "schema.toml"), write, rows, other)


def images() -> Command:
    rng = np.random.default_rng(1)
    rows = {
        name: (rng.integers(0, 255, (6, 6), dtype=np.uint8), int(rng.integers(0, 3)))
        for name in budgets().ids.tolist()
    }

    def write(rows: dict[str, Any]) -> None:
        pictures, targets = zip(*rows.values(), strict=True)
        np.savez(
            "images.npz", inputs=np.stack(pictures), targets=targets, ids=list(rows), classes=["a", "b", "c"]
        )

    def other(row: tuple[Any, int]) -> tuple[Any, int]:
        return 255 - row[0], (row[1] + 1) % 3

    return Command(("images.npz", "--model", "linear"), write, rows, other)


COMMANDS = {"table": a_table, "images": images}


def run_command(command: Command, rows: dict[str, Any]) -> dict[str, Any]:
    """Run it in the working directory, and give back what is public and what the terminal shows."""
    write_list()
    command.write(rows)
    folder = Path("folder")  # its name is the run's name in the ledger
    for path in Path().glob("people.ledger*"):
        path.unlink()  # each time the first run on these people
    arguments = (
        *("train", *command.arguments, "--budgets", "list.csv", "--id-column", "person"),
        *("--test-share", "0.2", "--yes", "--steps", "6", "--batch-size", "20", "--seed", str(SEED)),
        *("--evaluate-every", "2", "--run-folder", str(folder)),
    )
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    shown = {"stdout": result.stdout.encode(), "stderr": result.stderr.encode(), **published(folder)}
    folder.rename(f"folder-{random.random()}")
    return shown


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return COMMANDS[request.param]()


def unseen_by_the_command(shown: dict[str, Any]) -> list[str]:
    """Those on the list, without the test people, whom no step sampled."""
    folder = next(Path().glob("folder-*"))
    plan = Plan.from_json(shown["plan.json"].decode(), verify=False)
    columns, _ = read_columns(folder / "people" / "promises.csv", ["id", "asked_epsilon", "level"])
    plan = replace(plan, roster=Roster(columns["id"], columns["level"]))
    return never_sampled(plan, Budgets(columns["asked_epsilon"], ids=columns["id"]))


@pytest.mark.parametrize("command", list(COMMANDS), indirect=True)
def test_the_command_publishes_nothing_of_a_record_that_was_never_sampled(command: Command) -> None:
    before = run_command(command, command.rows)
    assert {"model.safetensors", "result.json", "report.html", "plan.json", "settings.json"} <= set(before)
    unseen = unseen_by_the_command(before)
    epsilon_of = dict(zip(budgets().ids.tolist(), budgets().epsilon.tolist(), strict=True))
    allows_nothing = next(name for name in unseen if epsilon_of[name] == 0)
    never_in_a_batch = next(name for name in unseen if epsilon_of[name] > 0)
    for name in (allows_nothing, never_in_a_batch):
        assert run_command(command, command.rows | {name: command.other(command.rows[name])}) == before
        assert run_command(command, {k: row for k, row in command.rows.items() if k != name}) == before


@pytest.mark.parametrize("command", list(COMMANDS), indirect=True)
def test_the_command_publishes_nothing_but_what_follows_from_the_noised_sums(command: Command) -> None:
    recorded = Recording()
    with released_by(recorded):
        before = run_command(command, command.rows)
    folder = next(Path().glob("folder-*"))
    promised = (folder / "people" / "promises.csv").read_text()
    trained_on = {line.split(",")[0] for line in promised.splitlines()[1:]}
    others = {
        name: command.other(row) if name in trained_on else row  # test people stay as they are
        for name, row in command.rows.items()
    }
    with released_by(Injecting(recorded.noised)):
        assert run_command(command, others) == before
