"""Plans with the paper's own bookkeeping, to reproduce its numbers: only those who are drawn into a round
pay.

Not sound: the draw is hidden, so somebody who was not drawn has not been told apart from somebody who was
(docs/everybody-pays.md). Such a plan flips its coins when it is made; it states, next to what the paper would
claim, the larger bound that is provable for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.accounting import Accountant, Exposure
from pdpsgd.accounting.calibration import smallest_noise_multiplier
from pdpsgd.accounting.registry import accountant as accountant_by_name
from pdpsgd.accounting.theorems import participation_for
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import check_one_of, fail
from pdpsgd.planning.levels import Roster, make_levels
from pdpsgd.planning.mechanisms import adapdp, pdp_sgd, sampling
from pdpsgd.planning.mechanisms.registry import MECHANISMS
from pdpsgd.planning.mechanisms.thresholded import split_evenly
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.planning.thresholds import Loss, adaptive_loss, best_threshold
from pdpsgd.planning.verification import AGREEMENT, PromiseBroken, Verification, epsilon_upper_bound

PUBLISHED_LOSSES: dict[str, Loss] = {
    "sampling": sampling.LOSS,
    "adapdp": adapdp.LOSS,
    "pdp-sgd-fixed": pdp_sgd.FIXED_LOSS,
    "pdp-sgd-adaptive": adaptive_loss,
}
NOTHING_LEFT = 1e-3
MOST_STEPS = 10_000_000


def plan_as_published(
    budgets: Budgets,
    mechanism: str,
    *,
    steps: int,
    batch_size: float,
    accountant: str,
    seed: int | None,
    max_grad_norm: float,
    rounds: int | None,
    noise_multiplier: float | None,
    weights: tuple[float, float] | None,
    loss: str | None,
    max_levels: int,
) -> Plan:
    """The paper's Algorithm 1 (or AdaPDP, or Sampling) with its coins flipped from `seed`.

    Each round: threshold on what the drawn have left, participation (e^left - 1)/(e^tau - 1), a rate of batch
    size over the expected number of participants, and noise (or, given the noise, steps) such that the round
    alone costs tau. Given the noise, the rounds end where what is left does not pay for a single step at it.
    """
    from pdpsgd.planning.thresholds import threshold_loss

    check_one_of(tuple(PUBLISHED_LOSSES), mechanism_as_published=mechanism)
    chosen = threshold_loss(weights, loss) or PUBLISHED_LOSSES[mechanism]
    by = accountant_by_name(accountant)
    if np.unique(budgets.delta).size > 1 or not np.isfinite(budgets.epsilon).all():
        fail("As-published bookkeeping takes one delta for all and finite budgets: the paper has no others.")
    delta = float(budgets.delta[0])
    levels = make_levels(budgets, max_levels)
    level = levels.of_person
    left = levels.epsilon[level].copy()
    coins = np.random.default_rng(seed)
    most = 1 if mechanism == "sampling" else rounds or MECHANISMS[mechanism].default_rounds
    drawn: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    made: list[tuple[int, float, float, float]] = []
    for count in split_evenly(steps, most):
        if not (left > NOTHING_LEFT).any():
            break
        values, people = np.unique(left[left > NOTHING_LEFT], return_counts=True)
        tau = best_threshold(values, people, chosen)
        chance = np.where(left > NOTHING_LEFT, participation_for(left, tau), 0.0)
        rate = min(1.0, batch_size / float(chance.sum()))
        if noise_multiplier is None:
            sigma = smallest_noise_multiplier(tau, delta, sample_rate=rate, steps=count, accounting=by)
        else:
            count, sigma = _most_steps(tau, delta, rate, noise_multiplier, by), noise_multiplier
            if not count:
                break
        drawn.append(coins.random(left.size) < chance)
        made.append((count, sigma, rate, tau))
        left = np.where(drawn[-1], np.maximum(left - tau, 0.0), left)
    if not (levels.epsilon > NOTHING_LEFT).any():
        fail(
            f"Expected somebody who allows more than {NOTHING_LEFT:g}. Got at most {levels.epsilon.max():g}."
        )
    if not made:
        fail(
            f"Expected a noise_multiplier at which the budgets pay for a step. Got {noise_multiplier}: one step of "
            f"{batch_size:g} people costs more than the first round's {tau:.3g}. Take more noise or smaller batches."
        )
    return _assemble(
        budgets,
        mechanism,
        by,
        max_grad_norm,
        delta,
        levels.epsilon,
        level,
        drawn,
        made,
        mechanism == "adapdp",
    )


def _most_steps(tau: float, delta: float, rate: float, noise_multiplier: float, by: Accountant) -> int:
    """As many steps at this noise as a round that costs at most tau has; perhaps none."""

    def fits(count: int) -> bool:
        return by.epsilon((Exposure(1.0, rate, noise_multiplier, count),), delta) <= tau

    low, high = 0, 1
    while fits(high) and high < MOST_STEPS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _assemble(
    budgets: Budgets,
    mechanism: str,
    by: Accountant,
    max_grad_norm: float,
    delta: float,
    epsilons: FloatArray,
    level: np.ndarray[tuple[int], np.dtype[np.int64]],
    drawn: list[np.ndarray[tuple[int], np.dtype[np.bool_]]],
    made: list[tuple[int, float, float, float]],
    fresh_model: bool,
) -> Plan:
    patterns, place, people = np.unique(
        np.column_stack([level, *drawn]).astype(np.int64), axis=0, return_inverse=True, return_counts=True
    )
    taus = [tau for *_, tau in made]
    bounds = {float(e): as_published_bound(float(e), taus) for e in epsilons}
    rounds = []
    for index, (steps, sigma, rate, tau) in enumerate(made):
        inside = patterns[:, 1 + index].astype(float)
        if not (people @ inside):
            continue  # nobody was drawn: the round is noise alone
        rounds.append(
            Round(
                steps=steps,
                noise_multiplier=sigma,
                expected_batch_size=float(people @ inside * rate),
                participation=tuple(inside.tolist()),
                sample_rates=tuple((inside * rate).tolist()),
                clip_scales=(1.0,) * len(people),
                threshold=tau,
                fresh_model=fresh_model,
            )
        )
    split = tuple(
        Level(
            epsilon=float(epsilons[pattern[0]]),
            delta=delta,
            people=int(n),
            claimed_epsilon=min(float(epsilons[pattern[0]]), float(np.dot(pattern[1:], taus))),
            provable_epsilon=bounds[float(epsilons[pattern[0]])],
            provable_delta=delta * len(made),
        )
        for pattern, n in zip(patterns, people, strict=True)
    )
    return Plan(
        mechanism,
        split,
        tuple(rounds),
        by.name,
        "as-published",
        max_grad_norm=max_grad_norm,
        roster=Roster(budgets.ids, place.reshape(-1), budgets.named),
    )


def as_published_bound(epsilon: float, thresholds: Sequence[float]) -> float:
    """What is provable for somebody under the paper's bookkeeping, where only those who are drawn pay.

    Guarantee: coins that are flipped without looking at the data turn the run into a mixture of fixed plans,
    so by joint convexity the loss is at most the largest sum of thresholds over rounds in which somebody with
    this budget can be drawn one after another; it is at most epsilon + max(thresholds). Each round adds its
    own delta. (docs/everybody-pays.md)

    A single round is covered by Theorem 1, which is tighter.

    >>> as_published_bound(0.5, [0.75, 0.75, 0.75]), as_published_bound(1.0, [0.5, 0.25, 0.5])
    (0.75, 1.25)
    """
    if len(thresholds) == 1:
        return min(epsilon, thresholds[0])
    left_after = {epsilon: 0.0}
    for tau in thresholds:
        for left, spent in list(left_after.items()):
            if left > 0:
                after = max(left - tau, 0.0)
                left_after[after] = max(left_after.get(after, 0.0), spent + tau)
    return max(left_after.values())


def _verify_as_published(plan: Plan) -> Verification:
    """Check that each round's threshold is what a drawn person spends, and that the provable bound is stated
    in full."""
    thresholds = [r.threshold for r in plan.rounds]
    known: dict[tuple[Exposure, float], float] = {}
    for index, r in enumerate(plan.rounds):
        for place, level in enumerate(plan.levels):
            exposure = r.exposure(place)
            if exposure.costs_nothing:
                continue
            key = (exposure, level.delta)
            if key not in known:
                known[key] = epsilon_upper_bound((exposure,), level.delta)
            if r.threshold is None or known[key] > r.threshold * (1 + AGREEMENT):
                raise PromiseBroken(
                    f"rounds[{index}].threshold={r.threshold!r} is below what the round costs level {place}, "
                    f"{known[key]:.6g}."
                )
    bounds = []
    for index, level in enumerate(plan.levels):
        bound = as_published_bound(level.epsilon, [t for t in thresholds if t is not None])
        claim = level.provable_epsilon
        drawn = [r.threshold or 0.0 for r in plan.rounds if not r.exposure(index).costs_nothing]
        if level.history or (math.fsum(drawn) > bound * (1 + 1e-9) and len(plan.rounds) > 1):
            raise PromiseBroken(
                f"levels[{index}] is drawn more often than its budget of {level.epsilon:g} allows."
            )
        if (
            claim is None
            or claim < bound * (1 - 1e-9)
            or (level.provable_delta or 0) < level.delta * len(plan.rounds)
        ):
            raise PromiseBroken(
                f"levels[{index}].provable_epsilon={claim!r} is below what can be proven, {bound:.6g}."
            )
        bounds.append(bound)
    return Verification(tuple(bounds), tuple(level.epsilon for level in plan.levels))
