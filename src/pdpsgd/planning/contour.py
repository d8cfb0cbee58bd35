"""From the losses of steps to epsilon, by one integral in the complex plane: the last part of the verifier.

For independent losses with sum X, z = tilt + i omega and tilt > 0, delta at epsilon is the integral over omega of
E[e^(z X)] e^(-z epsilon) / (z (z + 1)). As a sum over multiples of 2 pi / period it is never smaller, since all that
wraps around is positive. A Gaussian loss in X lets the sum end; what is cut off, and all that rounding may hide, is
charged to delta (docs/theory.md, "The verifier"). Any tilt and period give a bound; good ones a close one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdpsgd._typing import FloatArray

WRAPPED = 1e-6
"""About the share of delta that wraps around, and the share that is cut off."""
LARGEST_TERM = 12.0
"""The terms of the sum may be larger than delta by e to this, so that they lose a few digits and no more."""
EDGE = 8
"""Tilts so near to the end of those looked at are no choice: others are looked at."""
STEEPEST = 8.0
"""A tilt times epsilon over ln(1/delta) that is enough where losses end suddenly; for a Gaussian it is about 2."""
MOST_FREQUENCIES = 1 << 17
MOST_FOR_COSTS = 1 << 13
TRIALS = 80
CLOSE = 1e-6
"""How close to delta the search for epsilon ends, as a share of delta."""
UNIT = 2.0**-53
"""The relative error of one operation in double precision."""


@dataclass(frozen=True)
class Part:
    """Losses of an upper distribution, taken `times` times: `mass[j]` at `losses[j]`, `infinite` at infinity."""

    losses: FloatArray
    mass: FloatArray
    infinite: float
    times: int

    def support(self) -> tuple[FloatArray, FloatArray]:
        """Return losses and masses where there is mass."""
        found = self.mass > 0
        return (self.losses, self.mass) if found.all() else (self.losses[found], self.mass[found])


@dataclass(frozen=True)
class Sum:
    """The sum of independent losses and of one Gaussian mechanism's, which is N(v/2, v) with v its `variance`."""

    parts: tuple[Part, ...]
    variance: float

    @property
    def infinite(self) -> float:
        """The mass at infinity."""
        return -math.expm1(math.fsum(p.times * math.log1p(-min(p.infinite, 1 - UNIT)) for p in self.parts))

    def log_moments(self, tilts: FloatArray) -> FloatArray:
        """Return ln E[e^(tilt X)], for choosing a contour."""
        total = self.variance * tilts * (tilts + 1) / 2
        for part in self.parts:
            losses, mass = part.support()
            exponents = np.multiply.outer(tilts, losses)
            top = exponents.max(axis=1)
            exponents -= top[:, None]
            total += part.times * (np.log(np.exp(exponents, out=exponents) @ mass) + top)
        return total

    def widths(self) -> tuple[float, float]:
        """Return about the standard deviation of the sum, and the largest of it and of all losses."""
        variance, furthest = self.variance, 0.0
        for part in self.parts:
            mean = float(part.mass @ part.losses)
            variance += part.times * max(float(part.mass @ (part.losses - mean) ** 2), 0.0)
            furthest = max(furthest, float(np.abs(part.losses).max()))
        return math.sqrt(variance), max(math.sqrt(variance), furthest) or 1.0


@dataclass(frozen=True)
class Contour:
    """Where to integrate, for an epsilon that is about `epsilon`."""

    tilt: float
    period: float
    epsilon: float

    @property
    def least(self) -> float:
        """An epsilon below which relative precision does not matter."""
        return 0.01 / self.tilt


class ContourChoice:
    """Contours for a sum of losses, by its moments at many tilts."""

    def __init__(self, total: Sum, delta: float) -> None:
        self.goal = math.log(delta)
        width, furthest = total.widths()
        width = max(width, 1e-6 * furthest)
        low, high = 1e-2 / furthest, 1e3 / width
        tilts = np.geomspace(low, high, 8 * max(4, math.ceil(math.log10(high / low))))
        bounds = (total.log_moments(tilts) - self.goal) / tilts
        bounds = np.where(np.isnan(bounds), math.inf, bounds)
        bounds[tilts * np.fmax(bounds, 0.0) > STEEPEST * (1 - self.goal)] = math.inf
        self._total = total
        self._look_around(float(tilts[int(np.argmin(bounds))]))

    def _look_around(self, tilt: float) -> None:
        self.tilts = tilt * np.geomspace(1 / 8, 8, 64)
        self.log_moments = self._total.log_moments(self.tilts)

    def first(self) -> Contour:
        """Return a contour for the epsilon of Chernoff's bound."""
        bounds = (self.log_moments - self.goal) / self.tilts
        at = int(np.argmin(np.where(np.isnan(bounds), math.inf, bounds)))
        return self.near(max(float(bounds[at]), 0.01 / float(self.tilts[at])))

    def near(self, epsilon: float) -> Contour:
        """Return the contour with the shortest period for this epsilon, which needs the fewest terms.

        What wraps around from below is at most e^(-tilt period), from above e^(tilt period) P(X > epsilon + period),
        which Chernoff's bound keeps small.
        """
        goal, steepest = self.goal + math.log(WRAPPED), STEEPEST * (1 - self.goal)
        ahead = self.tilts[None, :] - self.tilts[:, None]
        for _ in range(TRIALS):
            heights = self.log_moments - self.tilts * epsilon
            with np.errstate(all="ignore"):
                from_above = np.where(ahead > 0, (heights - goal)[None, :] / ahead, math.inf).min(axis=1)
            periods = np.fmax(-goal / self.tilts, from_above)
            fitting = (heights <= self.goal + LARGEST_TERM) & (self.tilts * epsilon <= steepest)
            allowed = np.where(fitting, periods, math.inf)
            if not np.isfinite(allowed).any():
                allowed = np.where(np.isfinite(periods), heights, math.inf)
            at = int(np.argmin(allowed))
            if EDGE <= at < self.tilts.size - EDGE or (
                at >= EDGE and self.tilts[at] * epsilon > steepest / 8
            ):
                break
            self._look_around(float(self.tilts[at]))
            ahead = self.tilts[None, :] - self.tilts[:, None]
        return Contour(float(self.tilts[at]), float(periods[at]), epsilon)


class Integral:
    """An upper bound on the divergence of a sum of losses, as a function of epsilon >= 0.

    Guarantee: at every epsilon at least the mean under the upper distribution of the positive part of
    1 - e^(epsilon - X), as far as the losses and masses of the sum go.
    """

    def __init__(self, total: Sum, contour: Contour) -> None:
        self.tilt, self.infinite = contour.tilt, total.infinite
        spacing = 2 * math.pi / contour.period
        count = math.ceil(math.sqrt(-2 * math.log(WRAPPED) / total.variance) / spacing) + 1
        self.omega = np.arange(count + 1) * spacing
        self._log_scale = total.variance * self.tilt * (self.tilt + 1) / 2 - math.log(contour.period)
        self._relative = 0.0
        size, angle, more = np.zeros(count + 1), np.zeros(count + 1), np.zeros(count + 1)
        for part in total.parts:
            self._multiply(part, size, angle, more)
        decay = 0.5 * total.variance * self.omega**2
        turning = total.variance * self.omega * (self.tilt + 0.5)
        self._z = self.tilt + 1j * self.omega
        self._terms = np.exp(size - decay + 1j * (angle + turning)) / (self._z * (self._z + 1))
        self._terms[1:] *= 2  # and those with negative omega, which are conjugate
        doubled = 2 / np.abs(self._z * (self._z + 1))
        with np.errstate(over="ignore"):
            hidden = np.where(more < 1, np.expm1(more) * np.exp(size), np.exp(size + more)) * np.exp(-decay)
        rounding = UNIT * np.exp(size - decay) * (decay + np.abs(turning) + self.omega.size + 60)
        cut_off = 2 * math.exp(-float(decay[-1])) * contour.period**2 / (4 * math.pi**2 * count)
        self._lost = cut_off + float(doubled @ (hidden + rounding))
        self._lost_by_epsilon = 4 * UNIT * float((doubled * np.exp(size - decay)) @ self.omega)

    def _multiply(self, part: Part, size: FloatArray, angle: FloatArray, more: FloatArray) -> None:
        """Multiply by the moments of a part: logarithms of sizes, angles, and by how much the sizes may be larger."""
        losses, mass = part.support()
        exponents = self.tilt * losses
        top = float(exponents.max())
        weights = np.exp(exponents - top) * mass
        total = float(weights.sum())
        weights /= total
        distance = float(weights @ np.abs(losses))
        spectrum = _spectrum(losses, weights, self.omega[1], self.omega.size)
        # Each exponential is off by the rounding of its exponent, each sum by that of as many additions.
        exponent_error = 2 * (abs(top) + self.tilt * distance)
        error = UNIT * (losses.size + 20 + exponent_error + 4 * self.omega * distance)
        with np.errstate(divide="ignore"):
            log_size = np.log(np.abs(spectrum))
            more += part.times * np.log1p(error / np.maximum(np.abs(spectrum), 1e-300))
        size += part.times * np.maximum(log_size, math.log(1e-300))
        angle += part.times * np.angle(spectrum)
        log_moment = top + math.log(total)
        self._log_scale += part.times * log_moment
        self._relative += part.times * UNIT * (40 + exponent_error)

    def _scale(self, epsilon: float) -> float:
        """What all terms are multiplied by, rounded up."""
        exponent = self._log_scale - self.tilt * epsilon
        rounding = self._relative + 8 * UNIT * (abs(self._log_scale) + self.tilt * epsilon + 1)
        with np.errstate(over="ignore"):
            return float(np.exp(exponent + rounding))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on the divergence at epsilon."""
        turned = self._terms.real * np.cos(self.omega * epsilon) + self._terms.imag * np.sin(
            self.omega * epsilon
        )
        lost = self._lost + self._lost_by_epsilon * epsilon
        return self._scale(epsilon) * (max(float(turned.sum()), 0.0) + lost) + self.infinite

    def slope(self, epsilon: float) -> float:
        """Return about how fast delta falls with epsilon."""
        turned = self._terms * np.exp(-1j * self.omega * epsilon) * self._z
        return max(float(turned.real.sum()) * self._scale(epsilon), 0.0)

    def costs(self, epsilons: FloatArray) -> FloatArray:
        """Return about what a small variance v of X adds to delta at each epsilon, over v / 2."""
        turned = np.exp(np.multiply.outer(epsilons, -1j * self.omega[: self._costs.size])) @ self._costs
        scale = np.exp(np.clip(self._log_scale - self.tilt * epsilons, -700.0, 700.0))
        return np.maximum(turned.real * scale, 0.0)

    @cached_property
    def _costs(self) -> FloatArray:
        """The terms of the second derivative less the first, but for those that hardly count."""
        terms = (self._terms * self._z * (self._z + 1))[:MOST_FOR_COSTS]
        sizes = np.abs(terms)
        return np.asarray(terms[: 1 + int(np.flatnonzero(sizes >= 1e-4 * sizes.max())[-1])])

    def epsilon(self, delta: float, start: float) -> float:
        """Find about the smallest epsilon >= 0 at which the bound is at most delta; infinite if none is found."""
        if not self.infinite < delta:
            return math.inf
        low, high, trial = -1.0, math.inf, start
        for _ in range(TRIALS):
            trial = max(trial, 0.0)
            found = self.delta(trial)
            if found <= delta:
                high = min(high, trial)
                if found >= delta * (1 - CLOSE) or high == 0 or high - low <= 1e-9 * high:
                    break
            else:
                low = max(low, trial)
            slope = self.slope(trial)
            with np.errstate(all="ignore"):
                trial += float((np.log(found / delta) + CLOSE / 3) * found / np.float64(slope))
            if not low < trial < high:
                trial = (low + high) / 2 if math.isfinite(high) else 2 * max(low, start, 1 / self.tilt)
        return high


def _spectrum(losses: FloatArray, weights: FloatArray, spacing: float, count: int) -> FloatArray:
    """Sum of weights * e^(i k spacing loss), for k from 0, as one product of matrices: k = block a + b."""
    block = math.ceil(math.sqrt(count))
    turns = 1j * spacing * losses
    few = np.exp(np.multiply.outer(np.arange(block), turns))
    many = np.exp(np.multiply.outer(np.arange(-(-count // block)) * block, turns)) * weights
    return np.asarray((many @ few.T).reshape(-1)[:count])
