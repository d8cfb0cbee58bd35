"""Plans with the paper's own bookkeeping, to reproduce its numbers: only those who are drawn into a round
pay.

Not sound: the draw is hidden, so somebody who was not drawn has not been told apart from somebody who was
(docs/everybody-pays.md). Such a plan flips its coins when it is made; it states, next to what the paper would
claim, the larger bound that is provable for it.
"""

from __future__ import annotations

import numpy as np

from pdpsgd.accounting import Accountant, Exposure
from pdpsgd.accounting import accountant as accountant_by_name
from pdpsgd.budgets.budgets import Budgets, FloatArray
from pdpsgd.errors import check_one_of, fail
from pdpsgd.planning.levels import Roster, make_levels
from pdpsgd.planning.mechanisms import MECHANISMS
from pdpsgd.planning.mechanisms import adapdp
from pdpsgd.planning.mechanisms import pdp_sgd
from pdpsgd.planning.mechanisms import sampling
from pdpsgd.planning.mechanisms.thresholded import split_evenly
from pdpsgd.accounting.calibration import smallest_noise_multiplier
from pdpsgd.planning.plans import Level, Plan, Round
from pdpsgd.accounting.theorems import as_published_bound, participation_for
from pdpsgd.planning.thresholds import Loss, adaptive_loss, best_threshold

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
    from pdpsgd.planning.planner import threshold_loss

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
