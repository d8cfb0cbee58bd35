"""A plan for people to read: promised, proven and used by level, grouped where there are many."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.accounting.history import exposures_of
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.planning.signal import signal_efficiency

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 24
MOST_ROUNDS = 6


@dataclass(frozen=True)
class Row:
    """Some adjacent levels together; pairs are the smallest and the largest value."""

    epsilon: tuple[float, float]
    delta: tuple[float, float]
    people: int
    proven: tuple[float, float] | None
    used: float | None
    rate: tuple[float, float]


def rows(levels: Sequence[Level], rounds: Sequence[Round], *, most: int = MOST_ROWS) -> list[Row]:
    """Group the levels, in their order, into at most `most` rows.

    Args:
        levels: the levels of a plan.
        rounds: its rounds.
        most: maximum number of rows; each has about the same number of levels.

    Returns:
        The rows of the plan's table.
    """
    groups = np.array_split(np.arange(len(levels)), min(most, len(levels)))
    return [_row([levels[i] for i in group], [_rate(i, rounds) for i in group]) for group in groups]


def allowed_and_used(levels: Sequence[Level]) -> tuple[float, float | None]:
    """Sum over people the (finite) epsilon they allow, and what is proven to be used of it."""
    finite = [level for level in levels if math.isfinite(level.epsilon)]
    allowed = math.fsum(level.people * level.epsilon for level in finite)
    if any(level.proven_epsilon is None for level in finite):
        return allowed, None
    return allowed, math.fsum(
        level.people * min(level.proven_epsilon or 0.0, level.epsilon) for level in finite
    )


def headings(*, of_ledger: bool) -> tuple[str, str]:
    """Name a level's epsilon and what is proven: of a run in a ledger they are its share of what people allow."""
    return ("this run's share", "it takes") if of_ledger else ("epsilon allowed", "proven")


def table(
    mechanism: str,
    levels: Sequence[Level],
    rounds: Sequence[Round],
    *,
    accountant: str = "pld",
    of_ledger: bool = False,
    allows: Sequence[tuple[float, float]] | None = None,
) -> Table:
    """Lay a plan out as a rich table.

    Args:
        mechanism: the plan's mechanism, for the title.
        levels: the plan's levels.
        rounds: the plan's rounds.
        accountant: the name of the plan's accountant; beside certificates the exact figure is shown, which holds if
            nothing was chosen by results, unless `allows` takes its place.
        of_ledger: whether the levels' epsilons are shares of what people allow over all runs.
        allows: the least and the most that people of each level allow over all runs, if a ledger tells.

    Returns:
        The table, one row per level or per group of levels.
    """
    from rich.table import Table

    people, steps = sum(level.people for level in levels), sum(r.steps for r in rounds)
    laid_out = Table(title=f"{mechanism}, {people:,} people, {steps:,} steps", title_justify="left")
    by_certificates = (
        accountant == "certificate" and allows is None
    )  # else the plan's note says what it costs
    exact = ("if all was fixed",) if by_certificates else ()
    whole = () if allows is None else ("allow over all runs",)
    delta = "at delta" if of_ledger else "delta"
    for name in ("people", *whole, *headings(of_ledger=of_ledger), *exact, "used", "sampling rate", delta):
        laid_out.add_column(name, justify="right")
    groups = np.array_split(np.arange(len(levels)), min(MOST_ROWS, len(levels)))
    for row, group in zip(rows(levels, rounds), groups, strict=True):
        ends = (
            [_exact_epsilon(int(i), levels, rounds) for i in (group[0], group[-1])] if by_certificates else []
        )
        laid_out.add_row(
            f"{row.people:,}",
            *(() if allows is None else (span(range_of([allows[i] for i in group])),)),
            span(row.epsilon),
            "nothing proven" if row.proven is None else span(row.proven),
            *((span((min(ends), max(ends))),) if ends else ()),
            "" if row.used is None else f"{100 * row.used:.1f} %",
            span(row.rate, digits=3),
            span(row.delta, digits=3 if of_ledger else 4),
        )
    return laid_out


def summary(
    levels: Sequence[Level], rounds: Sequence[Round], *, accountant: str, of_ledger: bool = False
) -> list[str]:
    """Say what belongs under the table: noise multipliers, and how much of what people allow is used.

    Args:
        levels: the plan's levels.
        rounds: the plan's rounds.
        accountant: the name of the accountant that made the plan.
        of_ledger: as for `table`.

    Returns:
        Up to four sentences, each an entry.
    """
    noise = [f"{r.noise_multiplier:.3g} over {r.steps:,} steps" for r in rounds]
    shown = noise if len(noise) <= MOST_ROUNDS else [*noise[: MOST_ROUNDS - 1], f"... {len(noise)} rounds"]
    lines = [f"Noise multiplier {', '.join(shown)}; accountant {accountant}."]
    allowed, used = allowed_and_used(levels)
    if used is not None and allowed > 0:
        whole = "this run's share" if of_ledger else "all that people allow"
        lines.append(
            f"{100 * used / allowed:.2f} % of {whole} is used (epsilon summed over people: "
            f"{used:,.0f} of {allowed:,.0f})."
        )
    if of_ledger:
        lines.append(
            "The share is of what people allow over all runs, and has a delta of its own, at most theirs."
        )
    efficiency = signal_efficiency(levels, rounds)
    if rounds and efficiency is not None:
        lines.append(
            f"Signal efficiency {efficiency:.3f}: the share of the most signal that any plan gets from these budgets."
        )
    return lines


def _exact_epsilon(level: int, levels: Sequence[Level], rounds: Sequence[Round]) -> float:
    """What a level's exposures cost together if no plan was chosen by results: what adaptivity is paid beside."""
    from pdpsgd.accounting.registry import accountant

    exposures = exposures_of(levels[level].history) + tuple(r.exposure(level) for r in rounds)
    return accountant("pld").epsilon(exposures, levels[level].delta)


def render(table: Table, lines: Sequence[str]) -> str:
    """Print the table and the lines under it as text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=110, no_color=True)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return out.getvalue()


def _rate(level: int, rounds: Sequence[Round]) -> float:
    """The average over steps of the probability to be in the batch."""
    if not rounds:
        return 0.0
    rates = [r.participation[level] * r.sample_rates[level] for r in rounds]
    return float(np.average(rates, weights=[r.steps for r in rounds]))


def _row(levels: list[Level], rates: list[float]) -> Row:
    proven = [level.proven_epsilon for level in levels if level.proven_epsilon is not None]
    finite = [
        x for x in levels if math.isfinite(x.epsilon) and x.epsilon > 0 and x.proven_epsilon is not None
    ]
    allowed = math.fsum(x.people * x.epsilon for x in finite)
    used = math.fsum(x.people * (x.proven_epsilon or 0.0) for x in finite)
    return Row(
        epsilon=(min(x.epsilon for x in levels), max(x.epsilon for x in levels)),
        delta=(min(x.delta for x in levels), max(x.delta for x in levels)),
        people=sum(x.people for x in levels),
        proven=(min(proven), max(proven)) if len(proven) == len(levels) else None,
        used=used / allowed if allowed > 0 else None,
        rate=(min(rates), max(rates)),
    )


def span(values: tuple[float, float], digits: int = 4) -> str:
    """Format one value, or the two ends of a range."""
    low, high = ("no limit" if math.isinf(value) else f"{value:.{digits}g}" for value in values)
    return low if low == high else f"{low} to {high}"


def range_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the smallest and the largest of several ranges."""
    return min(low for low, _ in pairs), max(high for _, high in pairs)
