"""Charts of a ledger: what is spent and left of what people allow over all runs, by tier and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdpsgd.errors import fail
from pdpsgd.reporting.charts.plans import level_name
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

PARTS = ("spent before", "this run", "left")


def tier_names(tiers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each tier: its epsilon, and its delta where there are several."""
    deltas = len({tier["delta"] for tier in tiers})
    return [level_name(float(tier["epsilon"]), tier["delta"], deltas) for tier in tiers]


def share_rows(tiers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each tier of a run, the shares of mu^2 that add up to all that its people allow."""
    rows = []
    for name, tier in zip(tier_names(tiers), tiers, strict=True):
        before, mine = tier["share_before"], tier["share_this_run"]
        shares = (min(before, 1.0), min(mine, 1.0), max(1.0 - before - mine, 0.0))
        rows += [
            {"tier": name, "series": part, "order": order, "share": share, "people": tier["people"]}
            for order, (part, share) in enumerate(zip(PARTS, shares, strict=True))
        ]
    return rows


def shares_left_chart(rows: Rows, palette: Palette) -> Chart:
    """Draw what is spent and left as one bar per tier."""
    alt = altair_module()

    parts = list(dict.fromkeys(row["series"] for row in rows))
    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    colors = {
        "spent before": palette.muted,
        "spent": palette.muted,
        "this run": palette.accent,
        "left": palette.grid,
    }
    bars = alt.Chart(data_of(rows)).mark_bar(size=18)
    return bars.encode(
        x=alt.X(
            "share:Q",
            title="share of what people allow (mu²)",
            axis=alt.Axis(format=".0%"),
            scale=alt.Scale(domain=[0, 1]),
        ),
        y=alt.Y("tier:N", sort=tiers, title=None),
        order="order:Q",
        color=series_color(parts, palette, colors=[colors[part] for part in parts]),
        tooltip=[
            "tier:N",
            "series:N",
            alt.Tooltip("share:Q", format=".1%"),
            alt.Tooltip("people:Q", format=","),
        ],
    ).properties(height=max(90, 40 * len(tiers)))


def timeline_chart(rows: Rows, palette: Palette) -> Chart:
    """Draw the share that is left after each run, one line per tier."""
    alt = altair_module()

    names = list(dict.fromkeys(row["tier"] for row in rows))
    lines = alt.Chart(data_of(rows)).mark_line(strokeWidth=2, point={"size": 40, "filled": True})
    return lines.encode(
        x=alt.X("run:O", title="after run", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "share_left:Q",
            title="left on average",
            axis=alt.Axis(format=".0%"),
            scale=alt.Scale(domain=[0, 1]),
        ),
        color=levels_color(names, palette, title="tier"),
        tooltip=["tier:N", "run:O", "name:N", alt.Tooltip("share_left:Q", format=".1%")],
    )


def timeline_rows(timeline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is left after each run, for each tier, beginning with everything."""
    if not timeline:
        return []
    tiers = timeline[0]["by_tier"]
    begin = {"run": 0, "name": "before the first", "by_tier": [{**tier, "share_left": 1.0} for tier in tiers]}
    return [
        {"tier": name, "run": point["run"], "name": point["name"], "share_left": tier["share_left"]}
        for point in (begin, *timeline)
        for name, tier in zip(tier_names(point["by_tier"]), point["by_tier"], strict=True)
    ]


def save_ledger_chart(
    tiers: Sequence[Mapping[str, Any]],
    timeline: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    palette: Palette = PAPER,
) -> None:
    """Write what is allowed, spent and left as one picture: `.svg`, `.png` or a self-contained `.html`.

    Args:
        tiers: Tiers of the ledger, as plain data.
        timeline: What was left after each run, as plain data.
        path: The file.
        palette: Colors by what they are for.
    """
    if path.suffix.lower() not in (".svg", ".png", ".html"):
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")
    alt = altair_module()
    rows = [
        {"tier": name, "series": part, "order": order, "share": share, "people": tier["people"]}
        for name, tier in zip(tier_names(tiers), tiers, strict=True)
        for order, (part, share) in enumerate(
            (("spent", 1 - tier["mean_share_left"]), ("left", tier["mean_share_left"]))
        )
    ]
    made = [
        shares_left_chart(rows, palette).properties(title="Of what people allow over all runs, on average")
    ]
    if timeline:
        made.append(
            timeline_chart(timeline_rows(timeline), palette).properties(title="Over time", height=200)
        )
    sized = [part.properties(width=520) for part in made]
    save(alt.vconcat(*sized).resolve_scale(color="independent", x="independent"), path, palette)
