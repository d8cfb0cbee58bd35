"""Charts of a plan: who allows what, sampling rates, noise multipliers, and spending over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail
from pdpsgd.planning.plan_table import span
from pdpsgd.reporting.charts.style import (
    PAPER,
    Chart,
    Palette,
    Rows,
    altair_module,
    data_of,
    levels_color,
    save,
)

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

Allows = Sequence[tuple[float, float]]
"""The least and the most that people of each level allow over all runs."""
MOST_LINES = 5
MOST_BARS = 12
POINTS_OF_SPENDING = 13


def save_plan_chart(plan: Plan, path: Path, *, palette: Palette = PAPER) -> None:
    """Write budgets, rates and spending of a plan as one picture: `.svg`, `.png` or a self-contained `.html`."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png", "html"):
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")
    altair = altair_module()

    shared = plan.ledger is not None
    parts = [
        budgets_chart(plan, palette).properties(
            title="This run's share of what people allow" if shared else "What people allow"
        ),
        rates_chart(plan, palette).properties(title="How often they are sampled"),
        spending_chart(spending(plan), palette).properties(
            title="What this run will have taken" if shared else "What they will have spent"
        ),
    ]
    sized = [part.properties(width=520, height=180) for part in parts]
    save(altair.vconcat(*sized).resolve_scale(color="independent", x="independent"), path, palette)


def level_name(epsilon: float, delta: float, deltas: int) -> str:
    """Return the name of a level: its epsilon, and its delta where there are several."""
    name = "no limit" if math.isinf(epsilon) else f"ε {epsilon:.4g}"
    return name if deltas <= 1 else f"{name}, δ {delta:.2g}"


def epsilon_title(plan: Plan) -> str:
    """Say what the epsilon of a level is: all that its people allow, or a run's share of it."""
    return "epsilon that people allow" if plan.ledger is None else "epsilon that is this run's share"


def level_names(plan: Plan, allows: Allows | None = None) -> list[str]:
    """Return names of all levels of a plan, all different.

    Args:
        plan: The plan.
        allows: What people of each level allow over all runs, if the plan's epsilons are a run's share of it.

    Returns:
        A name per level: its epsilon, or what its people allow and the share.
    """
    deltas = len({level.delta for level in plan.levels})
    names: list[str] = []
    for index, level in enumerate(plan.levels):
        name = level_name(level.epsilon, level.delta, deltas)
        if plan.ledger is not None:
            share = name.removeprefix("ε ")
            name = f"share {share}" if allows is None else f"allow {span(allows[index])}, share {share}"
        same = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({same + 1})" if same else name)
    return names


def selected_levels(plan: Plan, most: int = MOST_LINES) -> list[int]:
    """Return at most this many of the levels that are used, from the strictest to the most generous."""
    used = [
        index
        for index, level in enumerate(plan.levels)
        if math.isfinite(level.epsilon) and any(not r.exposure(index).costs_nothing for r in plan.rounds)
    ]
    used.sort(key=lambda index: (plan.levels[index].epsilon, plan.levels[index].delta))
    if len(used) <= most:
        return used
    return [used[round(i * (len(used) - 1) / (most - 1))] for i in range(most)]


def spending(plan: Plan, allows: Allows | None = None) -> list[dict[str, Any]]:
    """Return what a few levels will have spent after some of the steps, by the plan's accountant."""
    from pdpsgd.accounting.registry import accountant

    account, names = accountant(plan.accountant), level_names(plan, allows)
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
    """Draw how many people allow how much."""
    alt = altair_module()

    rows = [
        {"epsilon": level.epsilon, "people": level.people, "delta": level.delta}
        for level in plan.levels
        if math.isfinite(level.epsilon)
    ]
    few = len(rows) <= MOST_BARS
    x = alt.X(
        "epsilon:O" if few else "epsilon:Q",
        title=epsilon_title(plan),
        axis=alt.Axis(labelAngle=0, format=".3~g"),
    )
    mark = alt.Chart(data_of(rows))
    bars = mark.mark_bar(color=palette.accent, size=26 if few else 4, cornerRadiusEnd=3)
    return bars.encode(x=x, y=alt.Y("people:Q", title="people"), tooltip=["epsilon:Q", "delta:Q", "people:Q"])


def promise_chart(plan: Plan, palette: Palette, allows: Allows | None = None) -> Chart:
    """Draw promised against proven, level by level; of a run in a ledger, its share against what it takes."""
    alt = altair_module()

    names = level_names(plan, allows)
    promised, proven = (
        ("promised", "proven") if plan.ledger is None else ("this run's share", "what it takes")
    )
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
    data = data_of(rows)
    if len(rows) <= MOST_BARS:
        y = alt.Y("level:N", sort=[row["level"] for row in rows], title=None)
        bar = alt.Chart(data).mark_bar(color=palette.accent, cornerRadiusEnd=3, size=18)
        tick = alt.Chart(data).mark_tick(color=palette.promised, thickness=3, size=28, opacity=1)
        x = alt.X("proven:Q", title=[f"epsilon: bar = {proven},", f"mark = {promised}"])
        return (
            bar.encode(x=x, y=y, tooltip=tooltip) + tick.encode(x="promised:Q", y=y, tooltip=tooltip)
        ).properties(height=max(90, 40 * len(rows)))
    top = max(row["promised"] for row in rows)
    line = alt.Chart(alt.Data(values=[{"promised": 0, "limit": 0}, {"promised": top, "limit": top}]))
    limit = line.mark_line(color=palette.promised, strokeWidth=2).encode(x="promised:Q", y="limit:Q")
    dots = alt.Chart(data).mark_circle(color=palette.accent, opacity=0.8, size=45)
    points = dots.encode(
        x=alt.X("promised:Q", title=f"epsilon: {promised}"),
        y=alt.Y("proven:Q", title=f"epsilon: {proven} (line: {promised})"),
        tooltip=tooltip,
    )
    return (limit + points).properties(height=260)


def rates_chart(plan: Plan, palette: Palette, allows: Allows | None = None) -> Chart:
    """Draw the sampling rate: by level, or over the rounds if there are several."""
    alt = altair_module()

    names = level_names(plan, allows)
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
            alt.Chart(data_of(rows))
            .mark_line(color=palette.accent, point={"color": palette.accent, "size": 60, "filled": True})
            .encode(
                x=alt.X("epsilon:Q", title=epsilon_title(plan)),
                y=alt.Y("rate:Q", title="sampling rate"),
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
        alt.Chart(data_of(rows))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("rate:Q", title="sampling rate"),
            color=levels_color([names[i] for i in chosen], palette),
            tooltip=["level:N", "round:Q", alt.Tooltip("rate:Q", format=".5f")],
        )
    )


def noise_chart(plan: Plan, palette: Palette) -> Chart:
    """Draw the noise multiplier of each round."""
    alt = altair_module()

    rows: list[dict[str, Any]] = []
    done = 0
    for number, r in enumerate(plan.rounds):
        shared: dict[str, Any] = {"noise": r.noise_multiplier, "round": number + 1}
        rows += [{"step": done, **shared}, {"step": done + r.steps, **shared}]
        done += r.steps
    return (
        alt.Chart(data_of(rows))
        .mark_line(color=palette.accent, strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("noise:Q", title="noise multiplier"),
            tooltip=["round:Q", alt.Tooltip("noise:Q", format=".4f")],
        )
    )


def spending_chart(rows: Rows, palette: Palette) -> Chart:
    """Draw epsilon spent over the steps, for a few levels; a thin line marks what was promised."""
    alt = altair_module()

    names = list(dict.fromkeys(row["level"] for row in rows))
    color = levels_color(names, palette)
    data = alt.Chart(data_of(rows))
    lines = data.mark_line(strokeWidth=2, point={"size": 28, "filled": True}).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("spent:Q", title="epsilon spent"),
        color=color,
        tooltip=["level:N", "step:Q", alt.Tooltip("spent:Q", format=".4f"), "promised:Q"],
    )
    limits = data.mark_line(strokeDash=[3, 3], strokeWidth=1).encode(x="step:Q", y="promised:Q", color=color)
    return limits + lines
