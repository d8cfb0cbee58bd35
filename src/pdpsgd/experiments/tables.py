"""The pages: tables as Markdown and CSV, made from records alone. A cell that was not run is empty."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdpsgd.experiments.cells import Cell, cell, printed_text
from pdpsgd.experiments.published import (
    DATASETS,
    IDP_CASES,
    IDP_SGD,
    INDIVIDUALIZED_PATE,
    SKEWS,
    TABLE_1,
    TABLE_2,
    TITLES,
    best_of_paper,
)
from pdpsgd.experiments.reasons import reasons
from pdpsgd.experiments.record import Record
from pdpsgd.experiments.search import GRIDS, SEARCH_SEED, THRESHOLDED
from pdpsgd.experiments.settings import Setting
from pdpsgd.experiments.studies import (
    EXACT_AND_UNIFORM,
    IDP_SYSTEMS,
    SOUND_SYSTEMS,
    as_published_settings,
    feature_settings,
    idp_settings,
    long_settings,
    table_1_settings,
    table_2_settings,
    was_searched,
)

HOW_TO_READ = (
    "Test accuracy in percent: mean ± standard deviation over seeds (number of seeds in parentheses). "
    "An empty cell was not run; `pdpsgd reproduce {what}` fills it."
)


@dataclass(frozen=True)
class Page:
    """A page and the figures on it."""

    name: str
    markdown: str
    cells: tuple[Cell, ...]

    def write(self, folder: Path) -> list[Path]:
        """Write the Markdown and the CSV file."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.md", folder / f"{self.name}.csv"]
        paths[0].write_text(self.markdown, encoding="utf-8")
        paths[1].write_text(_csv(self.cells), encoding="utf-8")
        return paths


def table_1(search: Record, record: Record) -> Page:
    """All systems under equal and sound conditions, and what personalization gains."""
    lines = [
        "# Table 1, under equal and sound conditions",
        "",
        "PLD accounting, everybody charged in every round, 20 groups of budgets in [0.5, 1], delta 1e-5, the "
        "paper's networks. Every system is given the same search: "
        + _grids("pixels")
        + f", seed {SEARCH_SEED}, the last 5,000 training people held out, k = 0; the best is then "
        f"trained on "
        "all training people. `idp-sample` is accounted by RDP, as its authors define it. `leave-out` trains "
        "DP-SGD on those who allow 0.75 or more. `one-after-another` trains on four tiers in turn, "
        "strictest first. Uniform DP-SGD goes by the smallest budget, so it is the same for every k. Where one "
        "learning rate is named, nothing was searched. Systems with "
        "thresholds get three rounds: where everybody pays, little is left "
        "after that. Columns headed *paper* are its printed figures: as-published bookkeeping, RDP, its own settings.",
        "",
        HOW_TO_READ.format(what="table-1")
        + " An asterisk: the search has not been run for this system yet, and it was trained with the recipe "
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
        lines += ["", f"## {TITLES[dataset]}", ""]
        lines += _by_skew(dataset, SOUND_SYSTEMS, known)
        lines += _gains(dataset, known)
        lines += _ten_rounds(dataset, record)
    return Page("table-1", "\n".join(lines) + "\n", tuple(cells))


def table_1_as_published(search: Record, record: Record) -> Page:
    """The paper's own set-up, its cells beside ours, and what is really proven for it."""
    lines = [
        "# Table 1, as the paper set it up",
        "",
        "Learning rate 0.05, batch 64, noise multiplier 1.3, clipping 1.0, at most 10 rounds, RDP, "
        "delta 1e-5 "
        "a round. **Not sound:** only people drawn into a round are charged. What is provable for these runs "
        "stands below. Rounds end where what is left does not pay for one more step at noise 1.3; how many each system "
        "has had stands below its accuracies. (The paper's AdaPDP had two, by its number of parameters in table 2.)",
        "",
        HOW_TO_READ.format(what="table-1-as-published"),
    ]
    cells: list[Cell] = []
    for dataset in DATASETS:
        settings = as_published_settings(dataset, search)
        known = [cell(s, record, TABLE_1.get((dataset, s.population.k, s.system))) for s in settings]
        cells += known
        systems = tuple(dict.fromkeys(s.system for s in settings))
        lines += ["", f"## {TITLES[dataset]}", "", *_by_skew(dataset, systems, known)]
        lines += _rounds_taken(dataset, record)
    lines += reasons(search, record)
    lines += ["", *_claims(record)]
    return Page("table-1-as-published", "\n".join(lines) + "\n", tuple(cells))


def table_2(search: Record, record: Record) -> Page:
    """Run time, iterations and parameters."""
    lines = [
        "# Table 2: run time, iterations, parameters",
        "",
        "The set-up of table 1 as published, k = 0; PDP-SGD is the adaptive one. The paper's figures are "
        "averages over its three data sets on a Titan RTX. Ours: iterations and parameters by the plan (seed 0; "
        "AdaPDP trains a model a round), and processor time on one core, measured in one run on one machine: the "
        "systems of a data set take turns, each is trained for some steps a turn, and the median is multiplied. A step "
        "is the same work in all three systems: what differs is how many there are. Whole runs (those of table 1 as "
        "published, on days when the machine was more or less busy, and some with slower code) are the last columns, "
        "also in processor time.",
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
    return Page("table-2", "\n".join(lines) + "\n", tuple(cells))


def features(search: Record, record: Record) -> Page:
    """Scattering features and a linear model."""
    lines = [
        "# A linear model on scattering features",
        "",
        "Not the paper's network: a linear model on wavelet features that need no training "
        "(`pdpsgd.scattering`), with 39,700 parameters, for SVHN 51,850 (in grey). Sound "
        "bookkeeping, PLD, k = 0. Search for both systems: "
        + _grids("scattering")
        + ", on 5,000 held-out training people.",
    ]
    return _exact_and_uniform("features", lines, feature_settings, search, record)


def long_page(search: Record, record: Record) -> Page:
    """The paper's networks with the best recipe there is for them."""
    lines = [
        "# The paper's networks, trained longer",
        "",
        "The recipes of the presets: larger batches and more steps than all systems of table 1 could be given. "
        "Sound bookkeeping, PLD, k = 0. Search for both systems: "
        + _grids("long")
        + ", on 5,000 held-out training people; where one learning rate is named, nothing was searched for "
        "uniform DP-SGD, and it was chosen by trials of pdp-sgd-exact (on the search page). Also tried there, "
        "without a gain that 5,000 people can show: averaging of weights, momentum, batches of 4,096; and all of this "
        "on MNIST, which is therefore not here. Four views of an example, moved by up to two pixels and averaged "
        "before clipping, were tried with the shorter recipes of table 1, at four times the work: on the search page.",
    ]
    return _exact_and_uniform("long", lines, long_settings, search, record)


def _exact_and_uniform(
    name: str,
    lines: list[str],
    settings: Callable[[str, Record], list[Setting]],
    search: Record,
    record: Record,
) -> Page:
    """A page on which `pdp-sgd-exact` meets uniform DP-SGD, one line a data set."""
    lines += ["", HOW_TO_READ.format(what=name), ""]
    lines += [
        "| data set | pdp-sgd-exact | dp-sgd | gain | the paper's best, its network |",
        "|---|---|---|---|---|",
    ]
    cells: list[Cell] = []
    for dataset in DATASETS:
        found = [cell(s, record, searched=was_searched(s, search)) for s in settings(dataset, search)]
        if not found:
            continue
        cells += found
        exact, uniform = (_find(found, system, 0.0) for system in EXACT_AND_UNIFORM)
        best = printed_text(best_of_paper(dataset))
        lines.append(
            f"| {TITLES[dataset]} | {_text(exact)} | {_text(uniform)} | {_gain(exact, uniform)} | {best} |"
        )
    return Page(name, "\n".join(lines) + "\n", tuple(cells))


def idp_benchmark(search: Record, record: Record) -> Page:
    """IDP-SGD's own benchmark."""
    lines = [
        "# IDP-SGD's own benchmark",
        "",
        "Budgets 1, 2 and 3 for shares of the people, delta 1e-5. Ours are trained with this paper's networks, and "
        "with a linear model on scattering features, with the recipes found for table 1 (budgets of 0.5 to 1). "
        "Printed: IDP-SGD's own figures, with its larger network; and, from the paper's comparison, Individualized "
        "PATE (by upsampling / by weighting) and PDP-SGD, both of which also train on public data, which ours do not "
        "have.",
        "",
        HOW_TO_READ.format(what="idp-benchmark") + " An asterisk: trained with the recipe of pdp-sgd-exact.",
        "",
        f"| data set | shares | model | {' | '.join(IDP_SYSTEMS)} | IDP-SGD, printed | I-PATE, printed | "
        "PDP-SGD, printed |",
        f"|---|---|---|{'---|' * len(IDP_SYSTEMS)}---|---|---|",
    ]
    cells: list[Cell] = []
    for dataset in ("mnist", "svhn"):
        for case, tiers in IDP_CASES.items():
            printed = IDP_SGD[dataset, case]
            for features, model in (("scattering", "linear"), ("pixels", "the paper's network")):
                found = [
                    cell(s, record, printed, searched=was_searched(s, search))
                    for s in idp_settings(dataset, search)
                    if s.population.tiers == tiers and s.recipe.features == features
                ]
                cells += found
                shown = " | ".join(_text(_find(found, system, 0.0)) for system in IDP_SYSTEMS)
                upsampled, weighted, papers = INDIVIDUALIZED_PATE[dataset, case]
                lines.append(
                    f"| {TITLES[dataset]} | {case} | {model} | {shown} | {printed_text(printed)} | "
                    f"{upsampled:.2f} / {weighted:.2f} | {papers:.2f} |"
                )
    return Page("idp-benchmark", "\n".join(lines) + "\n", tuple(cells))


def search_page(search: Record, record: Record) -> Page:
    """Every trial of the search."""
    lines = [
        "# The hyper-parameter search",
        "",
        "Accuracy on 5,000 held-out training people, in percent. The learning rate is for gradients "
        "divided by "
        "the clipping norm.",
        "",
        "| data set | features | system | steps | batch | activation | clipping | learning rate | momentum | "
        "averaging | views | accuracy | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    cells = []
    for run in search:
        setting = Setting.from_dict(run["setting"])
        recipe = setting.recipe
        cells.append(cell(setting, search))
        lines.append(
            f"| {TITLES[setting.dataset]} | {recipe.features} | {setting.system} | {recipe.steps} | "
            f"{recipe.batch_size:g} | {'' if recipe.features == 'scattering' else recipe.activation} | "
            f"{recipe.max_grad_norm:g} | {recipe.learning_rate:g} | {recipe.momentum or ''} | "
            f"{recipe.weight_average or ''} | {recipe.views if recipe.views > 1 else ''} | "
            f"{100 * run['accuracy']:.2f} | {run['seconds']:.0f} |"
        )
    return Page("search", "\n".join(lines) + "\n", tuple(cells))


PAGES: dict[str, Callable[[Record, Record], Page]] = {
    "search": search_page,
    "table-1": table_1,
    "table-1-as-published": table_1_as_published,
    "table-2": table_2,
    "long": long_page,
    "features": features,
    "idp-benchmark": idp_benchmark,
}


def _by_skew(dataset: str, systems: Sequence[str], cells: Sequence[Cell]) -> list[str]:
    heads = " | ".join(f"k = {k:g} | paper" for k in SKEWS)
    lines = [f"| system | {heads} |", f"|---|{'---|---|' * len(SKEWS)}"]
    for system in systems:
        shown = []
        for k in SKEWS:
            # Uniform DP-SGD at the smallest budget does not depend on k.
            found = _find(cells, system, k) or (_find(cells, system, 0.0) if system == "dp-sgd" else None)
            shown += [_text(found), printed_text(TABLE_1.get((dataset, k, system)))]
        lines.append(f"| {system} | {' | '.join(shown)} |")
    return lines


def _gains(dataset: str, cells: Sequence[Cell]) -> list[str]:
    uniform = _find(cells, "dp-sgd", 0.0)
    gains = [
        f"{system} {_gain(found, uniform)}"
        for system in SOUND_SYSTEMS
        if system != "dp-sgd" and (found := _find(cells, system, 0.0)) is not None and _gain(found, uniform)
    ]
    lines = []
    exact = _find(cells, "pdp-sgd-exact", 0.0)
    if exact is not None and exact.mean is not None and dataset in DATASETS:
        best = best_of_paper(dataset)
        lines.append(
            f"`pdp-sgd-exact` at k = 0: {exact.mean:.2f}, the paper's best cell: {best.mean:.2f} "
            f"({exact.mean - best.mean:+.2f}). Largest proven epsilon of any level, in all its runs: "
            f"{exact.largest_proven:.4f}, its budget is 1."
        )
    if gains:
        lines.append(
            f"Gain over uniform DP-SGD in points at k = 0 (systems with an asterisk are not tuned): {', '.join(gains)}."
        )
    return [line for text in lines for line in ("", text)]


def _ten_rounds(dataset: str, record: Record) -> list[str]:
    """Runs of systems with thresholds at the paper's ten rounds, which are in no cell of the table."""
    tried = [
        f"{run['setting']['system']} {100 * run['accuracy']:.2f} after {run['iterations']} steps"
        for run in record
        if run["setting"]["dataset"] == dataset
        and run["setting"]["bookkeeping"] == "sound"
        and run["setting"]["system"] in THRESHOLDED
        and run["setting"]["recipe"]["rounds"] is None
    ]
    if not tried:
        return []
    return [
        "",
        f"Tried first, with ten rounds as in the paper (seed 0): {'; '.join(tried)}. Rounds in which nobody has "
        "anything left are dropped with their steps. The change to three rounds was made after these test "
        "accuracies had been seen; it favours these systems.",
    ]


def _rounds_taken(dataset: str, record: Record) -> list[str]:
    """How many rounds the paper's systems have had."""
    taken: dict[str, set[int]] = {}
    for run in record:
        setting = run["setting"]
        if setting["dataset"] == dataset and _is_as_printed(setting):
            taken.setdefault(setting["system"], set()).add(len(run["rounds"]))
    parts = [f"{system} {' or '.join(map(str, sorted(counts)))}" for system, counts in taken.items()]
    return ["", f"Rounds: {', '.join(parts)}."] if parts else []


def _is_as_printed(setting: dict[str, Any]) -> bool:
    """Whether these are the paper's bookkeeping and noise."""
    recipe = setting["recipe"]
    return (
        setting["bookkeeping"] == "as-published"
        and recipe["noise_multiplier"] is not None
        and recipe["features"] == "pixels"
    )


def _claims(record: Record) -> list[str]:
    """What the paper would claim for as-published runs, and what is provable."""
    seeds: dict[tuple[Any, ...], list[int]] = {}
    for run in record:
        setting = run["setting"]
        if not _is_as_printed(setting):
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


def _find(cells: Sequence[Cell], system: str, k: float) -> Cell | None:
    return next((c for c in cells if c.setting.system == system and c.setting.population.k == k), None)


def _text(found: Cell | None) -> str:
    return "" if found is None else found.text()


def _gain(found: Cell | None, uniform: Cell | None) -> str:
    if found is None or uniform is None or found.mean is None or uniform.mean is None:
        return ""
    return f"{found.mean - uniform.mean:+.2f}"


def _grids(features: str) -> str:
    parts = []
    for (dataset, kind), (recipe, rates) in GRIDS.items():
        if kind == features and dataset in DATASETS:
            tried = ", ".join(f"{rate:g}" for rate in rates)
            parts.append(
                f"{TITLES[dataset]} {recipe.steps} steps of {recipe.batch_size:g}, learning rates {tried}"
            )
    return "; ".join(parts)


def _csv(cells: Sequence[Cell]) -> str:
    text = io.StringIO()
    rows = [found.row() for found in cells]
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
