"""Charts of what came out: accuracy over steps, by group and by seed, and what mechanisms use of what people allow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.reporting.charts.style import (
    PAPER,
    Chart,
    Palette,
    Rows,
    altair_module,
    data_of,
    levels_color,
    save,
    series_color,
)
from pdpsgd.training.measures import ACCURACY, Measure

if TYPE_CHECKING:
    from pdpsgd.training.comparison import Comparison


def save_comparison_chart(comparison: Comparison, path: Path, *, palette: Palette = PAPER) -> None:
    """Write what each mechanism uses of what people allow, and its accuracy, as one picture."""
    altair = altair_module()
    used = used_chart(used_rows(comparison), palette).properties(
        title="How much of what each tier allows is used", width=520
    )
    title = f"{comparison.measure.title.capitalize()} on test people"
    seeds = seeds_chart(seed_rows(comparison), palette, comparison.measure).properties(title=title, width=520)
    both = altair.vconcat(used, seeds).resolve_scale(color="independent", x="independent")
    save(both.properties(padding={"left": 24, "right": 8, "top": 5, "bottom": 5}), path, palette)


def used_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return what each mechanism uses of each tier's epsilon, where it is proven."""
    return [
        {
            "mechanism": outcome.mechanism,
            "tier": f"ε {tier.name}",
            "used": tier.used,
            "proven": tier.proven,
            "promised": tier.promised,
        }
        for outcome in comparison.outcomes
        for tier in outcome.tiers
        if tier.used is not None
    ]


def seed_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the figure of each run, and each mechanism's mean."""
    return [
        {"mechanism": outcome.mechanism, "seed": str(seed), "value": value, "mean": outcome.value}
        for outcome in comparison.outcomes
        for seed, value in zip(outcome.seeds, outcome.values, strict=True)
    ]


def lines_chart(rows: Rows, palette: Palette, *, y_title: str, form: str = ".1%") -> Chart:
    """Draw a figure over steps, a line per series; `rows` have step, series and value."""
    alt = altair_module()

    names = list(dict.fromkeys(row["series"] for row in rows))
    color = series_color(names, palette)
    return (
        alt.Chart(data_of(rows))
        .mark_line(strokeWidth=2, point={"size": 28, "filled": True})
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y(
                "value:Q",
                title=y_title,
                axis=alt.Axis(format="%" if form.endswith("%") else form),
                scale=alt.Scale(zero=False, nice=True),
            ),
            color=color,
            tooltip=["series:N", "step:Q", alt.Tooltip("value:Q", format=form)],
        )
    )


def shares_chart(rows: Rows, palette: Palette, *, x_title: str) -> Chart:
    """Draw accuracy of groups with 95 % intervals; `rows` have group, series, value, low, high, people."""
    alt = altair_module()

    names = list(dict.fromkeys(row["series"] for row in rows))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    several = len(names) > 1
    color = series_color(names, palette)
    more = {"yOffset": alt.YOffset("series:N", sort=names)} if several else {}
    base = alt.Chart(data_of(rows)).encode(y=alt.Y("group:N", sort=groups, title=None), color=color, **more)
    tooltip = [
        "group:N",
        "series:N",
        alt.Tooltip("value:Q", format=".1%"),
        alt.Tooltip("low:Q", format=".1%"),
        alt.Tooltip("high:Q", format=".1%"),
        alt.Tooltip("people:Q", format=","),
    ]
    scale = alt.Scale(zero=False, nice=True)
    x = alt.X("low:Q", title=x_title, axis=alt.Axis(format="%"), scale=scale)
    spans = base.mark_rule(strokeWidth=2, opacity=0.55).encode(x=x, x2="high:Q", tooltip=tooltip)
    dots = base.mark_circle(size=70, opacity=1).encode(x="value:Q", tooltip=tooltip)
    return (spans + dots).properties(height=max(90, (14 + 12 * len(names)) * len(groups)))


def differences_chart(rows: Rows, palette: Palette, *, x_title: str, percent: bool) -> Chart:
    """Draw differences of groups with 95 % intervals, and the line of no difference.

    `rows` have group, series, value, low, high and people; of shares, differences are in percent.
    """
    alt = altair_module()
    groups = [row["group"] for row in rows]
    form = "+.1%" if percent else "+.4~g"
    base = alt.Chart(data_of(rows)).encode(
        y=alt.Y("group:N", sort=groups, title=None),
        tooltip=[
            "group:N",
            "series:N",
            *(alt.Tooltip(f"{name}:Q", format=form) for name in ("value", "low", "high")),
            alt.Tooltip("people:Q", format=","),
        ],
    )
    x = alt.X(
        "low:Q", title=x_title, axis=alt.Axis(format="%" if percent else "~g"), scale=alt.Scale(nice=True)
    )
    spans = base.mark_rule(strokeWidth=2, opacity=0.55, color=palette.accent).encode(x=x, x2="high:Q")
    dots = base.mark_circle(size=70, opacity=1, color=palette.accent).encode(x="value:Q")
    none = alt.Chart(data_of([{"zero": 0}])).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(x="zero:Q")
    return (none + spans + dots).properties(height=max(90, 26 * len(groups)))


def reliability_chart(rows: Rows, palette: Palette) -> Chart:
    """Draw shares that were found against what was said, with the line on which both are the same.

    `rows` have said, found, low, high and records.
    """
    alt = altair_module()
    percent = alt.Axis(format="%")
    base = alt.Chart(data_of(rows)).encode(
        x=alt.X("said:Q", title="probability that the model says, on average", axis=percent),
        tooltip=[
            *(alt.Tooltip(f"{name}:Q", format=".1%") for name in ("said", "found", "low", "high")),
            alt.Tooltip("records:Q", format=","),
        ],
    )
    spans = base.mark_rule(strokeWidth=2, opacity=0.55, color=palette.accent).encode(
        y=alt.Y("low:Q", title="share that is so (line: 95 % interval)", axis=percent), y2="high:Q"
    )
    dots = base.mark_circle(size=70, opacity=1, color=palette.accent).encode(y="found:Q")
    ends = [min(row["said"] for row in rows), max(row["said"] for row in rows)]
    same = (
        alt.Chart(data_of([{"said": end, "found": end} for end in ends]))
        .mark_line(strokeDash=[4, 4], strokeWidth=1, color=palette.muted)
        .encode(x="said:Q", y="found:Q")
    )
    return same + spans + dots


def seeds_chart(rows: Rows, palette: Palette, measure: Measure = ACCURACY) -> Chart:
    """Draw the figure of each mechanism: a dot per seed, a mark at the mean.

    `rows` have mechanism, seed, value, mean.
    """
    alt = altair_module()
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    scale = alt.Scale(zero=False, nice=True)
    base = alt.Chart(data_of(rows)).encode(y=alt.Y("mechanism:N", sort=names, title=None))
    x = alt.X(
        "value:Q",
        title=f"{measure.title} on test people: dot = one seed, mark = mean",
        axis=alt.Axis(format="%" if measure.is_share else measure.chart_format),
        scale=scale,
    )
    tooltip = [
        "mechanism:N",
        "seed:N",
        alt.Tooltip("value:Q", format=measure.chart_format),
        alt.Tooltip("mean:Q", format=measure.chart_format),
    ]
    means = base.mark_tick(thickness=3, size=26, color=palette.promised, opacity=1).encode(
        x="mean:Q", tooltip=tooltip
    )
    dots = base.mark_circle(size=60, opacity=0.8, color=palette.accent).encode(x=x, tooltip=tooltip)
    return (dots + means).properties(height=max(90, 40 * len(names)))


def used_chart(rows: Rows, palette: Palette) -> Chart:
    """Draw the share of each tier's epsilon in use; `rows` have mechanism, tier, used, proven, promised."""
    alt = altair_module()

    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    return (
        alt.Chart(data_of(rows))
        .mark_bar(cornerRadiusEnd=3)
        .encode(
            y=alt.Y("mechanism:N", sort=names, title=None),
            yOffset=alt.YOffset("tier:N", sort=tiers),
            x=alt.X("used:Q", title="share of what people allow that is used", axis=alt.Axis(format="%")),
            color=levels_color(tiers, palette, title="tier"),
            tooltip=["mechanism:N", "tier:N", alt.Tooltip("used:Q", format=".1%"), "proven:Q", "promised:Q"],
        )
        .properties(height=max(90, 22 * len(tiers) * len(names)))
    )


def interval(right: float, people: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share of this many people."""
    if people == 0:
        return 0.0, 1.0
    z = 1.959964
    centre = (right + z * z / (2 * people)) / (1 + z * z / people)
    half = z * math.sqrt(right * (1 - right) / people + z * z / (4 * people * people)) / (1 + z * z / people)
    return max(0.0, centre - half), min(1.0, centre + half)
