"""The pages: tables as Markdown and CSV, made from records alone. A cell that was not run is empty."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from experiments.as_published_page import table_1_as_published
from experiments.cells import Cell, alike_text, cell, gain, is_alike, network_of, printed_text
from experiments.fashion import tried_for_fashion
from experiments.idp_page import idp_benchmark
from experiments.pages import HOW_TO_READ, Page, by_skew, find, text
from experiments.published import (
    DATASETS,
    TABLE_1,
    TABLE_2,
    TITLES,
    best_of_paper,
)
from experiments.record import Record
from experiments.search import EXCLUDE, GRIDS, SEARCH_SEED, SOUND_ROUNDS, kind_of
from experiments.settings import Setting
from experiments.studies import (
    PEOPLE,
    SOUND_SYSTEMS,
    feature_settings,
    network_settings,
    table_1_settings,
    table_2_settings,
    was_searched,
)
from experiments.systems import plan_of
from pdpsgd.planning.signal import signal_efficiency

PAPERS_ROUNDS = 10

NO_THIRD = (
    "*Signal*: the signal efficiency of the plan of `pdp-sgd-exact`, its share of the most that any plan gets from "
    "these budgets. Leaving the strict people out (`dp-sgd-exclude`) is no third column: at these budgets the "
    "threshold with the most signal leaves out nobody, so that it is `dp-sgd`."
)


def table_1(search: Record, record: Record) -> Page:
    """Return the page with all systems under equal and sound conditions, and what personalization gains."""
    lines = [
        "# Table 1, under equal and sound conditions",
        "",
        "PLD accounting, everybody charged in every round, 20 groups of budgets in [0.5, 1], delta 1e-5. Every system "
        f"is given the same search: {_grids('pixels')}, seed {SEARCH_SEED}, the last 5,000 training people held out, "
        "k = 0; the best is then trained on all. `idp-sample` is accounted by RDP, as its authors define it. "
        "`dp-sgd-exclude` is what many do today: uniform DP-SGD without those below a threshold, by default the "
        "one that leaves the most signal (people times mu). At k = -0.2 and 0 nobody is below it, so that it is "
        "`dp-sgd` there and the same figures are shown; at k = 0.2 those below 0.684 are left out. "
        "`leave-out` is the same with those below 0.75 left out. `one-after-another` trains on four tiers in turn, "
        "strictest first. Uniform DP-SGD goes by the smallest budget, so it is the same for every k. Systems with "
        "thresholds get three rounds, AdaPDP two: where everybody pays, little is left after that. Columns headed "
        "*paper* are its printed figures: as-published bookkeeping, RDP, its own settings.",
        "",
        HOW_TO_READ.format(what="table-1")
        + " An asterisk: the search is not finished for this system, and it was trained with the recipe "
        "that was chosen for pdp-sgd-exact.",
    ]
    cells: list[Cell] = []
    for dataset in (*DATASETS, "digits"):
        settings = table_1_settings(dataset, search)
        if dataset == "digits" and not settings:
            continue
        known = [
            cell(
                setting,
                record,
                TABLE_1.get((dataset, setting.population.k, setting.system)),
                searched=was_searched(setting, search),
            )
            for setting in settings
        ]
        cells += known
        lines += ["", f"## {TITLES[dataset]}"]
        if dataset in DATASETS:
            lines += [
                line for entry in known[:1] for line in ("", f"Model: {network_of(entry.setting.recipe)}.")
            ]
        lines += ["", *by_skew(dataset, SOUND_SYSTEMS, known)]
        lines += _gains(dataset, known)
        lines += _other_rounds(dataset, record)
    return Page("table-1", "\n".join(lines) + "\n", tuple(cells))


def table_2(search: Record, record: Record) -> Page:
    """Return the page with run time, iterations and parameters."""
    lines = [
        "# Table 2: run time, iterations, parameters",
        "",
        "The set-up of table 1 as published, k = 0; PDP-SGD is the adaptive one. The paper's figures are "
        "averages over its three data sets on a Titan RTX. Ours: iterations and parameters by the plan (seed 0; "
        "AdaPDP trains a model a round), and processor time on one core, measured in one run on one machine: the "
        "systems of a data set take turns, each is trained for some steps a turn, and the median is multiplied. A step "
        "is the same work in all three systems: what differs is how many there are. MNIST and Fashion-MNIST share a "
        "network, so the difference between them shows how far to trust a millisecond. Whole runs (those of table 1 as "
        "published, when the machine was more or less busy, and some with slower code) are the last columns, also in "
        "processor time.",
        "",
        "| data set | system | iterations | parameters | ms an iteration | seconds, from that | "
        "seconds of whole runs | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| the paper's mean | {name} | {effort.iterations:,} | {effort.parameters:,} | "
        f"{1000 * effort.seconds / effort.iterations:.1f} | | {effort.seconds:,.2f} | |"
        for name, effort in TABLE_2.items()
    ]
    efforts = {run["key"]: run for run in Record(record.path.with_name("effort.jsonl"))}
    cells = [cell(s, record) for dataset in DATASETS for s in table_2_settings(dataset, search)]
    for entry in cells:
        found = efforts.get(entry.setting.key(SEARCH_SEED))
        planned = " | | | "
        if found is not None:
            pace = found["processor_milliseconds"]
            planned = (
                f"{found['iterations']:,} | {found['parameters']:,} | {pace:.1f} | "
                f"{pace * found['iterations'] / 1000:,.0f}"
            )
        whole = f"{entry.processor_seconds:,.1f} | {entry.seeds}" if entry.processor_seconds else " | "
        name = TITLES[entry.setting.dataset]
        lines.append(f"| {name} | {entry.setting.system} | {planned} | {whole} |")
    lines += _mean_efforts(cells, efforts)
    return Page("table-2", "\n".join(lines) + "\n", tuple(cells))


def _mean_efforts(cells: Sequence[Cell], efforts: dict[str, dict[str, Any]]) -> list[str]:
    """Return what the paper's own averages compare with, once all data sets are measured."""
    rows, iterations = [], {}
    for system in dict.fromkeys(entry.setting.system for entry in cells):
        keys = [c.setting.key(SEARCH_SEED) for c in cells if c.setting.system == system]
        found = [efforts[key] for key in keys if key in efforts]
        if len(found) < len(DATASETS):
            return []
        iterations[system] = statistics.fmean(run["iterations"] for run in found)
        parameters = statistics.fmean(run["parameters"] for run in found)
        seconds = statistics.fmean(run["iterations"] * run["processor_milliseconds"] / 1000 for run in found)
        rows.append(
            f"| our mean | {system} | {iterations[system]:,.0f} | {parameters:,.0f} | "
            f"{1000 * seconds / iterations[system]:.1f} | {seconds:,.0f} | | |"
        )
    ours = 1 - iterations["pdp-sgd-adaptive"] / iterations["sampling"]
    papers = 1 - TABLE_2["pdp-sgd"].iterations / TABLE_2["sampling"].iterations
    return [
        *rows,
        "",
        f"PDP-SGD takes {100 * ours:.0f} % fewer iterations than Sampling here, {100 * papers:.0f} % fewer in the "
        "paper, which does not say why: that is not reproduced. On SVHN the last of AdaPDP's rounds, and so of its "
        "models, may be a few steps only.",
    ]


def features(search: Record, record: Record) -> Page:
    """Return the page on scattering features and a linear model."""
    lines = [
        "# A linear model on scattering features",
        "",
        "Not the paper's network: a linear model on wavelet features that need no training "
        "(`pdpsgd.models.scattering`), with 39,700 parameters, for SVHN 51,850 (in grey). Sound "
        "bookkeeping, PLD, k = 0. Search for both systems: "
        + f"{_grids('scattering')}; {_grids('scattering-large')}, on 5,000 held-out training people.",
        "",
        "Batches of 2,048 are the presets. Batches of 4,096 are twice the work, for a plan with more of the signal "
        "that the budgets allow. What that is worth to `pdp-sgd-exact`, in points: "
        f"{_worth_of_signal(search, record)}.",
    ]
    return _exact_and_uniform("features", lines, feature_settings, search, record)


def _worth_of_signal(search: Record, record: Record) -> str:
    """Say what larger batches gain on each data set that they were run on, seed by seed."""
    said = []
    for dataset in DATASETS:
        found = {
            kind_of(s): cell(s, record)
            for s in feature_settings(dataset, search)
            if s.system == "pdp-sgd-exact"
        }
        preset, large = found.get("scattering"), found.get("scattering-large")
        if over := gain(large, preset):
            said.append(f"{TITLES[dataset]} {over}{alike_text(preset, large)}")
    return ", ".join(said) or "not run"


def networks(search: Record, record: Record) -> Page:
    """Return the page on the paper's networks as printed and with the best recipe there is for them."""
    lines = [
        "# The paper's networks, as printed and at their best",
        "",
        "Table 1 under sound conditions has MNIST's network with tanh; here it is also with ReLU, as printed. Other "
        "rows are the recipes of the presets: the best that were found for the paper's networks, from random weights "
        "and from others, at more work than all systems of table 1 could be given. Sound bookkeeping, PLD, k = 0. "
        f"Search for both systems: {_grids('relu')}; {_grids('best')}; in large batches {_grids('large')}; started "
        f"from drawn digits {_grids('drawn')}; on 5,000 held-out training people. *Views*: an example goes through the "
        "network that often, each time moved by "
        "up to two pixels, and its gradients are averaged before clipping. *Images standardized*: each has mean 0 and "
        "standard deviation 1; locally, each pixel by those around it. What else was tried is on the search page, "
        "mostly by one trial each. Recipes differ in more than the start, so the rows do not tell what it is worth by "
        "itself.",
        "",
        "*Started from drawn digits*: the first weights are not random, but were trained, without privacy, on 40,000 "
        "digits that a program draws (`pdpsgd.models.synthetic_digits`), in the shapes that everybody knows them to "
        "have. No person's data goes into them; knowledge of the task does. How unsteady the hand is, how much is "
        "drawn, and how the network learns from it was settled by about fifteen trials of an earlier form of "
        "the program, which are not on record, by accuracies on the held-out training people and by looking at "
        "images of the benchmark. Clothes were drawn, too, and dropped: they did not help Fashion-MNIST's network "
        "at its preset's steps. Uniform DP-SGD has the same start.",
        "",
        "The presets of MNIST's and SVHN's network have plans with less than 0.97 of the signal. More of it costs "
        "work: MNIST's was trained in batches of 4,096, too, with one view (the row of 1,000 steps). For 1.7 times the "
        "work of the preset with four views it comes to less. From drawn digits, batches of 2,048 were no better in a "
        "trial (the search page). So the presets stay as they are. SVHN's was not trained in such batches.",
        "",
        *tried_for_fashion(search),
    ]
    return _exact_and_uniform("networks", lines, network_settings, search, record)


def _exact_and_uniform(
    name: str,
    lines: list[str],
    settings: Callable[[str, Record], list[Setting]],
    search: Record,
    record: Record,
) -> Page:
    """Return a page of `pdp-sgd-exact` beside uniform DP-SGD, one line per data set and recipe."""
    lines += [
        "",
        HOW_TO_READ.format(what=name) + " Gains are means over seeds ± standard error.",
        "",
        NO_THIRD,
        "",
    ]
    lines += [
        "| data set | model | steps | batch | signal | pdp-sgd-exact | dp-sgd | gain | the paper's best, k = 0 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cells: list[Cell] = []
    for dataset in DATASETS:
        found = [cell(s, record, searched=was_searched(s, search)) for s in settings(dataset, search)]
        cells += found
        best = printed_text(best_of_paper(dataset))
        for exact in (entry for entry in found if entry.setting.system == "pdp-sgd-exact"):
            recipe = exact.setting.recipe
            uniform = next((c for c in found if c.setting.system == "dp-sgd" and _alike(c, exact)), None)
            lines.append(
                f"| {TITLES[dataset]} | {network_of(recipe)} | {recipe.steps} | {recipe.batch_size:g} | "
                f"{_efficiency(exact.setting):.3f} | {exact.text()} | {text(uniform)} | {gain(exact, uniform)} | "
                f"{best} |"
            )
    return Page(name, "\n".join(lines) + "\n", tuple(cells))


@lru_cache(maxsize=64)
def _efficiency(setting: Setting) -> float:
    """Return the signal efficiency of a setting's plan."""
    made = plan_of(setting, setting.population.budgets(PEOPLE[setting.dataset], shuffle=0), seed=0)
    return signal_efficiency(made.levels, made.rounds) or 0.0


def _alike(one: Cell, other: Cell) -> bool:
    """Return whether the recipes are the same but for the learning rate."""
    return replace(one.setting.recipe, learning_rate=0.0) == replace(other.setting.recipe, learning_rate=0.0)


def search_page(search: Record, record: Record) -> Page:
    """Return the page with every trial of the search."""
    lines = [
        "# The hyper-parameter search",
        "",
        "Accuracy on 5,000 held-out training people, in percent, one seed: uncertain by about half a point. The "
        "learning rate is for gradients divided by the clipping norm. Trials that belong to no grid of "
        "`python -m experiments` were made to find one. Seconds are of processor time on one core, where they are on "
        "record; the start from drawn digits (a minute, five with IDP-SGD's network for SVHN) is not in them.",
        "",
        "| data set | features | system | steps | batch | activation | clipping | learning rate | momentum | "
        "averaging | views | start | rounds | accuracy | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    cells = []
    for run in search:
        setting = Setting.from_dict(run["setting"])
        recipe = setting.recipe
        cells.append(cell(setting, search))
        network = ", IDP-SGD's CNN" if recipe.network == "idp" else ""
        seconds = f"{run['processor_seconds']:.0f}" if "processor_seconds" in run else ""
        lines.append(
            f"| {TITLES[setting.dataset]} | {recipe.features}{network} | {setting.system} | {recipe.steps} | "
            f"{recipe.batch_size:g} | {'' if recipe.features == 'scattering' else recipe.activation} | "
            f"{recipe.max_grad_norm:g} | {recipe.learning_rate:g} | {recipe.momentum or ''} | "
            f"{recipe.weight_average or ''} | {recipe.views if recipe.views > 1 else ''} | "
            f"{'' if recipe.start == 'random' else recipe.start} | {recipe.rounds or ''} | "
            f"{100 * run['accuracy']:.2f} | {seconds} |"
        )
    return Page("search", "\n".join(lines) + "\n", tuple(cells))


PAGES: dict[str, Callable[[Record, Record], Page]] = {
    "search": search_page,
    "table-1": table_1,
    "table-1-as-published": table_1_as_published,
    "table-2": table_2,
    "networks": networks,
    "features": features,
    "idp-benchmark": idp_benchmark,
}


def _gains(dataset: str, cells: Sequence[Cell]) -> list[str]:
    uniform, exact = find(cells, "dp-sgd", 0.0), find(cells, "pdp-sgd-exact", 0.0)
    others = [
        found for system in SOUND_SYSTEMS if (found := find(cells, system, 0.0)) is not None and found.seeds
    ]
    paragraphs = []
    if exact is not None and exact.mean is not None and dataset in DATASETS:
        best = best_of_paper(dataset)
        paragraphs.append(
            f"`pdp-sgd-exact` at k = 0: {exact.mean:.2f}, the paper's best cell: {best.mean:.2f} "
            f"({exact.mean - best.mean:+.2f}). Largest proven epsilon of any level, in all its runs: "
            f"{exact.largest_proven:.4f}, its budget is 1."
        )
    gains = [
        f"{c.setting.system} {gain(c, uniform)}" for c in others if c is not uniform and gain(c, uniform)
    ]
    if gains:
        paragraphs.append(
            "Gain over uniform DP-SGD in points at k = 0, mean over seeds ± standard error (systems with an asterisk "
            f"are not tuned): {', '.join(gains)}."
        )
    skewed, excluding = find(cells, "pdp-sgd-exact", 0.2), find(cells, EXCLUDE, 0.2)
    if over := gain(skewed, excluding):
        paragraphs.append(
            f"`pdp-sgd-exact` over `dp-sgd-exclude` at k = 0.2: {over}{alike_text(excluding, skewed)}."
        )
    alike = [c.setting.system for c in others if c is not exact and is_alike(c, exact)]
    if alike:
        paragraphs.append(
            f"Not to be told apart from `pdp-sgd-exact` by these seeds (t test at 5 %): {', '.join(alike)}."
        )
    return [line for paragraph in paragraphs for line in ("", paragraph)]


def _other_rounds(dataset: str, record: Record) -> list[str]:
    """Return runs of systems with thresholds at other numbers of rounds than the table's."""
    tried: dict[tuple[str, int], list[float]] = {}
    steps: dict[tuple[str, int], int] = {}
    for run in record:
        setting, recipe = run["setting"], run["setting"]["recipe"]
        system, rounds = setting["system"], recipe["rounds"] or PAPERS_ROUNDS
        if (
            setting["dataset"] == dataset
            and setting["bookkeeping"] == "sound"
            and setting["weights"] is None
            and setting["population"] == {**setting["population"], "k": 0.0, "highest": 1.0, "tiers": []}
            and SOUND_ROUNDS.get(system, rounds) != rounds
        ):
            tried.setdefault((system, rounds), []).append(100 * run["accuracy"])
            steps[system, rounds] = run["iterations"]
    if not tried:
        return []
    texts = [
        f"{system} with {rounds} rounds {statistics.fmean(found):.2f} ({len(found)}) after {steps[system, rounds]} "
        "steps"
        for (system, rounds), found in tried.items()
    ]
    return [
        "",
        f"Tried first, k = 0: {'; '.join(texts)}. Rounds in which nobody has anything left are dropped with their "
        "steps. The numbers of rounds were changed after these test accuracies had been seen; it favours these "
        "systems.",
    ]


def _grids(features: str) -> str:
    parts = []
    for (dataset, kind), (recipe, rates) in GRIDS.items():
        if kind == features and dataset in DATASETS:
            tried = ", ".join(f"{rate:g}" for rate in rates)
            parts.append(
                f"{TITLES[dataset]} {recipe.steps} steps of {recipe.batch_size:g}, learning rates {tried}"
            )
    return "; ".join(parts)
