"""Chart of an advice: signal-to-noise by batch size and steps, and by mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail
from pdpsgd.reporting.charts.style import PAPER, Palette, altair_module, data_of, save, series_color

if TYPE_CHECKING:
    from pdpsgd.planning.advice import Advice


def save_advice_chart(advice: Advice, path: Path, *, palette: Palette = PAPER) -> None:
    """Write the advice as one picture: `.svg`, `.png` or a self-contained `.html`."""
    if path.suffix.lower() not in (".svg", ".png", ".html"):
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")
    alt = altair_module()
    lines: list[dict[str, Any]] = [
        {"batch": round(each.batch_size), "series": f"{each.steps:,} steps", "ratio": each.signal_to_noise}
        for each in advice.settings
    ]
    bars = [{"mechanism": each.mechanism, "ratio": each.signal_to_noise} for each in advice.mechanisms]
    names = list(dict.fromkeys(row["series"] for row in lines))
    y_title = "signal-to-noise ratio"
    by_batch = (
        alt.Chart(data_of(lines))
        .mark_line(strokeWidth=2, point={"size": 40, "filled": True})
        .encode(
            x=alt.X("batch:Q", title="batch size", scale=alt.Scale(type="log")),
            y=alt.Y("ratio:Q", title=y_title, scale=alt.Scale(zero=True)),
            color=series_color(names, palette),
        )
        .properties(title="By batch size and steps", width=520, height=200)
    )
    order = [row["mechanism"] for row in bars]
    by_mechanism = (
        alt.Chart(data_of(bars))
        .mark_bar(color=palette.accent, cornerRadiusEnd=3, size=22)
        .encode(x=alt.X("ratio:Q", title=y_title), y=alt.Y("mechanism:N", sort=order, title=None))
        .properties(title="By mechanism, at the recommended batch and steps", width=520, height=110)
    )
    save(alt.vconcat(by_batch, by_mechanism), path, palette)
