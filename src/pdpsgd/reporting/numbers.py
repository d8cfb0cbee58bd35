"""What a page says of predictions that are numbers: how far they are off, over the steps and by tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE
from pdpsgd.training.measures import RMSE
from pdpsgd.training.regression import error_sentences

if TYPE_CHECKING:
    from pdpsgd.training.finished_run import Run


def headline(evaluation: Mapping[str, Any]) -> tuple[str, str]:
    """Return the figure for the top of the page, and its name."""
    return (
        f"root mean squared error on {evaluation['people']:,} test people",
        f"{float(evaluation['errors']['rmse']):.4g}",
    )


def number_parts(run: Run) -> list[str]:
    """Say how far predictions are off on test people, and draw it over the steps."""
    label, limits = run.settings.get("label"), run.settings.get("label_range")
    unit = "Figures are in the unit of the label" + (f" ({label})." if label else ".")
    if limits:
        unit += (
            f" Its public range is {limits[0]:g} to {limits[1]:g}: labels outside count as its nearer end."
        )
    made = [parts.paragraph(each) for each in (*error_sentences(run.evaluation), unit)]
    rows = _rows(run)
    if not rows:
        return made
    title = "Root mean squared error on test people over the steps"
    data = parts.series_table(rows, series="series", value="value", form=".4g", caption=title)
    drawn = charts.lines_chart(rows, PAGE, y_title=RMSE.title, form=RMSE.chart_format).properties(height=240)
    return [*made, parts.chart(drawn, title=title, describe=f"{title}.", data=data)]


def tier_parts(run: Run) -> list[str]:
    """Lay out the errors by tier."""
    tiers = run.evaluation.get("errors_by_tier") or {}
    if not tiers:
        return [parts.paragraph("The tiers of test people are not known, so nothing can be said by tier.")]
    rows = [
        (
            f"ε {tier}",
            f"{float(each['rmse']):.4g}",
            f"{float(each['mae']):.4g}",
            "" if each["r_squared"] is None else f"{each['r_squared']:.3f}",
            f"{each['people']:,}",
        )
        for tier, each in tiers.items()
    ]
    head = ("tier", "root mean squared error", "mean absolute error", "R^2", "test people")
    return [parts.table(head, rows, caption="By tier: epsilon that test people allow")]


def _rows(run: Run) -> list[dict[str, Any]]:
    """Return the line over all test people, and one for each tier where there are few."""
    rows = []
    for record in run.history:
        if record.get("test_rmse") is None or record["test_rmse"] == "inf":
            continue
        rows.append({"step": record["step"], "series": "all", "value": record["test_rmse"]})
        tiers = record.get("rmse_by_tier") or {}
        if len(tiers) <= 4:
            rows += [{"step": record["step"], "series": f"ε {t}", "value": v} for t, v in tiers.items()]
    return rows
