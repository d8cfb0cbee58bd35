"""The privacy curve of N(mu, 1) against N(0, 1), exactly, for arrays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

from pdpsgd._typing import FloatArray, IntArray

SAFETY = 1e-11
"""Inverses are moved by this share to the safe side: far more than double precision loses in the curve."""


def gaussian_delta(mu: npt.ArrayLike, epsilon: npt.ArrayLike) -> FloatArray:
    """Compute delta_mu(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

    Guarantee: equality (Balle and Wang 2018, Theorem 8), in both directions, for every real epsilon. At mu = 0
    it is 1 - e^epsilon or 0, the larger.

    >>> round(float(gaussian_delta(1.0, 1.0)), 7)
    0.1269367
    """
    mus, epsilons, shape = _columns(mu, epsilon)
    delta = np.maximum(-np.expm1(np.minimum(epsilons, 0.0)), 0.0)
    some = mus > 0
    delta[some] = _curve(mus[some], epsilons[some])[0]
    return delta.reshape(shape)


def gaussian_mu(epsilon: npt.ArrayLike, delta: npt.ArrayLike) -> FloatArray:
    """Compute the largest mu with delta_mu(epsilon) <= delta, slightly below; 0 where delta is 0.

    Guarantee: N(mu, 1) against N(0, 1) is (epsilon, delta)-DP in both directions.

    >>> gaussian_mu([0.5, 1.0, 2.0], 0.9e-5).round(4).tolist()
    [0.1412, 0.2664, 0.4987]
    """
    epsilons, deltas, shape = _columns(epsilon, delta)
    found = np.where(np.isinf(epsilons) & (deltas > 0), np.inf, 0.0)
    some = np.isfinite(epsilons) & (epsilons >= 0) & (deltas > 0)
    e, log_delta = epsilons[some], np.log(deltas[some])
    # Phi(mu/2 - epsilon/mu) and mu/sqrt(2 pi) are both above the curve: each gives a mu that is small enough.
    z = -ndtri(deltas[some])
    low = np.maximum(-z + np.sqrt(z * z + 2 * e), math.sqrt(2 * math.pi) * deltas[some])

    def above(mu: FloatArray, index: IntArray) -> tuple[FloatArray, FloatArray]:
        value, density, _ = _curve(mu, e[index])
        return _log(value) - log_delta[index], density / np.maximum(value, 1e-300)

    found[some] = _root(above, low, _doubled(above, low))
    return found.reshape(shape)


def gaussian_epsilon(mu: npt.ArrayLike, delta: npt.ArrayLike) -> FloatArray:
    """Compute the smallest epsilon >= 0 with delta_mu(epsilon) <= delta, slightly above; infinite where delta is 0.

    Guarantee: N(mu, 1) against N(0, 1) is (epsilon, delta)-DP in both directions.

    >>> round(float(gaussian_epsilon(1.0, 1e-5)), 5)
    4.37718
    """
    mus, deltas, shape = _columns(mu, delta)
    found = np.where((mus > 0) & ((deltas <= 0) | np.isinf(mus)), np.inf, 0.0)
    some = (mus > 0) & (deltas > 0) & np.isfinite(mus)
    some[some] = gaussian_delta(mus[some], 0.0) > deltas[some]
    m, log_delta = mus[some], np.log(deltas[some])
    # At mu^2/2 + mu z already the first term of the curve is as small as delta.
    high = np.maximum(m * m / 2 - m * ndtri(deltas[some]), 1e-12)

    def below(epsilon: FloatArray, index: IntArray) -> tuple[FloatArray, FloatArray]:
        value, _, slope = _curve(m[index], epsilon)
        return log_delta[index] - _log(value), slope / np.maximum(value, 1e-300)

    found[some] = _root(below, np.zeros_like(m), high, to_upper=True)
    return found.reshape(shape)


def for_distinct(
    function: Callable[[FloatArray, FloatArray], FloatArray], first: FloatArray, second: FloatArray
) -> FloatArray:
    """Evaluate a function of two columns once for each pair of values that occurs: people share few of them."""
    ones, place = np.unique(first, return_inverse=True)
    others, other_place = np.unique(second, return_inverse=True)
    pairs, pair_of = np.unique(place.reshape(-1) * others.size + other_place.reshape(-1), return_inverse=True)
    found = function(ones[pairs // max(others.size, 1)], others[pairs % max(others.size, 1)])
    return found[pair_of.reshape(-1)].reshape(first.shape)


def _columns(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[FloatArray, FloatArray, tuple[int, ...]]:
    one, other = np.broadcast_arrays(np.asarray(first, dtype=float), np.asarray(second, dtype=float))
    return one.ravel(), other.ravel(), one.shape


def _curve(mu: FloatArray, epsilon: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The curve, its derivative in mu (a normal density), and minus its derivative in epsilon, for mu > 0."""
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    # e^epsilon density(b) = density(a), so both terms are density(a) times a Mills ratio: nothing overflows.
    low = a < 0
    ratio_a, ratio_b = _mills(np.where(low, -a, 0.0)), _mills(np.where(low, -b, 0.0))
    with np.errstate(over="ignore"):
        subtracted = np.where(low, density * ratio_b, np.exp(np.minimum(epsilon + log_ndtr(b), 0.0)))
    value = np.where(low, density * (ratio_a - ratio_b), ndtr(a) - subtracted)
    return np.maximum(value, 0.0), density, subtracted


def _mills(x: FloatArray) -> FloatArray:
    """Phi(-x) / density(x)."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _log(value: FloatArray) -> FloatArray:
    return np.log(np.maximum(value, 1e-320))


Increasing = Callable[[FloatArray, IntArray], tuple[FloatArray, FloatArray]]
"""Value and slope at points, of those of many functions that an index names."""


def _doubled(increasing: Increasing, start: FloatArray) -> FloatArray:
    """Points at which the functions are positive."""
    high, short = 2 * start, np.arange(start.size)
    while short.size:
        short = short[increasing(high[short], short)[0] < 0]
        high[short] *= 2
    return high


def _root(increasing: Increasing, low: FloatArray, high: FloatArray, *, to_upper: bool = False) -> FloatArray:
    """A point next to each root, on the side that is asked for: Newton's steps, kept inside the bracket.

    The point is `SAFETY` away from the root as found, and its sign was computed; else the bracket's end is taken.
    """
    x, low, high = (high if to_upper else low).copy(), low.copy(), high.copy()
    moving = np.arange(x.size)
    for _ in range(100):
        at = x[moving]
        value, slope = increasing(at, moving)
        high[moving] = np.where(value >= 0, at, high[moving])
        low[moving] = np.where(value <= 0, at, low[moving])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = at - value / slope
        inside = (step >= low[moving]) & (step <= high[moving])
        x[moving] = np.where(inside, step, (low[moving] + high[moving]) / 2)
        moving = moving[np.abs(x[moving] - at) > SAFETY / 10 * np.abs(at)]
        if not moving.size:
            break
    beside = x * (1 + SAFETY) if to_upper else x * (1 - SAFETY)
    value = increasing(beside, np.arange(x.size))[0]
    return np.where(value >= 0, beside, high) if to_upper else np.where(value <= 0, beside, low)
