"""Time of a private step with people who have many records, over a step with as many people of one record each.

    python bench/records.py [--models mnist svhn mlp linear] [--records 256] [--seconds 3] [--json FILE]

Everybody is sampled at every step, so that each step has exactly so many records; who has more than K of them has three
times K, so that records are really chosen. The engine is whole: sampling, forward, backward, clipped sum, noise. Losses
are summed, as they are in `fit`. All contenders take turns in one process, 16 steps each; a ratio is the median over
turns of time per step, over that of single records. Processor time on one thread, as `bench/steps.py --clock cpu`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import pdpsgd
from pdpsgd.models.networks import mnist_cnn, svhn_cnn
from pdpsgd.planning.rounds import Level, Round

TURN = 16

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mnist": (mnist_cnn, (1, 28, 28)),
    "svhn": (svhn_cnn, (3, 32, 32)),
    "mlp": (lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), (784,)),
    "linear": (lambda: nn.Linear(384, 2), (384,)),
}


def sizes_of(kind: str, records: int) -> tuple[int | None, np.ndarray]:
    """Return K, and how many records of each person take part, in all as many as wanted."""
    numbers = np.random.default_rng(0)
    if kind == "single":
        return None, np.ones(records, dtype=np.int64)
    if kind == "four each":
        return 4, np.full(records // 4, 4)
    most = 16 if "16" in kind else 4
    weights = np.ones(most) if "even" in kind else np.r_[0.7, np.full(most - 1, 0.3 / (most - 1))]
    drawn = numbers.choice(np.arange(1, most + 1), records, p=weights / weights.sum())
    drawn = drawn[: int(np.searchsorted(np.cumsum(drawn), records))]
    return most, np.r_[drawn, np.ones(records - drawn.sum(), dtype=np.int64)]


KINDS = ("single", "four each", "1 to 4, even", "1 to 4, most 1", "1 to 16, most 1")


def stepper(model: str, kind: str, records: int) -> Callable[[], None]:
    """Return what takes one step of the engine."""
    build, shape = MODELS[model]
    torch.manual_seed(0)
    module, (most, sizes) = build(), sizes_of(kind, records)
    counts = sizes if most is None else np.where(sizes == most, 3 * most, sizes)
    people, total = len(sizes), int(counts.sum())
    data = torch.randn(total, *shape), torch.randint(2, (total,))
    level = Level(8.0, 1e-5, people, proven_epsilon=8.0)
    steps = Round(100_000, 1.0, float(people), (1.0,), (1.0,), (1.0,))
    plan = pdpsgd.Plan(mechanism="dp-sgd", levels=(level,), rounds=(steps,)).remember_proof()
    private, optimizer, loader = pdpsgd.PrivacyEngine(watch_loop=False).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=data,
        plan=plan,
        record_ids=np.repeat(np.arange(people), counts),
        records_per_person=most,
        loss_reduction="sum",
    )
    batches = iter(loader)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        _loss(private(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def measure(model: str, records: int, seconds: float) -> dict[str, Any]:
    """Let all contenders take turns."""
    steppers = {kind: stepper(model, kind, records) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in steppers.values():
        for _ in range(TURN):
            step()
    begin = time.monotonic()
    while time.monotonic() - begin < seconds * len(KINDS) or len(times["single"]) < 3:
        for kind, step in steppers.items():
            start = time.process_time()
            for _ in range(TURN):
                step()
            times[kind].append((time.process_time() - start) / TURN)
    found = {kind: statistics.median(turns) for kind, turns in times.items()}
    ratios = {
        kind: statistics.median(a / b for a, b in zip(turns, times["single"], strict=True))
        for kind, turns in times.items()
    }
    return {"model": model, "milliseconds": {k: 1e3 * v for k, v in found.items()}, "ratios": ratios}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [measure(model, options.records, options.seconds) for model in options.models]
    table = Table(title=f"Steps with {options.records} records, over as many people of one record each")
    for heading in ("", "single, ms", *KINDS[1:]):
        table.add_column(heading)
    for row in found:
        ratios = [f"{row['ratios'][kind]:.2f}" for kind in KINDS[1:]]
        table.add_row(row["model"], f"{row['milliseconds']['single']:.2f}", *ratios)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
