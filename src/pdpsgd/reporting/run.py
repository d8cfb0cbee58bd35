"""The page of one run, from its folder.

What goes in: the plan, the settings, and figures on test people. What stays out: anything computed from the
private training data, and the list of who was promised what (`people/`), which is for each person alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdpsgd.errors import fail
from pdpsgd.planning.verdict import EXCEPT, NOT_FOR_RELEASE
from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.audit import audit_parts
from pdpsgd.reporting.charts import PAGE
from pdpsgd.reporting.numbers import headline, number_parts, tier_parts
from pdpsgd.reporting.over_time import over_time_parts
from pdpsgd.reporting.plan import (
    Check,
    check_of,
    promise_parts,
    schedule_parts,
    used_parts,
    verify_parts,
)
from pdpsgd.reporting.probabilities import probability_parts
from pdpsgd.training.class_figures import class_sentences
from pdpsgd.training.finished_run import Run, read_run
from pdpsgd.training.options import ACCOUNTABLE


def write_run_report(folder: str | Path, output: str | Path | None = None, **said: str | None) -> Path:
    """Write the page of a run, by default into its folder, and say where it is.

    What is said of purpose, operator and contact comes before what the run's settings say.
    """
    from pdpsgd.training.run_folder import RunFolder, write_atomically

    run = read_run(folder)
    stated = {name: value for name, value in said.items() if value is not None}
    run = replace(run, settings={**run.settings, **stated})
    path = RunFolder(folder).page(run.plan) if output is None else Path(output)
    text = run_page(run)
    if not path.parent.is_dir():
        fail(f"Expected a folder that is there, to write {str(path)!r} into. Got {str(path.parent)!r}.")
    write_atomically(path, text)
    return path


def run_page(run: Run) -> str:
    """Return the page as text."""
    name = str(run.settings.get("data") or run.name)
    check = check_of(run.plan)
    allows = allowed_by_level(run)
    of_ledger = run.plan.ledger is not None
    whole, share = _promise(run, allows)
    sections = [
        parts.Section("Overview", "At a glance", _accountable(run), _overview(run)),
        *((whole, share) if of_ledger else (share, whole)),
        parts.Section(
            "Use",
            f"How much of {'its share this run' if of_ledger else 'what people allow was'} used",
            *used_parts(run.plan, allows),
        ),
        parts.Section(
            "Rates and noise",
            "How often people were sampled, and with how much noise",
            *schedule_parts(run.plan, allows),
        ),
        parts.Section("Errors" if _is_number(run) else "Accuracy", "How good the model is", *_accuracy(run)),
        parts.Section("Gains and losses", "Who gains and who loses", *_gains(run)),
        parts.Section("Meaning", "What the promise means, and what it does not", _meaning(run)),
        parts.Section("Settings", "Settings", *_settings(run)),
        parts.Section("Check it", "How to check this yourself", *verify_parts(run.plan, check)),
    ]
    if run.audit is not None:
        sections.insert(7, parts.Section("Audit", "What attacks could measure", *audit_parts(run.audit)))
    return parts.page(
        title=f"Rehearsal on made-up rows: {name}" if _rehearsed(run) else f"Privacy report: {name}",
        kind="Rehearsal: no record was read" if _rehearsed(run) else "Training run",
        verdict=_verdict(run, check),
        sections=sections,
    )


def allowed_by_level(run: Run) -> charts.Allows | None:
    """Return what people of each level allow over all runs; None without a ledger, or where the run does not say."""
    levels = (run.result.get("ledger") or {}).get("levels") or []
    found = [tuple(map(float, each["allows"])) for each in levels]
    if len(found) != len(run.plan.levels) or any(len(each) != 2 for each in found):
        return None
    return [(low, high) for low, high in found]


def _promise(run: Run, allows: charts.Allows | None) -> tuple[parts.Section, parts.Section]:
    """Return the parts on all runs and on this one; with a ledger, people's promise is over all runs."""
    whole = parts.Section(
        "All runs", "Over all runs on these people", *over_time_parts(run.result.get("ledger"))
    )
    if run.plan.ledger is None:
        title = "What was promised, and what is proven"
        return whole, parts.Section("Promise", title, *promise_parts(run.plan))
    title = "This run's share, and what is proven that it takes"
    return whole, parts.Section("This run", title, *promise_parts(run.plan, allows))


def _verdict(run: Run, check: Check) -> str:
    plan = run.plan
    if plan.not_for_release is not None:
        return parts.verdict(False, "No promise is kept here.", f"{plan.not_for_release} Not for release.")
    if any(level.proven_epsilon is None for level in plan.levels if math.isfinite(level.epsilon)):
        return parts.verdict(
            False,
            "Nothing is proven.",
            f"The plan was made with {plan.accountant}, an approximation. Not for release.",
        )
    if check.broken is not None:
        return parts.verdict(False, "The plan breaks its promise.", f"{check.broken} Do not publish.")
    if run.audit is not None and not run.audit["passed"]:
        said = " ".join(f"{alarm}." for alarm in run.audit["alarms"])
        why = "Training is not what was proven, or the alarm is false: audit again, with another seed. Do not publish."
        return parts.verdict(False, "An audit of this run raised an alarm.", f"{said} {why}")
    found = run.verdict
    if found is None:
        return parts.verdict(
            False,
            "This run has no verdict.",
            "It was made by an earlier version. To publish a model, train again.",
        )
    assumed = [*(found.get("assumed") or []), *(found.get("beside") or [])]
    reasons = " ".join([*(reason["sentence"] for reason in found["reasons"]), *assumed])
    if found["outcome"] == NOT_FOR_RELEASE:
        return parts.verdict(False, "This run is not for release.", reasons)
    if found["outcome"] == EXCEPT:
        return parts.verdict(False, found["text"].removesuffix(reasons).strip(), reasons)
    return parts.verdict(
        True,
        f"The promise is proven for all {plan.people:,} people on the list.",
        "Whatever the model shows, and whoever looks at it, "
        + ("all of a person's records together weigh no" if _many(run) else "nobody's record weighs")
        + " ".join([" more than that person allowed.", *assumed]),
    )


def _is_number(run: Run) -> bool:
    """Tell whether what is predicted is a number."""
    return run.evaluation.get("errors") is not None


def _rehearsed(run: Run) -> bool:
    """Tell whether rows were made up."""
    return bool(run.settings.get("rehearsal"))


def _many(run: Run) -> bool:
    """Tell whether people have many records."""
    return run.settings.get("records_per_person") is not None


def _overview(run: Run) -> str:
    plan = run.plan
    from pdpsgd.planning.plan_table import allowed_and_used

    allowed, used = allowed_and_used(plan.levels)
    pairs = [
        ("people on the list", f"{plan.people:,}"),
        ("levels of privacy", f"{len(plan.levels):,}"),
        (
            "of what people allow, used" if plan.ledger is None else "of this run's share, used",
            "not proven" if used is None or not allowed else f"{100 * used / allowed:.1f} %",
        ),
        *_of_all_runs(run.result.get("ledger")),
    ]
    accuracy = run.evaluation.get("accuracy")
    if accuracy is not None:
        pairs.append((f"accuracy on {run.evaluation['people']:,} test people", f"{accuracy:.1%}"))
    if _is_number(run):
        pairs.append(headline(run.evaluation))
    pairs += [
        ("mechanism", plan.mechanism),
        ("steps", f"{plan.steps:,}"),
    ]
    return parts.figures(pairs)


def _of_all_runs(ledger: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Say how much of what people allow over all runs is spent now, this run included.

    Who has lowered it below what was spent before counts as spent, and as no more than that.
    """
    tiers = [tier for tier in (ledger or {}).get("tiers", ()) if 0 < float(tier["epsilon"]) < math.inf]
    people = sum(tier["people"] for tier in tiers)
    if not people:
        return []
    spent = sum(tier["people"] * min(1.0, tier["share_before"] + tier["share_this_run"]) for tier in tiers)
    return [("of what people allow over all runs, spent (mu²)", f"{100 * spent / people:.0f} %")]


def _accountable(run: Run) -> str:
    """Say what the run is for, who answers for it, and when it began; what nobody said is said to be missing."""
    run_of = run.settings
    rows = [(name, str(run_of.get(name) or "not stated")) for name in ACCOUNTABLE]
    return parts.particulars([*rows, ("date", str(run_of.get("date") or "not stated")), ("run", run.name)])


def _accuracy(run: Run) -> list[str]:
    evaluation = run.evaluation
    if _is_number(run):
        return number_parts(run)
    if evaluation.get("accuracy") is None:
        return [parts.paragraph("There were no test people, so nothing is said about accuracy.")]
    low, high = charts.interval(evaluation["accuracy"], evaluation["people"])
    per_person = evaluation.get("accuracy_per_person")
    if per_person is None:
        said = (
            f"The model is right for {evaluation['accuracy']:.1%} of {evaluation['people']:,} test people, "
            "who are not on the "
            f"list (95 % interval for people like them: {low:.1%} to {high:.1%})."
        )
    else:
        said = (
            f"The model is right for {evaluation['accuracy']:.1%} of the records of {evaluation['people']:,} test "
            f"people, who are not on the list, with all their records; for {per_person:.1%} if each person counts "
            "once, by the share of their records that is right."
        )
    named = run.settings.get("classes") or []
    made = [parts.paragraph(each) for each in (said, *class_sentences(evaluation, named))]
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
    return [*made, *probability_parts(run)]


def accuracy_rows(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the line over all test people, and one for each tier where there are few."""
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
    if _is_number(run):
        return [*made, *tier_parts(run)]
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
    protected = (
        "Protected: all of a person's records together, how many there are, and whether they supplied any at all. With "
        "or without all of them, the "
        if _many(run)
        else "Protected: each person's record, and whether they supplied one at all. With or without it, the "
    )
    lines = [
        f"{protected}probability of any "
        "outcome changes by a factor of at most e to the power epsilon, but for a probability of at most "
        "delta.",
        *(_MANY_RECORDS if _many(run) else ()),
        "Not protected: being on the list of people, and the (epsilon, delta) that a person allows. Both "
        "are public.",
        "It holds for the model and everything in public/ of the run's folder. "
        "It adds up: another run on the same people spends more, unless it is in the same ledger or its plan counts "
        "this one as history.",
        "It assumes that settings were not tuned by looking at the private data, and that the randomness "
        "stays secret.",
        "It is about what a record adds. What can be learned about a person from everybody else's records "
        "is not covered.",
    ]
    return parts.bullets(
        [*lines, *(f"Note: {note}" for note in (*run.settings.get("notes", ()), *run.plan.notes))]
    )


_MANY_RECORDS = (
    "Changing, adding or taking away some of a person's records while others stay is a removal and an addition: for "
    "that the promise is (2 epsilon, (1 + e to the power epsilon) delta), and no less is claimed.",
    "A record about two people protects the one whose id it has. Two ids are two people.",
)


def _settings(run: Run) -> list[str]:
    left_out = ("classes", "notes", "ledger", *ACCOUNTABLE, "date")
    settings = {name: value for name, value in run.settings.items() if name not in left_out}
    if "sources" in settings:
        settings["sources"] = {k: v for k, v in settings["sources"].items() if k not in left_out}
    plan = {
        "mechanism": run.plan.mechanism,
        "bookkeeping": run.plan.bookkeeping,
        "accountant": run.plan.accountant,
        "neighbours": run.plan.neighbours,
        "max_grad_norm": run.plan.max_grad_norm,
    }
    made = {
        **{"parameters of the model": f"{run.result.get('parameters', 0):,}"},
        **{f"version of {name}": value for name, value in (run.result.get("versions") or {}).items()},
    }
    return [
        parts.settings_table(plan, caption="The plan"),
        parts.settings_table(settings, caption="The training"),
        parts.settings_table(made, caption="The run"),
    ]
