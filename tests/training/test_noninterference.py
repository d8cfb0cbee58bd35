"""Nothing that is published depends on a record that was never sampled, nor on anything but the noised sums.

Non-interference: a key under which somebody is never sampled; with their record, with another one, and without, every
byte that may be published is the same. Replay: all records are others, and the noised sums that were recorded before
are released again: every byte is the same, so that the sums are the only way from records to what is published.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import pdpsgd
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.budgets.readers import read_columns
from pdpsgd.cli import app
from pdpsgd.engine.noising import Injecting, Recording, released_by
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.ledger import ledger, log
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.plans import Plan
from pdpsgd.reporting import comparison_page
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training import booking, comparison, progress, trainer
from pdpsgd.training.fitting import TrainingResult

SEED = 5


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a run takes is no secret that the promise is about."""
    for module in (trainer, progress, comparison):
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


# --- a comparison -----------------------------------------------------------------------------------------


def compared(problem: Any, records: Records, *mechanisms: str) -> dict[str, Any]:
    """Compare mechanisms on these records, and give back the page and all that the result says."""
    made = pdpsgd.compare(
        mechanisms,
        make_model=lambda seed: problem.model(),
        data=(records.inputs, records.targets),
        budgets=problem.budgets,
        test_data=problem.test,
        test_tiers=problem.test_tiers,
        record_ids=records.ids,
        seeds=(SEED,),
        plan_options={"steps": 2, "batch_size": 10},
    )
    return {"page": comparison_page(made), "figures": json.dumps(made.to_dict(), sort_keys=True)}


def test_a_comparison_publishes_nothing_of_a_record_that_was_never_sampled(problem):
    mechanisms, records = ("dp-sgd", "pdp-sgd-exact"), records_of(problem)
    plans = [pdpsgd.plan(problem.budgets, each, steps=2, batch_size=10) for each in mechanisms]
    unseen = set.intersection(*(set(never_sampled(each, problem.budgets)) for each in plans))
    assert len(unseen) > 10
    before = compared(problem, records, *mechanisms)
    for name in (min(unseen), max(unseen)):
        assert compared(problem, records.changed(name), *mechanisms) == before
        assert compared(problem, records.without(name), *mechanisms) == before
    seen = next(name for name in records.ids if name not in never_sampled(plans[0], problem.budgets))
    assert compared(problem, records.changed(seen), *mechanisms) != before  # it would be seen


def test_a_comparison_publishes_nothing_but_what_follows_from_the_noised_sums(problem):
    recorded = Recording()
    with released_by(recorded):
        before = compared(problem, records_of(problem), "pdp-sgd-exact")
    others = Records(torch.rand(100, 5) * 3 - 7, torch.randint(0, 3, (100,)), problem.budgets.ids.tolist())
    with released_by(Injecting(recorded.noised)):
        for data in (others, others.without("p3").without("p77")):
            assert compared(problem, data, "pdp-sgd-exact") == before


# --- own loops, and Lightning -----------------------------------------------------------------------------


def packed(tensors: dict[str, Any]) -> bytes:
    return safetensors.torch.save({name: value.detach().clone() for name, value in tensors.items()})


def told_by(engine: PrivacyEngine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an engine says of itself and leaves in model and optimizer."""
    return {
        "model": packed(engine.module.state_dict()),
        "optimizer": repr(optimizer.state_dict()),
        "left in the model": [n for n, p in engine.module.named_parameters() if p.grad is not None],
        "verdict": json.dumps(engine.verdict().to_dict()),
        "spent": engine.spent(),
        "steps": (engine.steps_taken, engine.steps_left, len(engine.loader)),
    }


def own_loop(problem: Any, records: Records, folder: Path, *, interrupted: bool) -> dict[str, Any]:
    """An own loop that publishes the model after every step; one that is interrupted repeats a step."""
    plan, seen = problem.plan(steps=(3, 3)), []

    def begin() -> PrivacyEngine:
        model = problem.model()
        engine = PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            data_loader=DataLoader(Items(records), batch_size=8),
            plan=plan,
            budgets=problem.budgets,
            record_ids=records.ids,
            max_physical_batch_size=8,
            seed=SEED,
        )
        return engine

    def train(engine: PrivacyEngine, *, until: int) -> None:
        for inputs, targets in engine.loader:
            engine.optimizer.zero_grad()
            nn.functional.cross_entropy(engine.module(inputs), targets).backward()
            engine.optimizer.step()
            if engine.optimizer.took_step:
                seen.append(packed(engine.module.state_dict()))
                if engine.steps_taken == 2:
                    engine.save(folder / "checkpoint")
                if engine.steps_taken == until:
                    return

    engine = begin()
    train(engine, until=4 if interrupted else plan.steps)
    if interrupted:
        engine = begin()
        engine.resume(folder / "checkpoint")
        train(engine, until=plan.steps)
    engine.close()
    return {**told_by(engine, engine.optimizer.original), "steps' models": seen}


def by_lightning(problem: Any, records: Records, folder: Path) -> dict[str, Any]:
    """A LightningModule that logs nothing of its batches; the checkpoint is Lightning's own."""
    lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")
    from pdpsgd.integrations.lightning import make_private

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = problem.model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    module = make_private(
        Module(),
        data_loader=DataLoader(Items(records), batch_size=8),
        plan=problem.plan(steps=(2, 2)),
        budgets=problem.budgets,
        record_ids=records.ids,
        seed=SEED,
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module)
    trainer.save_checkpoint(folder / "lightning.ckpt")
    saved = torch.load(folder / "lightning.ckpt", weights_only=False)
    said = {name: repr(part) for name, part in saved.items() if name != "state_dict"}
    return {
        **told_by(module.engine, module.engine.optimizer.original),
        **said,
        "saved model": packed(saved["state_dict"]),
        "metrics": repr(trainer.callback_metrics),
    }


OWN: dict[str, Callable[..., dict[str, Any]]] = {
    "own loop": partial(own_loop, interrupted=False),
    "own loop, resumed": partial(own_loop, interrupted=True),
    "Lightning": by_lightning,
}
QUIET = (
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning")
    if importlib.util.find_spec("lightning")
    else pytest.mark.filterwarnings("ignore:none"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
)


def quietly(function: Any) -> Any:
    for mark in QUIET:
        function = mark(function)
    return function


@quietly
@pytest.mark.parametrize("how", list(OWN))
def test_loops_publish_nothing_of_a_record_that_was_never_sampled(problem, tmp_path_factory, how):
    steps = (2, 2) if how == "Lightning" else (3, 3)
    unseen = never_sampled(problem.plan(steps=steps), problem.budgets)
    records = records_of(problem)
    seen = next(name for name in records.ids if name not in unseen)

    def run(data: Records) -> dict[str, Any]:
        return OWN[how](problem, data, tmp_path_factory.mktemp("run"))

    before = run(records)
    assert run(records.changed(unseen[0])) == before
    assert run(records.without(unseen[-1])) == before
    assert run(records.changed(seen))["model"] != before["model"]


@quietly
@pytest.mark.parametrize("how", list(OWN))
def test_loops_publish_nothing_but_what_follows_from_the_noised_sums(problem, tmp_path_factory, how):
    recorded = Recording()
    with released_by(recorded):
        before = OWN[how](problem, records_of(problem), tmp_path_factory.mktemp("run"))
    others = Records(torch.rand(100, 5) * 3 - 7, torch.randint(0, 3, (100,)), problem.budgets.ids.tolist())
    with released_by(Injecting(recorded.noised)):
        for data in (others, others.without("p3").without("p77")):
            assert OWN[how](problem, data, tmp_path_factory.mktemp("run")) == before


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
