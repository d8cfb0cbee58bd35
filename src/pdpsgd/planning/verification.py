"""An accountant that shares no code with those that make plans, to check what plans claim.

It discretises the privacy loss of one step by the exact probabilities of each cell, splits every cell between
its two ends so that both distributions keep their mass (connect the dots), and composes by one Fourier
transform of an exponentially tilted distribution, which keeps relative precision where epsilon is read off,
however small delta is. numpy and scipy only; nothing from `pdpsgd.accounting` but the description of a
history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import logsumexp, ndtr, ndtri

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import Exposure, History, simplify
from pdpsgd.errors import PromiseBroken
from pdpsgd.planning.rounds import Level, Round

FINENESS = (16, 64)
"""Grid points per standard deviation of a step's loss: first try, and second try before a plan is called
wrong."""
AGREEMENT = 2e-3
"""How far a plan's proven epsilon may lie below this accountant's before it is called a false claim."""


@dataclass(frozen=True)
class Verification:
    """What the independent accountant finds for each level of a plan, at the level's delta."""

    epsilon: tuple[float, ...]
    promised: tuple[float, ...]

    @property
    def kept(self) -> bool:
        """Whether every level stays within its promise (never false for sound bookkeeping: that raises)."""
        return all(e <= p for e, p in zip(self.epsilon, self.promised, strict=True))


def verify(levels: Sequence[Level], rounds: Sequence[Round]) -> Verification:
    """Recompute what every level of a plan spends, and refuse a promise or a claim that does not hold.

    Guarantee: if this returns, each level's people have (epsilon, delta)-DP as promised, whatever the
    accountant that made the plan did wrong.

    Raises:
        PromiseBroken: the rounds cost a level more than it is promised, or than the plan claims.
    """
    found = []
    known: dict[tuple[History, float], float] = {}
    for index, level in enumerate(levels):
        history = simplify(level.history + tuple(r.exposure(index) for r in rounds))
        exposed = history != simplify(level.history)
        key = (history, level.delta)
        for fineness in FINENESS:
            epsilon = (
                known[key] if key in known else epsilon_upper_bound(history, level.delta, fineness=fineness)
            )
            claim = math.inf if level.proven_epsilon is None else level.proven_epsilon
            broken = exposed and epsilon > level.epsilon
            false = claim < epsilon * (1 - AGREEMENT) - 1e-6
            if not (broken or false):
                break
        if broken:
            raise PromiseBroken(
                f"Level {index} is promised epsilon={level.epsilon:g} at delta={level.delta:g}; the plan's rounds cost "
                f"{epsilon:.6g}. Do not train with this plan."
            )
        if false:
            raise PromiseBroken(
                f"levels[{index}].proven_epsilon={level.proven_epsilon!r} is below the truth: the plan's rounds cost "
                f"{epsilon:.6g} at delta={level.delta:g}."
            )
        known[key] = epsilon
        found.append(epsilon)
    return Verification(tuple(found), tuple(level.epsilon for level in levels))


def epsilon_upper_bound(history: History, delta: float, *, fineness: int = FINENESS[0]) -> float:
    """The epsilon of a history at delta, for the worse of adding and removing.

    Guarantee: an upper bound, too high by about 0.03 % at the default fineness.

    >>> round(epsilon_upper_bound((Exposure(1.0, 64 / 60_000, 1.3, 20_000),), 1e-5), 3)
    0.482
    """
    history = simplify(history)
    if not history:
        return 0.0
    if delta <= 0:
        return math.inf
    interval = min(_step_deviation(e) for e in history if _matters(e, history)) / fineness
    return max(_epsilon_in_order(history, delta, interval, removing) for removing in (True, False))


def _step_deviation(e: Exposure) -> float:
    """About the standard deviation of one step's privacy loss, or of the whole round's if that is smaller.

    (A round that somebody is in by a small chance only has a smaller loss than its steps.)
    """
    inverse_variance = min(1 / e.noise_multiplier**2, 40.0)
    step = min(e.sample_rate * math.sqrt(math.exp(inverse_variance) - 1), math.sqrt(inverse_variance))
    return step * min(1.0, e.participation * math.sqrt(e.steps))


def _matters(e: Exposure, history: History) -> bool:
    total = max(_step_deviation(other) ** 2 * other.steps for other in history)
    return _step_deviation(e) ** 2 * e.steps > 1e-6 * total


@dataclass(frozen=True)
class _Losses:
    """A discrete privacy loss distribution: `mass[i]` at (`first` + i) * interval, `infinite` at infinity."""

    first: int
    mass: FloatArray
    infinite: float
    interval: float

    @property
    def losses(self) -> FloatArray:
        return (self.first + np.arange(self.mass.size)) * self.interval


def _epsilon_in_order(history: History, delta: float, interval: float, removing: bool) -> float:
    tail = delta * 1e-7 / len(history)
    parts: list[tuple[_Losses, int]] = []
    for pi, q, sigma, steps in history:
        step = _one_step(q, sigma, interval, tail / steps, removing)
        if pi == 1:
            parts.append((step, steps))
        else:
            # The mixture needs the whole distribution at full precision, so no tilting inside.
            inside = _compose([(step, steps)], tail, tilt_for=None)
            parts.append((_mixed(inside, pi, removing), 1))
    plain = _epsilon(_compose(parts, tail, tilt_for=None), delta)
    # Both are upper bounds; the tilted one keeps its digits where delta is close to the rounding error of the other.
    return plain if delta >= 1e-8 else min(plain, _epsilon(_compose(parts, tail, tilt_for=delta), delta))


def _one_step(q: float, sigma: float, interval: float, tail: float, removing: bool) -> _Losses:
    """Discretise the loss of one Poisson-subsampled Gaussian step.

    Removing: upper distribution (1-q) N(0) + q N(1), lower N(0), loss ln(1-q+q e^((2x-1)/(2 sigma^2))),
    increasing in x. Adding: the two exchanged, the loss negated.
    """
    reach = -float(ndtri(tail)) * sigma
    low, high = _loss(-reach, q, sigma), _loss(1 + reach, q, sigma)
    if not removing:
        low, high = -_loss(reach, q, sigma), -_loss(-reach, q, sigma)
    first, last = math.floor(low / interval), math.ceil(high / interval)
    edges = np.arange(first, last + 1) * interval
    x = np.sort(_inverse_loss(edges if removing else -edges, q, sigma))
    zero, one = _cells(x / sigma), _cells((x - 1) / sigma)
    upper, lower = (1 - q) * zero + q * one, zero
    if not removing:
        upper, lower = zero[::-1], upper[::-1]
    # Cells: below the first edge, between the edges, above the last edge. Keep both distributions' mass in each cell.
    to_right = (upper[1:-1] - lower[1:-1] * np.exp(edges[:-1])) / -math.expm1(-interval)
    to_right = np.clip(to_right, 0.0, upper[1:-1])
    mass = np.zeros(edges.size)
    mass[:-1] += upper[1:-1] - to_right
    mass[1:] += to_right
    mass[0] += upper[0]
    return _Losses(first, mass, float(upper[-1]), interval)


def _loss(x: float, q: float, sigma: float) -> float:
    return float(
        np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + (2 * x - 1) / (2 * sigma**2))
    )


def _inverse_loss(loss: FloatArray, q: float, sigma: float) -> FloatArray:
    excess = (np.expm1(loss) + q) / q
    with np.errstate(divide="ignore"):
        return 0.5 + sigma**2 * np.log(np.maximum(excess, 0.0))


def _cells(z: FloatArray) -> FloatArray:
    """Standard normal mass of (-inf, z0], (z0, z1], ..., (zn, inf), each from the more precise side."""
    below, above = ndtr(z), ndtr(-z)
    inner = np.where(z[1:] + z[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], np.maximum(inner, 0.0), above[-1:]])


def _mixed(inside: _Losses, pi: float, removing: bool) -> _Losses:
    """The distribution for a person who participates with probability `pi` (docs/theory.md, as point masses)."""
    h, losses = inside.interval, inside.losses
    if removing:
        other = inside.mass * np.exp(-losses)
        moved = np.log1p(pi * np.expm1(losses))
        mass = pi * inside.mass + (1 - pi) * other
        moved = np.append(moved, math.log1p(-pi))
        mass = np.append(mass, (1 - pi) * max(0.0, 1 - float(other.sum())))
        infinite = pi * inside.infinite
    else:
        moved = np.append(-np.log1p(pi * np.expm1(-losses)), -math.log1p(-pi))
        mass = np.append(inside.mass, inside.infinite)
        infinite = 0.0
    place = np.floor(moved / h).astype(np.int64)
    to_right = mass * np.expm1(place * h - moved) / math.expm1(-h)
    first = int(place.min())
    gathered = np.bincount(place - first, weights=mass - to_right, minlength=int(place.max()) - first + 2)
    gathered += np.bincount(place - first + 1, weights=to_right, minlength=gathered.size)
    return _Losses(first, np.asarray(gathered, dtype=float), infinite, h)


def _compose(parts: list[tuple[_Losses, int]], tail: float, tilt_for: float | None) -> _Losses:
    """The distribution of the sum of independent losses, each part taken so many times.

    Mass beyond the window (Chernoff, at most `tail`) counts as infinite. With `tilt_for` = delta the
    transform is taken of the distribution tilted by e^(lambda * loss), lambda the Chernoff exponent at that
    delta.
    """
    interval = parts[0][0].interval
    exponents = np.geomspace(1e-2, 1e6, 41)
    up = sum(times * _cumulant(part, exponents) for part, times in parts)
    tilt = float(exponents[np.argmin((up - math.log(tilt_for)) / exponents)]) if tilt_for else 0.0
    tilted = [_tilted(part, tilt) for part, _ in parts]
    total = sum(times * norm for (_, times), (_, norm) in zip(parts, tilted, strict=True))
    # The window holds all but `tail` of the untilted mass above, and all but 1e-17 of the tilted mass on both sides.
    shifts = np.geomspace(1e-2, 1e6, 25)
    above = sum(
        times * _cumulant(replace(part, mass=w), shifts)
        for (part, times), (w, _) in zip(parts, tilted, strict=True)
    )
    below = sum(
        times * _cumulant(replace(part, mass=w), -shifts)
        for (part, times), (w, _) in zip(parts, tilted, strict=True)
    )
    high = max(float(np.min((up - math.log(tail)) / exponents)), float(np.min((above + 40) / shifts)))
    low = -float(np.min((below + 40) / shifts))
    first, last = math.floor(low / interval) - 1, math.ceil(high / interval) + 1
    size = next_fast_len(last - first + 1, real=True)
    spectrum: np.ndarray[tuple[int], np.dtype[np.complex128]] | float = 1.0
    offset = 0
    for (part, times), (weights, _) in zip(parts, tilted, strict=True):
        wrapped = np.bincount(np.arange(weights.size) % size, weights=weights, minlength=size)
        spectrum = spectrum * rfft(wrapped) ** times
        offset += part.first * times
    mass = np.maximum(np.roll(irfft(spectrum, n=size), (offset - first) % size), 0.0)
    losses = (first + np.arange(size)) * interval
    if tilt:
        with np.errstate(divide="ignore"):
            mass = np.exp(np.minimum(np.log(mass) + total - tilt * losses, 0.0))
    survived = math.fsum(times * math.log1p(-part.infinite) for part, times in parts)
    rounding = 0.0 if tilt_for else 1e-15 * (10 + sum(times for _, times in parts))
    return _Losses(first, mass, -math.expm1(survived) + tail + rounding, interval)


def _cumulant(part: _Losses, exponents: FloatArray) -> FloatArray:
    """ln of the sum of mass * e^(exponent * loss)."""
    kept = part.mass > 0
    log_mass, losses = np.log(part.mass[kept]), part.losses[kept]
    peaks = [log_mass + t * losses for t in exponents]
    return np.array([peak.max() + math.log(np.exp(peak - peak.max()).sum()) for peak in peaks])


def _tilted(part: _Losses, tilt: float) -> tuple[FloatArray, float]:
    with np.errstate(divide="ignore"):
        log_weights = np.log(part.mass) + tilt * part.losses
    norm = float(logsumexp(log_weights))
    return np.exp(log_weights - norm), norm


def _epsilon(total: _Losses, delta: float) -> float:
    """The smallest epsilon >= 0 at which the hockey-stick divergence is at most delta."""
    upper = np.cumsum(total.mass[::-1])[::-1] + total.infinite
    # lower[j] = sum over i >= j of mass[i] * e^(loss[j] - loss[i]), as a recursion that cannot overflow.
    lower = lfilter([1.0], [1.0, -math.exp(-total.interval)], total.mass[::-1])[::-1]
    enough = np.flatnonzero((total.losses >= 0) & (upper - lower <= delta))
    if not enough.size:
        return math.inf
    place = enough[0]
    if upper[place] <= delta:
        return 0.0
    return max(0.0, float(total.losses[place]) + math.log((upper[place] - delta) / lower[place]))
