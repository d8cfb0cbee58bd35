"""Lower bounds on epsilon from what an attack got right: counts in, epsilon out, with a stated confidence.

Every function here is pure. `significance` is the probability, over coins and noise, that the bound is above the
truth; the confidence is one minus it. Whoever looks several times (at thresholds, at tiers) divides it among
the looks first: `shared`.

References: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846) for one run; Jagielski, Ullman, Oprea 2020 (arXiv
2006.07709) for many; Nasr et al. 2023 (arXiv 2302.07956) through Gaussian DP; Dong, Roth, Su 2019 (arXiv
1905.02383) for Gaussian DP itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import expit, log_ndtr, ndtr, ndtri
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

from pdpsgd.errors import fail

TOLERANCE = 1e-6
LARGEST_EPSILON = 200.0


def bonferroni(significance: float, comparisons: int) -> float:
    """Return the significance of each of several comparisons so that all hold together (Bonferroni).

    >>> bonferroni(0.05, 10)
    0.005
    """
    if not 0 < significance < 1:
        fail(f"Expected 0 < significance < 1. Got significance={significance!r}.")
    if comparisons < 1:
        fail(f"Expected at least one comparison. Got comparisons={comparisons!r}.")
    return significance / comparisons


def one_run_p_value(*, epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """Return how likely so many right guesses are if training is (epsilon, delta)-DP towards every canary.

    Guarantee: let each of the `canaries` have its record or not by an independent fair coin, let training
    satisfy (epsilon, delta)-DP towards each of them under adding or removing its record, and let `guesses` of
    the coins be guessed from the outcome by any rule fixed in advance (abstaining on the rest). Then the
    probability that this p-value is at most a, is at most a (Steinke et al. 2023, Theorem 5.2: right guesses are
    dominated by a binomial with success e^eps/(1+e^eps), plus a term of at most 2 * canaries * delta).

    Canaries of other tiers are further independent coins: given those, training still keeps its promise to
    each canary of this tier, so the theorem holds for one tier at a time with that tier's own epsilon
    (docs/audit.md has the argument).

    >>> 1024 * one_run_p_value(epsilon=0.0, delta=0.0, canaries=10, guesses=10, correct=10)
    1.0
    """
    if not 0 <= correct <= guesses <= canaries:
        fail(
            "Expected 0 <= correct <= guesses <= canaries. "
            f"Got correct={correct!r}, guesses={guesses!r}, canaries={canaries!r}."
        )
    success = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, success))
    if delta == 0 or correct == 0:
        return tail
    # The failure event of delta may turn up to i wrong guesses into right ones, at a price of 1/i each: the
    # worst i counts.
    shortfall = np.arange(1, correct + 1)
    just_below = binom.sf(correct - shortfall - 1, guesses, success) - tail
    worst = float(np.max(just_below / shortfall))
    return min(1.0, tail + 2 * canaries * delta * worst)


def one_run_epsilon(*, canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """Return the largest epsilon that so many right guesses refute; 0 where they refute nothing.

    Guarantee: as for `one_run_p_value`; the bound is above the true epsilon at `delta` with probability at most
    `significance`.
    """

    def refuted(epsilon: float) -> bool:
        p_value = one_run_p_value(
            epsilon=epsilon, delta=delta, canaries=canaries, guesses=guesses, correct=correct
        )
        return p_value <= significance

    if guesses == 0 or 2 * correct <= guesses:
        return 0.0
    return _largest(refuted)


def clopper_pearson_upper(successes: int, trials: int, significance: float) -> float:
    """Return an upper bound on a proportion that is below the truth with probability at most `significance`."""
    if not 0 <= successes <= trials:
        fail(f"Expected 0 <= successes <= trials. Got successes={successes!r}, trials={trials!r}.")
    if successes == trials:
        return 1.0
    return float(beta_distribution.ppf(1 - significance, successes + 1, trials - successes))


def many_runs_epsilon(
    *,
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    delta: float,
    significance: float,
) -> float:
    """Return the lower bound on epsilon from an attack's error rates over independent runs (Clopper-Pearson).

    `positives` runs had the canary's record and `negatives` had not; the attack, with a threshold fixed in
    advance, said "in" in `true_positives` and `false_positives` of them.

    Guarantee: if runs are independent, the bound is above the true epsilon at `delta` with probability at most
    `significance`. Half of it goes to each error rate; both directions (add, remove) use the same two rates, so
    looking at both costs nothing.
    """
    false_positive_rate, false_negative_rate = _error_rates(
        true_positives, positives, false_positives, negatives, significance
    )
    return max(
        _log_ratio(1 - false_negative_rate - delta, false_positive_rate),
        _log_ratio(1 - false_positive_rate - delta, false_negative_rate),
    )


def gaussian_mu(
    *, true_positives: int, positives: int, false_positives: int, negatives: int, significance: float
) -> float:
    """Return the lower bound on mu of Gaussian DP from an attack's error rates over independent runs.

    Guarantee: as `many_runs_epsilon`, but only for a mechanism that is known to be mu-Gaussian for some mu:
    here, where the canary is in every batch (rate 1), so that the run is one Gaussian mechanism. It is not a
    lower bound for others.
    """
    false_positive_rate, false_negative_rate = _error_rates(
        true_positives, positives, false_positives, negatives, significance
    )
    # Only the positive part: a negative mu here means that the attack showed nothing, not that it worked
    # backwards.
    return max(0.0, -float(ndtri(false_positive_rate) + ndtri(false_negative_rate)))


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which mu-Gaussian DP implies (epsilon, delta)-DP.

    Reference: Dong et al. 2019, Corollary 2.13.

    >>> round(epsilon_of_gaussian(1.0, 1e-5), 3)
    4.377
    """
    if mu <= 0:
        return 0.0

    def above(epsilon: float) -> bool:
        first = log_ndtr(-epsilon / mu + mu / 2)
        second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
        return bool(first + math.log(-math.expm1(min(second - first, -1e-300))) > math.log(delta))

    return _largest(above)


def one_run_gaussian_epsilon(
    *, canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Return the lower bound of one run for Gaussian mechanisms (Mahloujifar, Melis, Chaudhuri 2024).

    Guarantee: as `one_run_epsilon`, but only where training is mu-Gaussian DP towards each canary for some mu
    (rate 1). It is higher because it uses the whole trade-off curve instead of one point of it.

    Reference: arXiv 2410.22235, the numerical procedure for the joint distribution of right and wrong
    guesses.
    """
    if guesses == 0 or 2 * correct <= guesses:
        return 0.0

    def refuted(mu: float) -> bool:
        # Chance mass of (right, wrong) outcomes that the trade-off curve allows, from `correct` downwards: if
        # even the largest allowed mass cannot add up to all guesses, so many right ones have probability below the
        # significance.
        right = significance * correct / canaries
        wrong = significance * (guesses - correct) / canaries
        for index in range(correct - 1, -1, -1):
            allowed = max(wrong, float(ndtr(ndtri(right) - mu)))
            if allowed == wrong:
                break
            right = min(right + index / (guesses - index) * (allowed - wrong), 1.0)
            wrong = allowed
        return right + wrong > guesses / canaries

    return epsilon_of_gaussian(_largest(refuted), delta)


def _error_rates(
    true_positives: int, positives: int, false_positives: int, negatives: int, significance: float
) -> tuple[float, float]:
    half = bonferroni(significance, 2)
    return (
        clopper_pearson_upper(false_positives, negatives, half),
        clopper_pearson_upper(positives - true_positives, positives, half),
    )


def _log_ratio(numerator: float, denominator: float) -> float:
    return max(0.0, math.log(numerator / denominator)) if numerator > 0 and denominator > 0 else 0.0


def _largest(holds: Callable[[float], bool]) -> float:
    """Return the largest value at which a falling condition holds; what is returned does hold (or is 0)."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST_EPSILON and holds(high):
        low, high = high, 2 * high
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
