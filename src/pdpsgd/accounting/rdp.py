"""Renyi differential privacy of the Poisson-subsampled Gaussian, vectorized over histories and orders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure, History, Past, simplify, split
from pdpsgd.accounting.theorems import delta_from_renyi, epsilon_from_renyi, renyi_with_participation

ORDERS: tuple[float, ...] = (
    *(1 + k / 10 for k in range(1, 10)),
    *(2 + k / 4 for k in range(8)),
    *(4 + k / 2 for k in range(12)),
    *range(10, 64),
    *(2**e * (8 + k) for e in range(3, 10) for k in range(8)),
    8192,
)
"""Orders into the thousands: where noise is large, small orders overstate epsilon many times over."""


class RdpAccountant(Accountant):
    """Moments of the privacy loss (Mironov 2017; Mironov, Talwar and Zhang 2019, arXiv:1908.10530).

    Guarantee: upper bounds for adding and for removing a record, up to rounding in double precision (about
    1e-10 relative). Looser than `pld`, most of all for few steps.
    """

    name = "rdp"
    proves = True

    def __init__(self, orders: Sequence[float] = ORDERS) -> None:
        self.orders = np.asarray(orders, dtype=float)
        self._steps: dict[tuple[float, float], FloatArray] = {}

    def renyi(self, history: History) -> FloatArray:
        """Return rho(alpha) of the history at each of the accountant's orders; rounds add up."""
        self._compute_steps(history)
        return np.sum([self._renyi_of_round(e) for e in history], axis=0) if history else 0 * self.orders

    def epsilons(self, histories: Sequence[Past], deltas: Sequence[float]) -> list[float]:
        """Return the epsilon of many histories; steps that share their noise are computed together."""
        self._compute_steps([e for history in histories for e in simplify(split(history)[1])])
        return super().epsilons(histories, deltas)

    def _epsilon(self, history: History, delta: float) -> float:
        return float(np.min(epsilon_from_renyi(self.orders, self.renyi(history), delta)))

    def _delta(self, history: History, epsilon: float) -> float:
        return float(np.min(delta_from_renyi(self.orders, self.renyi(history), epsilon)))

    def _renyi_of_round(self, exposure: Exposure) -> FloatArray:
        pi, q, sigma, steps = exposure
        inside = steps * self._steps[q, sigma]
        if pi == 1:
            return inside
        integers = steps * renyi_of_step(np.array([q]), sigma, range(2, LARGEST_POISSON_ORDER + 1))[0]
        return renyi_with_participation(self.orders, inside, integers, pi)

    def _compute_steps(self, exposures: Sequence[Exposure]) -> None:
        if len(self._steps) > MOST_STEPS_KEPT:
            self._steps.clear()
        unknown = {(e.sample_rate, e.noise_multiplier) for e in exposures} - self._steps.keys()
        for sigma in {sigma for _, sigma in unknown}:
            rates = [q for q, other in unknown if other == sigma]
            curves = renyi_of_step(np.array(rates), sigma, self.orders)
            self._steps.update({(q, sigma): curve for q, curve in zip(rates, curves, strict=True)})


LARGEST_POISSON_ORDER = 128
"""Up to this order the tighter bound for participation below 1 is used; it needs every integer order below."""
MOST_STEPS_KEPT = 100_000


def renyi_of_step(sample_rates: FloatArray, noise_multiplier: float, orders: Iterable[float]) -> FloatArray:
    """Return rho(alpha) of one step for each rate (rows) and order (columns).

    Guarantee: for adding and removing: removing is the larger of the two for this mechanism (Mironov,
    Talwar and Zhang 2019, Theorem 5).
    """
    rates = np.atleast_1d(np.asarray(sample_rates, dtype=float))
    moments = [
        _integer_moment(rates, noise_multiplier, int(a))
        if a == int(a)
        else _moment(rates, noise_multiplier, a)
        for a in orders
    ]
    return np.stack(moments, axis=-1) / (np.fromiter(orders, float) - 1)


def _integer_moment(q: FloatArray, sigma: float, alpha: int) -> FloatArray:
    """ln E[(P/Q)^alpha] = ln(1 + sum_{k>=2} C(alpha,k) q^k (1-q)^(alpha-k) (e^((k^2-k)/(2 sigma^2)) - 1)).

    Without the terms that cancel (k = 0, 1 and the 1 of each binomial term), so that tiny rates lose no
    digits.
    """
    k = np.arange(2, alpha + 1)
    exponent = (k * k - k) / (2 * sigma**2)
    growth = exponent + np.log(-np.expm1(-exponent))
    log_choose = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    # A rate of 1 leaves only k = alpha; 0 * -inf is avoided by the smallest positive number.
    log_rest = np.log(np.maximum(1 - q, np.finfo(float).tiny))[:, None]
    terms = log_choose + growth + k * np.log(q)[:, None] + np.where(k == alpha, 0.0, alpha - k) * log_rest
    return np.logaddexp(0.0, logsumexp(terms, axis=1))


def _moment(q: FloatArray, sigma: float, alpha: float) -> FloatArray:
    """The same for any order, by the trapezoidal rule, which converges geometrically for this integrand."""
    width = min(0.1, sigma / 2)
    z = np.arange(-12.0, alpha / sigma + 12.0, width)
    shift = np.log(np.maximum(1 - q, np.finfo(float).tiny))[:, None]
    log_ratio = np.logaddexp(shift, np.log(q)[:, None] + z / sigma - 1 / (2 * sigma**2))
    log_density = -z * z / 2 - 0.5 * math.log(2 * math.pi)
    # E[(1+u)^alpha] - 1 with E[u] = 0, so -1 - alpha*u may be taken off inside: what is left is small where u is.
    small = log_ratio * alpha < 30
    u = np.expm1(np.where(small, log_ratio, 0.0))
    near = np.where(small, np.expm1(alpha * np.log1p(u)) - alpha * u, 0.0)
    near_sum = np.sum(near * np.exp(log_density), axis=1) * width
    far = np.where(small, -np.inf, alpha * log_ratio + log_density)
    far_sum = logsumexp(far, axis=1) + math.log(width)
    return np.logaddexp(np.log1p(np.maximum(near_sum, 0.0)), far_sum)
