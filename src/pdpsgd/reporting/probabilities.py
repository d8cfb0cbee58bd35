"""What a page says of a model's probabilities: log loss, calibration error, and the reliability chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE
from pdpsgd.training.finished_run import Run
from pdpsgd.training.probability_figures import LEAST_IN_A_BIN, probability_sentences

METHOD = (
    "Test people are put into up to ten groups of like size, of twenty at least, by what the model says of them. "
    "Log loss is the mean of -ln of the probability that the model gives to what is true; the expected calibration "
    "error is the mean difference between what is said and what is found."
)


def probability_parts(run: Run) -> list[str]:
    """Return sentences, the chart and its figures; nothing where a run has no probabilities."""
    found = run.evaluation.get("probabilities")
    if not found or not found["bins"]:
        return []
    of = _speaks_of(run)
    calibrated = run.result.get("calibration") is not None
    said = probability_sentences(run.evaluation, calibrated=calibrated)
    made = [parts.paragraph(each) for each in (*said, _calibrated(run))]
    rows = [
        {"said": each["said"], "found": each["found"], "records": each["records"]}
        | dict(zip(("low", "high"), charts.interval(each["found"], each["records"]), strict=True))
        for each in found["bins"]
        if each["records"] >= LEAST_IN_A_BIN
    ]
    if not rows:
        return made
    title = f"Do probabilities mean what they say? ({of})"
    data = parts.table(
        ("said, on average", "found", "95 % interval", "test records"),
        [
            (
                f"{r['said']:.1%}",
                f"{r['found']:.1%}",
                f"{r['low']:.1%} to {r['high']:.1%}",
                f"{r['records']:,}",
            )
            for r in rows
        ],
        caption=title,
    )
    chart = charts.reliability_chart(rows, PAGE).properties(height=260)
    made.append(
        parts.chart(chart, title=title, describe="Probabilities said against shares found.", data=data)
    )
    return [*made, parts.paragraph(METHOD)]


def _speaks_of(run: Run) -> str:
    classes = run.settings.get("classes") or []
    return f"probability of {classes[1]}" if len(classes) == 2 else "probability of the answer"


def _calibrated(run: Run) -> str:
    fitted: Mapping[str, Any] | None = run.result.get("calibration")
    if fitted is None:
        return "The probabilities are the network's own: nothing was calibrated."
    return (
        f"The probabilities are calibrated, on {fitted['fitted_on']}: temperature {fitted['temperature']:.3g} and a "
        "bias per class."
    )
