"""From budgets and public settings to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.certificates import next_d, settle
from pdpsgd.accounting.history import EarlierRun, Past, split
from pdpsgd.accounting.registry import ACCOUNTANTS
from pdpsgd.accounting.registry import accountant as accountant_by_name
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError, check_one_of, check_positive, fail, warn
from pdpsgd.planning.defaults import STEPS, default_batch_size
from pdpsgd.planning.fairness import evened_out
from pdpsgd.planning.levels import MAX_LEVELS, Levels, Roster, average_loss, make_levels, match_ids
from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.registry import MECHANISMS
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import Segment
from pdpsgd.planning.thresholds import threshold_loss

SMALLEST_CLIP_SCALE = 2**-10 / (1 - 2**-11)
"""Of the largest in a round: to less than this nothing is left of a clipping norm after the margins for rounding."""


def plan(
    budgets: Budgets,
    mechanism: str = "pdp-sgd-exact",
    steps: int | None = None,
    batch_size: float | None = None,
    accountant: str | None = None,
    max_grad_norm: float = 1.0,
    *,
    rounds: int | None = None,
    schedule: Sequence[tuple[int, float, float]] | None = None,
    noise_multiplier: float | None = None,
    drawn: str = "step",
    weights: tuple[float, float] | None = None,
    loss: str | None = None,
    exclude_below: float | None = None,
    filter_noise: float | None = None,
    gamma: float = 1.0,
    gamma_from: float | None = None,
    history: Sequence[Plan] = (),
    history_fixed: bool = False,
    max_levels: int = MAX_LEVELS,
) -> Plan:
    """Compute a plan: who is sampled at what rate, under how much noise, and what each person spends.

    Args:
        budgets: what each person on the list allows.
        mechanism: one of `MECHANISMS`; the default spends everything that everybody allows.
        steps: all steps together (300 unless the noise is given); rounds share them evenly.
        batch_size: expected number of people in a batch; by default one that suits what people allow
            (`planning.defaults`).
        accountant: `pld` (default), `rdp`, or `gdp`, which plans but proves nothing. `idp-sample` is defined
            under `rdp`.
        max_grad_norm: the clipping norm C.
        rounds: maximum number of rounds, for mechanisms with thresholds (10 by default).
        schedule: for `pdp-sgd-exact`, (steps, relative noise, relative batch size) for each round, instead of
            `steps`.
        noise_multiplier: given the noise, find the number of steps instead.
        drawn: "step" samples people at every step; "round" once a round (the paper's Definition 4.1).
        weights: (w1, w2) of loss_f, for mechanisms with thresholds.
        loss: "adaptive" or "adaptive-as-printed", for mechanisms with thresholds.
        exclude_below: for `dp-sgd-exclude`, the smallest epsilon of those who take part; by default the one that
            leaves the most signal.
        filter_noise: for `pdp-gd-filter`, noise as a share of what would keep everybody in to the end (0.9 by default).
        gamma: fairness, from 1 (default: people shape the model as far as they allow) to 0 (all alike): whoever
            allows more than the strictest is planned at mu_c^(1-gamma) mu_l^gamma (see `evened_out`).
        gamma_from: the epsilon above which gamma draws budgets together; by default the smallest.
        history: earlier plans on the same people, matched by id, in the order of time: what they spent counts, by
            certificates, so that this plan may be chosen after looking at their results. List a plan as often as it
            was run. A plan that has a history itself brings it along, and what is listed beside it as well is counted
            once; list all of them if some people were not on the latest list.
        history_fixed: say that this plan was fixed before any result of the plans in `history` was seen. Then the
            total is computed exactly, by `accountant` (docs/promise.md, "Several runs"). Another accountant than
            `certificate` without this leaves a result that is not for release.
        max_levels: maximum number of levels.

    Returns:
        The plan, with what is proven for each level.

    Raises:
        PdpsgdError: the settings contradict each other, or no plan keeps these budgets with them.

    Guarantee: see `Plan`. Depends on the arguments only, all of which are public.

    >>> from pdpsgd import Budgets, plan
    >>> made = plan(Budgets.exponential(60_000), steps=1000, batch_size=1024)
    >>> round(made.rounds[0].noise_multiplier, 1), all(x.proven_epsilon <= x.epsilon for x in made.levels)
    (2.8, True)
    """
    check_one_of(tuple(MECHANISMS), mechanism=mechanism)
    check_one_of(("step", "round"), drawn=drawn)
    check_positive(max_grad_norm=max_grad_norm)
    if batch_size is not None:
        check_positive(batch_size=batch_size)
    chosen = MECHANISMS[mechanism]
    by = accountant_by_name(
        _accountant_name(chosen, mechanism, accountant, bool(history) and not history_fixed)
    )
    segments = _segments(schedule, steps)
    total = _total_steps(steps, segments, noise_multiplier)
    for weak in budgets.weak_promises():
        warn(weak)
    rounded, of_person = make_levels(budgets, max_levels)
    chosen_after_results = by.name == "certificate" and not history_fixed
    levels, roster = _with_history(rounded, of_person, budgets, history, settled=chosen_after_results)
    if history_fixed and any(split(past)[0] for past in levels.histories):
        fail(
            "Expected history_fixed with plans that were all fixed beforehand. Got a plan in the history that was "
            "itself planned after others, by certificates: leave history_fixed out."
        )
    request = Request(
        levels=evened_out(levels, gamma, gamma_from),
        steps=total,
        batch_size=default_batch_size(rounded, total) if batch_size is None else batch_size,
        accountant=by,
        rounds=rounds or chosen.default_rounds,
        schedule=segments,
        noise_multiplier=noise_multiplier,
        drawn=drawn,
        loss=threshold_loss(weights, loss),
        exclude_below=_only_for("dp-sgd-exclude", mechanism, exclude_below=exclude_below),
        filter_noise=_only_for("pdp-gd-filter", mechanism, filter_noise=filter_noise),
    )
    draft = Plan(
        mechanism,
        levels.unproven(),
        tuple(_run(chosen, request) if batch_size is not None else _run_with_less(chosen, request)),
        by.name,
        max_grad_norm=float(max_grad_norm),
        history_fixed=history_fixed,
        counted=_all_counted(history),
    )
    proven = prove(draft, by)
    lost = average_loss(rounded.epsilon[of_person], budgets.epsilon)
    notes = (
        *_unmatched(history, budgets),
        *_rounding_notes(len(rounded), lost),
        *([] if chosen.note is None else [chosen.note]),
        *_level_notes(proven),
    )
    return replace(proven, roster=roster, notes=notes)


def prove(draft: Plan, by: Accountant) -> Plan:
    """Recompute every level's `proven_epsilon` from its rounds and history; None if `by` proves nothing."""
    if not by.proves:
        return draft
    costs = by.epsilons(
        [draft.history_of(i) for i in range(len(draft.levels))], [x.delta for x in draft.levels]
    )
    levels = []
    for index, (level, cost) in enumerate(zip(draft.levels, costs, strict=True)):
        exposed = any(not r.exposure(index).costs_nothing for r in draft.rounds)
        earlier, fixed = split(level.history)
        if not exposed and len(earlier) == 1 and not fixed:
            cost = accountant_by_name("pld").epsilon(
                earlier[0].exposures, level.delta
            )  # one run alone: exactly
        if exposed and cost > level.epsilon:
            raise PdpsgdError(
                f"Level {index} would spend {float(cost)!r} of epsilon={float(level.epsilon)!r}: no plan was computed."
            )
        levels.append(replace(level, proven_epsilon=float(cost)))
    return replace(draft, levels=tuple(levels)).remember_proof()


def _only_for(known: str, mechanism: str, **setting: float | None) -> float | None:
    """Return a setting that one mechanism knows; refuses it with another."""
    ((name, value),) = setting.items()
    if value is not None:
        if mechanism != known:
            fail(f"Expected mechanism={known!r} with {name}={value!r}. Got {mechanism!r}.")
        check_positive(**{name: value})
    return value


def _accountant_name(
    chosen: Mechanism, mechanism: str, accountant: str | None, chosen_after_results: bool
) -> str:
    if accountant is not None:
        check_one_of(ACCOUNTANTS, accountant=accountant)
        if chosen.accountant not in (None, accountant):
            fail(
                f"{mechanism} is defined under the accountant {chosen.accountant!r} (as published). "
                f"Got {accountant!r}. "
                "Under another accountant use pdp-sgd-exact: it is the same mechanism."
            )
    return chosen.accountant or accountant or ("certificate" if chosen_after_results else "pld")


def _segments(
    schedule: Sequence[tuple[int, float, float]] | None, steps: int | None
) -> tuple[Segment, ...] | None:
    if schedule is None:
        return None
    if not schedule:
        fail("Expected at least one round in the schedule. Got an empty one.")
    segments = tuple(Segment(int(n), float(noise), float(batch)) for n, noise, batch in schedule)
    for s in segments:
        check_positive(steps_of_a_round=s.steps, relative_noise=s.noise, relative_batch_size=s.batch_size)
    if steps is not None and steps != sum(s.steps for s in segments):
        fail(
            f"Expected steps to be the schedule's {sum(s.steps for s in segments)}, or left out. Got steps={steps}."
        )
    return segments


def _total_steps(
    steps: int | None, segments: tuple[Segment, ...] | None, noise_multiplier: float | None
) -> int:
    if noise_multiplier is not None and steps is not None:
        fail(
            f"Expected `steps` or `noise_multiplier`: one follows from the other. Got {steps} and {noise_multiplier}."
        )
    if segments is not None:
        return sum(s.steps for s in segments)
    total = STEPS if steps is None else steps
    if total != int(total) or total < 1:
        fail(f"Expected steps to be a whole number of at least 1. Got {total!r}.")
    return int(total)


def _run(chosen: Mechanism, request: Request) -> list[Round]:
    """Run the mechanism; people who ask for no protection get the rate of the largest finite level."""
    levels = request.levels
    infinite = np.isinf(levels.epsilon)
    if not infinite.any():
        return chosen.rounds(request)
    finite = np.flatnonzero(~infinite & levels.usable())
    if not finite.size:
        fail(
            "Expected somebody with a finite budget: people who ask for no protection follow the largest finite level."
        )
    top = finite[np.lexsort((levels.delta[finite], levels.epsilon[finite]))[-1]]
    kept = np.flatnonzero(~infinite)
    people = levels.people.copy()
    people[top] += levels.people[infinite].sum()
    inner = replace(request, levels=replace(levels, people=people).only(kept))
    source = np.where(infinite, np.searchsorted(kept, top), np.cumsum(~infinite) - 1)
    columns = ("participation", "sample_rates", "clip_scales", "spending_limits")
    spread = []
    for r in chosen.rounds(inner):
        values = {name: getattr(r, name) for name in columns if getattr(r, name) is not None}
        placed: dict[str, Any] = {name: tuple(np.array(v)[source].tolist()) for name, v in values.items()}
        spread.append(replace(r, **placed))
    return spread


def _run_with_less(chosen: Mechanism, request: Request) -> list[Round]:
    """Run the mechanism with a batch that nobody asked for: halved while fewer people can be used than it has."""
    try:
        return _run(chosen, request)
    except PdpsgdError:
        if request.batch_size <= 1:
            raise
        try:
            return _run_with_less(chosen, replace(request, batch_size=request.batch_size // 2))
        except PdpsgdError:
            pass
        raise  # what was wrong at first: a smaller batch does not help


def _with_history(
    levels: Levels, of_person: IntArray, budgets: Budgets, earlier: Sequence[Plan], *, settled: bool
) -> tuple[Levels, Roster]:
    """Levels split by what their people were exposed to before, and who is on which.

    With `settled`, each earlier plan counts as a run by itself, whose results may have been seen.
    """
    if not earlier:
        return levels, Roster(budgets.ids, of_person, budgets.named)
    now = np.array([levels.epsilon[of_person], levels.delta[of_person]])
    columns = [of_person]
    for number, before in enumerate(earlier):
        if before.roster is None:
            fail(
                f"Expected history[{number}] to know its people, to match them by id. A plan read from JSON does not: "
                "attach them with plan.with_people(budgets), the budgets it was made for."
            )
        if before.not_for_release is not None:
            fail(
                f"Expected history[{number}] to be a plan that keeps its promise: otherwise there is no sound total to "
                f"start from. Got one not for release: {before.not_for_release}"
            )
        if not (before.roster.named and budgets.named) and len(before.roster.ids) != len(budgets):
            fail(
                f"Expected people with ids, to match them with those of history[{number}]: without ids they are "
                f"known by their position only, and the lists have {len(before.roster.ids):,} and "
                f"{len(budgets):,} people."
            )
        columns.append(match_ids(before.roster, budgets))
        _warn_of_matching_by_place(number, before, columns[-1], budgets, now)
        if (columns[-1] < 0).all():
            fail(
                f"Nobody of history[{number}] is on this list: its ids look like {before.roster.ids[0]!r}, these like "
                f"{budgets.ids[0]!r}. People are matched by id; leave out plans on other people."
            )
    columns = [of_person, *_count_once(earlier, columns[1:])]
    kinds, place, people = np.unique(
        np.stack(columns, axis=1), axis=0, return_inverse=True, return_counts=True
    )
    place = place.reshape(-1)
    were_on = [[(b, int(i)) for b, i in zip(earlier, kind[1:], strict=True) if i >= 0] for kind in kinds]
    join = _settled if settled else _flat
    histories = tuple(join(plans) for plans in were_on)
    split = replace(levels.only(kinds[:, 0]), people=people.astype(float), histories=histories)
    return split, Roster(budgets.ids, place, budgets.named)


def _flat(plans: list[tuple[Plan, int]]) -> Past:
    """All that people on these levels of these plans were exposed to."""
    return tuple(entry for before, level in plans for entry in before.history_of(level))


def _settled(plans: list[tuple[Plan, int]]) -> Past:
    """The certificates of these plans, each fixed before its run's first output; who was not sampled pays nothing.

    A plan that was computed after others has its own d, and theirs. Any other takes the default share of what those
    before it in the list have left.
    """
    runs: list[EarlierRun] = []
    for before, level in plans:
        own, fixed = split(before.history_of(level))
        runs += own
        if not all(exposure.costs_nothing for exposure in fixed):
            runs.append(settle(fixed, next_d(own or runs, before.levels[level].delta)))
    return tuple(runs)


def _count_once(earlier: Sequence[Plan], levels: list[IntArray]) -> list[IntArray]:
    """Leave out, for each person, a plan that a later one brings along; whoever is not on that one keeps it.

    A plan that was run twice is listed twice, and is brought along as often as it is counted.
    """
    counted = [*levels]
    for later, there in zip(earlier, levels, strict=True):
        left = Counter(later.counted)
        for number, before in enumerate(earlier):
            if before is not later and left[before.identity] > 0:
                left[before.identity] -= 1
                counted[number] = np.where(there >= 0, -1, counted[number])
        absent = int((there < 0).sum())
        if +left and absent:
            fail(
                f"Expected the {left.total()} earlier plans that a plan in the history counts to be in the history as "
                f"well: {absent:,} people on this list are not on that plan's, and what they spent before would be "
                "forgotten. Got that plan without them."
            )
    return counted


def _all_counted(earlier: Sequence[Plan]) -> tuple[str, ...]:
    """Name all plans that a history counts, those that its plans bring along included."""
    total: Counter[str] = Counter()
    for before in earlier:
        total |= Counter(before.counted)
    listed = Counter(before.identity for before in earlier)
    return tuple(sorted((total | listed).elements()))


def _warn_of_matching_by_place(
    number: int, before: Plan, place: IntArray, budgets: Budgets, now: FloatArray
) -> None:
    """Say that nobody's name is known, where the wrong person's history would make a difference."""
    if budgets.named or np.all(place == place[0]):
        return
    then = np.array([(level.epsilon, level.delta) for level in before.levels])[place].T
    if not np.array_equal(now, then):
        warn(
            f"The people of history[{number}] have no ids, and their budgets were others then: what each has spent is "
            "matched by the place on the list. If anybody was added, taken off or moved since, others are charged for "
            "it. Give ids to be sure.",
        )


def _unmatched(earlier: Sequence[Plan], budgets: Budgets) -> list[str]:
    """Say how many of an earlier plan's people are not on this list: a misspelt id would look the same."""
    notes = []
    for number, before in enumerate(earlier):
        assert before.roster is not None
        missing = len(before.roster.ids) - int((match_ids(before.roster, budgets) >= 0).sum())
        if missing:
            notes.append(
                f"{missing:,} of the {len(before.roster.ids):,} people of history[{number}] are not on this list."
            )
    return notes


def _rounding_notes(levels: int, lost: float) -> list[str]:
    notes = []
    if lost > 0:
        notes.append(
            f"People are on {levels} levels; rounding budgets down to them gives up {100 * lost:.2f} % of epsilon "
            "on average."
        )
    if lost > 0.005:
        notes.append("That is more than half a percent: allow more levels with max_levels.")
    return notes


def _contributes(planned: Round, level: int) -> bool:
    """Whether anything is left of a level's clipping norm after the margins that rounding takes."""
    sampled = planned.sample_rates[level] * planned.participation[level] > 0
    return sampled and planned.clip_scales[level] > SMALLEST_CLIP_SCALE * max(planned.clip_scales)


def _level_notes(made: Plan) -> list[str]:
    notes = []
    for index, level in enumerate(made.levels):
        rates = [r.sample_rates[index] * r.participation[index] for r in made.rounds]
        who = f"{level.people:,} people at epsilon={level.epsilon:g}, delta={level.delta:g}"
        if (
            rates
            and max(rates) == 1
            and level.proven_epsilon is not None
            and level.proven_epsilon < 0.995 * level.epsilon
        ):
            notes.append(
                f"{who} are in every step of a round (rate 1) and still spend only {level.proven_epsilon:.4g}."
            )
        elif level.history and not any(rates):
            notes.append(
                f"{who} have nothing left after earlier runs ({level.proven_epsilon or 0:.4g} spent): never sampled."
            )
        elif level.epsilon > 0 and level.delta > 0 and not any(rates):
            notes.append(f"{who} allow so little that they are never sampled.")
        elif any(rates) and not any(_contributes(r, index) for r in made.rounds):
            notes.append(
                f"{who} contribute nothing: their clipping norm is below a thousandth of the largest, where rounding "
                "of others' gradients would show. They are charged all the same: another mechanism would use them."
            )
    if made.accountant == "gdp":
        notes.append("Computed with gdp, an approximation: nothing is proven.")
    return notes
