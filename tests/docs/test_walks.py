"""The walks of docs/architecture.md are followed: every function is there, and is called in the order of the page."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import pdpsgd
from pdpsgd.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Three walks")[2].partition("\n## ")[0]
_, *WALKS = re.split(r"^\*\*.*\*\*$", SECTION, flags=re.M)


def people(folder: Path) -> Path:
    rows = ["person,age,epsilon,income"]
    for number in range(60):
        income = "high" if number % 2 else "low"
        rows.append(f"p{number},{20 + number},{(1, 2, 4)[number % 3]},{income}")
    path = folder / "people.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def plan(folder: Path) -> Callable[[], object]:
    given = ("--id-column", "person", "--steps", "5", "--batch-size", "10", "--verify")
    return partial(command, "plan", people(folder), *given)


def train(folder: Path) -> Callable[[], object]:
    given = ("--label", "income", "--id-column", "person", "--epsilon-column", "epsilon", "--steps", "3")
    more = ("--batch-size", "10", "--yes", "--test-share", "0.2", "--run-folder", folder / "run")
    more = (*more, "--ledger", folder / "people.ledger")
    return partial(command, "train", people(folder), *given, *more)


def step(folder: Path) -> Callable[[], object]:
    budgets = pdpsgd.Budgets([1.0, 2.0] * 20, delta=1e-5)
    model = torch.nn.Linear(4, 2)
    _, optimizer, loader = pdpsgd.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=(torch.randn(40, 4), torch.randint(2, (40,))),
        plan=pdpsgd.plan(budgets, steps=1, batch_size=20),
        budgets=budgets,
        criterion=cross_entropy,
    )
    return lambda: [one_step(model, optimizer, *batch) for batch in loader]


def one_step(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def command(*words: object) -> None:
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == 0, answer.output


def calls_of(work: Callable[[], object]) -> list[CodeType]:
    """Do the work and return the code that is called, in order, in all threads."""
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def code_of(name: str) -> set[CodeType]:
    """Return the code behind a dotted name: of a function, or of all methods of a class but its making."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module("pdpsgd." + ".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = inspect.getattr_static(found, part)
        found = getattr(found, "__func__", found)
        members = (
            [m for n, m in vars(found).items() if n != "__init__"] if inspect.isclass(found) else [found]
        )
        return {inspect.unwrap(member).__code__ for member in members if inspect.isfunction(member)}
    raise AssertionError(f"{name} is not there")


@pytest.mark.parametrize(("place", "prepare"), [(0, plan), (1, train), (2, step)])
def test_the_walk_is_the_way_it_goes(
    place: int, prepare: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", WALKS[place])
    assert len(names) > 5
    codes = {name: code_of(name) for name in names}
    calls = calls_of(prepare(tmp_path))
    first = {code: number for number, code in reversed(list(enumerate(calls)))}
    called = {name: min((first[c] for c in codes[name] if c in first), default=-1) for name in names}
    assert [name for name in names if called[name] < 0] == []
    assert sorted(names, key=called.__getitem__) == names
