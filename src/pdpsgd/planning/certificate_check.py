"""Certificates computed a second time, by code that shares nothing with the accountants.

The loss of a step is discretized cell by cell. The distribution with the person and the one without are composed each
by itself, by Fourier transforms over a window that holds both; the corners of the trade-off are sums of the one and of
the other. numpy and scipy only; nothing from `pdpsgd.accounting` but the description of a history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import log_ndtr, ndtr, ndtri, ndtri_exp

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import EarlierRun, Exposure, History, simplify
from pdpsgd.errors import PromiseBroken
from pdpsgd.planning.rounds import Level, Round

FINENESS = (24, 96)
"""Grid points per standard deviation of a step's loss: first try, and second before a certificate is called wrong."""
AGREEMENT = 1e-6
"""How far a certificate may lie below this computation, which overstates as well, if by less."""
COARSEST = 0.2
"""The interval is at most this over the fineness."""
TAIL = 1e-15
"""Mass beyond each end of a window: counted as infinite loss above, and taken off where it could help."""


def certificate_holds(history: History, *, mu: float, d: float) -> bool:
    """Whether an independent computation confirms delta(epsilon) <= delta_mu(epsilon) + d for every epsilon.

    Guarantee: if so, it holds in both directions for mu (1 + `AGREEMENT`), whatever the code that computed the
    certificate did wrong.

    >>> run = (Exposure(1.0, 1024 / 60_000, 2.77, 1000),)
    >>> certificate_holds(run, mu=0.2055, d=2.5e-7), certificate_holds(run, mu=0.2045, d=2.5e-7)
    (True, False)
    """
    return any(
        mu_upper_bound(history, d=d, fineness=fineness) <= mu * (1 + AGREEMENT) for fineness in FINENESS
    )


def mu_upper_bound(history: History, *, d: float, fineness: int = FINENESS[-1]) -> float:
    """Compute the smallest mu with delta(epsilon) <= delta_mu(epsilon) + d for every epsilon, both directions.

    Guarantee: an upper bound; infinite where d is too small for double precision.
    """
    history = simplify(history)
    if not history:
        return 0.0
    if all(e.participation == 1 and e.sample_rate == 1 for e in history):
        return float(np.sqrt(np.sum([e.steps * e.noise_multiplier**-2.0 for e in history])))
    # With little noise a few steps decide, whose losses are far larger than their standard deviation.
    widths = [_deviation(e) / min(1.0, e.noise_multiplier) for e in history if _matters(e, history)]
    interval = min(min(widths), COARSEST) / fineness
    return max(_mu_in_direction(history, d, interval, removing) for removing in (True, False))


def check_claims(levels: Sequence[Level], rounds: Sequence[Round]) -> None:
    """Refuse levels whose proven epsilon does not follow from a certificate with d = a tenth of delta.

    Guarantee: if this returns, every level's rounds are dominated by the Gaussian that has the level's proven epsilon
    at nine tenths of its delta, but for a tenth of its delta, up to `AGREEMENT`.

    Raises:
        PromiseBroken: a claim is below what this computation finds.
    """
    for index, level in enumerate(levels):
        history = simplify(tuple(r.exposure(index) for r in rounds))
        if not history or level.proven_epsilon is None or math.isinf(level.proven_epsilon) or level.history:
            continue  # earlier runs are counted by `epsilon_after`
        bounds = (mu_upper_bound(history, d=level.delta / 10, fineness=fineness) for fineness in FINENESS)
        if not any(_delta(mu / (1 + AGREEMENT), level.proven_epsilon) <= 0.9 * level.delta for mu in bounds):
            raise PromiseBroken(
                f"levels[{index}].proven_epsilon={level.proven_epsilon!r} is below what a certificate gives at "
                f"delta={level.delta:g}. Do not train with this plan."
            )


def epsilon_after(
    earlier: Sequence[EarlierRun], history: History, delta: float, *, fineness: int = FINENESS[-1]
) -> float:
    """Compute what runs of which each may be chosen by the results of those before cost together.

    Args:
        earlier: the runs before, each with the certificate that it counts for.
        history: what the last run exposes the person to; it takes a quarter of what is left of delta / 10 as its d.
        delta: at which delta.
        fineness: grid points per standard deviation of a step's loss.

    Returns:
        An upper bound on epsilon, up to `AGREEMENT`; infinite where the d do not fit into a tenth of delta.

    Raises:
        PromiseBroken: an earlier run's certificate is below what this computation finds.
    """
    for run in earlier:
        if not certificate_holds(run.exposures, mu=run.mu, d=run.d):
            raise PromiseBroken(
                f"An earlier run is counted with mu={run.mu!r} and d={run.d!r}, which is less than it cost. Do not "
                "train with this plan."
            )
    spent_d = math.fsum(run.d for run in earlier)
    squares = [run.mu**2 for run in earlier]
    history = simplify(history)
    if history:
        in_every_step = all(e.participation == 1 and e.sample_rate == 1 for e in history)
        d = 0.0 if in_every_step else max((delta / 10 - spent_d) / 4, 0.0)
        squares.append((mu_upper_bound(history, d=d, fineness=fineness) / (1 + AGREEMENT)) ** 2)
        spent_d += d
    if spent_d > delta / 10 * (1 + 1e-12):
        return math.inf
    return _epsilon(math.sqrt(math.fsum(squares)), 0.9 * delta)


def _epsilon(mu: float, delta: float) -> float:
    """The epsilon at which the Gaussian's delta is at most this one, from above."""
    low, high = 0.0, 1.0
    if math.isinf(mu) or _delta(mu, 0.0) <= delta:
        return math.inf if math.isinf(mu) else 0.0
    while _delta(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mu, middle) > delta else (low, middle)
    return high


def _delta(mu: float, epsilon: float) -> float:
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


@dataclass(frozen=True)
class _Pair:
    """Masses with and without the person at losses (`first` + j) * interval; `infinite` of the upper one has none."""

    first: int
    upper: FloatArray
    lower: FloatArray
    infinite: float
    interval: float
    rounding: float = 0.0

    @property
    def losses(self) -> FloatArray:
        return (self.first + np.arange(self.upper.size)) * self.interval


def _mu_in_direction(history: History, d: float, interval: float, removing: bool) -> float:
    parts = []
    for pi, q, sigma, steps in history:
        step = _one_step(q, sigma, interval, TAIL / steps, removing)
        if pi == 1:
            parts.append((step, steps))
        else:
            parts.append((_mixed(_composed([(step, steps)]), pi, removing), 1))
    total = _composed(parts)
    losses = total.losses
    kept = losses >= 0
    a = np.minimum(np.cumsum(total.upper[::-1])[::-1] + total.infinite + total.rounding, 1.0)[kept]
    direct = np.cumsum(total.lower[::-1])[::-1][kept] - total.rounding
    # Where the lower distribution's tail has no digits left, it is the upper one's, weighted by e^-loss.
    with np.errstate(divide="ignore"):
        weighted = np.logaddexp.accumulate((np.log(total.upper) - losses)[::-1])[::-1][kept]
        log_s = np.where(direct > 1e6 * total.rounding, np.log(np.maximum(direct, 1e-300)), weighted)
    above = a > d
    if total.infinite + total.rounding > d:
        return math.inf
    if not above.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        gap = ndtri(a[above] - d) - ndtri_exp(np.minimum(log_s[above] - 1e-11, 0.0))
    return max(0.0, float(np.max(np.where(np.isnan(gap), np.inf, gap))) + 1e-10)


def _deviation(e: Exposure) -> float:
    """About the standard deviation of a step's loss, or of the whole round's if that is smaller."""
    inverse_variance = min(e.noise_multiplier**-2.0, 40.0)
    step = min(e.sample_rate * math.sqrt(math.expm1(inverse_variance)), math.sqrt(inverse_variance))
    return step * min(1.0, e.participation * math.sqrt(e.steps))


def _matters(e: Exposure, history: History) -> bool:
    largest = max(_deviation(other) ** 2 * other.steps for other in history)
    return _deviation(e) ** 2 * e.steps > 1e-6 * largest


def _one_step(q: float, sigma: float, interval: float, tail: float, removing: bool) -> _Pair:
    """One Poisson-subsampled Gaussian step: N(0) against (1-q) N(0) + q N(1), at its outcome's loss."""
    reach = -float(ndtri(tail)) * sigma
    ends = [_loss_at(x, q, sigma) for x in ((-reach, 1 + reach) if removing else (reach, -reach))]
    low, high = ends if removing else (-ends[0], -ends[1])
    first, last = math.floor(low / interval), math.ceil(high / interval) + 1
    edges = np.arange(first, last + 1) * interval
    # Outcomes at the edges, ascending; the loss of adding falls with the outcome.
    rising = edges if removing else -edges[::-1]
    with np.errstate(divide="ignore"):
        outcome = 0.5 + sigma**2 * np.log(np.maximum((np.expm1(rising) + q) / q, 0.0))
    without, shifted = _cells(outcome / sigma), _cells((outcome - 1) / sigma)
    together = (1 - q) * without + q * shifted
    upper, lower = (together, without) if removing else (without[::-1], together[::-1])
    inner_upper, inner_lower = upper[1:-1], lower[1:-1]
    to_right = np.clip(
        (inner_upper - inner_lower * np.exp(edges[:-1])) / -math.expm1(-interval), 0.0, inner_upper
    )
    mass = np.zeros(edges.size)
    mass[:-1] += inner_upper - to_right
    mass[1:] += to_right
    mass[0] += upper[0]
    return _Pair(first, mass, mass * np.exp(-edges), float(upper[-1]), interval)


def _loss_at(x: float, q: float, sigma: float) -> float:
    stays = math.log1p(-q) if q < 1 else -math.inf
    return float(np.logaddexp(stays, math.log(q) + (x - 0.5) / sigma**2))


def _cells(z: FloatArray) -> FloatArray:
    """Standard normal mass below, between and above the points, each from the side on which it keeps its digits."""
    below, above = ndtr(z), ndtr(-z)
    between = np.where(z[1:] + z[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], np.maximum(between, 0.0), above[-1:]])


def _mixed(inside: _Pair, pi: float, removing: bool) -> _Pair:
    """The same round for somebody who is in it with probability `pi` only, put back on the grid."""
    h, losses = inside.interval, inside.losses
    if removing:
        place = np.append(np.log1p(pi * np.expm1(losses)), math.log1p(-pi))
        missing = max(0.0, 1 - float(inside.lower.sum()))
        mass = np.append(pi * inside.upper + (1 - pi) * inside.lower, (1 - pi) * missing)
        infinite = pi * inside.infinite
    else:
        place = np.append(-np.log1p(pi * np.expm1(-losses)), -math.log1p(-pi))
        mass = np.append(inside.upper, inside.infinite)
        infinite = 0.0
    left = np.floor(place / h).astype(np.int64)
    to_right = np.clip(mass * np.expm1(left * h - place) / math.expm1(-h), 0.0, mass)
    first, size = int(left.min()), int(left.max() - left.min()) + 2
    upper = np.zeros(size)
    upper += np.bincount(left - first, weights=mass - to_right, minlength=size)
    upper += np.bincount(left - first + 1, weights=to_right, minlength=size)
    lower = upper * np.exp(-(first + np.arange(size)) * h)
    return _Pair(first, upper, lower, infinite, h, inside.rounding)


def _composed(parts: list[tuple[_Pair, int]]) -> _Pair:
    """The sum of independent losses, under the upper and under the lower distribution, each by its own transform."""
    interval = parts[0][0].interval
    reaches = [_window(parts, side) for side in ("upper", "lower")]
    first = math.floor(min(low for low, _ in reaches) / interval) - 1
    last = math.ceil(max(high for _, high in reaches) / interval) + 1
    size = next_fast_len(last - first + 1, real=True)
    upper, lower = (_convolved(parts, side, first, size) for side in ("upper", "lower"))
    steps = sum(times for _, times in parts)
    survives = math.fsum(times * math.log1p(-part.infinite) for part, times in parts)
    rounding = sum(part.rounding for part, _ in parts) + 1e-15 * (10 + steps) + 2 * TAIL
    return _Pair(first, upper, lower, -math.expm1(survives) + TAIL, interval, rounding)


def _convolved(parts: list[tuple[_Pair, int]], side: str, first: int, size: int) -> FloatArray:
    spectrum, offset = np.ones(size // 2 + 1, dtype=complex), 0
    for part, times in parts:
        mass: FloatArray = getattr(part, side)
        spectrum *= rfft(np.bincount(np.arange(mass.size) % size, weights=mass, minlength=size)) ** times
        offset += part.first * times
    return np.maximum(np.roll(irfft(spectrum, n=size), (offset - first) % size), 0.0)


def _window(parts: list[tuple[_Pair, int]], side: str) -> tuple[float, float]:
    """Where a sum of losses lies but for `TAIL` on each side, by Chernoff's bound."""
    exponents = np.geomspace(1e-2, 1e4, 25)
    above = sum(times * _log_moments(part, side, exponents) for part, times in parts)
    below = sum(times * _log_moments(part, side, -exponents) for part, times in parts)
    return (
        -float(np.min((below - math.log(TAIL)) / exponents)),
        float(np.min((above - math.log(TAIL)) / exponents)),
    )


def _log_moments(part: _Pair, side: str, exponents: FloatArray) -> FloatArray:
    mass: FloatArray = getattr(part, side)
    kept = mass > 0
    log_mass, losses = np.log(mass[kept]), part.losses[kept]
    tilted = (log_mass + t * losses for t in exponents)
    return np.array([logs.max() + math.log(np.exp(logs - logs.max()).sum()) for logs in tilted])
