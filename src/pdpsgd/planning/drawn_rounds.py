"""Rounds that a person is in with some probability, for the verifier: the losses of the round as a whole.

One step is discretized on an even grid by the exact probabilities of each cell, split between its two ends so that both
distributions keep their mass (connect the dots). Its steps compose by Fourier transforms, the upper and the lower
distribution each by itself. What rounding may hide in a transform is bounded and added; nothing is rescaled, and mass
that is not 1 is an error (docs/theory.md, "The verifier").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import Exposure
from pdpsgd.errors import fail
from pdpsgd.planning.contour import UNIT
from pdpsgd.planning.verifier_steps import SMALLEST_NOISE, SMALLEST_TAIL

MOST_POINTS = 1 << 16
"""Per grid point of a standard deviation; a grid with more is made coarser instead, which only ever overstates."""
FEW_POINTS = 1 << 14
"""Enough for Chernoff's bound, which decides about windows only."""


@dataclass(frozen=True)
class _Losses:
    """Losses of an upper distribution: `mass[i]` at (`first` + i) * interval, `infinite` at infinity."""

    first: int
    mass: FloatArray
    infinite: float
    interval: float

    @property
    def losses(self) -> FloatArray:
        return (self.first + np.arange(self.mass.size)) * self.interval


@dataclass(frozen=True)
class Points:
    """Losses of an upper distribution at any places."""

    losses: FloatArray
    mass: FloatArray
    infinite: float


def _step_deviation(e: Exposure) -> float:
    """About the standard deviation of one step's privacy loss."""
    inverse_variance = min(max(e.noise_multiplier, 1e-150) ** -2, 40.0)
    return min(e.sample_rate * math.sqrt(math.expm1(inverse_variance)), math.sqrt(inverse_variance))


def _deviation(losses: FloatArray, mass: FloatArray) -> float:
    mean = float(mass @ losses)
    return math.sqrt(max(float(mass @ (losses - mean) ** 2), 0.0))


def _step_range(e: Exposure, tail: float, removing: bool) -> float:
    low, high = _ends(e.sample_rate, max(e.noise_multiplier, SMALLEST_NOISE), tail, removing)
    return high - low


def _ends(q: float, sigma: float, tail: float, removing: bool) -> tuple[float, float]:
    """The losses between which a step's loss lies but for `tail` on either side."""
    reach = -float(ndtri(max(tail, SMALLEST_TAIL))) * sigma
    if removing:
        return _loss(-reach, q, sigma), _loss(1 + reach, q, sigma)
    return -_loss(reach, q, sigma), -_loss(-reach, q, sigma)


def _loss(x: float, q: float, sigma: float) -> float:
    """The loss of removing at outcome x: ln(1 - q + q e^((2x - 1)/(2 sigma^2))), which grows with x."""
    stays = math.log1p(-q) if q < 1 else -math.inf
    return float(np.logaddexp(stays, math.log(q) + (x - 0.5) / sigma**2))


def _one_step(
    q: float, sigma: float, interval: float, tail: float, removing: bool
) -> tuple[_Losses, _Losses]:
    """Discretize one Poisson-subsampled Gaussian step: its losses under the upper and the lower distribution.

    Removing: upper (1-q) N(0) + q N(1), lower N(0). Adding: the two exchanged, the loss negated. Lower masses
    at a loss of minus infinity are left out of the second, whose `infinite` is not used.
    """
    if sigma < SMALLEST_NOISE:
        return _telling_step(q, interval, removing)
    low, high = _ends(q, sigma, tail, removing)
    first = math.floor(low / interval)
    edges = np.arange(first, max(math.ceil(high / interval), first + 1) + 1) * interval
    rising = edges if removing else -edges[::-1]
    # e^((x - 1/2)/sigma^2) at the outcomes x of the edges; below 0 where no outcome has so small a loss.
    growth = 1 + np.expm1(rising) / q
    log_growth = np.log1p(np.maximum(np.expm1(rising) / q, -1.0))
    x = 0.5 + sigma**2 * np.where(rising < 700, log_growth, rising - math.log(q))
    zero, one = _cells(x / sigma), _cells((x - 1) / sigma)
    together = (1 - q) * zero + q * one
    # What goes to a cell's right end: upper - lower e^(left end), over 1 - e^-interval. Written so that the part
    # with which both distributions agree, 1 - q, drops out before it can cancel.
    if removing:
        upper, lower = together, zero
        excess = q * (one[1:-1] - zero[1:-1] * growth[:-1])
        noise = q * (_error(x - 1, sigma) + np.abs(growth[:-1]) * _error(x, sigma))
    else:
        upper, lower = zero[::-1], together[::-1]
        excess = np.exp(edges[:-1]) * q * (zero[1:-1] * growth[1:] - one[1:-1])[::-1]
        noise = np.exp(edges[:-1]) * q * (_error(x - 1, sigma) + np.abs(growth[1:]) * _error(x, sigma))[::-1]
    to_right = (excess + noise) / -math.expm1(-interval)
    to_right = np.clip(np.where(np.isfinite(to_right), to_right, np.inf), 0.0, upper[1:-1])
    mass, lower_mass = np.zeros(edges.size), np.zeros(edges.size)
    mass[:-1] += upper[1:-1] - to_right
    mass[1:] += to_right
    mass[0] += upper[0]
    # The lower masses that belong to these; what is left of the lower distribution has a loss of minus infinity.
    right = np.fmin(to_right * np.exp(-edges[1:]), lower[1:-1])
    lower_mass[:-1] += np.fmin((upper[1:-1] - to_right) * np.exp(-edges[:-1]), lower[1:-1] - right)
    lower_mass[1:] += right
    lower_mass[0] += np.fmin(upper[0] * np.exp(-edges[0]), lower[0])
    return _Losses(first, mass, float(upper[-1]), interval), _Losses(first, lower_mass, 0.0, interval)


def _telling_step(q: float, interval: float, removing: bool) -> tuple[_Losses, _Losses]:
    """A step that tells whom it sampled: at least as bad as any noise."""
    if q == 1:
        nothing = _Losses(0, np.zeros(1), 1.0, interval)
        return nothing, nothing
    loss, mass, infinite = (math.log1p(-q), 1 - q, q) if removing else (-math.log1p(-q), 1.0, 0.0)
    upper = _on_grid(Points(np.array([loss]), np.array([mass]), infinite), interval)
    return upper, _Losses(upper.first, upper.mass * np.exp(-upper.losses), 0.0, interval)


def _cells(z: FloatArray) -> FloatArray:
    """Standard normal mass of (-inf, z0], (z0, z1], ..., (zn, inf), each from the more precise side."""
    below, above = ndtr(z), ndtr(-z)
    inner = np.where(z[1:] + z[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], np.maximum(inner, 0.0), above[-1:]])


def _error(x: FloatArray, sigma: float) -> FloatArray:
    """A bound on the rounding error of the mass between neighboring outcomes."""
    side = ndtr(-np.abs(x / sigma))
    return 4 * UNIT * np.maximum(side[1:], side[:-1])


def drawn_round(e: Exposure, points: int, tail: float, removing: bool) -> Points:
    """The losses of a round that a person is in with probability pi only (docs/theory.md, "The verifier").

    Adding: the upper distribution stays, the loss becomes -ln(1-pi+pi e^-loss). Removing: the loss becomes
    ln(1-pi+pi e^loss), the upper distribution (1-pi) lower + pi upper. Of the two, each is composed by itself,
    and the one that is larger is used: the upper where the loss is positive, the lower where it is negative, so that
    rounding is multiplied by numbers below 1 only.
    """
    pi, q, sigma, steps = e
    most = MOST_POINTS * points
    interval = max(_step_deviation(e) / points, _step_range(e, tail / steps, removing) / most)
    while True:
        upper_step, lower_step = _one_step(q, sigma, interval, tail / steps, removing)
        upper = _Composed(upper_step, steps, most=most, tail=tail)
        lower = _Composed(lower_step, steps, most=most, tail=tail) if removing else upper
        size = max(upper.size, lower.size)
        if size <= most:
            break
        interval *= 1.1 * size / most
    never = math.log1p(-pi)
    inside, infinite = upper.losses(), upper.infinite
    if not removing:
        moved = -np.logaddexp(never, math.log(pi) - inside.losses)
        losses = np.append(moved, -never)
        return checked(
            Points(losses, np.append(inside.mass, infinite + upper.error), 0.0), upper.error + tail
        )
    positive, negative = inside.losses >= 0, lower.losses().losses < 0
    above, below = inside.losses[positive], lower.losses().losses[negative]
    weight = pi + (1 - pi) * np.exp(-above)
    # The error of the sum of masses above a loss, times a weight that falls with the loss, is at most its bound times
    # the weight there: as mass, what the weight falls by, and the rest at infinity.
    falls = -np.diff(np.append(weight, pi))
    over = inside.mass[positive] * weight + upper.error * falls
    under = lower.losses().mass[negative] * (pi * np.exp(below) + (1 - pi))
    absent = (1 - pi) * (-math.expm1(steps * math.log1p(-min(lower.missing, 1 - UNIT))) + lower.error + tail)
    losses = np.concatenate(
        [np.logaddexp(never, math.log(pi) + np.concatenate([above, below])), [0.0, never]]
    )
    mass = np.concatenate([over, under, [2 * lower.error, absent]])
    found = Points(losses, mass, pi * (infinite + upper.error))
    return checked(found, 2 * upper.error + 4 * lower.error + 4 * tail)


def checked(found: Points, slack: float) -> Points:
    """Refuse a distribution whose mass is not 1, up to what was added on purpose."""
    total = math.fsum(found.mass) + found.infinite
    if not abs(total - 1) <= 2 * slack + 1e-9:
        fail(
            f"Expected probabilities that sum to 1. Got {total!r}: double precision does not suffice to verify a round "
            "with this participation and noise."
        )
    return found


def _on_grid(found: Points, interval: float) -> _Losses:
    """Move each mass to the grid points beside it, so that both distributions keep theirs."""
    place = np.floor(found.losses / interval)
    to_right = found.mass * np.expm1(place * interval - found.losses) / math.expm1(-interval)
    to_right = np.clip(np.where(np.isnan(to_right), np.inf, to_right), 0.0, found.mass)
    first = int(place.min())
    index = (place - first).astype(np.int64)
    size = int(index.max()) + 2
    mass = np.zeros(size)
    mass += np.bincount(index, weights=found.mass - to_right, minlength=size)
    mass += np.bincount(index + 1, weights=to_right, minlength=size)
    return _Losses(first, mass, found.infinite, interval)


class _Composed:
    """A step's losses, `times` of them added up by one Fourier transform.

    Mass above the window (by Chernoff's bound at most `tail`) counts as infinite. `error` bounds what rounding may hide
    in the mass above any loss. If more than `most` points would be needed, `size` says so and nothing is computed.
    """

    def __init__(self, step: _Losses, times: int, *, most: int, tail: float) -> None:
        self.interval, self.missing = step.interval, 1 - math.fsum(step.mass)
        self._first, self.size, self.error = 0, 1, 0.0
        self._mass: FloatArray = np.zeros(1)
        self.infinite = 1.0
        if not (step.mass.any() and np.isfinite(step.mass.sum())):
            return  # nothing is left at a finite loss
        exponents = _exponents(step, times)
        above = times * _cumulants(step, exponents)
        below = times * _cumulants(step, -exponents)
        high = float(np.min((above - math.log(tail)) / exponents))
        high = max(high, float(np.min((above + 40) / exponents)))
        low = -float(np.min((below + 40) / exponents))
        if not -math.inf < low <= high < math.inf:
            return  # double precision does not tell where the sum lies
        self.infinite = -math.expm1(times * math.log1p(-min(step.infinite, 1 - UNIT))) + tail
        self._first = math.floor(low / self.interval) - 1
        self.size = math.ceil(high / self.interval) + 2 - self._first
        if self.size <= most:
            self.size = next_fast_len(self.size, real=True)
            self._mass, self.error = self._transform(step, times)

    def _transform(self, step: _Losses, times: int) -> tuple[FloatArray, float]:
        """The masses of the sum on its window, and a bound on their rounding errors.

        A spectrum is wrong by at most 8 UNIT (times + log2 size) of itself by powers and transforms, and, by that of
        the step, by 8 UNIT log2 size times the step's norm, times the spectrum of all others. Parseval's identity and
        Cauchy and Schwarz's inequality make of it a bound on any sum of absolute errors.
        """
        if times == 1:
            mass = np.zeros(self.size)
            at = step.first - self._first + np.arange(step.mass.size)
            kept = (at >= 0) & (at < self.size)
            mass[at[kept]] = step.mass[kept]
            return mass, 8 * UNIT
        wrapped = np.bincount(np.arange(step.mass.size) % self.size, weights=step.mass, minlength=self.size)
        one = rfft(wrapped)
        log_one = np.log(np.maximum(np.abs(one), 1e-300))
        digits = math.log2(self.size)
        error = (times + digits) * _norm(times * log_one)
        error += times * digits * float(np.linalg.norm(step.mass)) * _norm((times - 1) * log_one)
        mass = np.roll(irfft(one**times, n=self.size), (step.first * times - self._first) % self.size)
        bound = 8 * UNIT * error
        total, wanted = float(mass.sum()), float(step.mass.sum()) ** times
        if not abs(total - wanted) <= 4 * bound + 1e-9:
            fail(
                f"Expected probabilities that sum to {wanted:g}. Got {total!r}: double precision does not suffice to "
                f"verify {times:g} steps."
            )
        return np.maximum(mass, 0.0), bound

    def losses(self) -> _Losses:
        """Return the losses of the sum, without what rounding may hide."""
        return _Losses(self._first, self._mass, self.infinite, self.interval)


def _exponents(step: _Losses, times: int) -> FloatArray:
    """From far below to far above one over the width of the sum."""
    width = max(math.sqrt(times) * _deviation(step.losses, step.mass), step.interval)
    low, high = 1e-2 / max(width, float(np.abs(step.losses).max())), 1e3 / width
    return np.geomspace(low, high, 8 * max(5, math.ceil(math.log10(high / low))))


def _cumulants(step: _Losses, exponents: FloatArray) -> FloatArray:
    """An upper bound on ln of the mean of e^(exponent * loss), for exponents of the same sign."""
    losses, mass = _coarser(step.losses, step.mass, up=exponents[0] > 0)
    log_mass = np.log(mass)
    tilted = (log_mass + exponent * losses for exponent in exponents)
    return np.array([(top := float(x.max())) + math.log(float(np.exp(x - top).sum())) for x in tilted])


def _coarser(losses: FloatArray, mass: FloatArray, *, up: bool) -> tuple[FloatArray, FloatArray]:
    """Neighboring masses together, all at the highest of their losses, or all at the lowest."""
    group = -(-mass.size // FEW_POINTS)
    padded = np.append(mass, np.zeros(-mass.size % group)).reshape(-1, group).sum(axis=1)
    at = np.minimum(np.arange(padded.size) * group + (group - 1 if up else 0), mass.size - 1)
    return losses[at][padded > 0], padded[padded > 0]


def _norm(log_spectrum: FloatArray) -> float:
    """The Euclidean norm of a whole spectrum, of which a half is given by its logarithms."""
    return math.sqrt(2 * float(np.exp(np.minimum(2 * log_spectrum, 0.0)).sum()))
