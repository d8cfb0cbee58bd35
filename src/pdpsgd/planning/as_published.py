"""Plans with the paper's own bookkeeping, to reproduce its numbers: only people in a round pay for it.

Not sound: who is in a round is hidden, so people who are not in it cannot be told from those who are
(docs/everybody-pays.md). Such a plan tosses its coins when it is computed. It is an ordinary plan that is
marked not for release, because it breaks promises and tells who is in which round; `claims` says what the
paper would claim for it, and the larger bound that is provable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import BoolArray, FloatArray, IntArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure
from pdpsgd.accounting.registry import accountant as accountant_by_name
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.accounting.theorems import participation_for
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PromiseBroken, check_one_of, fail
from pdpsgd.planning.levels import MAX_LEVELS, Roster, make_levels
from pdpsgd.planning.mechanisms import adapdp, pdp_sgd, sampling
from pdpsgd.planning.mechanisms.registry import MECHANISMS
from pdpsgd.planning.mechanisms.thresholded import split_evenly
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.planning.thresholds import Loss, adaptive_loss, best_threshold, threshold_loss
from pdpsgd.planning.verification import AGREEMENT, epsilon_upper_bound

BOOKKEEPING = "as-published"
PUBLISHED_LOSSES: dict[str, Loss] = {
    "sampling": sampling.LOSS,
    "adapdp": adapdp.LOSS,
    "pdp-sgd-fixed": pdp_sgd.FIXED_LOSS,
    "pdp-sgd-adaptive": adaptive_loss,
}
NOTHING_LEFT = 1e-3
MOST_STEPS = 10_000_000


@dataclass(frozen=True)
class Claim:
    """What the paper would claim for a level, and the larger epsilon that is provable, at a larger delta."""

    claimed_epsilon: float
    provable_epsilon: float
    provable_delta: float


def plan_as_published(
    budgets: Budgets,
    mechanism: str,
    *,
    steps: int = 1000,
    batch_size: float = 1024,
    accountant: str = "rdp",
    seed: int | None = None,
    max_grad_norm: float = 1.0,
    rounds: int | None = None,
    noise_multiplier: float | None = None,
    weights: tuple[float, float] | None = None,
    loss: str | None = None,
    max_levels: int = MAX_LEVELS,
) -> Plan:
    """Compute a plan by the paper's Algorithm 1 (or AdaPDP, or Sampling), its coins tossed from `seed`.

    Each round: a threshold on what the people in it have left, participation (e^left - 1)/(e^tau - 1), a rate
    of batch size over the expected number of participants, and noise (or, given the noise, steps) such that
    the round alone costs tau. Given the noise, the rounds end where the rest does not pay for one more step.

    Args:
        budgets: what each person on the list allows; one delta for all, all finite.
        mechanism: one of `PUBLISHED_LOSSES`.
        steps: all steps together; not used with `noise_multiplier`.
        batch_size: expected number of people in a batch.
        accountant: name of the accountant of a round.
        seed: of the coins; from the operating system if None.
        max_grad_norm: the clipping norm C.
        rounds: maximum number of rounds; the mechanism's own by default.
        noise_multiplier: given, the number of steps follows.
        weights: (w1, w2) of loss_f.
        loss: "adaptive" or "adaptive-as-printed".
        max_levels: maximum number of levels of budgets.

    Returns:
        A plan that is marked not for release.
    """
    check_one_of(tuple(PUBLISHED_LOSSES), mechanism_as_published=mechanism)
    chosen = threshold_loss(weights, loss) or PUBLISHED_LOSSES[mechanism]
    by = accountant_by_name(accountant)
    deltas = np.unique(budgets.delta).tolist()
    if len(deltas) > 1:
        fail(f"Expected one delta for all: the paper has no others. Got {deltas[0]:g} and {deltas[1]:g}.")
    if not np.isfinite(budgets.epsilon).all():
        fail("Expected finite budgets: the paper has no others. Got epsilon=inf.")
    delta = float(budgets.delta[0])
    levels, level = make_levels(budgets, max_levels)
    left = levels.epsilon[level].copy()
    coins = np.random.default_rng(seed)
    most = 1 if mechanism == "sampling" else rounds or MECHANISMS[mechanism].default_rounds
    inside: list[BoolArray] = []
    settled: list[tuple[int, float, float, float]] = []
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
        inside.append(coins.random(left.size) < chance)
        settled.append((count, sigma, rate, tau))
        left = np.where(inside[-1], np.maximum(left - tau, 0.0), left)
    if not (levels.epsilon > NOTHING_LEFT).any():
        fail(
            f"Expected somebody who allows more than {NOTHING_LEFT:g}. Got at most {levels.epsilon.max():g}."
        )
    if not settled:
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
        inside,
        settled,
        mechanism == "adapdp",
    )


def _most_steps(tau: float, delta: float, rate: float, noise_multiplier: float, by: Accountant) -> int:
    """Return how many steps at this noise a round has that costs at most tau; perhaps 0."""

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
    level: IntArray,
    inside: list[BoolArray],
    settled: list[tuple[int, float, float, float]],
    fresh_model: bool,
) -> Plan:
    """Put people with the same budget and the same coins on one level."""
    patterns, place, people = np.unique(
        np.column_stack([level, *inside]).astype(np.int64), axis=0, return_inverse=True, return_counts=True
    )
    rounds = []
    for index, (steps, sigma, rate, tau) in enumerate(settled):
        # Never empty: whoever has at least the threshold left is in the round for certain.
        part = patterns[:, 1 + index].astype(float)
        rounds.append(
            Round(
                steps=steps,
                noise_multiplier=sigma,
                expected_batch_size=float(people @ part * rate),
                participation=tuple(part.tolist()),
                sample_rates=tuple((part * rate).tolist()),
                clip_scales=(1.0,) * len(people),
                threshold=tau,
                fresh_model=fresh_model,
            )
        )
    levels = tuple(
        Level(epsilon=float(epsilons[pattern[0]]), delta=delta, people=int(count))
        for pattern, count in zip(patterns, people, strict=True)
    )
    return Plan(
        mechanism,
        levels,
        tuple(rounds),
        by.name,
        BOOKKEEPING,
        max_grad_norm=max_grad_norm,
        not_for_release=_why(claims(levels, rounds)),
        roster=Roster(budgets.ids, place.reshape(-1), budgets.named),
    )


def _why(claimed: Sequence[Claim]) -> str:
    worst = max(claimed, key=lambda claim: claim.provable_epsilon)
    return (
        "As published, only people in a round pay for it, which does not keep the promise: what is provable is "
        f"epsilon up to {worst.provable_epsilon:.4g} at delta {worst.provable_delta:.3g}. "
        "The plan tells who is in which round: never publish it."
    )


def claims(levels: Sequence[Level], rounds: Sequence[Round]) -> tuple[Claim, ...]:
    """Return, for each level, what the paper would claim and what is provable."""
    thresholds = [r.threshold or 0.0 for r in rounds]
    return tuple(
        Claim(
            claimed_epsilon=min(
                level.epsilon, float(np.dot([r.participation[i] for r in rounds], thresholds))
            ),
            provable_epsilon=as_published_bound(level.epsilon, thresholds),
            provable_delta=level.delta * len(rounds),
        )
        for i, level in enumerate(levels)
    )


def as_published_bound(epsilon: float, thresholds: Sequence[float]) -> float:
    """Return what is provable for a person under the paper's bookkeeping.

    Guarantee: coins that are tossed without looking at the data turn the run into a mixture of fixed plans,
    so by joint convexity the loss is at most the largest sum of thresholds over rounds in which somebody with
    this budget can be, one after another; it is at most epsilon + max(thresholds). Each round adds its
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


def verify(plan: Plan) -> tuple[Claim, ...]:
    """Check that each round's threshold covers what it costs, and that nobody is in more than their budget pays.

    Returns:
        What is claimed and provable for each level; nothing at the level's own epsilon and delta.

    Raises:
        PromiseBroken: a round costs more than its threshold, or a level is in too many rounds.
    """
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
    found = claims(plan.levels, plan.rounds)
    for index, (level, claim) in enumerate(zip(plan.levels, found, strict=True)):
        paid = math.fsum(r.threshold or 0.0 for r in plan.rounds if not r.exposure(index).costs_nothing)
        if level.history or (paid > claim.provable_epsilon * (1 + 1e-9) and len(plan.rounds) > 1):
            raise PromiseBroken(
                f"levels[{index}] is in more rounds than its budget of {level.epsilon:g} pays for."
            )
    return found
