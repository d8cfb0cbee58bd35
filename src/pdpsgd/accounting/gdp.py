"""Gaussian differential privacy in the limit of many steps: quick, close, and no proof."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import EarlierRun, Exposure, History, Past


class GdpAccountant(Accountant):
    """The central limit theorem of f-DP (Dong, Roth and Su 2019; Bu et al. 2020, arXiv:1911.11607).

    A Poisson-subsampled Gaussian taken many times behaves like one Gaussian mechanism with mu = q * sqrt(T *
    (exp(1/sigma^2) - 1)). This is a limit, not a bound: the answer may lie below the truth, so this
    accountant plans and explores but never proves; plans computed with it have no `proven_epsilon`.
    """

    name = "gdp"
    proves = False

    def _epsilon(self, history: History, delta: float) -> float:
        return epsilon_of_gaussian(total_mu(history), delta)

    def _delta(self, history: History, epsilon: float) -> float:
        return delta_of_gaussian(total_mu(history), epsilon)


def total_mu(history: Past) -> float:
    """Return the limit's mu of a history: rounds add in squares; participation is a second layer of sampling."""
    return math.sqrt(math.fsum(_mu_squared(entry) for entry in history))


def _mu_squared(entry: Exposure | EarlierRun) -> float:
    if isinstance(entry, EarlierRun):
        return entry.mu**2
    pi, q, sigma, steps = entry
    inside = q * q * steps * _expm1(sigma**-2)
    return pi * pi * _expm1(inside) if pi < 1 else inside


def _expm1(x: float) -> float:
    return math.expm1(min(x, 700.0))


def delta_of_gaussian(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of the Gaussian mechanism with sensitivity over noise mu.

    Balle and Wang 2018, Theorem 8.
    """
    if mu == 0:
        return 0.0
    upper = ndtr(mu / 2 - epsilon / mu)
    return float(max(0.0, upper - math.exp(min(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0))))


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Invert `delta_of_gaussian` in epsilon.

    >>> round(epsilon_of_gaussian(1.0, 1e-5), 3)
    4.377
    """
    if delta_of_gaussian(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of_gaussian(mu, high) > delta:
        high *= 2
    return float(brentq(lambda e: delta_of_gaussian(mu, e) - delta, 0.0, high, xtol=1e-12, rtol=1e-12))
