"""Renyi differential privacy of the Poisson-subsampled Gaussian, vectorized over histories and orders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from pdpsgd._typing import FloatArray, IntArray
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
LITTLE_NOISE = 0.01
"""Below this noise multiplier a step costs an epsilon of thousands, and integrals would need 1 / sigma^2 points."""
MOST_STEPS_KEPT = 100_000


def renyi_of_step(sample_rates: FloatArray, noise_multiplier: float, orders: Iterable[float]) -> FloatArray:
    """Return rho(alpha) of one step for each rate (rows) and order (columns).

    Guarantee: for adding and removing: removing is the larger of the two for this mechanism (Mironov,
    Talwar and Zhang 2019, Theorem 5).
    """
    rates = np.atleast_1d(np.asarray(sample_rates, dtype=float))
    wanted = np.fromiter(orders, float)
    if noise_multiplier < LITTLE_NOISE:  # rho grows with the order: that of the next whole one is no less
        wanted = np.ceil(wanted)
    whole = wanted == np.rint(wanted)
    moments = np.empty((rates.size, wanted.size))
    moments[:, whole] = _integer_moments(rates, noise_multiplier, tuple(wanted[whole].astype(int)))
    for index in np.flatnonzero(~whole):
        moments[:, index] = _moment(rates, noise_multiplier, float(wanted[index]))
    return moments / (wanted - 1)


def _integer_moments(rates: FloatArray, sigma: float, orders: tuple[int, ...]) -> FloatArray:
    """ln E[(P/Q)^alpha] = ln(1 + sum_{k>=2} C(alpha,k) q^k (1-q)^(alpha-k) (e^((k^2-k)/(2 sigma^2)) - 1)).

    Without the terms that cancel (k = 0, 1 and the 1 of each binomial term), so that tiny rates lose no
    digits. The sums of all orders lie side by side in one array.
    """
    if not orders:
        return np.empty((rates.size, 0))
    k, rest, log_choose, starts = _binomial_terms(orders)
    every = np.arange(2.0, max(orders) + 1)
    exponent = (every * every - every) / (2 * sigma**2)
    growth = exponent + np.log(-np.expm1(-exponent))
    fixed = log_choose + growth[k - 2]
    found = np.empty((rates.size, len(orders)))
    lengths = np.diff(starts, append=k.size)
    for row, q in zip(found, rates.tolist(), strict=True):
        # A rate of 1 leaves only k = alpha; 0 * -inf is avoided by the smallest positive number.
        terms = rest * math.log(max(1 - q, float(np.finfo(float).tiny)))
        terms += fixed
        terms += k * (math.log(q) if q > 0 else -math.inf)
        top = np.maximum.reduceat(terms, starts)
        top[np.isneginf(top)] = 0.0
        terms -= np.repeat(top, lengths)
        row[:] = np.logaddexp(0.0, top + np.log(np.add.reduceat(np.exp(terms, out=terms), starts)))
    return found


@lru_cache(maxsize=8)
def _binomial_terms(orders: tuple[int, ...]) -> tuple[IntArray, FloatArray, FloatArray, IntArray]:
    """For k = 2 .. alpha of each order alpha in turn: k, alpha - k, ln C(alpha, k); and where each order starts."""
    k = np.concatenate([np.arange(2, alpha + 1) for alpha in orders])
    starts = np.cumsum([0, *(alpha - 1 for alpha in orders[:-1])])
    rest = np.repeat(orders, [alpha - 1 for alpha in orders]) - k
    log_choose = gammaln(k + rest + 1.0) - gammaln(k + 1.0) - gammaln(rest + 1.0)
    return k, rest.astype(float), log_choose, starts


def _moment(q: FloatArray, sigma: float, alpha: float) -> FloatArray:
    """The same for any order, by the trapezoidal rule, which converges geometrically for this integrand."""
    width = min(0.1, sigma / 2)
    z = np.arange(-12.0, alpha / sigma + 12.0, width)
    shift = np.log(np.maximum(1 - q, np.finfo(float).tiny))[:, None]
    log_ratio = np.logaddexp(shift, np.log(q)[:, None] + z / sigma - 1 / (2 * sigma**2))
    log_density = -z * z / 2 - 0.5 * math.log(2 * math.pi)
    # E[(1+u)^alpha] - 1 with E[u] = 0, so -1 - alpha*u may be taken off inside: what is left is small where u is.
    small = log_ratio * alpha < 30
    log_near = np.where(small, log_ratio, 0.0)
    near = np.expm1(alpha * log_near) - alpha * np.expm1(log_near)
    near_sum = np.sum(near * np.exp(log_density), axis=1) * width
    far = np.where(small, -np.inf, alpha * log_ratio + log_density)
    top = np.maximum(far.max(axis=1), np.log(np.finfo(float).tiny))
    with np.errstate(divide="ignore"):
        far_sum = top + np.log(np.exp(far - top[:, None]).sum(axis=1)) + math.log(width)
    return np.logaddexp(np.log1p(np.maximum(near_sum, 0.0)), far_sum)
