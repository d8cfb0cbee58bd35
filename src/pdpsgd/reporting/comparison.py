"""The page of a comparison: mechanisms side by side, and who gains from which."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE

if TYPE_CHECKING:
    from pdpsgd.training.comparison import Comparison, Outcome


def comparison_page(made: Comparison, *others: Comparison) -> str:
    """Return the page as text; `others` are comparisons with other lists of budgets, a shorter part each."""
    sections = [
        parts.Section("Overview", "At a glance", *_overview(made)),
        parts.Section("Promise", "What is promised, proven and used", *_promise(made)),
        parts.Section(
            "Accuracy" if made.measure.is_share else "Errors", "How good the models are", *_accuracy(made)
        ),
        parts.Section("Gains and losses", "Who gains and who loses", *_gains(made)),
        *(parts.Section(other.data, other.data, *_overview(other), *_remarks(other)) for other in others),
        parts.Section("Settings", "Settings", *_settings(made)),
        parts.Section("Remarks", "What to keep in mind", *_remarks(made)),
    ]
    names = ", ".join(outcome.mechanism for outcome in made.outcomes)
    return parts.page(
        title=f"{made.data}: {names}", kind="Comparison", verdict=_verdict(made), sections=sections
    )


def _verdict(made: Comparison) -> str:
    proven = all(
        tier.proven is not None and tier.proven <= tier.promised
        for outcome in made.outcomes
        for tier in outcome.tiers
        if math.isfinite(tier.promised)
    )
    best = made.best
    if not proven:
        headline = "Not every mechanism here keeps its promise by proof."
    elif made.runs == 1:
        headline = f"The run keeps its promise to all {made.people:,} people."
    elif made.within_budgets:
        headline = f"All {made.runs} runs together keep the promise to all {made.people:,} people."
    else:
        headline = f"Each of the {made.runs} runs keeps its promise by itself; all together, they do not."
    highest = max(
        made.together, key=lambda tier: tier.epsilon / tier.allowed if tier.allowed else 0, default=None
    )
    cost = (
        f" All {made.runs} runs cost people who allow {highest.name} an epsilon of {highest.epsilon:.4g}."
        if highest is not None and made.runs > 1
        else ""
    )
    return parts.verdict(
        proven and made.within_budgets,
        headline,
        f"{best.mechanism} has the {'highest' if made.measure.more_is_better else 'lowest'} {made.measure.title} on "
        f"test people: {best.text}, mean of "
        f"{len(best.seeds)} {'seed' if len(best.seeds) == 1 else 'seeds'}.{cost} "
        "Seeds are known, so this is for study, and no model of it is for release.",
    )


def _overview(made: Comparison) -> list[str]:
    tiers = [tier.name for tier in made.outcomes[0].tiers]
    rows = [
        (
            outcome.mechanism,
            outcome.text,
            *("not proven" if tier.proven is None else f"{tier.proven:.4g}" for tier in outcome.tiers),
            "" if outcome.used is None else f"{outcome.used:.1%}",
            _noise_of(outcome),
            f"{outcome.training_seconds:.1f} s",
        )
        for outcome in made.outcomes
    ]
    head = (
        "mechanism",
        made.measure.title,
        *(f"proven at ε {name}" for name in tiers),
        "used",
        "noise multiplier",
        "time per run",
    )
    return [
        parts.paragraph(
            f"The same {made.people:,} people, the same network ({made.model}) and the same seeds; "
            f"{made.measure.title} on "
            f"{made.test_people:,} test people who are not on the list (± is the standard error over "
            "seeds). Each tier's "
            "people allow the epsilon in the heading."
        ),
        parts.table(head, rows, caption="Mechanisms side by side"),
    ]


def _remarks(made: Comparison) -> list[str]:
    return [parts.bullets(made.notes or ("Nothing in particular.",))]


def _promise(made: Comparison) -> list[str]:
    rows = charts.used_rows(made)
    text = (
        "Uniform training (dp-sgd) treats everybody as the strictest person asks, and leaves unused what "
        "others allow. Leaving the strictest out (dp-sgd-exclude) raises what the others get, and uses nothing of "
        "the strictest people's records. "
        "Personalized training samples each person as often as their own budget allows."
    )
    if not rows:
        return [parts.paragraph(text)]
    data = parts.table(
        ("mechanism", "tier", "promised", "proven", "used"),
        [
            (r["mechanism"], r["tier"], f"{r['promised']:g}", f"{r['proven']:.4g}", f"{r['used']:.1%}")
            for r in rows
        ],
        caption="What each tier allows, and what is used of it",
    )
    return [
        parts.paragraph(text),
        parts.chart(
            charts.used_chart(rows, PAGE),
            title="How much of what each tier allows is used",
            describe="Share of each tier's epsilon that each mechanism uses.",
            data=data,
        ),
    ]


def _accuracy(made: Comparison) -> list[str]:
    seeds = charts.seed_rows(made)
    measure = made.measure
    title, form = measure.title.capitalize(), ".1%" if measure.is_share else ".4g"
    data = parts.table(
        ("mechanism", "seed", measure.title),
        [(r["mechanism"], r["seed"], measure.text(r["value"])) for r in seeds],
        caption=f"{title} on test people, run by run",
    )
    steps = [
        {"step": record["step"], "series": o.mechanism, "value": measure.in_history(record)}
        for o in made.outcomes
        for record in o.history
    ]
    caption = f"{title} on test people over the steps, mean over seeds"
    over_steps = parts.series_table(steps, series="series", value="value", form=form, caption=caption)
    return [
        parts.chart(
            charts.seeds_chart(seeds, PAGE, measure),
            title=f"{title} on test people",
            describe=f"{title} of each mechanism for each seed, and the mean.",
            data=data,
        ),
        parts.chart(
            charts.lines_chart(steps, PAGE, y_title=measure.title, form=measure.chart_format).properties(
                height=240
            ),
            title=f"{title} over the steps, mean over seeds",
            describe=f"{title} on test people over the steps for each mechanism.",
            data=over_steps,
        ),
    ]


def _gains(made: Comparison) -> list[str]:
    text = (
        f"A better average can hide that some lose. {made.measure.title.capitalize()} on test people by "
        f"{'class and by ' if made.outcomes[0].by_class else ''}tier, mean over seeds; nothing here "
        "is computed from the data that was trained on."
    )
    sections = [parts.paragraph(text)]
    for key, what in (("by_class", "class"), ("by_tier", "tier")):
        groups = list(getattr(made.outcomes[0], key))
        if not groups:
            continue
        names = {group: _group_name(key, group, made) for group in groups}
        if not made.measure.is_share:
            sections.append(_difference_table(made, key, what, names))
            continue
        rows = [
            _share_row(outcome, key, group, names[group]) for group in groups for outcome in made.outcomes
        ]
        sections.append(
            parts.chart(
                charts.shares_chart(rows, PAGE, x_title="accuracy (line: 95 % interval)"),
                title=f"By {what}",
                describe=f"Accuracy on test people by {what}, for each mechanism.",
                data=_difference_table(made, key, what, names),
            )
        )
    return sections


def _share_row(outcome: Outcome, key: str, group: str, name: str) -> dict[str, Any]:
    accuracy, people = getattr(outcome, key)[group]
    low, high = charts.interval(accuracy, people)
    return {
        "group": name,
        "series": outcome.mechanism,
        "value": accuracy,
        "low": low,
        "high": high,
        "people": people,
    }


def _difference_table(made: Comparison, key: str, what: str, names: dict[str, str]) -> str:
    first, *others = made.outcomes
    head = (what, "test people", first.mechanism, *(f"{o.mechanism} (change)" for o in others))
    rows = []
    for group, name in names.items():
        base, people = getattr(first, key)[group]
        values = [getattr(o, key)[group][0] for o in others]
        changes = [f"{made.measure.text(value)} ({made.measure.change(value, base)})" for value in values]
        rows.append((name, f"{people:,}", made.measure.text(base), *changes))
    title = made.measure.title.capitalize()
    return parts.table(head, rows, caption=f"{title} by {what}, and the change from {first.mechanism}")


def _group_name(key: str, group: str, made: Comparison) -> str:
    if key == "by_tier":
        return f"ε {group}"
    return made.classes[int(group)] if group.isdigit() and int(group) < len(made.classes) else group


def _settings(made: Comparison) -> list[str]:
    return [
        parts.settings_table({"data": made.data, "model": made.model, **made.settings}, caption="The runs"),
        parts.settings_table(made.versions, caption="Versions"),
    ]


def _noise_of(outcome: Outcome) -> str:
    noise = [r.noise_multiplier for r in outcome.plan.rounds]
    return f"{noise[0]:.2f}" if min(noise) == max(noise) else f"{min(noise):.2f} to {max(noise):.2f}"
