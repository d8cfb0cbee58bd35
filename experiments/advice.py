"""How far may weights travel for a plan's noise? Runs behind the rules of `pdpsgd advise`, one line of a record each.

    python -m experiments.advice FOLDER [--sets adult,census] [--output docs/results/advice.jsonl]

FOLDER has the files of those sets that no package carries (docs/results/advice.md says where they are from). Each set
is trained on with the same seeds at several lengths of travel (clipping norm times learning rate times steps, cosine
schedule), and once more with the learning rate that the rule chooses; runs that are on record are not done again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pdpsgd
from experiments.advice_sets import SETS, PublicSet, load
from pdpsgd.models.networks import by_name, count_parameters
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.planning.advice import choose_setting, outlook, rate_for

TIERS = {
    "strict": {0.1: 0.3, 0.3: 0.5, 1.0: 0.2},
    "wide": {0.5: 0.3, 2.0: 0.5, 8.0: 0.2},
    "narrow": {1.0: 0.34, 2.0: 0.43, 3.0: 0.23},
}
TRAVELS = (50.0, 200.0, 800.0, 3200.0, 12800.0)
SEED = 1


def trials(name: str) -> Iterator[dict[str, Any]]:
    """Name the runs of a set; travel None is the rule's, tiers None are no privacy."""
    yield {"set": name, "tiers": None, "travel": None}
    for tiers in TIERS:
        for travel in (None, *TRAVELS):
            yield {"set": name, "tiers": tiers, "travel": travel}


def network_for(data: PublicSet) -> nn.Module:
    """Make the network that `train` would take; a linear one for features."""
    torch.manual_seed(SEED)
    kind = "linear" if data.name.endswith("scattering") else "tabular"
    network = by_name(kind, input_shape=tuple(data.inputs.shape[1:]), classes=data.classes)
    if kind == "linear":
        start_at_zero(network)
    return network


def without_privacy(data: PublicSet, *, steps: int = 2000, batch_size: int = 256) -> dict[str, Any]:
    """Train the same network without privacy (Adam, weight decay 1e-4): what a loss of accuracy is measured against."""
    network = network_for(data)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-4)
    random = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        chosen = torch.randint(len(data.targets), (batch_size,), generator=random)
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data.inputs[chosen]), data.targets[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = pdpsgd.evaluate(network, (data.test_inputs, data.test_targets))
    return {
        "set": data.name,
        "tiers": None,
        "travel": None,
        "seen": SETS[data.name].seen,
        "people": len(data.targets),
        "accuracy": found.accuracy,
        "majority": data.majority,
    }


def run(data: PublicSet, trial: dict[str, Any]) -> dict[str, Any]:
    """Train once, and say what came of it."""
    if trial["tiers"] is None:
        return without_privacy(data)
    people = len(data.targets)
    budgets = pdpsgd.Budgets.from_tiers(TIERS[trial["tiers"]], people, min(1e-5, 0.1 / people), shuffle=0)
    network = network_for(data)
    parameters = count_parameters(network)
    setting = choose_setting(budgets, parameters)
    made = pdpsgd.plan(
        budgets, steps=setting.steps, batch_size=setting.batch_size, max_grad_norm=setting.max_grad_norm
    )
    travel = trial["travel"]
    rate = rate_for(made, parameters) if travel is None else travel / setting.max_grad_norm / setting.steps
    result = pdpsgd.fit(
        network,
        (data.inputs, data.targets),
        budgets,
        plan=made,
        learning_rate=rate,
        seed=SEED,
        secure=False,
        progress=False,
        test_data=(data.test_inputs, data.test_targets),
    )
    seen = outlook(made, parameters)
    return {
        **trial,
        "seen": SETS[data.name].seen,
        "people": people,
        "parameters": parameters,
        "learning_rate": rate,
        "batch_size": setting.batch_size,
        "max_grad_norm": setting.max_grad_norm,
        "noise_multiplier": round(seen.noise_multiplier, 4),
        "signal_to_noise": round(seen.signal_to_noise, 2),
        "accuracy": result.accuracy,
        "loss": None if result.evaluation is None else result.evaluation.loss,
        "majority": data.majority,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Lay the record out: the rule's accuracy beside the best of all lengths of travel, and beside no privacy."""
    base = {row["set"]: row["accuracy"] for row in rows if row["tiers"] is None}
    lines = [
        "| set | calibrated on | tiers | r | by the rule | best of five | no privacy | majority |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["tiers"] is None or row["travel"] is not None:
            continue
        key = (row["set"], row["tiers"])
        tried = [x["accuracy"] for x in rows if (x["set"], x["tiers"]) == key and x["travel"] is not None]
        without = f"{base[row['set']]:.1%}" if row["set"] in base else "not run"
        best = f"{max(tried):.1%}" if len(tried) == len(TRAVELS) else "not all run"
        lines.append(
            f"| {row['set']} | {'yes' if row['seen'] else 'no'} | {row['tiers']} | {row['signal_to_noise']:.3g} | "
            f"{row['accuracy']:.1%} | {best} | {without} | {row['majority']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is not on record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--output", type=Path, default=Path("docs/results/advice.jsonl"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    known = (
        [json.loads(line) for line in asked.output.read_text().splitlines()] if asked.output.exists() else []
    )
    done = {(row["set"], row["tiers"], row["travel"]) for row in known}
    for name in asked.sets.split(","):
        left = [trial for trial in trials(name) if (name, trial["tiers"], trial["travel"]) not in done]
        data = load(name, asked.folder) if left else None
        for trial in left:
            assert data is not None
            row = run(data, trial)
            with asked.output.open("a") as record:
                record.write(json.dumps(row) + "\n")
            known.append(row)
            print(row["set"], row["tiers"], row["travel"], f"{row['accuracy']:.4f}", flush=True)
    print(table(known))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
