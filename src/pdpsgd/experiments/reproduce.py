"""One command for each table and figure: run what is missing, then write the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pdpsgd.errors import check_one_of, fail
from pdpsgd.experiments.cells import cell
from pdpsgd.experiments.record import Record
from pdpsgd.experiments.search import SEARCH_SEED
from pdpsgd.experiments.settings import Setting
from pdpsgd.experiments.studies import (
    STUDIES,
    WITHOUT_TRAINING,
    Study,
    interval_settings,
    table_2_settings,
    weight_settings,
)

WHAT = (*STUDIES, *WITHOUT_TRAINING, "pages", "all")
"""`pages` only writes tables and figures again, from the records that are there."""

SHOWN_ON = dict.fromkeys(
    ("steps-as-published", "noise-as-published", "inputs-as-published"), "table-1-as-published"
)
"""Studies that have no page of their own."""

ALWAYS_THERE = "digits"  # for a first look without benchmark files; no figure of the paper

Say = Callable[[str], None]


def reproduce(
    what: str,
    *,
    output: Path,
    datasets: Sequence[str] = (),
    seeds: int = 3,
    quick: bool = False,
    part: tuple[int, int] = (1, 1),
    say: Say = print,
) -> list[Path]:
    """Run what is missing of a table or figure, then write its pages; the files that were written.

    `quick` takes few steps, to show that everything runs, and keeps its records apart. `part` (i, n) takes
    every n-th run beginning with the i-th, so that n processes share the work.
    """
    check_one_of(WHAT, what=what)
    if quick:
        output = output / "quick"
    search, record = Record(output / "search.jsonl"), Record(output / "runs.jsonl")
    names = [*STUDIES] if what == "all" else [what] if what in STUDIES else []
    if what in ("table-2", "all"):
        _measure_effort(output, search, datasets)
    for name in names:
        _run_study(
            STUDIES[name], search, record, datasets=datasets, seeds=seeds, quick=quick, part=part, say=say
        )
    return write_pages(what, search, record, output)


def write_pages(what: str, search: Record, record: Record, output: Path) -> list[Path]:
    """Write the tables and figures that a study belongs to, from the records."""
    from pdpsgd.experiments import figures
    from pdpsgd.experiments.overview import write_overview
    from pdpsgd.experiments.tables import PAGES

    written: list[Path] = []
    everything = what in ("all", "pages")
    page = SHOWN_ON.get(what, what)
    for name, make in PAGES.items():
        if everything or name in (page, "search"):
            written += make(search, record).write(output)
    written += write_overview(search, record, output)
    folder = output / "figures"
    if everything or what == "distributions":
        written += figures.save_chart(figures.distributions(), folder, "epsilon-distributions")
    if everything or what == "rounds":
        for mechanism in ("adapdp", "pdp-sgd-fixed", "pdp-sgd-adaptive"):
            published = figures.rounds_as_published(mechanism)
            written += figures.save_chart(published, folder, f"rounds-as-published-{mechanism}")
            written += figures.save_chart(
                figures.rounds_sound(mechanism), folder, f"rounds-sound-{mechanism}"
            )
    if everything or what == "weights":
        written += _weights_figure(search, record, folder)
    if everything or what == "intervals":
        written += _intervals_figure(search, record, folder)
    return written


def _run_study(
    study: Study,
    search: Record,
    record: Record,
    *,
    datasets: Sequence[str],
    seeds: int,
    quick: bool,
    part: tuple[int, int],
    say: Say,
) -> None:
    from pdpsgd.experiments.runner import run_all

    for dataset in datasets or study.datasets:
        if dataset not in (*study.datasets, ALWAYS_THERE):
            fail(
                f"Expected a data set out of {', '.join(study.datasets)} for {study.title!r}. "
                f"Got {dataset!r}."
            )
        searched = [(s, SEARCH_SEED) for trial in study.searches(dataset) if len(trial) > 1 for s in trial]
        run_all(_shared(searched, part), search, quick=quick, say=say)
        settings = study.settings(dataset, search)
        # All settings once, then again with the next seed: stopped early, there is something of everything.
        run_all(
            _shared([(s, seed) for seed in range(seeds) for s in settings], part),
            record,
            quick=quick,
            say=say,
        )


def _measure_effort(output: Path, search: Record, datasets: Sequence[str]) -> None:
    """The cheap part of table 2: plans, and the time of their first steps."""
    from pdpsgd.experiments.effort import measure_all

    effort = Record(output / "effort.jsonl")
    for dataset in datasets or STUDIES["table-2"].datasets:
        measure_all(table_2_settings(dataset, search), effort)


def _shared(runs: Sequence[tuple[Setting, int]], part: tuple[int, int]) -> Iterator[tuple[Setting, int]]:
    index, parts = part
    if not 1 <= index <= parts:
        fail(f"Expected a part from 1/{parts} to {parts}/{parts}. Got {index}/{parts}.")
    yield from runs[index - 1 :: parts]


def _weights_figure(search: Record, record: Record, folder: Path) -> list[Path]:
    from pdpsgd.experiments import figures

    points = []
    for setting in weight_settings("mnist", search):
        found = cell(setting, record)
        if found.mean is not None and setting.weights is not None:
            points.append(
                _point(found.mean, found.deviation, {"w1": setting.weights[0], "series": "ours, sound"})
            )
    if not points:
        return []
    chart = figures.sweep(
        points,
        x="w1",
        title="pdp-sgd-fixed on MNIST: accuracy against w1",
        subtitle=[
            "k = 0, sound bookkeeping. Diamond: the paper's printed accuracy at w1 = 0.7, as published.",
            'The paper: "the performances increase as w1 increases", similar from 0.7 on. With small w1',
            "the first of three rounds takes nearly all, and what is left buys rounds of little but noise.",
        ],
        marks=[figures.printed_point("w1", 0.7, "mnist", "pdp-sgd-fixed")],
    )
    return figures.save_chart(chart, folder, "weights-mnist")


def _intervals_figure(search: Record, record: Record, folder: Path) -> list[Path]:
    from pdpsgd.experiments import figures

    points = []
    for setting in interval_settings("mnist", search):
        found = cell(setting, record)
        if found.mean is not None:
            alpha = round(setting.population.highest - setting.population.lowest, 3)
            points.append(_point(found.mean, found.deviation, {"alpha": alpha, "series": setting.system}))
    if not points:
        return []
    chart = figures.sweep(
        points,
        x="alpha",
        title="MNIST: accuracy against the interval of budgets [0.5, 0.5 + alpha]",
        subtitle=[
            "k = 0, sound bookkeeping. Diamond: the paper's printed accuracy of PDP-SGD adaptive at",
            "alpha = 0.5, as published.",
        ],
        marks=[figures.printed_point("alpha", 0.5, "mnist", "pdp-sgd-adaptive")],
    )
    return figures.save_chart(chart, folder, "intervals-mnist")


def _point(mean: float, deviation: float | None, where: dict[str, object]) -> dict[str, object]:
    spread = deviation or 0.0
    return {**where, "accuracy": mean, "low": mean - spread, "high": mean + spread}
