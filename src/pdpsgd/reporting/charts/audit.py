"""Charts of an audit: proven against measured, and the membership attack by tier. Vega-Lite, by altair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt

    from pdpsgd.audit.result import AuditResult


def proven_against_measured(result: AuditResult | dict[str, Any]) -> alt.LayerChart | alt.FacetChart:
    """Draw what is promised, proven and measured for each tier, from a result or its `to_dict()`."""
    import altair as alt

    audit = result if isinstance(result, dict) else result.to_dict()
    order = [row["tier"] for row in audit["rows"]]
    values = [
        {"tier": row["tier"], "what": what, "epsilon": row[key]}
        for row in audit["rows"]
        for what, key in (
            ("promised: at most", "promised"),
            ("proven: at most", "proven"),
            ("measured: at least", "measured"),
        )
        if row[key] is not None
    ]
    ranges = [row for row in audit["rows"] if row["proven"] is not None]
    tier = alt.Y("tier:N", sort=order, title="tier (epsilon asked for)")
    what = alt.Color("what:N", title=None, sort=None, legend=alt.Legend(orient="top"))
    between = (
        alt.Chart(_inline(ranges))
        .mark_rule(strokeWidth=6, opacity=0.25)
        .encode(y=tier, x=alt.X("measured:Q", title="epsilon"), x2="proven:Q")
    )
    points = (
        alt.Chart(_inline(values))
        .mark_point(filled=True, opacity=1)
        .encode(
            y=tier,
            x=alt.X("epsilon:Q", title="epsilon", scale=alt.Scale(domainMin=0)),
            color=what,
            shape=alt.Shape("what:N", title=None, sort=None, legend=None),
            # What is promised is drawn larger, so that it shows behind what is proven.
            size=alt.Size("what:N", sort=None, legend=None, scale=alt.Scale(range=[420, 110, 110])),
            tooltip=[alt.Tooltip("tier:N"), alt.Tooltip("what:N"), alt.Tooltip("epsilon:Q", format=".3g")],
        )
    )
    title = f"Proven and measured ({audit['confidence']:.0%} confidence)"
    return alt.layer(between, points).properties(title=title, width=480, height=alt.Step(34))


def membership_curves(result: AuditResult | dict[str, Any]) -> alt.LayerChart | alt.FacetChart | None:
    """Draw the attack's ROC curve for each tier, both axes on a log scale; None where no such attack was made."""
    import altair as alt

    audit = result if isinstance(result, dict) else result.to_dict()
    if not audit["membership"]:
        return None
    order = [found["tier"] for found in audit["membership"]]
    values = [
        {"tier": found["tier"], "false positives": x, "true positives": y}
        for found in audit["membership"]
        for x, y in found["roc"]
        if x > 0 and y > 0
    ]
    lowest = min(value["false positives"] for value in values)
    scale = alt.Scale(type="log", domain=[lowest, 1], clamp=True)
    encoding = {
        "x": alt.X("false positives:Q", scale=scale, title="false positives"),
        "y": alt.Y("true positives:Q", scale=scale, title="true positives"),
    }
    curves = (
        alt.Chart(_inline(values))
        .mark_line()
        .encode(
            **encoding,
            color=alt.Color("tier:N", sort=order, title="tier"),
            strokeDash=alt.StrokeDash("tier:N", sort=order, legend=None),
        )
    )
    chance = (
        alt.Chart(_inline([{"false positives": x, "true positives": x} for x in (lowest, 1.0)]))
        .mark_line(color="gray", strokeWidth=1)
        .encode(**encoding)
    )
    title = "Who can be found from the model (gray: guessing)"
    return alt.layer(chance, curves).properties(title=title, width=360, height=360)


def _inline(values: list[dict[str, Any]]) -> alt.InlineData:
    import altair as alt

    return alt.InlineData(values)
