"""How cost grows: batches of 100 to 100,000, and people of 1,000 to 10,000,000; exponents between neighbors.

    python bench/growth.py [--json FILE] [--page FILE]

A linear model of 20 features. *First step* is `make_private`, the first batch with its checks, and its step; *step* is
a later one. Planning is for as many budgets as people, at a batch of 1,024 (or half of the people) and 1,000 steps.
Processor time, one thread. An exponent of 1 is a cost that grows with the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import pdpsgd

BATCHES = (100, 1_000, 10_000, 100_000)
PEOPLE = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
FEATURES = 20


class Run:
    """A private run of a linear model, whose steps are timed."""

    def __init__(self, people: int, batch: int) -> None:
        torch.manual_seed(0)
        data = torch.randn(people, FEATURES), torch.randint(2, (people,))
        plan = pdpsgd.plan(
            pdpsgd.Budgets(np.full(people, 8.0)), steps=1000, batch_size=batch, accountant="rdp"
        )
        module = nn.Linear(FEATURES, 2)
        start = time.process_time()
        self.model, self.optimizer, loader = pdpsgd.PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=data,
            plan=plan,
            criterion=F.cross_entropy,
        )
        self.batches = iter(loader)
        self.step()
        self.first_step = time.process_time() - start

    def step(self) -> None:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def later_step(self) -> float:
        for _ in range(10):  # until the loop is known
            self.step()
        start = time.process_time()
        for _ in range(5):
            self.step()
        return (time.process_time() - start) / 5


def planning(people: int) -> float:
    budgets = pdpsgd.Budgets(np.random.default_rng(0).uniform(0.5, 4, people))
    start = time.process_time()
    pdpsgd.plan(budgets, steps=1000, batch_size=min(1024, people // 2))
    return time.process_time() - start


def measure() -> list[dict[str, Any]]:
    """Return rows with a size, what was measured, and seconds."""
    Run(400, 100).later_step()  # imports, compiled code
    rows = []
    for batch in BATCHES:
        run = Run(2 * batch, batch)
        rows.append(
            {"size": batch, "first step, by batch": run.first_step, "step, by batch": run.later_step()}
        )
        print(rows[-1], flush=True)
    for people in PEOPLE:
        run = Run(people, 500)
        found = {"first step, by people": run.first_step, "step, by people": run.later_step()}
        rows.append({"size": people, **found, "planning, by people": planning(people)})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each thing measured: its name, seconds at each size, and the largest exponent between sizes."""
    lines = []
    for name in dict.fromkeys(name for row in rows for name in row if name != "size"):
        found = [(row["size"], row[name]) for row in rows if name in row]
        exponents = [math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in itertools.pairwise(found)]
        seconds = ", ".join(f"{size:,}: {value:.4f}" for size, value in found)
        lines.append([name, seconds, f"{max(exponents):.2f}"])
    return lines


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## Growth",
        "",
        "By `python bench/growth.py`: a linear model of 20 features, processor time on one thread. *First step* is "
        "`make_private`, the first batch with its checks, and its step. Planning at a batch of 1,024 (or half of the "
        "people), 1,000 steps. An exponent of 1 is a cost that grows with the work.",
        "",
        "| what | seconds by size | largest exponent between two sizes |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in table(rows))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = measure()
    for line in table(rows):
        print(*line, sep=" | ")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        options.page.write_text(page(rows))


if __name__ == "__main__":
    main()
