"""Charts of plans, runs and comparisons, as Altair charts: for files, and for the report page.

Colours come from a palette, so that the page can hand in CSS variables and follow light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.comparison import Comparison
    from pdpsgd.plans import Plan

Chart = Any  # altair.Chart or altair.LayerChart
Rows = Sequence[Mapping[str, Any]]

MOST_LINES = 5
MOST_BARS = 12
POINTS_OF_SPENDING = 13


@dataclass(frozen=True)
class Palette:
    """Colours by what they are for; levels run from the strictest budget to the most generous."""

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
        """So many of the level colours, spread over the ramp."""
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


def save_plan_chart(plan: Plan, path: Path, *, palette: Palette = PAPER) -> None:
    """Budgets, rates and spending of a plan in one picture: `.svg`, `.png` or a self-contained `.html`."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png", "html"):
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")
    altair = _altair()

    parts = [
        budgets_chart(plan, palette).properties(title="What people allow"),
        rates_chart(plan, palette).properties(title="How often they are drawn"),
        spending_chart(spending(plan), palette).properties(title="What they will have spent"),
    ]
    sized = [part.properties(width=520, height=180) for part in parts]
    _save(altair.vconcat(*sized).resolve_scale(color="independent", x="independent"), path, palette)


def save_comparison_chart(comparison: Comparison, path: Path, *, palette: Palette = PAPER) -> None:
    """What each mechanism uses of what people allow, and how good it is, in one picture."""
    altair = _altair()
    used = used_chart(used_rows(comparison), palette).properties(
        title="How much of what each tier allows is used", width=520
    )
    seeds = seeds_chart(seed_rows(comparison), palette).properties(title="Accuracy on test people", width=520)
    _save(altair.vconcat(used, seeds).resolve_scale(color="independent", x="independent"), path, palette)


def used_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """What each mechanism uses of each tier's epsilon, where it is proven."""
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
    """Accuracy of each run, and each mechanism's mean."""
    return [
        {"mechanism": outcome.mechanism, "seed": str(seed), "value": value, "mean": outcome.accuracy}
        for outcome in comparison.outcomes
        for seed, value in zip(outcome.seeds, outcome.accuracies, strict=True)
    ]


def level_name(epsilon: float, delta: float, deltas: int) -> str:
    """How a level is called: by its epsilon, and by its delta where there are several."""
    name = "no limit" if math.isinf(epsilon) else f"ε {epsilon:.4g}"
    return name if deltas <= 1 else f"{name}, δ {delta:.2g}"


def level_names(plan: Plan) -> list[str]:
    """Names of all levels of a plan, all different."""
    deltas = len({level.delta for level in plan.levels})
    names: list[str] = []
    for level in plan.levels:
        name = level_name(level.epsilon, level.delta, deltas)
        same = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({same + 1})" if same else name)
    return names


def selected_levels(plan: Plan, most: int = MOST_LINES) -> list[int]:
    """At most so many levels that are used at all, from the strictest to the most generous."""
    used = [
        index
        for index, level in enumerate(plan.levels)
        if math.isfinite(level.epsilon) and any(not r.exposure(index).costs_nothing for r in plan.rounds)
    ]
    used.sort(key=lambda index: (plan.levels[index].epsilon, plan.levels[index].delta))
    if len(used) <= most:
        return used
    return [used[round(i * (len(used) - 1) / (most - 1))] for i in range(most)]


def spending(plan: Plan) -> list[dict[str, Any]]:
    """What a few levels will have spent after some of the steps, by the plan's accountant."""
    from pdpsgd.accounting import accountant

    account, names = accountant(plan.accountant), level_names(plan)
    marks = sorted(
        {round(plan.steps * (i / (POINTS_OF_SPENDING - 1)) ** 2) for i in range(POINTS_OF_SPENDING)}
    )
    chosen = selected_levels(plan)
    rows = []
    for steps in marks:
        if steps == 0:
            costs = [account.epsilon(plan.levels[i].history, plan.levels[i].delta) for i in chosen]
        else:
            so_far = plan.prefix(steps)
            costs = account.epsilons(
                [so_far.history_of(i) for i in chosen], [plan.levels[i].delta for i in chosen]
            )
        rows += [
            {"step": steps, "level": names[i], "spent": cost, "promised": plan.levels[i].epsilon}
            for i, cost in zip(chosen, costs, strict=True)
        ]
    return rows


def budgets_chart(plan: Plan, palette: Palette) -> Chart:
    """How many people allow how much."""
    alt = _altair()

    rows = [
        {"epsilon": level.epsilon, "people": level.people, "delta": level.delta}
        for level in plan.levels
        if math.isfinite(level.epsilon)
    ]
    few = len(rows) <= MOST_BARS
    x = alt.X(
        "epsilon:O" if few else "epsilon:Q",
        title="epsilon that people allow",
        axis=alt.Axis(labelAngle=0, format=".3~g"),
    )
    mark = alt.Chart(_data(rows))
    bars = mark.mark_bar(color=palette.accent, size=26 if few else 4, cornerRadiusEnd=3)
    return bars.encode(x=x, y=alt.Y("people:Q", title="people"), tooltip=["epsilon:Q", "delta:Q", "people:Q"])


def promise_chart(plan: Plan, palette: Palette) -> Chart:
    """Promised against proven, level by level."""
    alt = _altair()

    names = level_names(plan)
    rows: list[dict[str, Any]] = [
        {"level": name, "promised": level.epsilon, "proven": level.proven_epsilon, "people": level.people}
        for name, level in zip(names, plan.levels, strict=True)
        if math.isfinite(level.epsilon)
    ]
    tooltip = [
        "level:N",
        "promised:Q",
        alt.Tooltip("proven:Q", format=".4f"),
        alt.Tooltip("people:Q", format=","),
    ]
    data = _data(rows)
    if len(rows) <= MOST_BARS:
        y = alt.Y("level:N", sort=[row["level"] for row in rows], title=None)
        bar = alt.Chart(data).mark_bar(color=palette.accent, cornerRadiusEnd=3, size=18)
        tick = alt.Chart(data).mark_tick(color=palette.promised, thickness=3, size=28, opacity=1)
        x = alt.X("proven:Q", title="epsilon: bar = proven, mark = promised")
        return (
            bar.encode(x=x, y=y, tooltip=tooltip) + tick.encode(x="promised:Q", y=y, tooltip=tooltip)
        ).properties(height=max(90, 40 * len(rows)))
    top = max(row["promised"] for row in rows)
    line = alt.Chart(alt.Data(values=[{"promised": 0, "limit": 0}, {"promised": top, "limit": top}]))
    limit = line.mark_line(color=palette.promised, strokeWidth=2).encode(x="promised:Q", y="limit:Q")
    dots = alt.Chart(data).mark_circle(color=palette.accent, opacity=0.8, size=45)
    points = dots.encode(
        x=alt.X("promised:Q", title="epsilon promised"),
        y=alt.Y("proven:Q", title="epsilon proven (line: the promise)"),
        tooltip=tooltip,
    )
    return (limit + points).properties(height=260)


def rates_chart(plan: Plan, palette: Palette) -> Chart:
    """The chance to be drawn at a step: by level, or over the rounds if there are several."""
    alt = _altair()

    names = level_names(plan)
    if len(plan.rounds) == 1:
        only = plan.rounds[0]
        rows = [
            {
                "epsilon": level.epsilon,
                "rate": only.participation[i] * only.sample_rates[i],
                "people": level.people,
            }
            for i, level in enumerate(plan.levels)
            if math.isfinite(level.epsilon)
        ]
        return (
            alt.Chart(_data(rows))
            .mark_line(color=palette.accent, point={"color": palette.accent, "size": 60, "filled": True})
            .encode(
                x=alt.X("epsilon:Q", title="epsilon that people allow"),
                y=alt.Y("rate:Q", title="chance per step"),
                tooltip=[
                    "epsilon:Q",
                    alt.Tooltip("rate:Q", format=".5f"),
                    alt.Tooltip("people:Q", format=","),
                ],
            )
        )
    chosen = selected_levels(plan)
    rows = []
    for i in chosen:
        done = 0
        for number, r in enumerate(plan.rounds):
            rate = r.participation[i] * r.sample_rates[i]
            shared: dict[str, Any] = {"level": names[i], "rate": rate, "round": number + 1}
            rows += [{"step": done, **shared}, {"step": done + r.steps, **shared}]
            done += r.steps
    return (
        alt.Chart(_data(rows))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("rate:Q", title="chance per step"),
            color=_levels_colour([names[i] for i in chosen], palette),
            tooltip=["level:N", "round:Q", alt.Tooltip("rate:Q", format=".5f")],
        )
    )


def noise_chart(plan: Plan, palette: Palette) -> Chart:
    """The noise of each round."""
    alt = _altair()

    rows: list[dict[str, Any]] = []
    done = 0
    for number, r in enumerate(plan.rounds):
        shared: dict[str, Any] = {"noise": r.noise_multiplier, "round": number + 1}
        rows += [{"step": done, **shared}, {"step": done + r.steps, **shared}]
        done += r.steps
    return (
        alt.Chart(_data(rows))
        .mark_line(color=palette.accent, strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("noise:Q", title="noise multiplier"),
            tooltip=["round:Q", alt.Tooltip("noise:Q", format=".4f")],
        )
    )


def spending_chart(rows: Rows, palette: Palette) -> Chart:
    """Epsilon spent over the steps, for a few levels; a thin line marks what was promised."""
    alt = _altair()

    names = list(dict.fromkeys(row["level"] for row in rows))
    colour = _levels_colour(names, palette)
    data = alt.Chart(_data(rows))
    lines = data.mark_line(strokeWidth=2, point={"size": 28, "filled": True}).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("spent:Q", title="epsilon spent"),
        color=colour,
        tooltip=["level:N", "step:Q", alt.Tooltip("spent:Q", format=".4f"), "promised:Q"],
    )
    limits = data.mark_line(strokeDash=[3, 3], strokeWidth=1).encode(x="step:Q", y="promised:Q", color=colour)
    return limits + lines


def lines_chart(rows: Rows, palette: Palette, *, y_title: str) -> Chart:
    """Accuracy over steps, a line a series; `rows` have step, series and value."""
    alt = _altair()

    names = list(dict.fromkeys(row["series"] for row in rows))
    colour = _series_colour(names, palette)
    return (
        alt.Chart(_data(rows))
        .mark_line(strokeWidth=2, point={"size": 28, "filled": True})
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y(
                "value:Q", title=y_title, axis=alt.Axis(format="%"), scale=alt.Scale(zero=False, nice=True)
            ),
            color=colour,
            tooltip=["series:N", "step:Q", alt.Tooltip("value:Q", format=".1%")],
        )
    )


def shares_chart(rows: Rows, palette: Palette, *, x_title: str) -> Chart:
    """Accuracy of groups with 95 % intervals; `rows` have group, series, value, low, high, people."""
    alt = _altair()

    names = list(dict.fromkeys(row["series"] for row in rows))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    several = len(names) > 1
    colour = _series_colour(names, palette)
    more = {"yOffset": alt.YOffset("series:N", sort=names)} if several else {}
    base = alt.Chart(_data(rows)).encode(y=alt.Y("group:N", sort=groups, title=None), color=colour, **more)
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


def seeds_chart(rows: Rows, palette: Palette) -> Chart:
    """Accuracy of each mechanism: a dot a seed, a mark at the mean.

    `rows` have mechanism, seed, value, mean.
    """
    alt = _altair()
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    scale = alt.Scale(zero=False, nice=True)
    base = alt.Chart(_data(rows)).encode(y=alt.Y("mechanism:N", sort=names, title=None))
    x = alt.X(
        "value:Q",
        title="accuracy on test people: dot = one seed, mark = mean",
        axis=alt.Axis(format="%"),
        scale=scale,
    )
    tooltip = [
        "mechanism:N",
        "seed:N",
        alt.Tooltip("value:Q", format=".1%"),
        alt.Tooltip("mean:Q", format=".1%"),
    ]
    means = base.mark_tick(thickness=3, size=26, color=palette.promised, opacity=1).encode(
        x="mean:Q", tooltip=tooltip
    )
    dots = base.mark_circle(size=60, opacity=0.8, color=palette.accent).encode(x=x, tooltip=tooltip)
    return (dots + means).properties(height=max(90, 40 * len(names)))


def used_chart(rows: Rows, palette: Palette) -> Chart:
    """How much of each tier's epsilon a mechanism uses; `rows` have mechanism, tier, used, proven,
    promised."""
    alt = _altair()

    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    return (
        alt.Chart(_data(rows))
        .mark_bar(cornerRadiusEnd=3)
        .encode(
            y=alt.Y("mechanism:N", sort=names, title=None),
            yOffset=alt.YOffset("tier:N", sort=tiers),
            x=alt.X("used:Q", title="share of what people allow that is used", axis=alt.Axis(format="%")),
            color=_levels_colour(tiers, palette, title="tier"),
            tooltip=["mechanism:N", "tier:N", alt.Tooltip("used:Q", format=".1%"), "proven:Q", "promised:Q"],
        )
        .properties(height=max(90, 22 * len(tiers) * len(names)))
    )


def styled(chart: Chart, palette: Palette, *, background: str | None = None) -> Chart:
    """The chart with quiet axes in the palette's colours."""
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


def interval(right: float, people: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of so many people."""
    if people == 0:
        return 0.0, 1.0
    z = 1.959964
    centre = (right + z * z / (2 * people)) / (1 + z * z / people)
    half = z * math.sqrt(right * (1 - right) / people + z * z / (4 * people * people)) / (1 + z * z / people)
    return max(0.0, centre - half), min(1.0, centre + half)


def _levels_colour(names: list[str], palette: Palette, *, title: str | None = None) -> Any:
    return _colour("level" if title is None else title, names, palette.of_levels(len(names)), title=title)


def _series_colour(names: list[str], palette: Palette) -> Any:
    colours = [palette.series[i % len(palette.series)] for i in range(len(names))]
    return _colour("series", names, colours) if len(names) > 1 else _altair().value(palette.accent)


def _colour(field: str, names: list[str], colours: list[str], *, title: str | None = None) -> Any:
    """Colours in the order of the names, with a legend that fits a phone."""
    alt = _altair()
    columns = max(1, 42 // (max(map(len, names), default=1) + 4))
    scale = alt.Scale(domain=names, range=colours)
    return alt.Color(f"{field}:N", sort=names, title=title, scale=scale, legend=alt.Legend(columns=columns))


def _save(picture: Chart, path: Path, palette: Palette) -> None:
    kind = path.suffix.lower().lstrip(".")
    by_kind: dict[str, dict[str, Any]] = {"html": {"inline": True}, "png": {"scale_factor": 2}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        styled(picture, palette, background="white").save(str(path), **by_kind.get(kind, {}))
    except OSError as error:
        fail(f"Expected to be able to write {str(path)!r}. Got: {error.strerror}.")


def _altair() -> Any:
    """Altair, loaded when a chart is drawn; its own types are too fine for building encodings step by
    step."""
    import altair

    return altair


def _data(rows: Rows) -> Any:
    return _altair().Data(values=list(rows))
