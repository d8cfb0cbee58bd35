"""The page of two finished models on the same test people: which is better, for whom, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE
from pdpsgd.training.finished_run import Run, read_run
from pdpsgd.training.model_comparison import METHOD
from pdpsgd.training.paired_measures import HIGHER_IS_BETTER, SHARES

if TYPE_CHECKING:
    from pdpsgd.training.model_comparison import Figure, Group, ModelComparison

EXPLAINED = {
    "accuracy": "the share of test records that are put into the right class (of one class: its recall)",
    "balanced accuracy": "the mean of the classes' recalls, so that rare classes count as much as frequent ones",
    "AUC": "how often a record of a class gets a higher probability for it than one of another class (0.5: chance)",
    "log loss": "how far off probabilities are: the mean of minus the logarithm of what the right class was given",
    "RMSE": "the root of the mean squared error, in the unit of the label",
    "MAE": "the mean absolute error, in the unit of the label",
    "R^2": "1 less the squared error over that of always answering the mean label (1: perfect, 0: no better than that)",
}


def models_page(made: ModelComparison, runs: Sequence[str], *, test_file: str) -> str:
    """Return the page as text.

    Args:
        made: The comparison.
        runs: The folders of both runs.
        test_file: What the test people were read from.
    """
    kinds = [(kind, list(groups)) for kind, groups in groupby(made.groups, key=lambda group: group.kind)]
    whole, *others = kinds
    sections = [
        parts.Section("Overview", "On all test people", *_overview(made, whole[1][0], test_file)),
        *(parts.Section(f"By {kind}", f"By {kind}", *_by(made, kind, groups)) for kind, groups in others),
        parts.Section("Runs", "The two runs", *_runs([read_run(run) for run in runs], made.names)),
        parts.Section("Remarks", "What to keep in mind", *_remarks(made)),
    ]
    return parts.page(
        title=f"{made.names[0]} and {made.names[1]}",
        kind="Two models",
        verdict=_verdict(made),
        sections=sections,
    )


def _verdict(made: ModelComparison) -> str:
    first, second = made.main
    better = {each.verdict for each in (first, second)}
    names = {"first is better": made.names[0], "second is better": made.names[1]}
    shown = better - {"no difference shown"}
    if not shown:
        headline = f"No difference is shown, by {first.name} or by {second.name}."
    elif len(shown) == 2:
        headline = (
            f"{names[first.verdict]} is better by {first.name}, {names[second.verdict]} by {second.name}."
        )
    else:
        by = [each.name for each in (first, second) if each.verdict in shown]
        headline = f"{names[shown.pop()]} is better by {' and '.join(by)}."
    if made.on_lists:
        return parts.verdict(
            False, "Not to be published: some test people are on a run's list.", f"{headline} {made.answer()}"
        )
    return parts.verdict(True, headline, made.answer())


def _overview(made: ModelComparison, group: Group, test_file: str) -> list[str]:
    used = [
        f"{figure.name.capitalize() if figure.name.islower() else figure.name}: {EXPLAINED[figure.name]}."
        for figure in group.figures
    ]
    return [
        parts.paragraph(
            f"Both models on the same {group.people:,} test people of {test_file}. A difference is the second model's "
            "figure less the first's, of shares in points; where its interval does not contain 0, one is better for "
            "people like these."
        ),
        _table([group], made, caption="Both models on all test people"),
        parts.bullets(used),
    ]


def _by(made: ModelComparison, kind: str, groups: Sequence[Group]) -> list[str]:
    name = made.main[0].name
    rows = [
        {
            "group": f"{group.name} ({group.people:,})",
            "series": _short(figure, made),
            "value": figure.difference,
            "low": figure.low,
            "high": figure.high,
            "people": group.people,
        }
        for group in groups
        for figure in group.figures
        if figure.name == name
    ]
    side = "right" if HIGHER_IS_BETTER[name] else "left"
    what = "difference (line: 95 % interval)"
    return [
        parts.chart(
            charts.differences_chart(rows, PAGE, x_title=what, percent=name in SHARES),
            title=f"Difference in {name} by {kind} (number of people); {side} of 0, {made.names[1]} is better",
            describe=f"Difference of both models in {name} on test people by {kind}, with 95 % intervals.",
        ),
        _table(groups, made, caption=f"Both models by {kind}"),
    ]


def _short(figure: Figure, made: ModelComparison) -> str:
    better = {"first is better": made.names[0], "second is better": made.names[1]}.get(figure.verdict)
    return "no difference shown" if better is None else f"{better} is better"


def _table(groups: Sequence[Group], made: ModelComparison, *, caption: str) -> str:
    rows = [
        (
            f"{group.name} ({group.people:,})" if index == 0 else "",
            figure.name,
            figure.text(figure.first),
            figure.text(figure.second),
            _change(figure),
        )
        for group in groups
        for index, figure in enumerate(group.figures)
    ]
    head = ("people", "figure", *made.names, "difference (95 % interval; *: without 0)")
    return parts.table(head, rows, caption=caption)


def _change(figure: Figure) -> str:
    """Write a difference and its interval, without units: the text above has them."""
    difference, interval = figure.change(figure.difference), figure.interval
    sure = "" if figure.verdict.startswith("no") else " *"
    return f"{difference} ({interval}){sure}".replace(" points", "")


def _runs(runs: Sequence[Run], names: tuple[str, str]) -> list[str]:
    def row(name: str, run: Run) -> tuple[str, ...]:
        return (name, str(run.settings.get("date", "")), run.plan.mechanism, f"{run.plan.people:,}")

    def said(name: str, run: Run) -> str:
        found = run.verdict
        return f"{name}: {found['text'] if found else 'no verdict.'}"

    rows = [row(name, run) for name, run in zip(names, runs, strict=True)]
    return [
        parts.table(("run", "date", "mechanism", "people"), rows, caption="The two runs"),
        parts.bullets(said(name, run) for name, run in zip(names, runs, strict=True)),
    ]


def _remarks(made: ModelComparison) -> list[str]:
    groups = len(made.groups)
    many = [f"{groups} groups: one in twenty intervals misses by chance alone."] if groups > 8 else []
    cost = (
        "Test people are promised nothing: figures on them are computed without noise. Groups of fewer than ten people "
        "are left out."
    )
    return [parts.bullets([METHOD, cost, *many, *made.notes])]
