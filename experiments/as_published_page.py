"""The page on table 1 as the paper set it up: its cells beside ours, why they differ, and what is provable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.cells import Cell, cell
from experiments.pages import HOW_TO_READ, Page, by_skew
from experiments.published import DATASETS, TABLE_1, TITLES
from experiments.reasons import reasons
from experiments.record import Record
from experiments.settings import PAPERS_RECIPE, Setting
from experiments.studies import as_published_settings


def table_1_as_published(search: Record, record: Record) -> Page:
    """Return the page with the paper's own set-up: its cells beside ours, and what is really proven for it."""
    lines = [
        "# Table 1, as the paper set it up",
        "",
        "Learning rate 0.05, batch 64, noise multiplier 1.3, clipping 1.0, at most 10 rounds, RDP, delta 1e-5 a round. "
        "**Not sound where there are several rounds:** only people drawn into a round are charged. What is provable "
        "for these runs stands at the end; where there was one round only, it is what is claimed. Rounds end where the "
        "next threshold, at what is left, does not pay for one step at noise 1.3 (by RDP about 0.4); how many each "
        "system has had stands below its accuracies. (The paper's AdaPDP trained 1.92 models on average, by the number "
        "of parameters in its table 2.)",
        "",
        HOW_TO_READ.format(what="table-1-as-published"),
    ]
    cells: list[Cell] = []
    for dataset in DATASETS:
        settings = as_published_settings(dataset, search)
        known = [cell(s, record, TABLE_1.get((dataset, s.population.k, s.system))) for s in settings]
        cells += known
        systems = tuple(dict.fromkeys(s.system for s in settings))
        lines += ["", f"## {TITLES[dataset]}", "", *by_skew(dataset, systems, known)]
        lines += _rounds_taken(dataset, record)
    lines += reasons(cells, search, record)
    lines += ["", *_claims(record)]
    return Page("table-1-as-published", "\n".join(lines) + "\n", tuple(cells))


def _rounds_taken(dataset: str, record: Record) -> list[str]:
    """Return how many rounds the paper's systems have had."""
    taken: dict[str, set[int]] = {}
    for run in record:
        setting = run["setting"]
        if setting["dataset"] == dataset and _is_as_printed(setting):
            taken.setdefault(setting["system"], set()).add(len(run["rounds"]))
    parts = [f"{system} {' or '.join(map(str, sorted(counts)))}" for system, counts in taken.items()]
    return ["", f"Rounds: {', '.join(parts)}."] if parts else []


def _is_as_printed(setting: dict[str, Any]) -> bool:
    """Return whether these are the paper's bookkeeping and recipe."""
    return bool(
        setting["bookkeeping"] == "as-published"
        and setting == replace(Setting.from_dict(setting), recipe=PAPERS_RECIPE).to_dict()
    )


def _claims(record: Record) -> list[str]:
    """Return what the paper would claim for as-published runs, and what is provable."""
    seeds: dict[tuple[Any, ...], list[int]] = {}
    for run in record:
        setting = run["setting"]
        if setting["dataset"] not in DATASETS or not _is_as_printed(setting):
            continue
        of = (DATASETS.index(setting["dataset"]), setting["population"]["k"], setting["system"])
        for level in (run["levels"][0], run["levels"][-1]):
            figures = (level["claimed_epsilon"], level["provable_epsilon"], level["provable_delta"])
            seeds.setdefault((*of, level["epsilon"], *figures), []).append(run["seed"])
    if not seeds:
        return []
    return [
        "## Claimed and provable",
        "",
        "The largest over people of the smallest and of the largest budget. Provable holds at the larger delta shown.",
        "",
        "| data set | k | system | budget | claimed | provable | at delta | seeds |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {TITLES[DATASETS[dataset]]} | {k:g} | {system} | {budget:g} | {claimed:.3f} | {provable:.3f} | "
            f"{delta:.0e} | {', '.join(map(str, sorted(found)))} |"
            for (dataset, k, system, budget, claimed, provable, delta), found in sorted(seeds.items())
        ),
    ]
