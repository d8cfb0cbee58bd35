"""The experiments on why accuracies as published are not the printed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.cells import Cell, cell, printed_text
from experiments.published import DATASETS, TABLE_1, TITLES, Printed, best_of_paper
from experiments.record import Record
from experiments.studies import (
    INPUTS_AS_PUBLISHED,
    as_published_settings,
    by_pld,
    experiments_on,
    input_settings,
    noise_settings,
    round_settings,
    step_settings,
    with_falling_rate,
    with_inputs,
    with_noise_for_the_sum,
)


def reasons(cells: Sequence[Cell], search: Record, record: Record) -> list[str]:
    """Return lines of the page, as far as there are runs; `cells` are those of table 1 as published."""
    return [
        *_differences(cells, record),
        *_by_inputs(search, record),
        *_by_steps(search, record),
        *_by_rates(search, record),
        *_by_rounds(search, record),
        *_by_accountants(search, record),
        *_by_noise(search, record),
    ]


def _differences(cells: Sequence[Cell], record: Record) -> list[str]:
    rows, unexplained, compared = [], [], 0
    for entry in cells:
        setting = entry.setting
        # Uniform DP-SGD is the same at all skews, in print too: it counts once.
        printed = TABLE_1[setting.dataset, setting.population.k, setting.system]
        if entry.mean is None:
            continue
        compared += 1
        apart, deviation = entry.mean - printed.mean, _deviation(entry, printed)
        if abs(apart) > 2 * deviation:
            which = f"| {TITLES[setting.dataset]} | {setting.population.k:g} | {setting.system} |"
            tried = {
                what: found for what, s in experiments_on(setting).items() if (found := cell(s, record)).seeds
            }
            reason = _reason(tried, printed)
            shown = f"{entry.text()} | {printed_text(printed)} | {apart:+.2f}"
            rows.append(f"{which} {shown} | {reason or 'not explained'} |")
            if reason is None:
                unexplained += [
                    f"{which} {what} | {found.text()} | {(found.mean or 0.0) - printed.mean:+.2f} |"
                    for what, found in tried.items()
                ]
    if not rows:
        return []
    return [
        "",
        "## Where ours and the printed figures differ",
        "",
        f"By more than two standard deviations (those of ours and of the print together): {len(rows)} of {compared} "
        "cells, uniform DP-SGD counted once. The last column has the simplest of the experiments below, done on that "
        "very cell, by which it comes within two deviations of the print, and what it gives; in this order: pixels "
        "from 0 to 1, pixels from -1 to 1, a learning rate that falls, noise searched for the sum of thresholds, that "
        "with one of the others or by a tighter accountant, and batches that are drawn from everybody, by weight. "
        "That something gives the printed figure does not say that it is what the authors did: where many things are "
        "tried, one of them may by chance, and several of these spend more than people allow (below). With two or "
        "three seeds deviations are uncertain, so that where ours is wide it is easy to be within two of them.",
        "",
        "| data set | k | system | ours | paper | difference | reason |",
        "|---|---|---|---|---|---|---|",
        *rows,
        *_what_was_tried(unexplained),
    ]


def _what_was_tried(rows: list[str]) -> list[str]:
    if not rows:
        return []
    return [
        "",
        "Tried on those that no reading explains:",
        "",
        "| data set | k | system | experiment | accuracy | from the print |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _deviation(entry: Cell, printed: Printed) -> float:
    return math.hypot(entry.deviation or 0.0, printed.deviation or 0.0)


def _reason(tried: dict[str, Cell], printed: Printed) -> str | None:
    """Return the simplest experiment that brings a cell within two deviations of the print, or None."""
    for what, found in tried.items():
        if abs((found.mean or 0.0) - printed.mean) <= 2 * _deviation(found, printed):
            return f"{what}: {found.text()}"
    return None


def _by_inputs(search: Record, record: Record) -> list[str]:
    rows = []
    for dataset in DATASETS:
        for setting in input_settings(dataset, search, INPUTS_AS_PUBLISHED[:1]):
            kinds = ("pixels", *INPUTS_AS_PUBLISHED)
            found = [cell(with_inputs(setting, kind), record) for kind in kinds]
            if any(entry.seeds for entry in found[1:]):
                k = setting.population.k
                shown = " | ".join(entry.text() for entry in found)
                printed = printed_text(TABLE_1[dataset, k, setting.system])
                rows.append(f"| {TITLES[dataset]} | {k:g} | {setting.system} | {shown} | {printed} |")
    if not rows:
        return []
    return [
        "",
        "## What the inputs do",
        "",
        "The paper does not say how pixels were scaled. Above they are normalized by the data set's customary "
        "constants; here also from 0 to 1, as they are in the files, and from -1 to 1, all else the same:",
        "",
        "| data set | k | system | normalized | from 0 to 1 | from -1 to 1 | paper |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def _by_steps(search: Record, record: Record) -> list[str]:
    steps = [entry for s in step_settings("mnist", search) if (entry := cell(s, record)).seeds]
    if not steps:
        return []
    return [
        "",
        "## What fewer steps do",
        "",
        "At noise 1.3 a budget buys tens of thousands of steps, and at a learning rate that stays at 0.05 their "
        "noise adds up in the weights: more budget, more steps, and no more accuracy. The same budget in fewer "
        "steps, with the smallest noise that RDP allows for them (`pdp-sgd-adaptive`, MNIST, k = 0, one round that "
        "costs what it costs above):",
        "",
        "| steps | noise multiplier | accuracy |",
        "|---|---|---|",
        *(f"| {entry.iterations:,} | {_noise(entry, record):.3f} | {entry.text()} |" for entry in steps),
        "",
        _best_of(steps, TABLE_1["mnist", 0.0, "pdp-sgd-adaptive"]),
    ]


def _best_of(steps: Sequence[Cell], printed: Printed) -> str:
    apart = max(entry.mean or 0.0 for entry in steps) - printed.mean
    way = "below" if apart < 0 else "above"
    return f"The best of these is {abs(apart):.1f} points {way} the printed {printed_text(printed)}."


def _by_rates(search: Record, record: Record) -> list[str]:
    rows = []
    for dataset in DATASETS:
        for setting in as_published_settings(dataset, search):
            falling = cell(with_falling_rate(setting), record)
            searched = cell(with_falling_rate(with_noise_for_the_sum(setting)), record)
            if not (falling.seeds or searched.seeds):
                continue
            k, shown = setting.population.k, (cell(setting, record), falling, searched)
            rows.append(
                f"| {TITLES[dataset]} | {k:g} | {setting.system} | {' | '.join(entry.text() for entry in shown)} | "
                f"{printed_text(TABLE_1[dataset, k, setting.system])} |"
            )
    if not rows:
        return []
    return [
        "",
        "## What a learning rate that falls does",
        "",
        "The text names one learning rate, 0.05; Algorithm 1 has mu_R, one for each round. Here it falls from 0.05 to "
        "nothing along half a cosine, and nothing else is changed: no budget is spent beyond what is spent above. In "
        "the column after that, noise is searched for the sum of thresholds too (below), which spends far more than "
        "anybody allows.",
        "",
        "| data set | k | system | rate stays | rate falls | rate falls, noise for the sum | paper |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "At a rate that stays, the noise of tens of thousands of steps adds up in the weights, and a rate that falls "
        f"takes it out again.{_what_sampling_would_have(search, record)}",
    ]


def _what_sampling_would_have(search: Record, record: Record) -> str:
    for setting in as_published_settings("mnist", search):
        falling = cell(with_falling_rate(setting), record)
        if setting.system == "sampling" and falling.seeds:
            printed = TABLE_1["mnist", setting.population.k, "sampling"]
            return (
                f" Sampling, too, has {falling.text()} by it on MNIST at k = {setting.population.k:g}, where "
                f"{printed_text(printed)} is printed: if that is how the paper's PDP-SGD was trained, its baselines "
                "were not."
            )
    return ""


def _by_rounds(search: Record, record: Record) -> list[str]:
    rows, nearest = [], []
    for dataset in DATASETS:
        found: list[tuple[float, str]] = []
        for setting in round_settings(dataset, search):
            entry = cell(setting, record)
            if not entry.seeds:
                continue
            run = min(record.of(setting), key=lambda run: int(run["seed"]))
            noises = [f"{r['noise_multiplier']:.3g}" for r in run["rounds"]]
            worst = max(run["levels"], key=lambda level: float(level["provable_epsilon"]))
            provable = f"{worst['provable_epsilon']:.3g} at {worst['provable_delta']:.0e}"
            reading = setting.reading or "steps"
            if setting.recipe.features == "unit-pixels":
                reading += ", pixels from 0 to 1"
            loss = ", loss as printed" if setting.loss else ""
            printed = TABLE_1[dataset, 0.0, setting.system]
            apart, deviation = (entry.mean or 0.0) - printed.mean, _deviation(entry, printed)
            far = abs(apart) / (deviation or math.inf)
            found.append((far, f"{TITLES[dataset]} {reading} ({apart:+.2f}, {far:.1f} deviations)"))
            rows.append(
                f"| {TITLES[dataset]} | {setting.system}{loss} | {reading} | {', '.join(noises)} | {provable} | "
                f"{entry.text()} | {printed_text(printed)} |"
            )
        nearest += [text for _, text in sorted(found)[:1]]
    if not rows:
        return []
    return [
        "",
        "## Noise searched round by round",
        "",
        "Above, noise is 1.3 in all rounds, the paper's initial one, and a round is as long as its threshold pays "
        "for. Algorithm 1 searches the noise for each round instead. Here are ten rounds of it, with as many steps "
        "in all as the paper reports, by several readings. *Steps*: all rounds have as many steps, and each the "
        "smallest noise at which it costs its threshold by itself. *Epochs*: rounds have as many passes over those "
        "who were drawn. *Sum*: the paper's appendix extends the search by the history of earlier rounds, and does "
        "not say for which total; here for the sum of the thresholds so far, as if everybody were drawn at 64 / "
        "people. That is not what the drawn spend: a round of few people draws each of them often, and somebody who "
        "is in one round only pays for more than its threshold. What is provable for somebody, whatever they asked "
        "for, is in the table (of the first seed).",
        "",
        "| data set | system | reading | noise, round by round | provable epsilon, delta | accuracy | paper |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Where each round pays for itself, little is left after the first, so the others are mostly noise. Nearest to "
        f"the print: {'; '.join(nearest)}. What is provable by a search for the sum is far above what anybody allows. "
        "Where also the nearest is more than two deviations away, none of these readings by itself explains it.",
    ]


def _by_accountants(search: Record, record: Record) -> list[str]:
    rows = []
    for dataset in DATASETS:
        for setting in as_published_settings(dataset, search):
            searched = with_noise_for_the_sum(setting)
            both = [by_pld(searched), by_pld(with_falling_rate(searched))]
            found = [cell(s, record) for s in (searched, with_falling_rate(searched), *both)]
            if not (found[2].seeds or found[3].seeds):
                continue
            run = min((run for s in both for run in record.of(s)), key=lambda run: int(run["seed"]))
            noise = ", ".join(f"{r['noise_multiplier']:.3g}" for r in run["rounds"])
            worst = max(run["levels"], key=lambda level: float(level["provable_epsilon"]))
            rows.append(
                f"| {TITLES[dataset]} | {setting.population.k:g} | {setting.system} | {noise} | "
                f"{run['iterations']:,} | {worst['provable_epsilon']:.3g} at {worst['provable_delta']:.0e} | "
                f"{' | '.join(entry.text() for entry in found)} | "
                f"{printed_text(TABLE_1[dataset, setting.population.k, setting.system])} |"
            )
    if not rows:
        return []
    return [
        "",
        "## What a tighter accountant does",
        "",
        "The paper names three accountants, RDP, GDP and PRV, and says that it uses RDP; the engine of Opacus, which "
        "it uses, takes PRV where it is told nothing (version 1.6). PRV finds what PLD finds, nearly the least epsilon "
        "that there is, which is less than RDP's: so noise that is searched by it for the same sum of "
        "thresholds is less in most rounds. Rounds by epochs, and the paper's steps less those of rounds in which "
        "nobody has anything left; noise and what is provable are of the first seed:",
        "",
        "| data set | k | system | noise by PLD, round by round | steps | provable epsilon, delta | by RDP | "
        "by RDP, rate falls | by PLD | by PLD, rate falls | paper |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *rows,
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
        "and less noise; and the epsilon, by RDP, that everybody would have to allow for it; at a rate that stays, and "
        "at one that falls:",
        "",
        "| data set | noise multiplier | steps | epsilon by RDP | rate stays | rate falls | paper's best, k = 0 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {TITLES[dataset]} | {_noise(entry, record):.1f} | {entry.iterations:,} | {_allowed(entry):.2f} | "
        f"{entry.text()} | {cell(with_falling_rate(entry.setting), record).text()} | "
        f"{printed_text(best_of_paper(dataset))} |"
        for dataset, entries in found.items()
        for entry in entries
    ]
    reached = [
        text for dataset, entries in found.items() for text in _where_reached(dataset, entries, record)
    ]
    return [
        *lines,
        "",
        f"{' '.join(reached)} People allow 0.5 to 1. Weighted batches were tried as Poisson draws "
        "only: the paper's approximate sampling of them has no proof.",
    ]


def _where_reached(dataset: str, entries: Sequence[Cell], record: Record) -> list[str]:
    if not entries:
        return []
    printed = best_of_paper(dataset)
    least = printed.mean - (printed.deviation or 0.0)
    text = f"{TITLES[dataset]}: the paper's best cell less its deviation, {least:.2f}, is reached"
    falling = [cell(with_falling_rate(entry.setting), record) for entry in entries]
    for rate, cells in (("stays", entries), ("falls", falling)):
        enough = [entry for entry in cells if entry.mean is not None and entry.mean >= least]
        where = f"where everybody allows {min(map(_allowed, enough)):.2f}" if enough else "at none of these"
        text += f", at a rate that {rate}, {where}" if any(entry.seeds for entry in cells) else ""
    return [f"{text}."]


def _noise(entry: Cell, record: Record) -> float:
    found: float = record.of(entry.setting)[0]["rounds"][0]["noise_multiplier"]
    return found


def _allowed(entry: Cell) -> float:
    return entry.setting.population.tiers[0][0]
