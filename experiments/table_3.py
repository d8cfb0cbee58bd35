"""Table 3: Individualized PATE with sound accounting beside PDP-SGD; linear on scattering features, and CNNs.

    python -m experiments table-3 [--dataset mnist] [--system pate] [--seeds 3] [--output docs/results]

People are the first 50,000 training images of MNIST (63,257 of SVHN), public are the last 10,000, test images the usual
ones. PATE sees public images without labels. Each run is one line of table-3.jsonl, and is not done again.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pdpsgd
from experiments.inputs import features_of
from experiments.published import IDP_CASES, INDIVIDUALIZED_PATE, TITLES
from experiments.runner import commit_of_this_code
from experiments.search import SOUND_ROUNDS
from pdpsgd._typing import IntArray
from pdpsgd.errors import check_one_of
from pdpsgd.models.networks import by_name, linear_model
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.pate import (
    answer_queries,
    ask_about,
    assign_people,
    plan_votes,
    spread_labels,
    train_network_teachers,
    train_ridge_teachers,
    train_student,
    vote_counts,
)
from pdpsgd.pate.teachers import Teacher
from pdpsgd.sampling.source import RandomSource

PEOPLE = {"mnist": 50_000, "svhn": 63_257}
VOTES = ("pate", "i-pate-upsample", "i-pate-weight by epsilon", "i-pate-weight by mu")
AFTER = " after public labels"
TRAINED = ("pdp-sgd-exact", "pdp-sgd-exact" + AFTER, "pdp-sgd-adaptive" + AFTER)
SYSTEMS = (*VOTES, *TRAINED)
PAGE = "table-3"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kind:
    """What teachers, students and private training are: the inputs, the network, and a recipe for PDP-SGD."""

    title: str
    features: str
    network: str
    steps: int
    batch_size: int
    rate: float
    activation: str | None = None
    clip: float = 0.1

    def model(self, shape: tuple[int, ...]) -> nn.Module:
        """Make a network; a linear one starts at zero."""
        if self.network == "linear":
            linear = linear_model(math.prod(shape), 10)
            start_at_zero(linear)
            return linear
        return by_name(self.network, input_shape=shape, classes=10, activation=self.activation)


LINEAR = Kind("linear on scattering features", "scattering", "linear", 400, 2048, 4.0)
KINDS = {
    ("mnist", "linear"): LINEAR,
    ("svhn", "linear"): LINEAR,
    ("mnist", "cnn"): Kind("the paper's CNN with tanh", "pixels", "mnist-cnn", 600, 2048, 4.0, "tanh"),
    ("svhn", "cnn"): Kind(
        "the paper's CNN with tanh, images standardized",
        "standardised-pixels",
        "svhn-cnn",
        600,
        2048,
        4.0,
        "tanh",
    ),
}


def run_table_3(
    output: Path,
    *,
    datasets: Sequence[str] = (),
    systems: Sequence[str] = (),
    seeds: int = 3,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Do the runs that the record does not have yet, then write the page; return the files written."""
    path = output / f"{PAGE}.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    for dataset in datasets:
        check_one_of(tuple(PEOPLE), dataset=dataset)
    for system in systems:
        check_one_of(SYSTEMS, system=system)
    done = {_key(r) for r in read_runs(path)}
    for seed in range(seeds):
        for dataset, kind in KINDS:
            for case in IDP_CASES:
                for system in systems or SYSTEMS:
                    wanted = (dataset, kind, case, system, seed)
                    if wanted in done or dataset not in (datasets or PEOPLE):
                        continue
                    run = _run(dataset, kind, case, system, seed)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(run) + "\n")
                    say(f"{dataset} {kind} {case} {system} seed {seed}: {100 * run['accuracy']:.2f} %")
    page = output / f"{PAGE}.md"
    page.write_text(write_page(read_runs(path)), encoding="utf-8")
    return [path, page]


def _key(run: dict[str, Any]) -> tuple[str, str, str, str, int]:
    return run["dataset"], run.get("model", "linear"), run["case"], run["system"], run["seed"]


def _run(dataset: str, kind: str, case: str, system: str, seed: int) -> dict[str, Any]:
    training = KINDS[dataset, kind]
    loaded = features_of(dataset, training.features)
    inputs, targets, number = loaded.train_inputs, loaded.train_targets, PEOPLE[dataset]
    people, public = (inputs[:number], targets[:number]), (inputs[number:], targets[number:])
    test = loaded.test_inputs, loaded.test_targets
    budgets = pdpsgd.Budgets.from_tiers(dict(IDP_CASES[case]), number, 1e-5, shuffle=seed)
    torch.manual_seed(seed)
    busy = time.process_time()
    if system in TRAINED:
        found = _train(training, system, people, public, test, budgets, seed)
    else:
        found = _vote(training, system, people, public, test, budgets, seed)
    seconds = time.process_time() - busy + found.pop("shared_seconds", 0.0)
    return {
        "dataset": dataset,
        "model": kind,
        "case": case,
        "system": system,
        "seed": seed,
        **found,
        "processor_seconds": round(seconds, 1),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "commit": commit_of_this_code(),
    }


def _vote(
    kind: Kind, system: str, people: Pair, public: Pair, test: Pair, budgets: pdpsgd.Budgets, seed: int
) -> dict[str, Any]:
    mechanism, _, weights = system.partition(" by ")
    planned = plan_votes(budgets, mechanism, weights=weights or "mu")
    planned.plan.verify()
    teachers = assign_people(planned, planned.plan.level_of_person(budgets), seed=seed)
    order = ask_about(public[0], planned.questions, seed=seed)
    shown = np.union1d(
        np.arange(ALWAYS_SHOWN), order
    )  # networks take their time: nobody asks about the others
    labels, shared_seconds = _labels_of(kind, teachers, people, public[0], shown)
    counts = torch.zeros(len(public[0]), 10, dtype=torch.float64)
    counts[shown] = vote_counts(teachers, labels, classes=10)
    in_order = answer_queries(counts, planned, source=RandomSource.from_seed(2 * seed))
    centers = answer_queries(counts, planned, order, source=RandomSource.from_seed(2 * seed + 1))
    spread = spread_labels(public[0], centers.examples, centers.labels, classes=10)
    truth = public[1].numpy()
    supervised = [
        _student(
            kind, public[0][a.examples], nn.functional.one_hot(torch.from_numpy(a.labels), 10).float(), test
        )
        for a in (in_order, centers)
    ]
    votes = counts[:ALWAYS_SHOWN].argmax(1).numpy()
    return {
        "accuracy": supervised[0],
        "with_centers": supervised[1],
        "with_both": _student(kind, public[0], spread, test),
        "answers": len(in_order.labels),
        "questions": in_order.asked,
        "planned_answers": planned.answers,
        "label_accuracy": float((in_order.labels == truth[in_order.examples]).mean()),
        "vote_accuracy": float((votes == truth[:ALWAYS_SHOWN]).mean()),
        "proven": [level.proven_epsilon for level in planned.plan.levels],
        "teachers": len(teachers),
        "shared_seconds": shared_seconds,
    }


def _labels_of(
    kind: Kind, teachers: Sequence[Teacher], people: Pair, public: Tensor, shown: IntArray
) -> tuple[IntArray, float]:
    """Train the teachers, or take those of a run before if they are the same; return labels, and seconds saved."""
    key = tuple(t.people.tobytes() for t in teachers), kind, shown.tobytes()
    if key in _KEPT:
        labels, seconds = _KEPT[key]
        return labels, seconds
    began = time.process_time()
    asked = public[torch.from_numpy(shown)]
    if kind.network == "linear":
        labels = train_ridge_teachers(teachers, *people, asked, classes=10)
    else:
        labels = train_network_teachers(
            teachers, *people, asked, network=lambda: kind.model(tuple(asked.shape[1:]))
        )
    if len(_KEPT) == 3:
        del _KEPT[next(iter(_KEPT))]
    _KEPT[key] = labels, time.process_time() - began
    return labels, 0.0


_KEPT: dict[Any, tuple[IntArray, float]] = {}
ALWAYS_SHOWN = 1000
"""Of the public examples in their own order: more than any plan here asks about."""


def _student(kind: Kind, inputs: Tensor, wanted: Tensor, test: Pair) -> float:
    """Train a student, and return its accuracy."""
    model = kind.model(tuple(inputs.shape[1:]))
    if not len(inputs):
        return _accuracy(model, test)  # nobody answered
    train_student(model, inputs, wanted)
    return _accuracy(model, test)


def _train(
    kind: Kind, system: str, people: Pair, public: Pair, test: Pair, budgets: pdpsgd.Budgets, seed: int
) -> dict[str, Any]:
    mechanism, after = system.removesuffix(AFTER), system.endswith(AFTER)
    model = kind.model(tuple(people[0].shape[1:]))
    start = None
    if after:
        known = nn.functional.one_hot(public[1], 10).float()
        train_student(model, public[0], known, steps=600, batch_size=256, learning_rate=1e-3)
        start = _accuracy(model, test)
    plan = pdpsgd.plan(
        budgets,
        mechanism,
        steps=kind.steps,
        batch_size=kind.batch_size,
        max_grad_norm=kind.clip,
        rounds=SOUND_ROUNDS.get(mechanism),
    )
    result = pdpsgd.fit(
        model,
        people,
        budgets,
        plan=plan,
        learning_rate=(kind.rate / 4 if after else kind.rate) / kind.clip,
        test_data=test,
        seed=seed,
        progress=False,
    )
    return {
        "accuracy": result.accuracy,
        "at_start": start,
        "proven": [level.proven_epsilon for level in plan.levels],
    }


@torch.no_grad()
def _accuracy(model: nn.Module, test: Pair) -> float:
    model.eval()
    right = [
        (model(x).argmax(1) == y).sum()
        for x, y in zip(torch.split(test[0], 2000), torch.split(test[1], 2000), strict=True)
    ]
    return int(sum(right)) / len(test[1])


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs on record."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def write_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page, from the record alone."""
    lines = [TEXT]
    for dataset in PEOPLE:
        for case in IDP_CASES:
            found = [r for r in runs if r["dataset"] == dataset and r["case"] == case]
            if not found:
                continue
            upsample, weight, papers = INDIVIDUALIZED_PATE[dataset, case]
            lines += [
                f"## {TITLES[dataset]}, {case} %",
                "",
                f"Printed: I-PATE by upsampling {upsample:.2f}, by weighting {weight:.2f}, PDP-SGD after training on "
                f"public labels {papers:.2f} (other networks, other accounting).",
                "",
            ]
            for name, kind in KINDS:
                alike = [r for r in found if _key(r)[1] == kind]
                if name == dataset and alike:
                    lines += [*_table(KINDS[name, kind].title, alike), ""]
    return "\n".join(lines)


def _table(title: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"| {title} | accuracy | asked by centers | and labels spread | labels | right | seconds | MB | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(system, [r for r in runs if r["system"] == system]) for system in SYSTEMS),
    ]


def _line(system: str, runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return f"| {system} | not run |  |  |  |  |  |  |  |"

    def mean(name: str, digits: int = 2, factor: float = 100.0) -> str:
        values = [factor * r[name] for r in runs if r.get(name) is not None]
        return f"{statistics.fmean(values):.{digits}f}" if values else ""

    accuracy = [100 * r["accuracy"] for r in runs]
    spread = f" ± {statistics.stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
    return (
        f"| {system} | {statistics.fmean(accuracy):.2f}{spread} | {mean('with_centers')} | {mean('with_both')} | "
        f"{mean('answers', 0, 1.0)} | {mean('label_accuracy', 1)} | {mean('processor_seconds', 0, 1.0)} | "
        f"{mean('megabytes', 0, 1.0)} | {len(runs)} |"
    )


TEXT = """\
# Table 3: Individualized PATE, soundly

`python -m experiments table-3`; every run is a line of `table-3.jsonl`. Budgets 1/2/3 at the shares named, delta
1e-5. People are the first 50,000 training images of MNIST (63,257 of SVHN), public are the last 10,000, test images
are the usual ones, in every row. Teachers, students and private training have the same model in a table: linear on
scattering features (teachers by ridge regression), or the paper's CNN (teachers with Adam, 20 epochs, rate 2e-3). There
are 250 teachers, and more with upsampling.

Accounting is exact and does not depend on the data (`docs/theory.md`, "Individualized PATE"): sigma1 150, sigma2 40,
threshold 200, two questions for each answer. *Labels*: those that the teachers gave; *right*: how many of them are.
The student of the first column is trained on these alone, as published. *Asked by centers*: public features choose
which images are asked about. *And labels spread*: over the nearest-neighbor graph of all public images. Both cost
nobody anything.

`pdp-sgd-exact` trains on the people alone; *after public labels* it starts from a model that has learned the public
images' true labels, which PATE never sees: that is the paper's comparison, and more than PATE has. `pdp-sgd-adaptive`
after public labels is the paper's own row, with sound bookkeeping. Settings: batch 2,048, clipping 0.1, rate 4 (a
quarter of that after public labels), 400 steps on features and 600 with the CNNs; none were tuned here. Rows of a seed
share their noise, so they are not independent: where votes are nearly unanimous, two rows may get the very same labels.
Figures are means over seeds, in the first column with ± the standard deviation of a run. *Seconds* are processor
time of one core, features not counted; *MB* is the largest memory of the process up to then. Lines with commit
f7c19e79a56b were made before the code had its place in this history; MNIST's (seeds 0 and 1) were repeated with
ed496ab484d1, to the same digits, SVHN's seed 0 was not.

The published figures rest on data-dependent accounting, which allows more labels for the same budgets but keeps no
promise: what it spends is itself a function of the votes. Where a row is far below its printed cell, compare the
number of labels: a student learns less from fewer.
"""
