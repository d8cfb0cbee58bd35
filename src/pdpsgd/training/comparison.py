"""Several mechanisms on the same data, people and seeds: what each gets, and what each uses.

A comparison is for study, on public data or on data whose people agreed to it: every run spends what its plan
says, several runs on the same people add up, and its seeds can be guessed. Its models are not for release.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail
from pdpsgd.training.measures import ACCURACY, RMSE, Measure

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan

MOST_TIERS = 6


@dataclass(frozen=True)
class Tier:
    """What a mechanism promises and proves to the people of like budgets."""

    name: str
    people: int
    promised: float
    proven: float | None
    used: float | None


@dataclass(frozen=True)
class Outcome:
    """One mechanism over all seeds."""

    mechanism: str
    plan: Plan
    tiers: tuple[Tier, ...]
    used: float | None
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    by_tier: Mapping[str, tuple[float, int]]
    by_class: Mapping[str, tuple[float, int]]
    history: tuple[Mapping[str, Any], ...]
    planning_seconds: float
    training_seconds: float
    measure: Measure = ACCURACY

    @property
    def value(self) -> float:
        """The figure that models are compared by, mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy over the seeds; None where numbers are predicted."""
        return self.value if self.measure is ACCURACY else None

    @property
    def text(self) -> str:
        """The figure that models are compared by, with its standard error."""
        return self.measure.text(self.value, self.standard_error)

    @property
    def standard_error(self) -> float | None:
        """Of the mean over the seeds; None with one seed."""
        count = len(self.values)
        return statistics.stdev(self.values) / math.sqrt(count) if count > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        name = self.measure.name
        return {
            "mechanism": self.mechanism,
            name: self.value,
            "standard_error": self.standard_error,
            "seeds": list(self.seeds),
            self.measure.plural: list(self.values),
            "used": self.used,
            "tiers": [asdict(tier) for tier in self.tiers],
            "noise_multipliers": [r.noise_multiplier for r in self.plan.rounds],
            "steps": self.plan.steps,
            "by_tier": {group: {name: a, "people": n} for group, (a, n) in self.by_tier.items()},
            "by_class": {group: {name: a, "people": n} for group, (a, n) in self.by_class.items()},
            "history": [dict(record) for record in self.history],
            "planning_seconds": round(self.planning_seconds, 2),
            "training_seconds": round(self.training_seconds, 2),
        }


@dataclass(frozen=True)
class Together:
    """What all runs of a comparison cost the people of a tier, beside what these people allow in all."""

    name: str
    people: int
    allowed: float
    epsilon: float


@dataclass(frozen=True)
class Comparison:
    """Mechanisms side by side. `notes` are what a reader must be told; `together` is what all runs cost."""

    data: str
    model: str
    classes: tuple[str, ...]
    people: int
    test_people: int
    outcomes: tuple[Outcome, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    together: tuple[Together, ...] = ()

    @property
    def measure(self) -> Measure:
        """The figure that models are compared by."""
        return self.outcomes[0].measure

    @property
    def best(self) -> Outcome:
        """The mechanism that is best by it."""
        choose = max if self.measure.more_is_better else min
        return choose(self.outcomes, key=lambda outcome: outcome.value)

    @property
    def runs(self) -> int:
        """The number of runs on these people."""
        return sum(len(outcome.seeds) for outcome in self.outcomes)

    @property
    def within_budgets(self) -> bool:
        """Whether all runs together cost nobody more than they allow."""
        return all(tier.epsilon <= tier.allowed for tier in self.together)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "data": self.data,
            "model": self.model,
            "classes": list(self.classes),
            "people": self.people,
            "test_people": self.test_people,
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "runs": self.runs,
            "together": [asdict(tier) for tier in self.together],
        }

    def table(self) -> Any:
        """Return a rich table: accuracy, promised and proven epsilon per tier, share used, noise multiplier."""
        from rich import box
        from rich.table import Table

        title = f"{self.data}, {self.people:,} people, {self.test_people:,} to test"
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        made.add_column("mechanism", no_wrap=True)
        made.add_column("accuracy, %" if self.measure.is_share else "RMSE", justify="right", no_wrap=True)
        promised = " / ".join(tier.name for tier in self.outcomes[0].tiers)
        made.add_column(
            f"epsilon proven, of\n{promised} promised", justify="right", no_wrap=len(promised) < 24
        )
        for name in ("used", "noise"):
            made.add_column(name, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            noise = [r.noise_multiplier for r in outcome.plan.rounds]
            made.add_row(
                outcome.mechanism,
                outcome.text.removesuffix(" %").removesuffix("%"),
                " / ".join("?" if tier.proven is None else _bound(tier.proven) for tier in outcome.tiers),
                "" if outcome.used is None else f"{outcome.used:.1%}",
                f"{min(noise):.2f}" if min(noise) == max(noise) else f"{min(noise):.2f} to {max(noise):.2f}",
            )
        return made


def compare(
    mechanisms: Sequence[str],
    *,
    make_model: Callable[[int], nn.Module],
    data: tuple[Any, Any],
    budgets: Budgets,
    test_data: tuple[Any, Any],
    test_tiers: Sequence[str] | None = None,
    record_ids: Any = None,
    test_ids: Any = None,
    seeds: Sequence[int] = (0, 1, 2),
    plan_options: Mapping[str, Any] | None = None,
    options_of: Mapping[str, Mapping[str, Any]] | None = None,
    training: Mapping[str, Any] | None = None,
    name: str = "data",
    model_name: str = "model",
    classes: Sequence[str] = (),
    notes: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Plan once for each mechanism, train it with every seed, evaluate on the same test people.

    `make_model(seed)` gives a fresh network, the same for the same seed. `plan_options` go to `plan`,
    `training` to `fit`; `options_of[mechanism]` overrides either for one mechanism. `test_ids` name the person of each
    test record, where people have many.
    """
    from pdpsgd.training.versions import versions

    _check(mechanisms, seeds)
    outcomes = []
    settings = {
        "plan": dict(plan_options or {}),
        "training": dict(training or {}),
        **{name: dict(options) for name, options in (options_of or {}).items()},
        "seeds": list(seeds),
    }
    for mechanism in mechanisms:
        own = dict((options_of or {}).get(mechanism, {}))
        outcomes.append(
            _outcome(
                mechanism,
                budgets=budgets,
                plan_options={
                    **(plan_options or {}),
                    **{k: own.pop(k) for k in list(own) if k in PLAN_OPTIONS},
                },
                training={**(training or {}), **own},
                make_model=make_model,
                data=data,
                test_data=test_data,
                test_tiers=test_tiers,
                record_ids=record_ids,
                test_ids=test_ids,
                seeds=seeds,
                progress=progress,
            )
        )
    together = cost_together([(outcome.plan, len(outcome.seeds)) for outcome in outcomes])
    return Comparison(
        data=name,
        model=model_name,
        classes=tuple(classes),
        people=len(budgets),
        test_people=len(test_data[0] if test_ids is None else set(test_ids.tolist())),
        outcomes=tuple(outcomes),
        settings=settings,
        versions=versions(),
        notes=(
            *notes,
            *_about_people_left_out(outcomes),
            *_about_all_runs(together, sum(len(outcome.seeds) for outcome in outcomes)),
        ),
        together=together,
    )


PLAN_OPTIONS = (
    "steps",
    "batch_size",
    "accountant",
    "max_grad_norm",
    "rounds",
    "noise_multiplier",
    "drawn",
    "weights",
    "loss",
    "exclude_below",
    "filter_noise",
    "gamma",
    "gamma_from",
)


def tiers_of(plan: Plan, most: int = MOST_TIERS) -> tuple[Tier, ...]:
    """Return the plan's levels as tiers, neighbors together if there are many."""
    from pdpsgd.planning.plan_table import rows

    tiers = []
    for row in rows(plan.levels, plan.rounds, most=most):
        low, high = row.epsilon
        name = f"{low:g}" if low == high else f"{low:.3g} to {high:.3g}"
        tiers.append(Tier(name, row.people, high, None if row.proven is None else row.proven[1], row.used))
    return tuple(tiers)


def cost_together(plans: Sequence[tuple[Plan, int]], most: int = MOST_TIERS) -> tuple[Together, ...]:
    """Compute what several plans, each run a number of times on the same people, cost them in all.

    Guarantee: were the seeds secret, everything that all runs show would be (epsilon, delta)-DP for the people of
    each tier, at their own delta.

    Args:
        plans: Plans for the same people, and how often each was run.
        most: The largest number of tiers; the figure of a tier is that of its most generous level.

    Returns:
        One figure per tier of people who ask for protection.
    """
    from pdpsgd.accounting.registry import accountant

    first = plans[0][0]
    found = []
    for tier in tiers_of(first, most):
        if not math.isfinite(tier.promised):
            continue
        level = min((x for x in first.levels if x.epsilon == tier.promised), key=lambda x: x.delta)
        history = tuple(
            exposure
            for plan, times in plans
            for index, same in enumerate(plan.levels)
            if (same.epsilon, same.delta) == (level.epsilon, level.delta)
            for exposure in plan.history_of(index) * times
        )
        epsilon = accountant("pld").epsilon(history, level.delta)
        found.append(Together(tier.name, tier.people, tier.promised, epsilon))
    return tuple(found)


def _about_people_left_out(outcomes: Sequence[Outcome]) -> list[str]:
    """Say whose records a mechanism never draws although they allow something."""
    said = []
    for outcome in outcomes:
        plan = outcome.plan
        unused = [
            level.people
            for index, level in enumerate(plan.levels)
            if level.epsilon > 0 and all(r.exposure(index).costs_nothing for r in plan.rounds)
        ]
        if left_out := sum(unused):
            said.append(
                f"{outcome.mechanism} leaves out {left_out:,} of {plan.people:,} people who allow something: their "
                "records shape nothing."
            )
    return said


def _about_all_runs(together: Sequence[Together], runs: int) -> list[str]:
    """Say what all runs together cost, where there is more than one."""
    if runs < 2 or not together:
        return []
    cost = " / ".join(f"{tier.epsilon:.4g}" for tier in together)
    allowed = " / ".join(tier.name for tier in together)
    return [
        f"All {runs} runs on these people together cost epsilon {cost} where {allowed} is allowed, even if the seeds "
        "were secret: the promise is about one of them."
    ]


def _outcome(
    mechanism: str,
    *,
    budgets: Budgets,
    plan_options: Mapping[str, Any],
    training: Mapping[str, Any],
    make_model: Callable[[int], nn.Module],
    seeds: Sequence[int],
    data: Any,
    test_data: Any,
    test_tiers: Sequence[str] | None,
    record_ids: Any,
    test_ids: Any,
    progress: Callable[[str, int, int], None] | None,
) -> Outcome:
    from pdpsgd.planning.plan_table import allowed_and_used
    from pdpsgd.planning.planner import plan
    from pdpsgd.training.fitting import fit

    started = time.monotonic()
    made = plan(budgets, mechanism, **plan_options)
    planned = time.monotonic() - started
    results, seconds = [], []
    for number, seed in enumerate(seeds):
        if progress is not None:
            progress(mechanism, number, len(seeds))
        started = time.monotonic()
        results.append(
            fit(
                make_model(seed),
                data,
                budgets,
                plan=made,
                record_ids=record_ids,
                test_data=test_data,
                test_tiers=test_tiers,
                test_ids=test_ids,
                seed=seed,
                progress=False,
                **{"evaluate_every": max(1, made.steps // 20), **training},
            )
        )
        seconds.append(time.monotonic() - started)
    if progress is not None:
        progress(mechanism, len(seeds), len(seeds))
    allowed, used = allowed_and_used(made.levels)
    found = [result.evaluation for result in results if result.evaluation is not None]
    measure = RMSE if found and found[0].errors is not None else ACCURACY
    return Outcome(
        mechanism=mechanism,
        plan=made,
        tiers=tiers_of(made),
        used=None if used is None or not allowed else used / allowed,
        seeds=tuple(seeds),
        measure=measure,
        values=tuple(_value(result, measure) for result in results),
        by_tier=_means([measure.by_tier(each) for each in found]),
        by_class=_means(
            [{name: (s.accuracy, s.people) for name, s in each.by_class.items()} for each in found]
        ),
        history=tuple(_mean_history([result.history for result in results], measure)),
        planning_seconds=planned,
        training_seconds=statistics.fmean(seconds),
    )


def _value(result: Any, measure: Measure) -> float:
    value = measure.of(result.evaluation)
    if value is None:
        fail(
            "Expected a model whose outputs are classes, or numbers (task='regression'), to compare by. Got another."
        )
    return float(value)


def _means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Average each group's figure over the seeds; with the number of test people in it."""
    return {name: (statistics.fmean(part[name][0] for part in parts), parts[0][name][1]) for name in parts[0]}


def _mean_history(
    histories: Sequence[Sequence[Mapping[str, Any]]], measure: Measure
) -> Iterator[dict[str, Any]]:
    for records in zip(*histories, strict=True):
        yield {
            "step": records[0]["step"],
            f"test_{measure.name}": statistics.fmean(measure.in_history(record) for record in records),
        }


def _bound(epsilon: float) -> str:
    """Write a bound with three digits, rounded up."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.3g}"


def _check(mechanisms: Sequence[str], seeds: Sequence[int]) -> None:
    if not mechanisms or len(set(mechanisms)) < len(mechanisms):
        fail(f"Expected one or more different mechanisms. Got {list(mechanisms)!r}.")
    if not seeds or len(set(seeds)) < len(seeds):
        fail(f"Expected one or more different seeds. Got {list(seeds)!r}.")
