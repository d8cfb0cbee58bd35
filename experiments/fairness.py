"""Fairness: what personalization does to strict people where strictness goes with a class, and what remedies cost.

    python -m experiments fairness [--dataset mnist] [--seeds 3] [--output docs/results]

Everybody with one of two classes is strict. Linear on scattering features, by the presets. Each run is one line of
fairness.jsonl, and is not done again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import pdpsgd
from experiments.inputs import features_of
from experiments.published import TITLES
from experiments.runner import commit_of_this_code
from pdpsgd.errors import check_one_of
from pdpsgd.models.networks import linear_model
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training.class_counts import adjust_logits, logit_adjustment, plan_counts, release_counts
from pdpsgd.training.evaluation import Evaluation, evaluate
from pdpsgd.training.presets import preset

STRICT = {"mnist": (8, 9), "fashion-mnist": (4, 6)}
"""Fashion-MNIST's are coats and shirts, which are hard to tell from pullovers."""
LISTS = ((1.0, 3.0), (0.1, 1.0))
"""Epsilon of the strict classes, and of all others."""
CLASSES = 10
PAGE = "fairness"

TRAININGS = ("gamma 1", "gamma 0.5", "gamma 0", "counts", "exclude")
ROWS = {
    "gamma 1": ("gamma 1", "`pdp-sgd-exact` (gamma 1)"),
    "gamma 0.5": ("gamma 0.5", "gamma 0.5"),
    "gamma 0": ("gamma 0", "gamma 0: uniform DP-SGD"),
    "gamma 1, known": ("gamma 1", "gamma 1, logits adjusted by public knowledge"),
    "gamma 0.5, known": ("gamma 0.5", "gamma 0.5, logits adjusted by public knowledge"),
    "counts": ("counts", "gamma 1, logits adjusted by counts with noise, charged"),
    "exclude": ("exclude", "`dp-sgd-exclude`"),
}


def run_fairness(
    output: Path, *, datasets: Sequence[str] = (), seeds: int = 3, say: Callable[[str], None] = print
) -> list[Path]:
    """Do the runs that the record does not have yet, then write the page; return the files written."""
    path = output / f"{PAGE}.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    done = {(r["dataset"], *r["list"], r["training"], r["seed"]) for r in _read(path)}
    for seed in range(seeds):
        for dataset in datasets or STRICT:
            check_one_of(tuple(STRICT), dataset=dataset)
            for allowed in LISTS:
                for training in TRAININGS:
                    if (dataset, *allowed, training, seed) in done:
                        continue
                    found = run(dataset, allowed, training, seed)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")
                    say(
                        f"{dataset} {allowed} {training} seed {seed}: "
                        + ", ".join(f"{100 * e['accuracy']:.2f} %" for e in found["evaluations"].values())
                    )
    return [path, *write_fairness(output)]


def write_fairness(output: Path) -> list[Path]:
    """Write the page from the record, where there is one."""
    path = output / f"{PAGE}.jsonl"
    if not path.exists():
        return []
    page = output / f"{PAGE}.md"
    page.write_text(page_of(_read(path)), encoding="utf-8")
    return [page]


def run(dataset: str, allowed: tuple[float, float], training: str, seed: int) -> dict[str, Any]:
    """Train once, and evaluate by tier and class, without and with adjusted logits."""
    commit = commit_of_this_code()
    loaded, made = features_of(dataset, "scattering"), preset(f"{dataset}-scattering")
    labels, test = loaded.train_targets.numpy(), (loaded.test_inputs, loaded.test_targets)
    budgets = pdpsgd.Budgets(_epsilon(labels, dataset, allowed), 1e-5)
    busy = time.process_time()
    counted = plan_counts(budgets) if training == "counts" else None
    options: dict[str, Any] = {"steps": made.steps, "batch_size": made.batch_size}
    if training.startswith("gamma"):
        options |= {"gamma": float(training.split()[1])}
    planned = pdpsgd.plan(
        budgets,
        "dp-sgd-exclude" if training == "exclude" else "pdp-sgd-exact",
        max_grad_norm=made.max_grad_norm,
        history=[] if counted is None else [counted],
        history_fixed=counted is not None,
        **options,
    )
    model = linear_model(loaded.train_inputs[0].numel(), CLASSES)
    start_at_zero(model)
    result = pdpsgd.fit(
        model,
        (loaded.train_inputs, loaded.train_targets),
        budgets,
        plan=planned,
        learning_rate=made.learning_rate,
        seed=seed,
        progress=False,
    )
    models: dict[str, nn.Module] = {training: result.model}
    if counted is not None:
        counts = release_counts(
            counted, budgets, labels, classes=CLASSES, source=RandomSource.from_seed(10_000 + seed)
        ).counts
        models = {"counts, not adjusted": result.model, "counts": adjusted(result, counts)}
    elif training in ("gamma 1", "gamma 0.5"):
        models[f"{training}, known"] = adjusted(result, known_counts(dataset))
    tiers = np.where(np.isin(loaded.test_targets.numpy(), STRICT[dataset]), "strict", "others")
    return {
        "dataset": dataset,
        "list": list(allowed),
        "training": training,
        "seed": seed,
        "evaluations": {
            name: _plain(evaluate(each, test, tiers=tiers.tolist())) for name, each in models.items()
        },
        "noise_multiplier": planned.rounds[0].noise_multiplier,
        "sample_rates": planned.rounds[0].sample_rates,
        "levels": [[level.epsilon, level.people, level.proven_epsilon] for level in planned.levels],
        "processor_seconds": round(time.process_time() - busy, 1),
        "commit": commit,
    }


def adjusted(result: pdpsgd.TrainingResult, counts: Any) -> nn.Module:
    """Return the model with logits adjusted for these counts per level and class."""
    return adjust_logits(result.model, logit_adjustment(result.plan, counts))


def known_counts(dataset: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return what anybody knows: classes are equally frequent, and who has two of them is strict."""
    strict = np.isin(np.arange(CLASSES), STRICT[dataset])
    return np.array([strict, ~strict], dtype=float)


def _epsilon(
    labels: np.ndarray[Any, Any], dataset: str, allowed: tuple[float, float]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.where(np.isin(labels, STRICT[dataset]), *allowed)


def _plain(found: Evaluation) -> dict[str, Any]:
    return {
        "accuracy": found.accuracy,
        "by_tier": {name: share.accuracy for name, share in found.by_tier.items()},
        "by_class": {name: share.accuracy for name, share in found.by_class.items()},
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def page_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page, from the record alone."""
    lines = [TEXT]
    for dataset, strict in STRICT.items():
        for allowed in LISTS:
            found = [r for r in runs if r["dataset"] == dataset and tuple(r["list"]) == allowed]
            if not found:
                continue
            heads = [f"**{c}**" if c in strict else str(c) for c in range(CLASSES)]
            lines += [
                f"## {TITLES[dataset]}: classes {strict[0]} and {strict[1]} at epsilon {allowed[0]:g}, "
                f"all others at {allowed[1]:g}",
                "",
                f"| | all | strict | others | {' | '.join(heads)} | seeds |",
                f"|---|{'---|' * (CLASSES + 4)}",
                *(line for name in ROWS if (line := _line(name, found))),
                "",
            ]
    return "\n".join(lines)


def _line(name: str, runs: Sequence[dict[str, Any]]) -> str:
    shown = [r["evaluations"][name] for r in runs if name in r["evaluations"]]
    if not shown:
        return ""
    overall = [100 * e["accuracy"] for e in shown]
    spread = f" ± {statistics.stdev(overall):.2f}" if len(overall) > 1 else ""

    def mean(key: str, group: str) -> float:
        return 100 * statistics.fmean(e[key][group] for e in shown)

    tiers = " | ".join(f"{mean('by_tier', tier):.2f}" for tier in ("strict", "others"))
    classes = " | ".join(f"{mean('by_class', str(c)):.1f}" for c in range(CLASSES))
    return (
        f"| {ROWS[name][1]} | {statistics.fmean(overall):.2f}{spread} | {tiers} | {classes} | {len(shown)} |"
    )


TEXT = """\
# Fairness: where strictness goes with a class

`python -m experiments fairness --seeds 3`; every run is a line of `fairness.jsonl`. All people of two classes are
strict, all others are not, so that a personalized plan sees the two classes more rarely than they are. Linear on
scattering features, 400 steps of 2,048, the presets' learning rates: none were tuned here. Delta 1e-5.
Fashion-MNIST's strict classes are coats (4) and shirts (6), which are hard to tell from pullovers (2). Accuracy in
percent on the usual test people, whose tier is that of their class: mean over seeds, ± the standard deviation of a
run; by class it is recall.

To first order a person's influence on the model *is* their budget (rate times clipping norm over noise). So full
correction is uniform DP-SGD (gamma 0), at the strictest budget for all, and everything between is a trade.

- *gamma 0.5*: people who allow more than the strictest are planned at the geometric mean of the two (`--gamma 0.5`).
- *Logits adjusted*: ln of a class's share of people over its share of what training sees is added to its logit; from
  public knowledge (classes are equally frequent, and who has those two is strict), or from class counts per level
  that are released with noise and charged, 1 % of what everybody allows (`pdpsgd.training.class_counts`).
- *`dp-sgd-exclude`* leaves out those below the threshold with the most signal: here all people of the two classes.
  What nobody shows the model it never says.

What came out, three seeds each. Leaving the strict out loses two classes altogether. Of the others, personalized
training alone gets least of the strict classes right. Adjusted logits bring back part of that and cost the others a
few tenths of a point, by noisy counts as much as by what is known. Where budgets are a factor of three apart, uniform
DP-SGD and gamma 0.5 do best overall, a tenth or two from each other: what personalization adds for the others is
worth less than what the strict classes lose. Where they are a factor of ten apart, uniform DP-SGD costs the others
most (4 points on MNIST, 12 on Fashion-MNIST, against gamma 1); best overall is gamma 1 with adjusted logits on MNIST,
and gamma 0.5 with adjusted logits on Fashion-MNIST, where the two strict classes are hard to tell from others.

What this cannot repair: an adjustment gives a class its share of the answers back, not what training did not see of
it; where classes are hard to tell apart it moves errors from one to the other. And budgets are public: where they go
with a class, a person's budget tells it, whatever training does.
"""
