"""A plan for people to read: what is promised, proven and used, level by level, grouped when there are
many."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

    from pdpsgd.planning.plans import Plan

MOST_ROWS = 24


@dataclass(frozen=True)
class Row:
    """Some neighbouring levels together."""

    epsilon: tuple[float, float]
    delta: tuple[float, float]
    people: int
    proven: tuple[float, float] | None
    used: float | None
    rate: tuple[float, float]


def rows(plan: Plan, most: int = MOST_ROWS) -> list[Row]:
    """At most so many rows; levels are grouped in their order, by equal numbers of levels."""
    groups = np.array_split(np.arange(len(plan.levels)), min(most, len(plan.levels)))
    return [_row(plan, group.tolist()) for group in groups]


def allowed_and_used(plan: Plan) -> tuple[float, float | None]:
    """Sum over people of the epsilon they allow (finite ones), and of what is proven to be used of it."""
    finite = [level for level in plan.levels if math.isfinite(level.epsilon)]
    allowed = math.fsum(level.people * level.epsilon for level in finite)
    if any(level.proven_epsilon is None for level in finite):
        return allowed, None
    return allowed, math.fsum(
        level.people * min(level.proven_epsilon or 0.0, level.epsilon) for level in finite
    )


def table(plan: Plan) -> Table:
    """The plan as a rich table."""
    from rich.table import Table

    made = Table(
        title=f"{plan.mechanism}, {plan.people:,} people, {plan.steps:,} steps", title_justify="left"
    )
    for name in ("people", "epsilon allowed", "proven", "used", "chance per step", "delta"):
        made.add_column(name, justify="right")
    for row in rows(plan):
        made.add_row(
            f"{row.people:,}",
            span(row.epsilon),
            "nothing proven" if row.proven is None else span(row.proven),
            "" if row.used is None else f"{100 * row.used:.1f} %",
            span(row.rate, digits=3),
            span(row.delta),
        )
    return made


def render(plan: Plan) -> str:
    """The table and what else there is to say, as text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=110, no_color=True)
    console.print(table(plan))
    for line in summary(plan):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return out.getvalue()


def summary(plan: Plan) -> list[str]:
    """What belongs under the table: noise per round, what stays unused, notes, warnings."""
    noise = [f"{r.noise_multiplier:.3g} over {r.steps:,} steps" for r in plan.rounds]
    shown = noise if len(noise) <= 6 else [*noise[:5], f"... {len(noise)} rounds"]
    lines = [
        f"Noise multiplier {', '.join(shown)}; accountant {plan.accountant}; bookkeeping {plan.bookkeeping}."
    ]
    allowed, used = allowed_and_used(plan)
    if used is not None and allowed > 0:
        lines.append(
            f"Of all that people allow (epsilon summed over people: {allowed:,.0f}) "
            f"{100 * used / allowed:.2f} % is used and {100 * (1 - used / allowed):.2f} % is not."
        )
    if plan.sensitive:
        provable = max(level.provable_epsilon or 0.0 for level in plan.levels)
        lines.append(
            "As published: only those who are drawn pay, which does not keep the promise. "
            f"What is provable for this plan: epsilon up to {provable:.4g}, "
            f"at a delta {len(plan.rounds)} times as large. "
            "Not for release; never publish the plan, it tells who was drawn."
        )
    return [*lines, *plan.notes]


def _row(plan: Plan, group: list[int]) -> Row:
    levels = [plan.levels[i] for i in group]
    proven = [level.proven_epsilon for level in levels if level.proven_epsilon is not None]
    finite = [
        x for x in levels if math.isfinite(x.epsilon) and x.epsilon > 0 and x.proven_epsilon is not None
    ]
    allowed = math.fsum(x.people * x.epsilon for x in finite)
    used = math.fsum(x.people * (x.proven_epsilon or 0.0) for x in finite)
    rates = [
        float(
            np.average(
                [r.participation[i] * r.sample_rates[i] for r in plan.rounds],
                weights=[r.steps for r in plan.rounds],
            )
        )
        if plan.rounds
        else 0.0
        for i in group
    ]
    return Row(
        epsilon=(min(x.epsilon for x in levels), max(x.epsilon for x in levels)),
        delta=(min(x.delta for x in levels), max(x.delta for x in levels)),
        people=sum(x.people for x in levels),
        proven=(min(proven), max(proven)) if len(proven) == len(levels) else None,
        used=used / allowed if allowed > 0 else None,
        rate=(min(rates), max(rates)),
    )


def span(values: tuple[float, float], digits: int = 4) -> str:
    """One value, or the two ends of a range."""
    low, high = ("no limit" if math.isinf(value) else f"{value:.{digits}g}" for value in values)
    return low if low == high else f"{low} to {high}"
