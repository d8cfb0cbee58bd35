"""The theorems, as plain functions: amplification by sampling, composition, and conversions from Renyi DP.

Each function states the guarantee it gives and where it is proven; the proofs that are ours stand in
`docs/theory.md`. All of them hold for adding and for removing a person's record, unless they say which.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

from pdpsgd._typing import FloatArray
from pdpsgd.errors import check_probability, fail

Curve = Callable[[float], float]
"""delta as a function of epsilon."""


def participation_for(epsilon: npt.ArrayLike, tau: float) -> FloatArray:
    """Return the sampling mechanism's participation (paper, eq. 1): (e^epsilon - 1)/(e^tau - 1), at most 1.

    Guarantee: a person who participates in a (tau, delta)-DP algorithm with this probability, independently
    and hidden, has (epsilon, pi * delta)-DP (Theorem 1 of the paper; docs/theory.md, "Drawn once a round").

    >>> participation_for([0.5, 1.0], tau=0.75).round(4).tolist()
    [0.5808, 1.0]
    """
    below = np.minimum(np.asarray(epsilon, dtype=float), tau)
    return np.exp(below - tau) * np.expm1(-below) / np.expm1(-tau)  # the same, for epsilons above 700, too


def amplify(epsilon: float, delta: float, participation: float) -> tuple[float, float]:
    """Amplify (epsilon, delta) by participation, in both directions (Theorem 1).

    Guarantee: an (epsilon, delta)-DP algorithm is (ln(1 + pi(e^epsilon - 1)), pi * delta)-DP towards a person
    who is in its data with probability pi, independently and hidden. Removing attains it; adding is never
    worse.

    >>> amplify(1.0, 1e-5, 0.5)
    (0.6201145069582775, 5e-06)
    """
    check_probability(participation=participation)
    return math.log1p(participation * math.expm1(epsilon)), participation * delta


def amplify_removing(curve: Curve, participation: float) -> Curve:
    """Return the exact curve delta'(epsilon') for removing the record, from the algorithm's own curve.

    Guarantee: equality. With P = (1-pi) Q + pi P1, the hockey-stick divergence of P from Q at e^epsilon' is
    pi times that of P1 from Q at 1 + (e^epsilon' - 1)/pi; below ln(1-pi) it is 1 - e^epsilon'.
    """
    check_probability(participation=participation)

    def amplified(epsilon: float) -> float:
        if participation == 0:
            return max(0.0, -math.expm1(epsilon))
        inner = math.expm1(epsilon) / participation
        return participation * curve(math.log1p(inner)) if inner > -1 else -math.expm1(epsilon)

    return amplified


def amplify_adding(curve: Curve, participation: float) -> Curve:
    """Return the exact curve delta'(epsilon') for adding the record, from the algorithm's own curve.

    Guarantee: equality. delta' = pi * e^(epsilon' - epsilon) * delta(epsilon) where e^-epsilon = (e^-epsilon'
    - (1-pi))/pi; from -ln(1-pi) on it is 0, because the mixture contains (1-pi) of the other distribution.
    """
    check_probability(participation=participation)

    def amplified(epsilon: float) -> float:
        if participation == 0:
            return max(0.0, -math.expm1(epsilon))
        shrunk = 1 + math.expm1(-epsilon) / participation
        return participation * math.exp(epsilon) * shrunk * curve(-math.log(shrunk)) if shrunk > 0 else 0.0

    return amplified


def compose(*promises: tuple[npt.ArrayLike, npt.ArrayLike]) -> tuple[FloatArray, FloatArray]:
    """Compose (Phi_1, Delta_1)-PDP, (Phi_2, Delta_2)-PDP, ... by adding them up (Theorem 2).

    Guarantee: for every person i the adaptive composition is (sum of epsilon_i, sum of delta_i)-DP
    (docs/theory.md, "Composition", with the positive part that the paper's proof needs). Simple and loose;
    the accountants are tighter.

    >>> [x.tolist() for x in compose(([0.5, 1.0], 1e-6), ([0.25, 0.0], 1e-6))]
    [[0.75, 1.0], [2e-06, 2e-06]]
    """
    epsilons, deltas = zip(*promises, strict=True)
    totals = (
        sum(np.asarray(e, dtype=float) for e in epsilons),
        sum(np.asarray(d, dtype=float) for d in deltas),
    )
    epsilon, delta = np.broadcast_arrays(*totals)
    return epsilon.copy(), delta.copy()


def post_process(promise: tuple[FloatArray, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the same promise: anything computed from the output without the data keeps it.

    Guarantee: for every (also randomized) function of the output (docs/theory.md, "Post-processing"). The
    identity on promises, here so that code can say why a promise carries over (weight averaging, momentum,
    model selection on public data).
    """
    return promise


def epsilon_from_renyi_as_published(
    order: npt.ArrayLike, rho: npt.ArrayLike, delta: npt.ArrayLike
) -> FloatArray:
    """Convert individual RDP as the paper states it: epsilon_i = rho_i + ln(1/delta_i)/(alpha - 1).

    Guarantee: if the Renyi divergence of order alpha between the two outputs is at most rho_i in both
    directions, person i has (epsilon_i, delta_i)-DP (paper, Theorem 4; Mironov 2017, Proposition 3).
    """
    alpha = _orders(order)
    return np.asarray(rho) + np.log(1 / np.asarray(delta, dtype=float)) / (alpha - 1)


def epsilon_from_renyi(order: npt.ArrayLike, rho: npt.ArrayLike, delta: npt.ArrayLike) -> FloatArray:
    """Convert RDP more tightly: rho + ln((alpha-1)/alpha) - (ln(delta) + ln(alpha))/(alpha-1), at least 0.

    Guarantee: as above, and never worse (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Proposition 12).

    >>> round(float(epsilon_from_renyi(10, 0.1, 1e-5)), 4)
    1.018
    >>> round(float(epsilon_from_renyi_as_published(10, 0.1, 1e-5)), 4)
    1.3792
    """
    alpha = _orders(order)
    gain = np.log1p(-1 / alpha) - (np.log(np.asarray(delta, dtype=float)) + np.log(alpha)) / (alpha - 1)
    return np.maximum(np.asarray(rho) + gain, 0.0)


def delta_from_renyi(order: npt.ArrayLike, rho: npt.ArrayLike, epsilon: npt.ArrayLike) -> FloatArray:
    """Convert RDP to delta at an epsilon; at most 1."""
    alpha = _orders(order)
    exponent = (alpha - 1) * (np.asarray(rho) - np.asarray(epsilon) + np.log1p(-1 / alpha)) - np.log(alpha)
    return np.exp(np.minimum(exponent, 0.0))


def renyi_with_participation(
    orders: FloatArray, rho: FloatArray, integer_rho: FloatArray, participation: float
) -> FloatArray:
    """Return rho'(alpha) for a person who is in the round with probability `participation`, hidden.

    Guarantee: for any algorithm and both directions, the smaller of two bounds: joint convexity,
    e^((alpha-1) rho') <= 1 - pi + pi e^((alpha-1) rho); and, at integer orders, the Poisson bound of Zhu and
    Wang (2019), Theorem 5.

    Args:
        orders: the Renyi orders.
        rho: the round's own curve at `orders`.
        integer_rho: its values at the orders 2, 3, ...
        participation: the probability of being in the round.

    Returns:
        The amplified curve at `orders`.
    """
    exponent = (orders - 1) * rho
    bound = np.logaddexp(math.log1p(-participation), math.log(participation) + exponent) / (orders - 1)
    for index, alpha in enumerate(orders):
        if alpha == int(alpha) and 2 <= alpha <= integer_rho.size + 1:
            bound[index] = min(bound[index], _poisson_bound(int(alpha), integer_rho, participation))
    return bound


def _poisson_bound(alpha: int, integer_rho: FloatArray, pi: float) -> float:
    ell = np.arange(2, alpha + 1)
    choose = gammaln(alpha + 1) - gammaln(ell + 1) - gammaln(alpha - ell + 1)
    terms = (
        choose + (alpha - ell) * math.log1p(-pi) + ell * math.log(pi) + (ell - 1) * integer_rho[: alpha - 1]
    )
    terms[1:] += math.log(3)
    first = (alpha - 1) * math.log1p(-pi) + math.log1p((alpha - 1) * pi)
    return float(logsumexp([first, *terms])) / (alpha - 1)


def _orders(order: npt.ArrayLike) -> FloatArray:
    alpha = np.asarray(order, dtype=float)
    if (alpha <= 1).any():
        fail(f"Expected Renyi orders above 1. Got {alpha.min()!r}.")
    return alpha
