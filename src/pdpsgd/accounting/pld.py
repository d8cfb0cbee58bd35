"""Privacy loss distributions, on Google's dp-accounting, with a grid that fits the level."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting._dp_accounting import Losses, compose
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.gaussian import gaussian_delta, gaussian_epsilon
from pdpsgd.accounting.history import Exposure, History, is_gaussian
from pdpsgd.accounting.rdp import RdpAccountant

GRID_POINTS = 10
"""Per standard deviation of one step's loss; the answer is too high by about 8 % / GRID_POINTS^2."""
ROUGH_GRID_POINTS = 4
"""The same, for guesses: about half a percent too high."""
SMALLEST_DELTA = 1e-10
COARSEST_INTERVAL = 0.02
MOST_BINS = 1 << 25
CELLS = 128
"""On either side of the mode, for Chernoff's bound."""
MUCH = 1e3
"""So many times delta is far more mass than lies above the epsilon of a delta."""
TRUNCATED_MASS = 1e-14
"""In all steps together: counted as infinite loss, so part of delta."""
ROUNDING = 1e-15
"""What double precision may lose of a tail, for each step and ten more: counted as infinite loss, too. (Against long
doubles, a third of that or less: see the tests.)"""

Pair = tuple[Losses, Losses]
"""The distributions for removing and for adding a record."""
Curve = Callable[[FloatArray], FloatArray]
"""delta at each epsilon."""
Amplified = Callable[[Curve, float, FloatArray], FloatArray]


class PldAccountant(Accountant):
    """Numerical composition of privacy loss distributions (Doroshenko et al. 2022, arXiv:2207.04380).

    Guarantee: epsilon and delta are upper bounds for adding and for removing a record. Losses are discretized
    pessimistically (connect the dots) and truncated mass counts as infinite loss. Numerical error: the
    discretization overstates epsilon by about 0.1 % (`GRID_POINTS`); what convolution in double precision may
    lose counts as infinite loss (`ROUNDING`), so small deltas, and those close to that loss, are answered by
    the RDP accountant, which has no such floor. Where everybody is in every step, the run is one Gaussian
    mechanism and the answer is its closed form.
    """

    name = "pld"
    proves = True

    def __init__(self, points: int = GRID_POINTS) -> None:
        self._rdp, self._points = RdpAccountant(), points

    @property
    def rough(self) -> Accountant:
        """The same on a coarser grid, in about half of the time."""
        return PldAccountant(ROUGH_GRID_POINTS)

    def _epsilon(self, history: History, delta: float) -> float:
        if is_gaussian(history):
            return float(gaussian_epsilon(_gaussian_mu(history), delta))
        if delta < _smallest_delta(history):
            return self._rdp.epsilon(history, delta)
        try:
            return _larger_epsilon(history, delta, self._points)
        except _GridTooFineError:
            return self._rdp.epsilon(history, delta)

    def _delta(self, history: History, epsilon: float) -> float:
        if is_gaussian(history):
            return float(gaussian_delta(_gaussian_mu(history), epsilon))
        at = np.array([epsilon])
        try:
            delta = max(float(_delta_curve(losses)(at)[0]) for losses in _distribution(history, self._points))
        except _GridTooFineError:
            return self._rdp.delta(history, epsilon)
        smallest = _smallest_delta(history)
        return delta if delta >= smallest else min(smallest, self._rdp.delta(history, epsilon))


def _gaussian_mu(history: History) -> float:
    """The mu of a history in which every step samples the person: squares of 1/sigma add up, exactly."""
    return math.sqrt(math.fsum(e.steps / e.noise_multiplier**2 for e in history))


def _smallest_delta(history: History) -> float:
    """What rounding may take is at most a tenth of any delta from here on."""
    return max(SMALLEST_DELTA, 10 * ROUNDING * sum(exposure.steps for exposure in history))


class _GridTooFineError(Exception):
    """A grid that fits the steps has too many points for memory: tiny rates over very many steps."""


@lru_cache(maxsize=4096)
def _larger_epsilon(history: History, delta: float, points: int) -> float:
    """The epsilon for the worse of removing and adding."""
    return max(_epsilon_at(losses, delta) for losses in _distribution(history, points))


@lru_cache(maxsize=512)
def _distribution(history: History, points: int = GRID_POINTS) -> Pair:
    """The history's distributions, composed over its rounds."""
    interval = grid_interval(history, points)
    (removing, adding), *others = [_round(exposure, interval) for exposure in history]
    for one_removing, one_adding in others:
        removing, adding = compose(removing, one_removing), compose(adding, one_adding)
    return removing, adding


def grid_interval(history: History, points: int = GRID_POINTS) -> float:
    """Return the smallest standard deviation of a step's loss in the history, over `points`.

    A step's loss has a standard deviation of about q * sqrt(exp(1/sigma^2) - 1) (small q) and of about
    1/sigma (q near 1). With little noise a few steps decide, whose losses are far larger than that: a coarser
    grid is as exact. Rounds that hardly count next to the rest do not refine the grid.
    """
    variance = [_loss_deviation(e) ** 2 * e.steps for e in history]
    counted = [e for e, v in zip(history, variance, strict=True) if v > 1e-6 * max(variance)]
    wanted = min(_loss_deviation(e) / min(1.0, e.noise_multiplier) for e in counted) / points
    return min(wanted, COARSEST_INTERVAL)


def _loss_deviation(e: Exposure) -> float:
    small_rate = e.sample_rate * math.sqrt(math.expm1(min(max(e.noise_multiplier, 1e-100) ** -2, 50.0)))
    # With a small participation, the loss of the whole round is smaller than that of one step inside it.
    return min(small_rate, 1 / e.noise_multiplier) * min(1.0, e.participation * math.sqrt(e.steps))


def _round(exposure: Exposure, interval: float) -> Pair:
    pi, q, sigma, steps = exposure
    inside = _steps(q, sigma, steps, interval)
    return inside if pi == 1 else _drawn_once(inside, pi, interval)


@lru_cache(maxsize=256)
def _steps(q: float, sigma: float, steps: int, interval: float) -> Pair:
    """`steps` steps of the Poisson-subsampled Gaussian.

    The curve delta(epsilon) of one step is evaluated here, for the whole grid at once: dp-accounting's own
    constructor gives the same distribution, but inverts the loss point by point in Python and fails for
    little noise.
    """
    reach = -sigma * float(ndtri(TRUNCATED_MASS / steps))
    removing = _connect_dots(
        lambda e: _removing_curve(e, q, sigma), _loss(-reach, q, sigma), _loss(1 + reach, q, sigma), interval
    )
    adding = _connect_dots(
        lambda e: _adding_curve(e, q, sigma), -_loss(reach, q, sigma), -_loss(-reach, q, sigma), interval
    )
    return _self_compose(removing, steps), _self_compose(adding, steps)


def _self_compose(one: Losses, steps: int) -> Losses:
    """The distribution composed with itself `steps` times, several times faster than dp-accounting does it.

    A Fourier transform over the window outside which Chernoff's bound leaves at most `TRUNCATED_MASS` on
    either side; the mass above counts as infinite, the mass below can only wrap around to larger losses.
    (dp-accounting finds the same window, with forty calls of scipy's logsumexp, which take most of its time.)
    """
    losses, log_mass = _few_points(one.mass)
    highest, lowest = _reach(losses, log_mass, steps), -_reach(-losses, log_mass, steps)
    first = max(0, math.floor(lowest))
    last = min(steps * (one.mass.size - 1), math.ceil(highest))
    if last - first > MOST_BINS:
        raise _GridTooFineError
    size = next_fast_len(last - first + 1, real=True)
    wrapped = np.bincount(np.arange(one.mass.size) % size, weights=one.mass, minlength=size)
    composed = np.roll(irfft(_power(rfft(wrapped), steps), n=size), -first % size)[: last - first + 1]
    infinite = TRUNCATED_MASS + ROUNDING * (10 + steps) - math.expm1(steps * math.log1p(-one.infinite))
    return Losses(one.interval, one.first * steps + first, np.maximum(composed, 0.0), infinite)


def _reach(losses: FloatArray, log_mass: FloatArray, steps: int) -> float:
    """Chernoff's bound: a sum of `steps` such losses is above this with probability at most `TRUNCATED_MASS`.

    Any exponent gives a bound, and it falls and then rises with the exponent; so a few exponents, from far below to
    far above one over the composed width, show where the best is.
    """

    def bounds(exponents: FloatArray) -> FloatArray:
        peaks = log_mass + exponents[:, None] * losses
        top = peaks.max(axis=1)
        cumulant = steps * (top + np.log(np.exp(peaks - top[:, None]).sum(axis=1)))
        return (cumulant - math.log(TRUNCATED_MASS)) / exponents

    found = bounds(_EXPONENTS)
    best = int(np.argmin(found))
    below, above = _EXPONENTS[max(best - 1, 0)], _EXPONENTS[min(best + 1, _EXPONENTS.size - 1)]
    return float(min(found[best], bounds(below * (above / below) ** _BETWEEN).min()))


_EXPONENTS = np.geomspace(1e-6, 3.0, 6)
_BETWEEN = np.arange(1, 6) / 6


def _few_points(mass: FloatArray) -> tuple[FloatArray, FloatArray]:
    """A few losses, with logarithms of their masses, for which every mean of e^(exponent * loss) is at least as large.

    Cells are one point wide around the mode and grow with the distance from it. Each cell's mass goes to its two
    ends, with the same mean: for a convex function, that is e^(exponent * loss) with either sign, no less.
    """
    mode, last = int(np.argmax(mass)), mass.size - 1
    away = _distances(last.bit_length())
    edges = np.concatenate([mode - away[::-1], [mode], mode + away])
    edges = np.unique(np.clip(edges, 0, last))
    inside = np.add.reduceat(mass, edges)
    from_left = np.add.reduceat(mass * np.arange(mass.size), edges) - inside * edges
    to_right = np.clip(from_left[:-1] / np.diff(edges), 0.0, inside[:-1])
    inside[:-1] -= to_right
    inside[1:] += to_right
    kept = inside > 0
    return edges[kept].astype(float), np.log(inside[kept])


@lru_cache
def _distances(bits: int) -> IntArray:
    """Distances of cells' edges from the mode, up to 2^bits."""
    return np.unique(np.rint(np.geomspace(1, 2.0 ** max(bits, 1), CELLS))).astype(np.int64)


def _power(spectrum: npt.NDArray[np.complex128], steps: int) -> npt.NDArray[np.complex128]:
    """`spectrum ** steps` where that is above e^-60, and 0 elsewhere: in a wide distribution, nearly everywhere.

    By squaring: each product is wrong by at most sqrt(5) units of rounding, and there are `steps` - 1 factors.
    """
    matter = np.flatnonzero(spectrum.real**2 + spectrum.imag**2 > math.exp(-120 / steps))
    square, left = spectrum[matter], steps
    product = np.ones_like(square)
    while left:
        if left & 1:
            product *= square
        left >>= 1
        if left:
            square *= square
    powers = np.zeros_like(spectrum)
    powers[matter] = product
    return powers


def _loss(x: float, q: float, sigma: float) -> float:
    """ln(1 - q + q e^((2x - 1)/(2 sigma^2))): the loss of removing at outcome x."""
    return float(
        np.logaddexp(np.log(1 - q) if q < 1 else -np.inf, math.log(q) + (2 * x - 1) / (2 * sigma**2))
    )


def _outcome(loss: FloatArray, q: float, sigma: float) -> FloatArray:
    with np.errstate(divide="ignore"):
        return sigma**2 * np.log(np.maximum((np.expm1(loss) + q) / q, 0.0)) + 0.5


def _removing_curve(epsilon: FloatArray, q: float, sigma: float) -> FloatArray:
    """P(x > x_epsilon) - e^epsilon Q(x > x_epsilon) with P = (1-q) N(0) + q N(1), Q = N(0)."""
    x = _outcome(epsilon, q, sigma)
    return q * ndtr((1 - x) / sigma) - (np.expm1(epsilon) + q) * ndtr(-x / sigma)


def _adding_curve(epsilon: FloatArray, q: float, sigma: float) -> FloatArray:
    """The two exchanged: Q(x < x_-epsilon) - e^epsilon P(x < x_-epsilon)."""
    x = _outcome(-epsilon, q, sigma)
    grown = np.exp(epsilon)
    return (1 - grown * (1 - q)) * ndtr(x / sigma) - grown * q * ndtr((x - 1) / sigma)


def _connect_dots(curve: Curve, low: float, high: float, interval: float) -> Losses:
    """The dominating distribution on the grid (Doroshenko et al. 2022, Algorithm 1).

    The same masses as dp-accounting's `create_pmf_pessimistic_connect_dots_fixed_gap`, without going through
    a dictionary.
    """
    first, last = math.floor(low / interval), max(math.ceil(high / interval), math.floor(low / interval) + 1)
    if last - first > MOST_BINS:
        raise _GridTooFineError
    deltas = np.minimum.accumulate(np.clip(curve(np.arange(first, last + 1) * interval), 0.0, 1.0))
    # Slopes of delta in e^epsilon, times e^-epsilon at the left end.
    slopes = -np.diff(deltas) / math.expm1(interval)
    mass = np.empty_like(deltas)
    mass[0] = 1 - deltas[0] - slopes[0]
    mass[1:-1] = math.exp(interval) * slopes[:-1] - slopes[1:]
    mass[-1] = math.exp(interval) * slopes[-1]
    return Losses(interval, first, np.maximum(mass, 0.0), float(deltas[-1]))


def _drawn_once(inside: Pair, participation: float, interval: float) -> Pair:
    """The same rounds for a person who is in them with probability `participation`, and else not at all.

    Exact (docs/theory.md, "Drawn once a round"), evaluated on the grid and connected by dots again, which
    only ever overstates. The two directions are kept apart: they are amplified differently.
    """
    removing, adding = inside

    def amplified(losses: Losses, curve: Amplified, moved: Callable[[float], float]) -> Losses:
        inner = _delta_curve(losses)
        low, high = moved(losses.first * interval), moved((losses.first + losses.mass.size - 1) * interval)
        return _connect_dots(lambda e: curve(inner, participation, e), low, high, interval)

    return (
        amplified(removing, _amplified_removing, lambda loss: _mixed_loss(loss, participation)),
        amplified(adding, _amplified_adding, lambda loss: -_mixed_loss(-loss, participation)),
    )


LARGEST_EXPONENT = 600.0
"""Beyond, e^epsilon is so large that 1 is nothing next to it."""


def _mixed_loss(loss: float, participation: float) -> float:
    """ln(1 - pi + pi e^loss), for losses in the thousands as well."""
    return float(np.logaddexp(math.log1p(-participation), math.log(participation) + loss))


def _amplified_removing(curve: Curve, participation: float, epsilon: FloatArray) -> FloatArray:
    """`theorems.amplify_removing` for arrays."""
    small = np.minimum(epsilon, LARGEST_EXPONENT)
    inner = np.expm1(small) / participation
    reachable = inner > -1
    inside = np.log1p(np.where(reachable, inner, 0.0)) + (epsilon - small)
    return np.where(reachable, participation * curve(inside), -np.expm1(small))


def _amplified_adding(curve: Curve, participation: float, epsilon: FloatArray) -> FloatArray:
    """`theorems.amplify_adding` for arrays."""
    epsilon = np.maximum(epsilon, -LARGEST_EXPONENT)  # below, delta is 1 in double precision
    shrunk = 1 + np.expm1(-epsilon) / participation
    reachable = shrunk > 0
    inside = -np.log(np.where(reachable, shrunk, 1.0))
    grown = np.exp(np.where(reachable, epsilon, 0.0))
    return np.where(reachable, participation * grown * np.maximum(shrunk, 0.0) * curve(inside), 0.0)


def _tails(mass: FloatArray, interval: float, infinite: float) -> tuple[FloatArray, FloatArray]:
    """For masses from the largest loss down: the mass from there up, and that weighted by e^(loss - its own loss)."""
    # A recursion rather than sums of e^-loss, which overflow where losses are in the hundreds.
    return np.cumsum(mass) + infinite, decaying_sums(mass, interval)


def decaying_sums(mass: FloatArray, interval: float) -> FloatArray:
    """Return w_k = mass_k + exp(-interval) w_(k-1)."""
    from scipy.signal import lfilter  # with all that it imports, 50 MB: only where somebody needs it

    sums: FloatArray = lfilter([1.0], [1.0, -math.exp(-interval)], mass)
    return sums


def _delta_curve(found: Losses) -> Curve:
    """delta(epsilon) for arrays of epsilon (dp-accounting's own loops over both in Python)."""
    losses = (found.first + np.arange(found.mass.size)) * found.interval
    above, weighted = (some[::-1] for some in _tails(found.mass[::-1], found.interval, found.infinite))

    def curve(epsilon: FloatArray) -> FloatArray:
        beyond = epsilon > losses[-1]
        first = np.minimum(np.searchsorted(losses, epsilon), losses.size - 1)
        delta = above[first] - np.exp(np.minimum(epsilon - losses[first], 0.0)) * weighted[first]
        return np.where(beyond, found.infinite, np.maximum(delta, found.infinite))

    return curve


def _epsilon_at(found: Losses, delta: float) -> float:
    """The smallest epsilon >= 0 with a delta of at most `delta`; the curve is linear in e^epsilon on the grid."""
    negative = min(max(0, -found.first), found.mass.size - 1)  # how many losses are below 0
    mass = found.mass[negative:][::-1]
    # Delta is a part of the mass above, rarely a small one: it is reached near the end, before that mass is large.
    near = int(np.searchsorted(np.cumsum(mass), MUCH * delta)) + 1
    for count in dict.fromkeys((min(near, mass.size), mass.size)):
        above, weighted = _tails(mass[:count], found.interval, found.infinite)
        too_much = np.flatnonzero(above - weighted > delta)
        if too_much.size:
            break
    reached = int(too_much[0]) - 1 if too_much.size else mass.size - 1  # the smallest loss that will do
    if reached < 0:
        return math.inf
    if above[reached] <= delta:
        return 0.0
    loss = (found.first + found.mass.size - 1 - reached) * found.interval
    return max(0.0, loss + math.log((above[reached] - delta) / weighted[reached]))
