"""The experiments on why accuracies as published are not the printed ones."""

from __future__ import annotations

from dataclasses import replace

from pdpsgd.experiments.cells import Cell, cell, printed_text
from pdpsgd.experiments.published import DATASETS, TABLE_1, TITLES, best_of_paper
from pdpsgd.experiments.record import Record
from pdpsgd.experiments.studies import input_settings, noise_settings, step_settings


def reasons(search: Record, record: Record) -> list[str]:
    """Lines of the page, as far as there are runs."""
    return [*_by_steps(search, record), *_by_noise(search, record), *_by_inputs(search, record)]


def _by_steps(search: Record, record: Record) -> list[str]:
    steps = [entry for s in step_settings("mnist", search) if (entry := cell(s, record)).seeds]
    if not steps:
        return []
    return [
        "",
        "## Why these are not the printed figures: steps",
        "",
        "At noise 1.3 a budget buys tens of thousands of steps, and at a learning rate that stays at 0.05 their "
        "noise adds up in the weights: more budget, more steps, and no more accuracy. The same budget in fewer "
        "steps, with the smallest noise that RDP allows for them (`pdp-sgd-adaptive`, MNIST, k = 0, one round that "
        "costs what it costs above):",
        "",
        "| steps | noise multiplier | accuracy |",
        "|---|---|---|",
        *(f"| {entry.iterations:,} | {_noise(entry, record):.3f} | {entry.text()} |" for entry in steps),
    ]


def _by_noise(search: Record, record: Record) -> list[str]:
    found = {
        dataset: [entry for s in noise_settings(dataset, search) if (entry := cell(s, record)).seeds]
        for dataset in DATASETS
    }
    if not any(found.values()):
        return []
    lines = [
        "",
        "## Which noise the printed figures would take",
        "",
        "As many steps as the paper reports for PDP-SGD, all people, its learning rate, batch and clipping, at less "
        "and less noise; and the epsilon, by RDP, that everybody would have to allow for it:",
        "",
        "| data set | noise multiplier | steps | epsilon by RDP | accuracy |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {TITLES[dataset]} | {_noise(entry, record):.1f} | {entry.iterations:,} | {_allowed(entry):.2f} | "
        f"{entry.text()} |"
        for dataset, entries in found.items()
        for entry in entries
    ]
    reached = [
        text for dataset, entries in found.items() for text in _where_reached(dataset, entries, record)
    ]
    if reached:
        lines += [
            "",
            f"{' '.join(reached)} People allow 0.5 to 1. No reading of the paper's algorithm and accounting that we "
            "found gives its PDP-SGD so little noise over so many steps.",
        ]
    return lines


def _where_reached(dataset: str, entries: list[Cell], record: Record) -> list[str]:
    printed = best_of_paper(dataset)
    enough = [entry for entry in entries if entry.mean is not None and entry.mean >= printed.mean]
    if not entries:
        return []
    if not enough:
        return [
            f"The paper's best cell for {TITLES[dataset]}, {printed_text(printed)}, is reached at none of these."
        ]
    most = max(enough, key=lambda entry: _noise(entry, record))
    return [
        f"The paper's best cell for {TITLES[dataset]}, {printed_text(printed)}, is reached from a noise multiplier of "
        f"{_noise(most, record):.1f} down, where everybody has to allow {_allowed(most):.2f}."
    ]


def _by_inputs(search: Record, record: Record) -> list[str]:
    rows = []
    for dataset in DATASETS:
        for setting in input_settings(dataset, search):
            normalised = replace(setting, recipe=replace(setting.recipe, features="pixels"))
            here, there = cell(normalised, record), cell(setting, record)
            if here.mean is None or there.mean is None:
                continue
            k = setting.population.k
            printed = TABLE_1[dataset, k, setting.system]
            rows.append(
                f"| {TITLES[dataset]} | {setting.system} | {k:g} | {here.text()} | {there.text()} | "
                f"{there.mean - here.mean:+.2f} | {printed_text(printed)} | {printed.mean - here.mean:+.2f} |"
            )
    if not rows:
        return []
    return [
        "",
        "## What the inputs do",
        "",
        "The paper does not say how pixels were scaled. Above they are normalised by the data set's customary "
        "constants; here also from 0 to 1, as they are in the files, all else the same:",
        "",
        "| data set | system | k | normalised | from 0 to 1 | moved by | paper | from ours, normalised |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _noise(entry: Cell, record: Record) -> float:
    found: float = record.of(entry.setting)[0]["rounds"][0]["noise_multiplier"]
    return found


def _allowed(entry: Cell) -> float:
    return entry.setting.population.tiers[0][0]
