"""Table 3: Individualized PATE with sound accounting beside `pdp-sgd-exact`, linear on scattering features.

    python -m experiments table-3 [--dataset mnist] [--seeds 3] [--output docs/results]

People are the first 50,000 training images of MNIST (63,257 of SVHN), public are the last 10,000, test images the usual
ones. PATE sees public images without labels. Each run is one line of table-3.jsonl, and is not done again.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pdpsgd
from experiments.inputs import features_of
from experiments.published import IDP_CASES, INDIVIDUALIZED_PATE, TITLES
from experiments.runner import commit_of_this_code
from pdpsgd.errors import check_one_of
from pdpsgd.models.networks import linear_model
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.pate import (
    answer_queries,
    ask_about,
    assign_people,
    plan_votes,
    spread_labels,
    train_ridge_teachers,
    train_student,
    vote_counts,
)
from pdpsgd.sampling.source import RandomSource

PEOPLE = {"mnist": 50_000, "svhn": 63_257}
VOTES = ("pate", "i-pate-upsample", "i-pate-weight by epsilon", "i-pate-weight by mu")
AFTER = " after public labels"
EXACT = ("pdp-sgd-exact", f"pdp-sgd-exact{AFTER}", f"pdp-sgd-adaptive{AFTER}")
SYSTEMS = (*VOTES, *EXACT)
ROUNDS = 3
"""Of the paper's PDP-SGD, whose thresholds leave little after that where everybody pays (as in table 1)."""
STEPS, BATCH, RATE, CLIP = 400, 2048, 4.0, 0.1
PAGE = "table-3"
Pair = tuple[Tensor, Tensor]


def run_table_3(
    output: Path, *, datasets: Sequence[str] = (), seeds: int = 3, say: Callable[[str], None] = print
) -> list[Path]:
    """Do the runs that the record does not have yet, then write the page; return the files written."""
    path = output / f"{PAGE}.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    done = {(r["dataset"], r["case"], r["system"], r["seed"]) for r in read_runs(path) if "network" not in r}
    for dataset in datasets or PEOPLE:
        check_one_of(tuple(PEOPLE), dataset=dataset)
        for seed in range(seeds):
            for case in IDP_CASES:
                for system in SYSTEMS:
                    if (dataset, case, system, seed) in done:
                        continue
                    run = _run(dataset, case, system, seed)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(run) + "\n")
                    say(f"{dataset} {case} {system} seed {seed}: {100 * run['accuracy']:.2f} %")
    return [path, *write_table_3(output)]


def write_table_3(output: Path) -> list[Path]:
    """Write the page from the record, where there is one."""
    path = output / f"{PAGE}.jsonl"
    if not path.exists():
        return []
    from experiments.table_3_published import published_section

    page = output / f"{PAGE}.md"
    section = "\n".join(published_section(output))
    page.write_text(write_page(read_runs(path)) + ("\n" + section if section else ""), encoding="utf-8")
    return [page]


def _run(dataset: str, case: str, system: str, seed: int) -> dict[str, Any]:
    loaded = features_of(dataset, "scattering")
    inputs, targets, number = loaded.train_inputs, loaded.train_targets, PEOPLE[dataset]
    people, public = (inputs[:number], targets[:number]), (inputs[number:], targets[number:])
    test = loaded.test_inputs, loaded.test_targets
    budgets = pdpsgd.Budgets.from_tiers(dict(IDP_CASES[case]), number, 1e-5, shuffle=seed)
    torch.manual_seed(seed)
    busy = time.process_time()
    if system in EXACT:
        found = _trained(
            system.removesuffix(AFTER),
            people,
            public if system.endswith(AFTER) else None,
            test,
            budgets,
            seed,
        )
    else:
        found = _vote(system, people, public, test, budgets, seed)
    return {
        "dataset": dataset,
        "case": case,
        "system": system,
        "seed": seed,
        **found,
        "processor_seconds": round(time.process_time() - busy, 1),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "commit": commit_of_this_code(),
    }


def _vote(
    system: str, people: Pair, public: Pair, test: Pair, budgets: pdpsgd.Budgets, seed: int
) -> dict[str, Any]:
    mechanism, _, weights = system.partition(" by ")
    planned = plan_votes(budgets, mechanism, weights=weights or "mu")
    planned.plan.verify()
    teachers = assign_people(planned, planned.plan.level_of_person(budgets), seed=seed)
    labels = train_ridge_teachers(teachers, *people, public[0], classes=10)
    counts = vote_counts(teachers, labels, classes=10)
    in_order = answer_queries(counts, planned, source=RandomSource.from_seed(2 * seed))
    order = ask_about(public[0], planned.questions, seed=seed)
    centers = answer_queries(counts, planned, order, source=RandomSource.from_seed(2 * seed + 1))
    spread = spread_labels(public[0], centers.examples, centers.labels, classes=10)
    truth = public[1].numpy()
    supervised = [
        student_accuracy(
            public[0][a.examples], torch.nn.functional.one_hot(torch.from_numpy(a.labels), 10).float(), test
        )
        for a in (in_order, centers)
    ]
    return {
        "accuracy": supervised[0],
        "with_centers": supervised[1],
        "with_both": student_accuracy(public[0], spread, test),
        "answers": len(in_order.labels),
        "questions": in_order.asked,
        "planned_answers": planned.answers,
        "label_accuracy": float((in_order.labels == truth[in_order.examples]).mean()),
        "vote_accuracy": float((counts.argmax(1).numpy() == truth).mean()),
        "proven": [level.proven_epsilon for level in planned.plan.levels],
    }


def student_accuracy(inputs: Tensor, wanted: Tensor, test: Pair) -> float:
    """Train a linear student, and return its accuracy."""
    model = linear_model(inputs[0].numel(), 10)
    start_at_zero(model)
    train_student(model, inputs, wanted)
    return _accuracy(model, test)


def _trained(
    mechanism: str, people: Pair, public: Pair | None, test: Pair, budgets: pdpsgd.Budgets, seed: int
) -> dict[str, Any]:
    model = linear_model(people[0][0].numel(), 10)
    start_at_zero(model)
    if public is not None:
        train_student(
            model,
            public[0],
            torch.nn.functional.one_hot(public[1], 10).float(),
            steps=600,
            batch_size=256,
            learning_rate=1e-3,
        )
    start = _accuracy(model, test)
    rounds = ROUNDS if mechanism == "pdp-sgd-adaptive" else None
    plan = pdpsgd.plan(budgets, mechanism, steps=STEPS, batch_size=BATCH, max_grad_norm=CLIP, rounds=rounds)
    rate = RATE if public is None else RATE / 4
    result = pdpsgd.fit(
        model,
        people,
        budgets,
        plan=plan,
        learning_rate=rate / CLIP,
        test_data=test,
        seed=seed,
        progress=False,
    )
    return {
        "accuracy": result.accuracy,
        "at_start": start if public is not None else None,
        "proven": [level.proven_epsilon for level in plan.levels],
    }


@torch.no_grad()
def _accuracy(model: torch.nn.Module, test: Pair) -> float:
    return float((model(test[0]).argmax(1) == test[1]).float().mean())


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Read the record; none if there is no file."""
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
            for network in (None, "cnn"):
                lines += _table(network, [r for r in found if r.get("network") == network])
    return "\n".join(lines)


COLUMNS = (
    "system",
    "accuracy",
    "at start",
    "asked by centers",
    "and labels spread",
    "labels",
    "right",
    "seconds",
    "MB",
    "seeds",
)


def _table(network: str | None, runs: Sequence[dict[str, Any]]) -> list[str]:
    """One table, all of whose models are linear or the paper's CNN; with CNNs, once all of its rows are run."""
    run = {r["system"] for r in runs}
    if not runs or (network is not None and not run.issuperset(SYSTEMS)):
        return []
    return [
        "Linear on scattering features:" if network is None else "The paper's CNN throughout:",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(_line(system, [r for r in runs if r["system"] == system]) for system in SYSTEMS),
        "",
    ]


def _line(system: str, runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return f"| {system} | not run |  |  |  |  |  |  |  |  |"

    def mean(name: str, digits: int = 2, factor: float = 100.0) -> str:
        values = [factor * r[name] for r in runs if r.get(name) is not None]
        return f"{statistics.fmean(values):.{digits}f}" if values else ""

    accuracy = [100 * r["accuracy"] for r in runs]
    spread = f" ± {statistics.stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
    return (
        f"| {system} | {statistics.fmean(accuracy):.2f}{spread} | {mean('at_start')} | {mean('with_centers')} | "
        f"{mean('with_both')} | {mean('answers', 0, 1.0)} | {mean('label_accuracy', 1)} | "
        f"{mean('processor_seconds', 0, 1.0)} | {mean('megabytes', 0, 1.0)} | {len(runs)} |"
    )


TEXT = """\
# Table 3: Individualized PATE, soundly

`python -m experiments table-3`; every run is a line of `table-3.jsonl`. Budgets 1/2/3 at the shares named, delta
1e-5. People are the first 50,000 training images of MNIST (63,257 of SVHN), public are the last 10,000, test images
are the usual ones, in every row. In the first table of each list all models are linear on scattering features:
teachers (ridge, 250 of them; more with upsampling) and students. In the second (`python -m experiments
table-3-networks`) all are the paper's CNN with tanh: teachers see their people ten times (Adam 4e-3, batches of 20;
settled on four teachers, with the public images' labels in sight), students take 200 steps. Their questions are
chosen, and labels spread, by scattering features all the same, which cost nothing. With CNNs `pdp-sgd-exact` has the
steps, batch and rate of the presets `mnist` and `svhn`, but one view of each image. That table is shown where all of
its rows are run: a set of teachers takes one to five minutes of a core, and a seed of both data sets and lists an hour.

Accounting is exact and does not depend on the data (`docs/theory.md`, "Individualized PATE"): sigma1 150, sigma2 40,
threshold 200, two questions for each answer. *Labels*: those that the teachers gave; *right*: how many of them are.
The student of the first column is trained on these alone, as published. *Asked by centers*: public features choose
which images are asked about. *And labels spread*: over the nearest-neighbor graph of all public images. Both cost
nobody anything.

`pdp-sgd-exact` trains on the people alone; *after public labels* it starts from a model that has learned the public
images' true labels, which PATE never sees: that is the paper's comparison, and more than PATE has.
The column *at start* is that model before any person's record was used. `pdp-sgd-adaptive` is the paper's own
mechanism, kept sound: everybody pays in each of its three rounds. The linear models' settings are steps 400, batch
2,048, clipping 0.1, rate 4 for both data sets (MNIST's scattering preset has 2, SVHN's 4), and a quarter of that
after public labels; none were tuned here. Rows of a seed share their noise, so they are not independent: where votes
are nearly unanimous, two rows may get the very same labels.
Figures are means over seeds, in the first column with ± the standard deviation of a run. *Seconds* are processor
time of one core, features not counted; *MB* is the largest memory of the process up to then. Lines with commit
f7c19e79a56b were made before the code had its place in this history; MNIST's (seeds 0 and 1) were repeated with
ed496ab484d1, to the same digits, SVHN's seed 0 was not.

What came out. `pdp-sgd-exact` is ahead of every sound row of PATE, on features and with the CNN, without public data;
after public labels it is ahead of every printed cell as well. On MNIST that says little of private training: the 10,000
public labels alone do as well, and what comes after them adds a tenth of a point or nothing. On SVHN it adds two
points to features. Soundly, I-PATE has 100 to 170 labels, and its student stays far below the printed cells, on MNIST
less far where labels are spread. On SVHN, CNNs that see 250 images are right less than half of the time, seldom agree,
give 70 to 110 labels, and a CNN that learns from so few is hardly better than a guess.

The published figures rest on data-dependent accounting, which allows more labels for the same budgets but keeps no
promise: what it spends is itself a function of the votes. Where a row is far below its printed cell, compare the
number of labels: a student learns less from fewer.
"""
