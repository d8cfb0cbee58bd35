"""Personal least squares, with nothing tuned: digits, and Fashion-MNIST on scattering features.

    python -m experiments least-squares [--dataset fashion-mnist] [--seeds 3] [--output docs/results]

Each run is one line of least-squares.jsonl, and is not done again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pdpsgd
from experiments.inputs import features_of
from experiments.runner import commit_of_this_code
from pdpsgd.data import benchmarks
from pdpsgd.errors import check_one_of
from pdpsgd.models.networks import linear_model

PAGE = "least-squares"
DATASETS = ("digits", "fashion-mnist")
SYSTEMS = ("personal", "uniform")


def budgets_of(dataset: str, system: str, people: int, seed: int) -> pdpsgd.Budgets:
    """Return the benchmark's budgets, or everybody at the strictest of them."""
    if dataset == "digits":
        made = pdpsgd.Budgets.from_tiers({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, people, 1e-5, shuffle=seed)
    else:
        made = pdpsgd.Budgets.exponential(people, shuffle=seed)
    return made if system == "personal" else pdpsgd.Budgets([float(made.epsilon.min())] * people)


def run_least_squares(
    output: Path, *, datasets: Sequence[str] = (), seeds: int = 3, say: Callable[[str], None] = print
) -> list[Path]:
    """Do the runs that the record does not have yet, then write the page; return the files written."""
    path, page = output / f"{PAGE}.jsonl", output / f"{PAGE}.md"
    output.mkdir(parents=True, exist_ok=True)
    for dataset in datasets or DATASETS:
        check_one_of(DATASETS, dataset=dataset)
        for seed in range(seeds):
            for system in SYSTEMS:
                what = {"dataset": dataset, "system": system, "seed": seed}
                if any(all(run[name] == value for name, value in what.items()) for run in _read(path)):
                    continue
                found = {**what, **_run(dataset, system, seed), "commit": commit_of_this_code()}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                say(f"{what}: {100 * found['accuracy']:.2f} %")
    page.write_text(write_page(_read(path)), encoding="utf-8")
    return [path, page]


def _run(dataset: str, system: str, seed: int) -> dict[str, Any]:
    loaded = benchmarks.load("digits") if dataset == "digits" else features_of(dataset, "scattering")
    budgets = budgets_of(dataset, system, len(loaded.train_targets), seed)
    busy = time.process_time()
    result = pdpsgd.fit(
        linear_model(loaded.train_inputs[0].numel(), 10),
        (loaded.train_inputs, loaded.train_targets),
        budgets,
        mechanism="least-squares",
        test_data=(loaded.test_inputs, loaded.test_targets),
        seed=seed,
        progress=False,
    )
    return {
        "accuracy": result.accuracy,
        "noise_multiplier": result.plan.rounds[0].noise_multiplier,
        "proven": [level.proven_epsilon for level in result.plan.levels],
        "processor_seconds": round(time.process_time() - busy, 1),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def write_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page, from the record alone."""
    rows = []
    for dataset in DATASETS:
        for system in SYSTEMS:
            found = [r for r in runs if (r["dataset"], r["system"]) == (dataset, system)]
            if not found:
                continue
            accuracy = [100 * r["accuracy"] for r in found]
            spread = f" ± {statistics.stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
            seconds = statistics.fmean(r["processor_seconds"] for r in found)
            rows.append(
                f"| {dataset} | {system} | {statistics.fmean(accuracy):.2f}{spread} | {len(found)} | {seconds:.0f} |"
            )
    return "\n".join([TEXT, *rows, ""])


TEXT = """\
# Personal least squares

`python -m experiments least-squares`; every run is a line of `least-squares.jsonl`. The mechanism `least-squares` has
nothing to tune: one release, and its solution. *digits*: 1,437 people, pixels, budgets 1/2/3 at 34/43/23 %, 360 test
images. *fashion-mnist*: 60,000 people, scattering features (3,969 of them), 20 groups of budgets in [0.5, 1] (k = 0).
delta 1e-5. *Uniform*: everybody at the strictest budget. Accuracy on test images: mean ± standard deviation over seeds;
seconds are processor time of one core. On Fashion-MNIST's features SGD with `pdp-sgd-exact`, tuned, has 87.62
([features](features.md)).

| data set | budgets | accuracy | seeds | seconds |
|---|---|---|---|---|"""
