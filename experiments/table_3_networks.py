"""Table 3 with the paper's CNNs: as teachers, as students, and trained with `pdp-sgd-exact`.

    python -m experiments table-3-networks [--dataset mnist] [--seeds 1] [--output docs/results]

People, public and test images are those of `experiments.table_3`, and so is the record: lines with a `network`. Rows
that can share teachers do: plain PATE's are the same for both lists, and weights change votes, not teachers. Teachers
label only what is asked about.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pdpsgd
from experiments.inputs import features_of
from experiments.published import IDP_CASES
from experiments.runner import commit_of_this_code
from experiments.table_3 import AFTER, EXACT, PAGE, PEOPLE, ROUNDS, read_runs, write_table_3
from pdpsgd.errors import check_one_of
from pdpsgd.models.networks import by_name
from pdpsgd.pate import (
    NetworkTraining,
    VotePlan,
    answer_queries,
    ask_about,
    assign_people,
    plan_votes,
    spread_labels,
    train_network_teachers,
    train_student,
    vote_counts,
)
from pdpsgd.pate.votes import Answers
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training.presets import Preset, preset

NETWORK = "cnn"
TEACHERS = NetworkTraining(epochs=10, batch_size=20, learning_rate=4e-3)
STUDENT_STEPS = 200
WEIGHTED = ("i-pate-weight by epsilon", "i-pate-weight by mu")
Row = tuple[str, str]
"""A case and a system."""


@dataclass(frozen=True)
class Images:
    """A data set in three parts, and the public part's scattering features, by which images are near to each other."""

    people: tuple[Tensor, Tensor]
    public: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    near: Tensor


def run_table_3_networks(
    output: Path, *, datasets: Sequence[str] = (), seeds: int = 1, say: Callable[[str], None] = print
) -> list[Path]:
    """Do the runs that the record does not have yet, then write the page; return the files written."""
    path = output / f"{PAGE}.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    done = {
        (r["dataset"], r["case"], r["system"], r["seed"])
        for r in read_runs(path)
        if r.get("network") == NETWORK
    }
    for dataset in datasets or PEOPLE:
        check_one_of(tuple(PEOPLE), dataset=dataset)
        for seed in range(seeds):
            for rows in _groups():
                missing = [row for row in rows if (dataset, *row, seed) not in done]
                for run in _runs(dataset, missing, seed) if missing else ():
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(run) + "\n")
                    say(f"{dataset} {run['case']} {run['system']} seed {seed}: {100 * run['accuracy']:.2f} %")
    return [path, *write_table_3(output)]


def _groups() -> list[list[Row]]:
    """Rows that share their teachers, or the lack of them; those of one list first."""
    first, second = IDP_CASES
    trained = [[(case, system) for system in EXACT] for case in IDP_CASES]
    weighted = [[(case, system) for system in WEIGHTED] for case in IDP_CASES]
    upsampled = [[(case, "i-pate-upsample")] for case in IDP_CASES]
    plain = [(first, "pate"), (second, "pate")]
    return [trained[0], weighted[0], plain, upsampled[0], trained[1], weighted[1], upsampled[1]]


def _runs(dataset: str, rows: Sequence[Row], seed: int) -> Iterator[dict[str, Any]]:
    images = images_of(dataset)
    system = rows[0][1]
    made = _trained(dataset, images, rows, seed) if system in EXACT else _voted(dataset, images, rows, seed)
    for (case, name), found in made:
        yield {
            "dataset": dataset,
            "case": case,
            "system": name,
            "seed": seed,
            "network": NETWORK,
            **found,
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "commit": commit_of_this_code(),
        }


def _voted(
    dataset: str, images: Images, rows: Sequence[Row], seed: int
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Train one set of teachers, and let it vote for each row."""
    number = len(images.people[0])
    votes = {}
    for case, system in rows:
        mechanism, _, weights = system.partition(" by ")
        budgets = _budgets(case, number, seed)
        planned = plan_votes(budgets, mechanism, weights=weights or "mu")
        planned.plan.verify()
        votes[case, system] = planned, planned.plan.level_of_person(budgets)
    orders = {
        row: ask_about(images.near, planned.questions, seed=seed) for row, (planned, _) in votes.items()
    }
    asked = np.unique(
        np.concatenate([np.arange(max(len(order) for order in orders.values())), *orders.values()])
    )
    torch.manual_seed(seed)
    planned, levels = votes[rows[0]]
    busy = time.process_time()
    teachers = assign_people(planned, levels, seed=seed)
    labels = train_network_teachers(
        lambda: network_of(dataset), teachers, *images.people, images.public[0][asked], settings=TEACHERS
    )
    training = time.process_time() - busy
    for row, (planned, levels) in votes.items():
        torch.manual_seed(seed)
        busy = time.process_time()
        counts = torch.zeros(len(images.public[0]), 10, dtype=torch.float64)
        counts[asked] = vote_counts(assign_people(planned, levels, seed=seed), labels, classes=10)
        in_order = answer_queries(counts, planned, source=RandomSource.from_seed(2 * seed))
        centers = answer_queries(counts, planned, orders[row], source=RandomSource.from_seed(2 * seed + 1))
        found = _students(dataset, images, planned, in_order, centers)
        truth = images.public[1].numpy()
        alone = float((labels == truth[asked]).mean())
        measured = {
            "teacher_accuracy": alone,
            "vote_accuracy": float((counts[asked].argmax(1).numpy() == truth[asked]).mean()),
            "teachers": len(teachers),
            "processor_seconds": round(training + time.process_time() - busy, 1),
        }
        yield row, {**found, **measured}


def _students(
    dataset: str, images: Images, planned: VotePlan, in_order: Answers, centers: Answers
) -> dict[str, Any]:
    truth = images.public[1].numpy()
    spread = spread_labels(images.near, centers.examples, centers.labels, classes=10)

    def student(shown: Tensor, wanted: Tensor) -> float:
        model = network_of(dataset)
        train_student(model, shown, wanted, steps=STUDENT_STEPS)
        return accuracy_of(model, images.test)

    alone = [
        student(
            images.public[0][found.examples],
            nn.functional.one_hot(torch.from_numpy(found.labels), 10).float(),
        )
        for found in (in_order, centers)
    ]
    return {
        "accuracy": alone[0],
        "with_centers": alone[1],
        "with_both": student(images.public[0], spread),
        "answers": len(in_order.labels),
        "questions": in_order.asked,
        "planned_answers": planned.answers,
        "label_accuracy": float((in_order.labels == truth[in_order.examples]).mean()),
        "proven": [level.proven_epsilon for level in planned.plan.levels],
    }


def _trained(
    dataset: str, images: Images, rows: Sequence[Row], seed: int
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Train by a plan, with and without the public images' true labels before."""
    recipe = recipe_of(dataset)
    for case, system in rows:
        budgets = _budgets(case, len(images.people[0]), seed)
        torch.manual_seed(seed)
        busy = time.process_time()
        mechanism, public = system.removesuffix(AFTER), system.endswith(AFTER)
        model = network_of(dataset)
        if public:
            wanted = nn.functional.one_hot(images.public[1], 10).float()
            train_student(model, images.public[0], wanted, steps=600, batch_size=256, learning_rate=1e-3)
        start = accuracy_of(model, images.test)
        plan = pdpsgd.plan(
            budgets,
            mechanism,
            steps=recipe.steps,
            batch_size=recipe.batch_size,
            max_grad_norm=recipe.max_grad_norm,
            rounds=ROUNDS if mechanism == "pdp-sgd-adaptive" else None,
        )
        result = pdpsgd.fit(
            model,
            images.people,
            budgets,
            plan=plan,
            learning_rate=recipe.learning_rate / (4 if public else 1),
            test_data=images.test,
            seed=seed,
            progress=False,
        )
        found = {
            "accuracy": result.accuracy,
            "at_start": start if public else None,
            "proven": [level.proven_epsilon for level in plan.levels],
            "processor_seconds": round(time.process_time() - busy, 1),
        }
        yield (case, system), found


def recipe_of(dataset: str) -> Preset:
    """The data set's preset, whose images are moved about in no row here."""
    return preset(dataset)


def network_of(dataset: str) -> nn.Module:
    """Make the paper's network for the data set, with tanh as in its preset."""
    made = recipe_of(dataset)
    shape = (1, 28, 28) if dataset == "mnist" else (3, 32, 32)
    return by_name(made.model, input_shape=shape, classes=10, activation=made.activation)


@cache
def images_of(dataset: str) -> Images:
    """Load the parts, pixels as the preset has them."""
    number = PEOPLE[dataset]
    near = features_of(dataset, "scattering").train_inputs[number:].clone()
    loaded = features_of(dataset, recipe_of(dataset).features)
    inputs, targets = loaded.train_inputs, loaded.train_targets
    return Images(
        (inputs[:number], targets[:number]),
        (inputs[number:], targets[number:]),
        (loaded.test_inputs, loaded.test_targets),
        near,
    )


def _budgets(case: str, number: int, seed: int) -> pdpsgd.Budgets:
    return pdpsgd.Budgets.from_tiers(dict(IDP_CASES[case]), number, 1e-5, shuffle=seed)


@torch.no_grad()
def accuracy_of(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The share of test images that the model gets right."""
    model.eval()
    right = sum(
        int((model(inputs).argmax(1) == targets).sum())
        for inputs, targets in zip(torch.split(test[0], 1000), torch.split(test[1], 1000), strict=True)
    )
    model.train()
    return right / len(test[1])
