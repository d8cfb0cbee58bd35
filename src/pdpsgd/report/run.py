"""The page of one run, from its folder.

What goes in: the plan, the settings, and figures on test people. What stays out: anything computed from the
private training data, and the list of who was promised what (`promises.csv`), which is for each person alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd import charts
from pdpsgd.charts import PAGE
from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.report import parts
from pdpsgd.report.audit import audit_parts
from pdpsgd.report.finished_run import Run, read_run

if TYPE_CHECKING:
    from pdpsgd.plans import Plan

MOST_LEVELS_VERIFIED = 64


def write_run_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a run, by default into its folder, and say where it is.

    The page of a plan that tells who was drawn (as-published bookkeeping) gets a name that says so.
    """
    from pdpsgd.run_folder import SENSITIVE, write_atomically

    run = read_run(folder)
    name = f"{SENSITIVE}-report.html" if run.plan.sensitive else "report.html"
    path = Path(folder) / name if output is None else Path(output)
    text = run_page(run)
    if not path.parent.is_dir():
        fail(f"Expected a folder that is there, to write {str(path)!r} into. Got {str(path.parent)!r}.")
    write_atomically(path, text)
    return path


def run_page(run: Run) -> str:
    """The page as text."""
    name = str(run.settings.get("data") or run.name)
    check = _check(run.plan)
    sections = [
        parts.Section("Overview", "At a glance", _overview(run)),
        parts.Section("Promise", "What was promised, and what is proven", *_promise(run.plan)),
        parts.Section("Use", "How much of what people allow was used", *_used(run.plan)),
        parts.Section(
            "Rates and noise", "How often people were drawn, and under how much noise", *_schedule(run.plan)
        ),
        parts.Section("Accuracy", "How good the model is", *_accuracy(run)),
        parts.Section("Gains and losses", "Who gains and who loses", *_gains(run)),
        parts.Section("Meaning", "What the promise means, and what it does not", _meaning(run)),
        parts.Section("Settings", "Settings", *_settings(run)),
        parts.Section("Check it", "How to check this yourself", *_verify(run.plan, check)),
    ]
    if run.audit is not None:
        sections.insert(6, parts.Section("Audit", "What attacks could measure", *audit_parts(run.audit)))
    return parts.page(
        title=f"Privacy report: {name}", kind="Training run", verdict=_verdict(run, check), sections=sections
    )


@dataclass(frozen=True)
class Check:
    """What the independent accountant said: how much of the tightest promise is used, or what is wrong."""

    tightest: float | None = None
    broken: str | None = None


def _check(plan: Plan) -> Check:
    """Verify the plan anew, unless it has so many levels that the page would take long to write."""
    if len(plan.levels) > MOST_LEVELS_VERIFIED:
        return Check()
    try:
        found = plan.verify()
    except PdpsgdError as error:
        return Check(broken=str(error))
    shares = (e / p for e, p in zip(found.epsilon, found.promised, strict=True) if 0 < p < math.inf)
    return Check(tightest=max(shares, default=0.0))


def _verdict(run: Run, check: Check) -> str:
    plan = run.plan
    if plan.sensitive:
        return parts.verdict(
            False,
            "No promise is kept here.",
            "The plan follows the published bookkeeping, in which only those who are drawn pay. What can "
            "be proven for it is "
            "more than people allowed. Not for release.",
        )
    if any(level.proven_epsilon is None for level in plan.levels if math.isfinite(level.epsilon)):
        return parts.verdict(
            False,
            "Nothing is proven.",
            f"The plan was made with {plan.accountant}, an approximation. Not for release.",
        )
    if check.broken is not None:
        return parts.verdict(False, "The plan breaks its promise.", f"{check.broken} Do not publish.")
    note = run.result.get("release_note")
    if note:
        return parts.verdict(
            False,
            "The plan keeps its promise, but this run is not for release.",
            f"Reason: {str(note).removesuffix(': not for release')}. To publish a model, train again "
            "without a seed.",
        )
    return parts.verdict(
        True,
        f"The promise is proven for all {plan.people:,} people on the list.",
        "Whatever the model shows, and whoever looks at it, nobody's record weighs more than that person "
        "allowed.",
    )


def _overview(run: Run) -> str:
    plan = run.plan
    from pdpsgd.plan_table import allowed_and_used

    allowed, used = allowed_and_used(plan)
    pairs = [
        ("people on the list", f"{plan.people:,}"),
        ("levels of privacy", f"{len(plan.levels):,}"),
        (
            "of what people allow, used",
            "not proven" if used is None or not allowed else f"{100 * used / allowed:.1f} %",
        ),
    ]
    accuracy = run.evaluation.get("accuracy")
    if accuracy is not None:
        pairs.append((f"accuracy on {run.evaluation['people']:,} test people", f"{accuracy:.1%}"))
    pairs += [
        ("mechanism", plan.mechanism),
        ("steps", f"{plan.steps:,}"),
    ]
    return parts.figures(pairs)


def _promise(plan: Plan) -> list[str]:
    describe = f"Epsilon promised and proven for {len(plan.levels)} levels."
    made = [
        parts.paragraph(
            "Each person said how much privacy loss (epsilon, at a small probability delta) they allow. "
            "People with like "
            "budgets stand on one level, at a budget that is at most their own. Smaller is more private."
        ),
        _promise_table(plan),
    ]
    if not plan.sensitive and any(math.isfinite(level.epsilon) for level in plan.levels):
        made.insert(
            1,
            parts.chart(charts.promise_chart(plan, PAGE), title="Proven against promised", describe=describe),
        )
    if plan.sensitive:
        provable = max(level.provable_epsilon or 0 for level in plan.levels)
        made.append(
            parts.paragraph(
                "As published, the paper would claim each level's epsilon. What can be proven is up to "
                f"{provable:.4g}, at a "
                f"delta {len(plan.rounds)} times as large.",
                kind="note",
            )
        )
    if any(level.history for level in plan.levels):
        made.append(
            parts.paragraph("Proven figures include what earlier runs on the same people spent.", kind="note")
        )
    return made


def _promise_table(plan: Plan) -> str:
    from pdpsgd.plan_table import rows

    return parts.table(
        ("epsilon promised", "people", "epsilon proven", "used", "chance per step", "delta"),
        [
            (
                span(row.epsilon),
                f"{row.people:,}",
                "nothing" if row.proven is None else span(row.proven),
                "" if row.used is None else f"{row.used:.1%}",
                span(row.rate, digits=3),
                span(row.delta),
            )
            for row in rows(plan)
        ],
        caption="Promised and proven, level by level"
        + ("; neighbouring levels together" if len(plan.levels) > 24 else ""),
    )


def _used(plan: Plan) -> list[str]:
    from pdpsgd.plan_table import allowed_and_used

    allowed, used = allowed_and_used(plan)
    if used is None or not allowed:
        return [parts.paragraph("Nothing is proven, so what was used cannot be said.")]
    unused = 100 * (1 - used / allowed)
    made = [
        parts.paragraph(
            f"Summed over people, {100 * used / allowed:.2f} % of the epsilon that people allow was used, "
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


def _schedule(plan: Plan) -> list[str]:
    noise = [r.noise_multiplier for r in plan.rounds]
    batch = math.fsum(r.steps * r.expected_batch_size for r in plan.rounds) / plan.steps
    rounds = "" if len(noise) == 1 else f" in the first round, {noise[-1]:.3g} in the last"
    made = [
        parts.paragraph(
            "At each step every person is drawn by their own chance; whoever allows more is drawn more "
            f"often. Noise of {noise[0]:.3g} times the largest contribution of one person{rounds} is added "
            f"to the sum of what the drawn people contribute. On average {batch:,.0f} people are drawn at a "
            "step; the drawn numbers themselves stay secret."
        )
    ]
    made.append(
        parts.chart(
            charts.rates_chart(plan, PAGE).properties(height=220),
            title="Chance to be drawn at a step",
            describe="Chance per step to be drawn, by what people allow.",
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


def _accuracy(run: Run) -> list[str]:
    evaluation = run.evaluation
    if evaluation.get("accuracy") is None:
        return [parts.paragraph("There were no test people, so nothing is said about accuracy.")]
    low, high = charts.interval(evaluation["accuracy"], evaluation["people"])
    made = [
        parts.paragraph(
            f"The model is right for {evaluation['accuracy']:.1%} of {evaluation['people']:,} test people, "
            "who are not on the "
            f"list (95 % interval for people like them: {low:.1%} to {high:.1%})."
        )
    ]
    rows = accuracy_rows(run.history)
    if rows:
        data = parts.series_table(
            rows, series="series", value="value", form=".1%", caption="Accuracy on test people over the steps"
        )
        made.append(
            parts.chart(
                charts.lines_chart(rows, PAGE, y_title="accuracy").properties(height=240),
                title="Accuracy on test people over the steps",
                describe="Accuracy on test people over the steps.",
                data=data,
            )
        )
    return made


def accuracy_rows(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The line over all test people, and one for each tier where there are few."""
    rows = []
    for record in history:
        if record.get("test_accuracy") is None:
            continue
        rows.append({"step": record["step"], "series": "all", "value": record["test_accuracy"]})
        tiers = record.get("by_tier") or {}
        if len(tiers) <= 4:
            rows += [{"step": record["step"], "series": f"ε {t}", "value": v} for t, v in tiers.items()]
    return rows


def _gains(run: Run) -> list[str]:
    evaluation = run.evaluation
    made = [
        parts.paragraph(
            "People who allow more weigh more in training, so the model may suit them better. These "
            "figures are of test people; "
            "nothing here is computed from the data that was trained on."
        )
    ]
    groups = (
        ("by_tier", "tier", "By tier: epsilon that test people allow"),
        ("by_class", "class", "By class"),
    )
    for key, what, title in groups:
        shares = evaluation.get(key) or {}
        if not shares:
            continue
        named = {_group_name(key, name, run.settings): share for name, share in shares.items()}
        rows = [
            {"group": name, "series": "this model", "value": s["accuracy"], "people": s["people"]}
            | dict(zip(("low", "high"), charts.interval(s["accuracy"], s["people"]), strict=True))
            for name, s in named.items()
        ]
        made.append(
            parts.chart(
                charts.shares_chart(rows, PAGE, x_title="accuracy (line: 95 % interval)"),
                title=title,
                describe=f"Accuracy on test people by {what}.",
                data=parts.table(
                    (what, "accuracy", "95 % interval", "test people"),
                    [
                        (
                            r["group"],
                            f"{r['value']:.1%}",
                            f"{r['low']:.1%} to {r['high']:.1%}",
                            f"{r['people']:,}",
                        )
                        for r in rows
                    ],
                    caption=title,
                ),
            )
        )
    if len(made) == 1:
        made.append(
            parts.paragraph("There were no test people, so nothing can be said about tiers and classes.")
        )
    return made


def _group_name(key: str, name: str, settings: Mapping[str, Any]) -> str:
    if key == "by_tier":
        return f"ε {name}"
    classes = settings.get("classes") or []
    return str(classes[int(name)]) if name.isdigit() and int(name) < len(classes) else name


def _meaning(run: Run) -> str:
    lines = [
        "Protected: each person's record, and whether they supplied one at all. With or without it, the "
        "chance of any "
        "outcome changes by a factor of at most e to the power epsilon, but for a probability of at most "
        "delta.",
        "Not protected: being on the list of people, and the (epsilon, delta) that a person allows. Both "
        "are public.",
        "It holds for the model and everything in the run's folder, apart from files named SENSITIVE and "
        "the checkpoint. "
        "It adds up: another run on the same people spends more, unless its plan counts this one as history.",
        "It assumes that settings were not tuned by looking at the private data, and that the randomness "
        "stays secret.",
        "It is about what a record adds. What can be learned about a person from everybody else's records "
        "is not covered.",
    ]
    return parts.bullets(
        [*lines, *(f"Note: {note}" for note in (*run.settings.get("notes", ()), *run.plan.notes))]
    )


def _settings(run: Run) -> list[str]:
    left_out = ("classes", "notes")
    settings = {name: value for name, value in run.settings.items() if name not in left_out}
    plan = {
        "mechanism": run.plan.mechanism,
        "bookkeeping": run.plan.bookkeeping,
        "accountant": run.plan.accountant,
        "neighbours": run.plan.neighbours,
        "max_grad_norm": run.plan.max_grad_norm,
    }
    made = {
        **{"parameters of the model": f"{run.result.get('parameters', 0):,}"},
        "seconds of training": run.result.get("seconds"),
        **{f"version of {name}": value for name, value in (run.result.get("versions") or {}).items()},
    }
    return [
        parts.settings_table(plan, caption="The plan"),
        parts.settings_table(settings, caption="The training"),
        parts.settings_table(made, caption="The run"),
    ]


def _verify(plan: Plan, check: Check) -> list[str]:
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
            "plan.json from the run's folder; an accountant that shares no code with the one that made "
            "the plan derives every "
            "level's epsilon again."
        ),
        parts.code(commands),
        parts.code(python),
        parts.paragraph(f"Fingerprint of the plan (SHA-256): {plan.digest}"),
    ]
    if plan.sensitive:
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
            "Each person can be told their own line of promises.csv, which is not part of this page: what "
            "they asked for and what "
            "is proven for them."
        )
    )
    return made


def span(values: tuple[float, float], digits: int = 4) -> str:
    """One value, or the two ends of a range."""
    low, high = ("no limit" if math.isinf(value) else f"{value:.{digits}g}" for value in values)
    return low if low == high else f"{low} to {high}"
