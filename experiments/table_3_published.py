"""Table 3's weighted votes by the published accounting: how many labels it gives, and what they really cost.

    python -m experiments table-3-published [--dataset mnist] [--seeds 3] [--output docs/results]

For comparison only, not for release. People, votes and students are those of `experiments.table_3`, with the weights of
I-PATE's public code. Each run is one line of table-3-published.jsonl, and is not done again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

import pdpsgd
from experiments.inputs import features_of
from experiments.published import IDP_CASES, INDIVIDUALIZED_PATE, TITLES
from experiments.runner import commit_of_this_code
from experiments.table_3 import PEOPLE, read_runs, student_accuracy, write_table_3
from pdpsgd.errors import check_one_of
from pdpsgd.pate import assign_people, plan_votes, train_ridge_teachers, vote_counts
from pdpsgd.pate.as_published import CHARGES, PublishedVote, vote_as_published

RECORD = "table-3-published.jsonl"
RIDGES = (1.0, 0.1)
"""Of the teachers: as in table 3, and less, for what the number of labels follows from."""
OTHER_NOISE = (100, 200, 300)
"""Added to the seed of the noise for other votes on the same counts, of which only the number of labels is kept."""


def run_table_3_published(
    output: Path, *, datasets: Sequence[str] = (), seeds: int = 3, say: Callable[[str], None] = print
) -> list[Path]:
    """Do the runs that the record does not have yet, then write table 3's page; return the files written."""
    path = output / RECORD
    output.mkdir(parents=True, exist_ok=True)
    done = {(r["dataset"], r["case"], r["seed"], _ridge(r)) for r in read_runs(path)}
    for dataset in datasets or PEOPLE:
        check_one_of(tuple(PEOPLE), dataset=dataset)
        for seed, case, ridge in product(range(seeds), IDP_CASES, RIDGES):
            if (dataset, case, seed, ridge) in done:
                continue
            run = _run(dataset, case, seed, ridge)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            say(
                f"{dataset} {case} seed {seed} ridge {ridge:g}: {run['by-rank']['labels']}, {run['own']['labels']}"
            )
    return [path, *write_table_3(output)]


def _ridge(run: dict[str, Any]) -> float:
    return float(run.get("ridge", RIDGES[0]))  # the first runs do not name it


def _run(dataset: str, case: str, seed: int, ridge: float) -> dict[str, Any]:
    loaded, number = features_of(dataset, "scattering"), PEOPLE[dataset]
    inputs, targets = loaded.train_inputs, loaded.train_targets
    test = loaded.test_inputs, loaded.test_targets
    budgets = pdpsgd.Budgets.from_tiers(dict(IDP_CASES[case]), number, 1e-5, shuffle=seed)
    torch.manual_seed(seed)
    busy = time.process_time()
    planned = plan_votes(budgets, "i-pate-weight", weights="epsilon-times-share")
    teachers = assign_people(planned, planned.plan.level_of_person(budgets), seed=seed)
    labels = train_ridge_teachers(
        teachers, inputs[:number], targets[:number], inputs[number:], classes=10, ridge=ridge
    )
    counts = vote_counts(teachers, labels, classes=10)
    epsilons = [level.epsilon for level in planned.plan.levels]
    found: dict[str, Any] = {}
    for charge in CHARGES:
        vote, *others = (
            vote_as_published(counts, planned.weights, epsilons, charge=charge, seed=seed + other)
            for other in (0, *OTHER_NOISE)
        )
        given = torch.nn.functional.one_hot(torch.from_numpy(vote.labels), 10).float()
        accuracy = student_accuracy(inputs[number:][vote.examples], given, test)
        found[charge] = {
            **_figures(vote, targets[number:].numpy(), accuracy),
            "labels_by_other_noise": [len(other.labels) for other in others],
        }
    return {
        "dataset": dataset,
        "case": case,
        "seed": seed,
        "ridge": ridge,
        "weights": [round(weight, 4) for weight in planned.weights],
        "sound_answers": planned.answers,
        **found,
        "processor_seconds": round(time.process_time() - busy, 1),
        "commit": commit_of_this_code(),
    }


def _figures(vote: PublishedVote, truth: Any, accuracy: float) -> dict[str, Any]:
    return {
        "labels": len(vote.labels),
        "questions": vote.asked,
        "label_accuracy": float((vote.labels == truth[vote.examples]).mean()),
        "accuracy": accuracy,
        **{name: [round(x, 4) for x in getattr(vote, name).tolist()] for name in ("charged", "own", "exact")},
    }


def published_section(output: Path) -> list[str]:
    """Return what table 3's page says of the published accounting, from the record; nothing if there is none."""
    runs = read_runs(output / RECORD)
    if not runs:
        return []
    lines = [TEXT]
    said: list[str] = []
    for dataset, case in product(PEOPLE, IDP_CASES):
        by_ridge = [
            [r for r in runs if (r["dataset"], r["case"], _ridge(r)) == (dataset, case, ridge)]
            for ridge in RIDGES
        ]
        lines += [_line(dataset, case, charge, by_ridge[0]) for charge in CHARGES if by_ridge[0]]
        if all(by_ridge):
            said.append(_other_teachers(dataset, case, *by_ridge))
    if said:
        lines += ["", WHY_OTHER_COUNTS.format(usual=RIDGES[0], less=RIDGES[1], said="\n".join(said))]
    return [*lines, ""]


def _other_teachers(
    dataset: str, case: str, usual: Sequence[dict[str, Any]], less: Sequence[dict[str, Any]]
) -> str:
    """Say how the number of labels changes with the teachers' regularization, and with nothing but the noise."""

    def mean(runs: Sequence[dict[str, Any]], charge: str, name: str = "labels") -> float:
        return statistics.fmean(r[charge][name] for r in runs)

    every = [[r["by-rank"]["labels"], *r["by-rank"]["labels_by_other_noise"]] for r in less]
    low, high = min(map(min, every)), max(map(max, every))
    counts = [f"{mean(runs, charge):,.0f}" for runs in (less, usual) for charge in CHARGES]
    right = [f"{100 * mean(runs, 'by-rank', 'label_accuracy'):.1f}" for runs in (less, usual)]
    return (
        f"- {TITLES[dataset]}, {case} %: {counts[0]} labels by rank and {counts[1]} each its own, in place "
        f"of {counts[2]} and {counts[3]}; right {right[0]} % in place of {right[1]}. By rank {low:,} to {high:,}, by "
        "seed and noise."
    )


def _line(dataset: str, case: str, charge: str, runs: Sequence[dict[str, Any]]) -> str:
    def mean(name: str) -> float:
        return statistics.fmean(r[charge][name] for r in runs)

    def levels(name: str) -> str:
        columns = zip(*(r[charge][name] for r in runs), strict=True)
        budgets = (epsilon for epsilon, _ in IDP_CASES[case])
        spent = ((statistics.fmean(column), budget) for column, budget in zip(columns, budgets, strict=True))
        return " / ".join(f"**{x:.2f}**" if x > budget else f"{x:.2f}" for x, budget in spent)

    order = "by rank, as the public code" if charge == "by-rank" else "each its own"
    soundly = statistics.fmean(r["sound_answers"] for r in runs)
    return (
        f"| {TITLES[dataset]}, {case} % | {order} | {mean('labels'):.0f} | {soundly:.0f} | {levels('own')} "
        f"| {levels('exact')} | {100 * mean('label_accuracy'):.1f} | {100 * mean('accuracy'):.2f} "
        f"| {INDIVIDUALIZED_PATE[dataset, case][1]:.2f} | {len(runs)} |"
    )


TEXT = """\
## By the published accounting: not for release

`python -m experiments table-3-published`; every run is a line of `table-3-published.jsonl`. The published accounting
of PATE (Papernot et al. 2018, Theorem 6, Renyi orders 2 to 50, rho + ln(1/delta)/(alpha - 1)) charges an answer by the
votes for it, and a vote ends when a level's charge would pass its budget. So costs and number of labels follow from
people's records, and nobody is charged for telling. The rule is written anew here
(`pdpsgd.pate.as_published`), and runs on the votes of 250 linear teachers as in the first tables, weighted as I-PATE's
public code weights them: budget times share of people. On those weights the code sorts weights and budgets apart
and pairs them by rank. Where a level's weight is larger than a more generous level's, they are charged for each
other: level 2 for level 3's weight at 34/43/23, levels 1 and 2 for smaller ones at 54/37/9.

*Spent*: what the labels cost levels 1, 2, 3 by the same accounting when each is charged for its own weight, bold where
that is above the budget: **the published order of groups breaks the promise**. *Exact*: what so many questions and
answers cost whatever the votes are, which is what the first tables keep to; *soundly* is how many answers that allows
with these weights. *Student*: linear, trained on the labels alone. *Printed* is the paper's cell for weighting, made
with other networks; whether its groups were charged so is not known.

| | charged | labels | soundly | spent by 1 / 2 / 3 | exact, 1 / 2 / 3 | right | student | printed | seeds |
|---|---|---|---|---|---|---|---|---|---|"""

WHY_OTHER_COUNTS = """\
How many labels there are follows from the votes and from luck, and is no property of the budgets. Teachers that are
regularized less (ridge {less:g} in place of {usual:g}) agree more often: an answer is charged less, and more questions
pass the check.

{said}

A prototype's counts, 1,003 and 643 at 34/43/23, 1,390 and 379 at 54/37/9, are of such votes; its weights were by whole
numbers of teachers (0.53, 1.33, 1.08; 0.92, 1.25, 0.45) in place of shares. The rule of charging is the same: on our
votes, weighted so, levels spend what the prototype's did."""
