"""Chart of an advice: signal-to-noise by batch size and steps, and by mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail
from pdpsgd.reporting.charts.style import PAPER, Chart, Palette, altair_module, data_of, save, series_color

if TYPE_CHECKING:
    from pdpsgd.planning.advice import Advice

RATIO = "signal-to-noise ratio"


def save_advice_chart(advice: Advice, path: Path, *, palette: Palette = PAPER) -> None:
    """Write the advice as one picture: `.svg`, `.png` or a self-contained `.html`."""
    if path.suffix.lower() not in (".svg", ".png", ".html"):
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")
    alt = altair_module()
    both = alt.vconcat(_by_batch(advice, palette), _by_mechanism(advice, palette))
    save(both.resolve_scale(color="independent", x="independent"), path, palette)


def _by_batch(advice: Advice, palette: Palette) -> Chart:
    """Draw a line for each number of steps, and a ring around what is recommended."""
    alt = altair_module()
    rows: list[dict[str, Any]] = [
        {"batch": round(each.batch_size), "series": f"{each.steps:,} steps", "ratio": each.signal_to_noise}
        for each in advice.settings
    ]
    best = {"batch": round(advice.best.batch_size), "ratio": advice.best.signal_to_noise}
    sizes = sorted({row["batch"] for row in rows})
    apart = [size for place, size in enumerate(sizes) if place == 0 or size > 1.1 * sizes[place - 1]]
    x = alt.X(
        "batch:Q",
        title="batch size",
        scale=alt.Scale(type="log", domain=[0.85 * sizes[0], 1.15 * sizes[-1]], nice=False),
        axis=alt.Axis(values=apart, format=",d", grid=False),
    )
    y = alt.Y("ratio:Q", title=RATIO, scale=alt.Scale(zero=True))
    names = list(dict.fromkeys(row["series"] for row in rows))
    lines = (
        alt.Chart(data_of(rows))
        .mark_line(strokeWidth=2, point={"size": 40, "filled": True})
        .encode(x=x, y=y, color=series_color(names, palette))
    )
    ring = alt.Chart(data_of([best])).mark_point(size=220, strokeWidth=2, color=palette.ink)
    title = "By batch size and steps (ring: recommended)"
    return (lines + ring.encode(x=x, y=y)).properties(title=title, width=520, height=200)


def _by_mechanism(advice: Advice, palette: Palette) -> Chart:
    alt = altair_module()
    rows = [{"mechanism": each.mechanism, "ratio": each.signal_to_noise} for each in advice.mechanisms]
    bars = alt.Chart(data_of(rows)).mark_bar(color=palette.accent, cornerRadiusEnd=3, size=22)
    y = alt.Y("mechanism:N", sort=[row["mechanism"] for row in rows], title=None)
    title = "By mechanism, at the recommended batch and steps"
    return bars.encode(x=alt.X("ratio:Q", title=RATIO), y=y).properties(title=title, width=520, height=110)
