"""Should the learning rate be smaller when a run starts from last month's model? And what momentum does to one.

    python -m experiments.advice_start FOLDER [--output docs/results/advice-start.jsonl]

January's people are one half of a public set and February's the other, with the wide budgets of `experiments.advice`.
January's model is trained by the rule; February's run starts from it, or afresh, at the rule's learning rate times
several factors. Momentum 0.9 is tried on digits at rates that are meant for none. One line of the record a run.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pdpsgd
from experiments.advice import TIERS, network_for
from experiments.advice_sets import PublicSet, load
from pdpsgd.models.networks import count_parameters
from pdpsgd.planning.advice import doubt_about_rate, rate_for

SETS = ("digits", "synthetic-4000", "synthetic-20000", "adult")
FACTORS = (1.0, 0.5, 0.25, 0.1, 0.03)
SEEDS = (1, 2, 3)


def months(data: PublicSet, tiers: dict[float, float], seed: int) -> Iterator[dict[str, Any]]:
    """Train January once, and February from it and afresh."""
    half = len(data.targets) // 2
    parts = [(data.inputs[:half], data.targets[:half]), (data.inputs[half:], data.targets[half:])]

    def train(network: nn.Module, month: int, factor: float) -> tuple[nn.Module, float]:
        people = len(parts[month][1])
        budgets = pdpsgd.Budgets.from_tiers(tiers, people, min(1e-5, 0.1 / people), shuffle=month)
        result = pdpsgd.fit(
            network,
            parts[month],
            budgets,
            learning_rate=None if factor == 1 else factor * by_rule(network, budgets),
            seed=seed + 10 * month,
            secure=False,
            progress=False,
            test_data=(data.test_inputs, data.test_targets),
        )
        assert result.accuracy is not None
        return result.model, result.accuracy

    january, first = train(network_for(data), 0, 1.0)
    yield {
        "set": data.name,
        "seed": seed,
        "start": None,
        "month": "january",
        "factor": 1.0,
        "accuracy": first,
    }
    _, fresh = train(network_for(data), 1, 1.0)
    yield {
        "set": data.name,
        "seed": seed,
        "start": None,
        "month": "february",
        "factor": 1.0,
        "accuracy": fresh,
    }
    for factor in FACTORS:
        _, found = train(copy.deepcopy(january), 1, factor)
        about = {"set": data.name, "seed": seed, "start": "january", "month": "february"}
        yield {**about, "factor": factor, "accuracy": found}


def by_rule(network: nn.Module, budgets: pdpsgd.Budgets) -> float:
    """Return the learning rate that `fit` would choose."""
    options = pdpsgd.TrainingOptions().with_defaults(parameters=count_parameters(network))
    return rate_for(options.make_plan(budgets), count_parameters(network))


def momentum(data: PublicSet, rate: float, momentum: float, steps: int, seed: int) -> dict[str, Any]:
    """Train on digits at a learning rate that somebody chose, and note what would have been said of it."""
    people = len(data.targets)
    budgets = pdpsgd.Budgets.from_tiers(TIERS["narrow"], people, 1e-5, shuffle=0)
    made = pdpsgd.plan(budgets, steps=steps, batch_size=256)
    network = network_for(data)
    warned = doubt_about_rate(made, count_parameters(network), rate, momentum=momentum) is not None
    result = pdpsgd.fit(
        network,
        (data.inputs, data.targets),
        budgets,
        plan=made,
        learning_rate=rate,
        momentum=momentum,
        seed=seed,
        secure=False,
        progress=False,
        test_data=(data.test_inputs, data.test_targets),
    )
    about = {"set": data.name, "seed": seed, "momentum": momentum, "learning_rate": rate, "steps": steps}
    return {**about, "warned": warned, "accuracy": result.accuracy}


def main() -> None:
    """Run everything, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/results/advice-start.jsonl"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with asked.output.open("w") as record:

        def note(row: dict[str, Any]) -> None:
            record.write(json.dumps(row) + "\n")
            record.flush()
            print(row, flush=True)

        digits = load("digits", asked.folder)
        for steps in (150, 300, 1000):
            for chosen in ((0.5, 0.0), (0.5, 0.9), (0.05, 0.9)):
                note(momentum(digits, *chosen, steps, 1))
        for name in SETS:
            data = load(name, asked.folder)
            for seed in SEEDS:
                for row in months(data, TIERS["wide"], seed):
                    note(row)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
