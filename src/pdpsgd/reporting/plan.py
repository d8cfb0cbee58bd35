"""What a page says of the plan: what was promised and is proven, how it is spent, and how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plan_table import allowed_and_used, headings, span
from pdpsgd.planning.plan_table import rows as table_rows
from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

MOST_LEVELS_VERIFIED = 64
OF_LEDGER = (
    " That is for all runs together (see the part on all runs). The figures here are of this run alone: what it may "
    "take, as its share of what was left, and what it takes."
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


def promise_parts(plan: Plan) -> list[str]:
    """Say what each level was promised, and what is proven for it."""
    describe = f"Epsilon promised and proven for {len(plan.levels)} levels."
    made = [
        parts.paragraph(
            "Each person said how much privacy loss (epsilon, at a small probability delta) they allow. "
            "People with like "
            "budgets stand on one level, at a budget that is at most their own. Smaller is more private."
            + (OF_LEDGER if plan.ledger is not None else "")
        ),
        _promise_table(plan),
    ]
    if plan.not_for_release is None and any(math.isfinite(level.epsilon) for level in plan.levels):
        made.insert(
            1,
            parts.chart(charts.promise_chart(plan, PAGE), title="Proven against promised", describe=describe),
        )
    if plan.not_for_release is not None:
        made.append(parts.paragraph(plan.not_for_release, kind="note"))
    if any(level.history for level in plan.levels):
        made.append(
            parts.paragraph("Proven figures include what earlier runs on the same people spent.", kind="note")
        )
    return made


def _promise_table(plan: Plan) -> str:
    of_ledger = plan.ledger is not None
    allowed, proven = headings(of_ledger=True) if of_ledger else ("epsilon promised", "epsilon proven")
    return parts.table(
        (allowed, "people", proven, "used", "sampling rate", "delta"),
        [
            (
                span(row.epsilon),
                f"{row.people:,}",
                "nothing" if row.proven is None else span(row.proven),
                "" if row.used is None else f"{row.used:.1%}",
                span(row.rate, digits=3),
                span(row.delta),
            )
            for row in table_rows(plan.levels, plan.rounds)
        ],
        caption=("Of this run, level by level" if of_ledger else "Promised and proven, level by level")
        + ("; adjacent levels together" if len(plan.levels) > 24 else ""),
    )


def used_parts(plan: Plan) -> list[str]:
    """Say how much of what people allow is used, and when it is spent."""

    allowed, used = allowed_and_used(plan.levels)
    if used is None or not allowed:
        return [parts.paragraph("Nothing is proven, so what was used cannot be said.")]
    unused = 100 * (1 - used / allowed)
    whole = "the epsilon that people allow" if plan.ledger is None else "the epsilon that this run may take"
    made = [
        parts.paragraph(
            f"Summed over people, {100 * used / allowed:.2f} % of {whole} was used, "
            f"and {unused:.2f} % was "
            "not. What is not used could have made the model better at no further cost to anybody's wishes."
        )
    ]
    rows = charts.spending(plan)
    if rows:
        data = parts.series_table(
            rows, series="level", value="spent", form=".4f", caption="Epsilon spent after some of the steps"
        )
        made.append(
            parts.chart(
                charts.spending_chart(rows, PAGE),
                title="Spending over the steps (dashed: the promise)",
                describe="Epsilon spent over the steps for some levels, up to what was promised.",
                data=data,
            )
        )
    return made


def schedule_parts(plan: Plan) -> list[str]:
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
            charts.rates_chart(plan, PAGE).properties(height=220),
            title="Sampling rate",
            describe="Sampling rate, by what people allow.",
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
    made.append(
        parts.paragraph(
            "Each person can be told their own line of people/promises.csv, which is not part of this page: what "
            "they asked for and what is proven for them. `pdpsgd report RUN --letters FOLDER` makes a letter in plain "
            "words of it, to each of them."
        )
    )
    return made
