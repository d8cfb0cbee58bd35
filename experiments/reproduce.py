"""One command for each table and figure: run what is missing, then write the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.record import Record
from experiments.search import SEARCH_SEED
from experiments.settings import Setting
from experiments.studies import (
    SHOWN_ON,
    STUDIES,
    WITHOUT_TRAINING,
    Study,
    table_2_settings,
)
from pdpsgd.errors import check_one_of, fail

OWN_RECORDS = ("table-3", "table-3-networks", "table-3-published", "fairness", "filter", "least-squares")
"""Studies that keep records of their own and are no part of `all`."""

WHAT = (*STUDIES, *WITHOUT_TRAINING, "pages", "all")
"""`pages` only writes tables and figures again, from the records that are there."""

ALWAYS_THERE = "digits"  # for a first look without benchmark files; no figure of the paper

Say = Callable[[str], None]


def reproduce(
    what: str,
    *,
    output: Path,
    datasets: Sequence[str] = (),
    systems: Sequence[str] = (),
    skews: Sequence[float] = (),
    seeds: int = 3,
    quick: bool = False,
    part: tuple[int, int] = (1, 1),
    say: Say = print,
    progress: bool = False,
) -> list[Path]:
    """Run what is missing of a table or figure, then write its pages; return the files written.

    `systems` and `skews` (the paper's k) leave out other runs.
    `quick` takes few steps, to show that everything runs, and keeps its records apart. `part` (i, n) takes
    every n-th run beginning with the i-th, so that n processes share the work. `progress` shows a bar.
    """
    from experiments.runner import run_all
    from experiments.systems import SYSTEMS

    check_one_of(WHAT, what=what)
    for system in systems:
        check_one_of(SYSTEMS, system=system)
    if quick:
        output = output / "quick"
    search, record = Record(output / "search.jsonl"), Record(output / "runs.jsonl")
    names = [*STUDIES] if what == "all" else [what] if what in STUDIES else []
    if what in ("table-2", "all"):
        _measure_effort(output, search, datasets, quick=quick)
    for name in names:
        study = STUDIES[name]
        for dataset in _datasets_of(study, datasets):
            searches = [
                (setting, SEARCH_SEED)
                for trial in study.searches(dataset)
                for setting in trial
                if len(trial) > 1 and (not systems or setting.system in systems)
            ]
            run_all(_shared(searches, part), search, quick=quick, say=say, progress=progress)
            settings = [
                setting
                for setting in study.settings(dataset, search)
                if (not systems or setting.system in systems) and (not skews or setting.population.k in skews)
            ]
            if not settings:
                say(f"nothing of {name} to run for {dataset}")
            # All settings once, then again with the next seed: stopped early, there is something of everything.
            runs = [(setting, seed) for seed in range(seeds) for setting in settings]
            run_all(_shared(runs, part), record, quick=quick, say=say, progress=progress)
    return write_pages(what, search, record, output)


def write_pages(what: str, search: Record, record: Record, output: Path) -> list[Path]:
    """Write the tables and figures that a study belongs to, from the records."""
    from experiments.fairness import write_fairness
    from experiments.figures_page import write_figures
    from experiments.overview import write_overview
    from experiments.table_3 import write_table_3
    from experiments.tables import PAGES

    written: list[Path] = []
    everything = what in ("all", "pages")
    page = SHOWN_ON.get(what, what)
    for name, make in PAGES.items():
        if everything or name in (page, "search"):
            written += make(search, record).write(output)
    if everything:
        written += [*write_table_3(output), *write_fairness(output)]
    written += write_overview(search, record, output)
    return written + write_figures(what, search, record, output)


def _datasets_of(study: Study, asked: Sequence[str]) -> Sequence[str]:
    for dataset in asked:
        if dataset not in (*study.datasets, ALWAYS_THERE):
            fail(
                f"Expected a data set out of {', '.join(study.datasets)} for {study.title!r}. "
                f"Got {dataset!r}."
            )
    return asked or study.datasets


def _measure_effort(output: Path, search: Record, datasets: Sequence[str], *, quick: bool) -> None:
    """Measure the cheap part of table 2: plans, and the time of their first steps."""
    from experiments.effort import measure_all

    effort = Record(output / "effort.jsonl")
    for dataset in datasets or STUDIES["table-2"].datasets:
        measure_all(table_2_settings(dataset, search), effort, quick=quick)


def _shared(runs: Sequence[tuple[Setting, int]], part: tuple[int, int]) -> Iterator[tuple[Setting, int]]:
    index, parts = part
    if not 1 <= index <= parts:
        fail(f"Expected a part from 1/{parts} to {parts}/{parts}. Got {index}/{parts}.")
    yield from runs[index - 1 :: parts]
