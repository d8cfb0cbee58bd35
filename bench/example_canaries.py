"""What mislabeled examples show on digits: white box over all steps, and by the final model's loss alone.

python bench/example_canaries.py --out docs/results/audit/examples.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd.accounting.history import exposures_of
from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.canaries import add_canaries, tiers_of
from pdpsgd.audit.example_canaries import attacked_steps
from pdpsgd.audit.membership import area_under_curve
from pdpsgd.audit.one_run import one_run_bounds, simulated_rule
from pdpsgd.audit.scores import ExampleScores, simulated_scores
from pdpsgd.audit.targets import target_of
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.planning.planner import plan as make_plan
from pdpsgd.planning.plans import Plan

PEOPLE, STEPS, BATCH = 1437, 100, 128
LISTS = {"epsilon 1, 3, 8": ((1.0, 3.0, 8.0), 100), "epsilon 8": ((8.0,), 300), "epsilon 16": ((16.0,), 300)}
"""Lists of people, and canaries per tier."""


def attacked(
    made: Plan, target: AuditTarget, canaries: int, seed: int, significance: float
) -> list[dict[str, Any]]:
    """Train once with canaries, and attack it both ways."""
    generator = np.random.default_rng(seed)
    tiers = tiers_of(made)
    each = significance / len(tiers)
    rules = [
        simulated_rule(
            exposures_of(made.history_of(t.levels[-1])), canaries, delta=t.delta, significance=each
        )
        for t in tiers
    ]
    listed = add_canaries(made, canaries, generator, tiers=tiers, level_of_person=target.level_of_person)
    examples = target.canary_examples(len(listed), generator)
    module = target.make_model()
    scores = ExampleScores(listed)
    for seen in attacked_steps(
        listed,
        module=module,
        criterion=target.criterion,
        examples=examples,
        others=target.others,
        learning_rate=target.learning_rate,
        seed=seed,
    ):
        scores.observe(seen)
    found = {"white box": scores.scores(), "loss of the final model": -losses(module, examples)}
    bounds = {
        name: one_run_bounds(listed, values, rules=rules, significance=significance)
        for name, values in found.items()
    }
    rows = []
    for place, tier in enumerate(tiers):
        own, coins = listed.tier == place, listed.has_record
        _, best = best_possible(made, tier.levels[-1])
        row: dict[str, Any] = {
            "seed": seed,
            "tier": tier.name,
            "proven": tier.proven,
            "auc of Dirac canaries": best,
        }
        for name, values in found.items():
            row[f"auc, {name}"] = area_under_curve(values[own & coins], values[own & ~coins])
            row[f"measured, {name}"] = bounds[name][place].measured
        rows.append(row)
    return rows


def losses(module: nn.Module, examples: tuple[Tensor, Tensor]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        each = functional.cross_entropy(module(examples[0]), examples[1], reduction="none")
    return each.double().numpy()


def best_possible(made: Plan, level: int) -> tuple[int, float]:
    coins, scores = simulated_scores(exposures_of(made.history_of(level)), 20_000, np.random.default_rng(0))
    return level, area_under_curve(scores[coins], scores[~coins])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--significance", type=float, default=0.05)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "people": PEOPLE,
        "steps": STEPS,
        "batch_size": BATCH,
        **vars(options),
        "lists": {},
    }
    record["out"] = None
    for name, (epsilons, canaries) in LISTS.items():
        allowed = np.repeat(epsilons, -(-PEOPLE // len(epsilons)))[:PEOPLE]
        made = make_plan(Budgets(allowed), steps=STEPS, batch_size=BATCH)
        target = target_of(made, "digits", learning_rate=1.0)
        record["lists"][name] = [
            row
            for seed in range(1, options.seeds + 1)
            for row in attacked(made, target, canaries, seed, options.significance)
        ]
    text = json.dumps(record, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
