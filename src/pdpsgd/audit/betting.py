"""Tests that hold at every sample size: bets against the plan that are fair if the plan is followed.

For a statistic whose moment generating function under the plan is known, exp(lambda * S - psi(lambda)) is the
wealth of somebody who bets on S being too large (or, for negative lambda, too small). If the plan is followed
its expectation is one, so wealth 1/a is reached with probability at most a (Markov; for sums over steps, Ville). A
few lambdas share the stake, so nothing has to be tuned to the fault, and no normal approximation is made.

Reference: Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference" (arXiv
2210.01948).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp

from pdpsgd._typing import FloatArray

SPREAD = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
"""Bets in both directions around the one that is best for a deviation just large enough to be seen."""


def bets(variance: float, *, significance: float) -> FloatArray:
    """Return the lambdas to bet with on a sum of this variance; fixed before anything is seen."""
    return np.array(SPREAD) * math.sqrt(2 * math.log(1 / significance) / variance)


def p_value(sums: float, lambdas: FloatArray, log_moments: FloatArray) -> float:
    """Return one over the wealth of bets that share the stake evenly.

    Guarantee: if `log_moments` are at least the logs of E exp(lambda * S) (S centered or not), the probability of a
    value at most a is at most a.
    """
    log_wealth = float(logsumexp(lambdas * sums - log_moments)) - math.log(lambdas.size)
    return min(1.0, math.exp(min(0.0, -log_wealth)))


def deviations_needed(significance: float) -> float:
    """Return about how many standard deviations away a sum must be for its bets to win."""
    return math.sqrt(2 * (math.log(1 / significance) + math.log(len(SPREAD))))


def log_moment_draws(lambdas: FloatArray, weights: FloatArray, rates: FloatArray) -> FloatArray:
    """Return log E exp(lambda * sum of w_j (B_j - q_j)) for independent samples B_j at rates q_j, for each lambda."""
    exponent = lambdas[:, None] * weights[None, :]
    moments = _log_mixture(rates[None, :], exponent) - exponent * rates[None, :]
    return np.asarray(moments.sum(axis=1))


def log_moment_rounds(
    lambdas: FloatArray, weights: FloatArray, rates: FloatArray, participation: FloatArray, steps: int
) -> FloatArray:
    """Do as `log_moment_draws`, for a round of steps whose participation is sampled once."""
    exponent = lambdas[:, None] * weights[None, :]
    taking_part = steps * _log_mixture(rates[None, :], exponent)
    drawn = _log_mixture(participation[None, :], taking_part)
    return np.asarray((drawn - steps * exponent * (participation * rates)[None, :]).sum(axis=1))


def log_moment_gaussian(lambdas: FloatArray, variance: float) -> FloatArray:
    """Return log E exp(lambda * N) for N normal with mean 0."""
    return lambdas**2 * variance / 2


def log_moment_square(
    lambdas: FloatArray, *, probabilities: FloatArray, means: FloatArray, variance: float
) -> FloatArray:
    """Return log E exp(lambda * (M + N)^2), where M takes the `means` with these probabilities and N is normal.

    Finite for lambda below 1 / (2 * variance) only.
    """
    shrink = 1 - 2 * lambdas * variance
    with np.errstate(divide="ignore"):
        terms = np.log(probabilities)[None, :] + lambdas[:, None] * means[None, :] ** 2 / shrink[:, None]
    return np.asarray(logsumexp(terms, axis=1)) - np.log(shrink) / 2


def _log_mixture(probability: FloatArray, exponent: FloatArray) -> FloatArray:
    """Return log(1 - p + p e^x), also where e^x is too large for a float."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-probability), np.log(probability) + exponent)
