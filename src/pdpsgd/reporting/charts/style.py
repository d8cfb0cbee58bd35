"""The look of charts: colors by what they are for, quiet axes, and writing files.

Colours come from a palette, so that the page can hand in CSS variables and follow light, dark and print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdpsgd.errors import fail

Chart = Any  # altair.Chart or altair.LayerChart
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Palette:
    """Colors by what they are for; levels run from the strictest budget to the most generous."""

    ink: str = "#1f2430"
    muted: str = "#5f6778"
    grid: str = "#e3e6ec"
    accent: str = "#2a6fb5"
    promised: str = "#b4541a"
    levels: tuple[str, ...] = ("#7fb2e5", "#4a8fd0", "#2a6fb5", "#1b4f87", "#0f3159")
    series: tuple[str, ...] = (
        "#2a6fb5",
        "#b4541a",
        "#2f7d5b",
        "#8a4fa3",
        "#8a6d1b",
        "#4c5a70",
        "#a83a5b",
        "#3b7f8c",
    )

    def of_levels(self, count: int) -> list[str]:
        """Return this many of the level colors, spread over the ramp."""
        if count <= 1:
            return [self.accent]
        return [self.levels[round(i * (len(self.levels) - 1) / (count - 1))] for i in range(count)]


PAPER = Palette()
PAGE = Palette(
    ink="var(--ink)",
    muted="var(--muted)",
    grid="var(--grid)",
    accent="var(--accent)",
    promised="var(--promised)",
    levels=tuple(f"var(--level-{i})" for i in range(1, 6)),
    series=tuple(f"var(--series-{i})" for i in range(1, 9)),
)


def styled(chart: Chart, palette: Palette, *, background: str | None = None) -> Chart:
    """Return the chart with quiet axes in the palette's colors."""
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
    text = {"labelColor": palette.muted, "titleColor": palette.ink, "labelFont": font, "titleFont": font}
    return (
        chart.configure(background=background or "transparent", font=font)
        .configure_view(stroke=None)
        .configure_axis(
            **text,
            gridColor=palette.grid,
            domainColor=palette.muted,
            tickColor=palette.muted,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            labelLimit=260,
        )
        .configure_axisQuantitative(tickCount=6)
        .configure_legend(**text, orient="bottom", labelFontSize=12, symbolType="circle", labelLimit=260)
        .configure_title(color=palette.ink, anchor="start", fontSize=14, font=font)
    )


def levels_color(names: list[str], palette: Palette, *, title: str | None = None) -> Any:
    """Return the colors of levels or tiers, from the strictest on, with a legend."""
    return _color("level" if title is None else title, names, palette.of_levels(len(names)), title=title)


def series_color(names: list[str], palette: Palette, *, colors: list[str] | None = None) -> Any:
    """Return colors that tell series apart, with a legend; a single one needs none."""
    colors = colors or [palette.series[i % len(palette.series)] for i in range(len(names))]
    return _color("series", names, colors) if len(names) > 1 else altair_module().value(palette.accent)


def _color(field: str, names: list[str], colors: list[str], *, title: str | None = None) -> Any:
    """Return colors in the order of the names, with a legend that fits a phone."""
    alt = altair_module()
    columns = max(1, 42 // (max(map(len, names), default=1) + 4))
    scale = alt.Scale(domain=names, range=colors)
    return alt.Color(f"{field}:N", sort=names, title=title, scale=scale, legend=alt.Legend(columns=columns))


FITS_A_PHONE = """<meta name="viewport" content="width=device-width, initial-scale=1">
<style>.vega-embed {width: 100%} .vega-embed svg {max-width: 100%; height: auto; align-self: flex-start}</style>
"""


def save(picture: Chart, path: Path, palette: Palette) -> None:
    """Write a chart as `.svg`, `.png` or a self-contained `.html`."""
    kind = path.suffix.lower().lstrip(".")
    drawn = styled(picture, palette, background="white")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "html":
            # "</head>" is in the scripts, too; "<head>" first of all in the page itself.
            text = drawn.to_html(inline=True, embed_options={"renderer": "svg", "actions": False})
            path.write_text(text.replace("<head>", f"<head>\n{FITS_A_PHONE}", 1), encoding="utf-8")
        else:
            drawn.save(str(path), format=kind, **({"scale_factor": 2} if kind == "png" else {}))
    except OSError as error:
        fail(f"Expected to be able to write {str(path)!r}. Got: {error.strerror}.")


def altair_module() -> Any:
    """Import Altair when a chart is drawn; its own types are too fine for building encodings step by step."""
    import altair

    return altair


def data_of(rows: Rows) -> Any:
    """Return rows as a chart takes them."""
    return altair_module().Data(values=list(rows))
