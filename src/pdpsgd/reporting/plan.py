"""What a page says of the plan: what was promised and is proven, how it is spent, and how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plan_table import MOST_ROWS, allowed_and_used, headings, range_of, span
from pdpsgd.planning.plan_table import rows as table_rows
from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE, Allows

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

MOST_LEVELS_VERIFIED = 64
OF_RUN = (
    "The figures here are of this run alone: its share of what people allow over all runs (the part above), and what "
    "is proven that it takes. People with like shares stand on one level. A share has a delta of its own, at "
    "most people's own; at theirs, what this run takes reads as in the table above."
)
OF_ALL = (
    "Each person said how much privacy loss (epsilon, at a small probability delta) they allow. People with like "
    "budgets stand on one level, at a budget that is at most their own. Smaller is more private."
)


@dataclass(frozen=True)
class Check:
    """The verdict of the independent accountant: how much of the tightest promise is used, or what is wrong."""

    tightest: float | None = None
    broken: str | None = None


def check_of(plan: Plan) -> Check:
    """Verify the plan anew, unless it has so many levels that the page would take long to write."""
    if len(plan.levels) > MOST_LEVELS_VERIFIED:
        return Check()
    try:
        found = plan.verify()
    except PdpsgdError as error:
        return Check(broken=str(error))
    shares = (e / p for e, p in zip(found.epsilon, found.promised, strict=True) if 0 < p < math.inf)
    return Check(tightest=max(shares, default=0.0))


def promise_parts(plan: Plan, allows: Allows | None = None) -> list[str]:
    """Say what each level was promised, and what is proven for it.

    Args:
        plan: The plan of the run.
        allows: What people of each level allow over all runs, where a ledger tells.

    Returns:
        The parts of the section.
    """
    of_ledger = plan.ledger is not None
    about = ("This run's share", "and what it takes") if of_ledger else ("Promised", "and proven")
    describe = f"Epsilon of {len(plan.levels)} levels: {about[0].lower()}, {about[1]}."
    made = [parts.paragraph(OF_RUN if of_ledger else OF_ALL), _promise_table(plan, allows)]
    if plan.not_for_release is None and any(math.isfinite(level.epsilon) for level in plan.levels):
        title = "What this run takes, against its share" if of_ledger else "Proven against promised"
        made.insert(1, parts.chart(charts.promise_chart(plan, PAGE, allows), title=title, describe=describe))
    if plan.not_for_release is not None:
        made.append(parts.paragraph(plan.not_for_release, kind="note"))
    if any(level.history for level in plan.levels):
        made.append(
            parts.paragraph("Proven figures include what earlier runs on the same people spent.", kind="note")
        )
    return made


def _promise_table(plan: Plan, allows: Allows | None) -> str:
    of_ledger = plan.ledger is not None
    allowed, proven = headings(of_ledger=True) if of_ledger else ("epsilon promised", "epsilon proven")
    found = table_rows(plan.levels, plan.rounds)
    wholes: list[tuple[str, ...]] = [()] * len(found)
    if allows is not None:
        groups = np.array_split(np.arange(len(plan.levels)), len(found))
        wholes = [(span(range_of([allows[i] for i in group])),) for group in groups]
    return parts.table(
        (
            *(() if allows is None else ("allow over all runs",)),
            allowed,
            "people",
            proven,
            "used",
            "sampling rate",
            "at delta" if of_ledger else "delta",
        ),
        [
            (
                *whole,
                span(row.epsilon),
                f"{row.people:,}",
                "nothing" if row.proven is None else span(row.proven),
                "" if row.used is None else f"{row.used:.1%}",
                span(row.rate, digits=3),
                span(row.delta),
            )
            for whole, row in zip(wholes, found, strict=True)
        ],
        caption=("Of this run, level by level" if of_ledger else "Promised and proven, level by level")
        + ("; adjacent levels together" if len(plan.levels) > MOST_ROWS else ""),
    )


def used_parts(plan: Plan, allows: Allows | None = None) -> list[str]:
    """Say how much of what people allow, or of a run's share of it, is used, and when it is spent."""
    allowed, used = allowed_and_used(plan.levels)
    if used is None or not allowed:
        return [parts.paragraph("Nothing is proven, so what was used cannot be said.")]
    unused = 100 * (1 - used / allowed)
    of_ledger = plan.ledger is not None
    whole = "this run's share" if of_ledger else "the epsilon that people allow"
    made = [
        parts.paragraph(
            f"Summed over people, {100 * used / allowed:.2f} % of {whole} was used, "
            f"and {unused:.2f} % was "
            "not. What is not used could have made the model better at no further cost to anybody's wishes."
        )
    ]
    rows = charts.spending(plan, allows)
    if rows:
        data = parts.series_table(
            rows, series="level", value="spent", form=".4f", caption="Epsilon spent after some of the steps"
        )
        made.append(
            parts.chart(
                charts.spending_chart(rows, PAGE),
                title=f"Spending over the steps (dashed: {'this run’s share' if of_ledger else 'the promise'})",
                describe="Epsilon spent over the steps of this run for some levels, up to "
                + ("its share." if of_ledger else "what was promised."),
                data=data,
            )
        )
    return made


def schedule_parts(plan: Plan, allows: Allows | None = None) -> list[str]:
    """Say how often people are sampled, and with which noise multiplier."""
    noise = [r.noise_multiplier for r in plan.rounds]
    batch = math.fsum(r.steps * r.expected_batch_size for r in plan.rounds) / plan.steps
    rounds = "" if len(noise) == 1 else f" in the first round, {noise[-1]:.3g} in the last"
    made = [
        parts.paragraph(
            "At each step every person is sampled at their own rate; those who allow more are sampled more "
            f"often. Noise of {noise[0]:.3g} times the largest contribution of one person{rounds} is added "
            f"to the sum of the clipped gradients of the sampled people. On average {batch:,.0f} people are sampled at "
            "a step; the actual numbers stay secret."
        )
    ]
    made.append(
        parts.chart(
            charts.rates_chart(plan, PAGE, allows).properties(height=220),
            title="Sampling rate",
            describe=f"Sampling rate, by {charts.epsilon_title(plan)}.",
        )
    )
    if len(plan.rounds) > 1:
        made.append(
            parts.chart(
                charts.noise_chart(plan, PAGE).properties(height=160),
                title="Noise in each round",
                describe="Noise multiplier over the steps.",
            )
        )
    rows = [
        (
            f"{number + 1}",
            f"{r.steps:,}",
            f"{r.noise_multiplier:.4g}",
            f"{r.expected_batch_size:,.1f}",
            "" if r.threshold is None else f"{r.threshold:.4g}",
        )
        for number, r in enumerate(plan.rounds)
    ]
    made.append(
        parts.table(
            ("round", "steps", "noise multiplier", "expected batch", "threshold"), rows, caption="Rounds"
        )
    )
    return made


def verify_parts(plan: Plan, check: Check) -> list[str]:
    """Say how anybody can check the promise, and what a check has found."""
    commands = "pdpsgd plan plan.json --verify"
    python = "\n".join(
        (
            "import pdpsgd",
            "",
            'plan = pdpsgd.Plan.from_json(open("plan.json").read())  # refuses a plan that claims too little',
            "print(plan.verify())",
        )
    )
    made = [
        parts.paragraph(
            "The promise follows from the plan alone: no data and no trust in whoever trained are needed "
            "to check it. Take "
            "public/plan.json from the run's folder; an accountant that shares no code with the one that made "
            "the plan derives every "
            "level's epsilon again."
        ),
        parts.code(commands),
        parts.code(python),
        parts.paragraph(f"Fingerprint of the plan (SHA-256): {plan.digest}"),
    ]
    if plan.not_for_release is not None:
        return made[:1]
    if check.broken is not None:
        made.insert(1, parts.paragraph(f"Checked while this page was written: {check.broken}", kind="note"))
    elif check.tightest is not None:
        made.insert(
            1,
            parts.paragraph(
                "Checked while this page was written: every level is within its promise; the tightest uses "
                f"{check.tightest:.2%} of it."
            ),
        )
    made += [
        parts.paragraph(
            "Each person can be told their own line of people/promises.csv, which is not part of this page: what "
            "they asked for and what is proven for them. This makes a letter in plain words of it, to each of them:"
        ),
        parts.code("pdpsgd report RUN --letters FOLDER"),
    ]
    return made
