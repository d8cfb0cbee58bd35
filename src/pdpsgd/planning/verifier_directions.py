"""The verifier for one direction: rounds as losses, coarse first, then as fine as the answer needs.

A rough answer, which is a bound as well, says where precision matters: how much a small variance of a step's loss costs
in delta at each loss. Cells are chosen by it, so that all together overstate epsilon by a given share. Which cells are
chosen changes how close the bound is, never that it is one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import Exposure, History
from pdpsgd.planning.contour import MOST_FREQUENCIES, WRAPPED, Contour, ContourChoice, Integral, Part, Sum
from pdpsgd.planning.drawn_rounds import Points, drawn_round
from pdpsgd.planning.verifier_steps import SMALLEST_NOISE, SMALLEST_TAIL, losses_at, outcomes, step, telling

CUT_OFF = 1e-7
"""The share of delta that all truncations together may take; what is cut off above counts as infinite loss."""
ROUGH_CELLS = 256
FEWEST_CELLS, MOST_CELLS = 192, 1 << 13
TRIALS = 30
ROUGH = 2e-2
"""The share of epsilon by which smoothing may overstate the rough answer."""
EVEN = 0.1
"""The share of cells that lie evenly, wherever precision seems to matter."""
MIDDLING = 2e-3
ROUGHLY_NEAR, NEAR = 0.7, 0.97
"""How near to the epsilon for which cells were chosen the answer has to be; else they are chosen again."""


class Losses(Protocol):
    """Losses of a round that can be divided into cells anywhere."""

    at: FloatArray

    def part(self, at: FloatArray) -> Part:
        """Return the losses with cells between these places, in their order, after one below them all."""

    def losses(self, at: FloatArray) -> FloatArray:
        """Return the losses at these places."""


class SampledSteps:
    """Steps that sample the person at a rate below 1; places are outcomes."""

    def __init__(self, e: Exposure, tail: float, removing: bool) -> None:
        self.exposure, self.removing = e, removing
        self.at = outcomes(e.noise_multiplier, tail / e.steps, ROUGH_CELLS)

    def part(self, at: FloatArray) -> Part:
        """Return the losses with cells between these outcomes."""
        return step(self.exposure, at, self.removing)

    def losses(self, at: FloatArray) -> FloatArray:
        """Return the losses of these outcomes."""
        return losses_at(at, self.exposure, self.removing)


class DrawnRounds:
    """The same round `times` times, with participation below 1; places are losses."""

    def __init__(self, found: Points, times: int) -> None:
        losses, place = np.unique(found.losses, return_inverse=True)
        mass = np.bincount(place, weights=found.mass).astype(np.float64)
        self.found, self.times, self.at = Points(losses, mass, found.infinite), times, losses
        if losses.size > 2 * ROUGH_CELLS:
            by_mass = np.interp(np.linspace(0, 1, ROUGH_CELLS), np.cumsum(mass) / mass.sum(), losses)
            even = np.linspace(losses[0], losses[-1], ROUGH_CELLS)
            self.at = np.unique(np.concatenate([even, by_mass]))

    def part(self, at: FloatArray) -> Part:
        """Return the losses, put together at these ones if they are fewer."""
        losses, mass = self.found.losses, self.found.mass
        if at.size >= losses.size:
            return Part(losses, mass, self.found.infinite, self.times)
        # Each loss goes to the places beside it, so that both distributions keep their mass.
        at = np.unique(np.concatenate([losses[:1], at, losses[-1:]]))
        left = np.clip(np.searchsorted(at, losses, side="right") - 1, 0, at.size - 2)
        share = np.expm1(at[left] - losses) / np.expm1(at[left] - at[left + 1])
        to_right = mass * np.clip(share * (1 + 1e-15), 0.0, 1.0)
        moved = np.zeros(at.size)
        moved += np.bincount(left, weights=mass - to_right, minlength=at.size)
        moved += np.bincount(left + 1, weights=to_right, minlength=at.size)
        return Part(at, moved, self.found.infinite, self.times)

    def losses(self, at: FloatArray) -> FloatArray:
        """Return the places, which are losses."""
        return at


@dataclass(frozen=True)
class _Need:
    """Where cells are needed: `density` between the places `at`; n cells cost about `cost` / n^2 in delta."""

    at: FloatArray
    density: FloatArray
    cost: float

    def places(self, number: float) -> FloatArray:
        wanted = int(min(max(number, FEWEST_CELLS), MOST_CELLS))
        filled = np.concatenate([[0.0], np.cumsum(self.density * np.diff(self.at))])
        return np.unique(np.interp(np.linspace(0.0, filled[-1], wanted), filled, self.at))


class Direction:
    """Epsilon of a history at delta for adding or for removing.

    Guarantee: `rough` and `epsilon()` are upper bounds.
    """

    def __init__(self, history: History, delta: float, points: int, removing: bool) -> None:
        self.delta, self.share = delta, 0.01 / points**2
        tail = max(CUT_OFF * delta / (4 * len(history)), SMALLEST_TAIL)
        self.variance, self.divisible, self.fixed = _losses(history, tail, points, removing)
        self._rough_parts = [losses.part(losses.at) for losses in self.divisible]
        self.rough = math.inf
        if math.isfinite(self.variance):
            self._find_roughly()

    def _find_roughly(self) -> None:
        total = Sum((*self._rough_parts, *self.fixed), self.variance)
        if total.infinite >= self.delta:
            return
        self.contours = ContourChoice(total, self.delta)
        contour = self.contours.first()
        for _ in range(TRIALS):
            self.integral = _integral(total, ROUGH * contour.epsilon / (contour.tilt + 1), contour)
            self.rough = min(self.rough, self.integral.epsilon(self.delta, contour.epsilon))
            if not contour.least < self.rough < ROUGHLY_NEAR * contour.epsilon:
                break
            contour = self.contours.near(self.rough)

    def epsilon(self) -> float:
        """Return an upper bound that is close."""
        best = self.rough
        for share in (max(MIDDLING, self.share), self.share):
            for _ in range(TRIALS):
                before, best = best, self._closely(best, share)
                if not best < NEAR * before:
                    break
        return best

    def _closely(self, epsilon: float, share: float) -> float:
        """Return a bound that overstates by about this share, if `epsilon` is about right; at most `epsilon`."""
        if not 0 < epsilon < math.inf:
            return epsilon
        contour = self.contours.near(epsilon)
        slope = max(self.integral.slope(epsilon), 0.1 * contour.tilt * self.delta)
        allowed = np.float64(share * max(epsilon, contour.least) * slope)
        if not 0 < allowed < math.inf:
            return epsilon  # double precision does not tell how delta falls
        needs = [self._need(*pair, epsilon) for pair in zip(self.divisible, self._rough_parts, strict=True)]
        together = math.fsum(need.cost ** (1 / 3) for need in needs)
        parts = [
            losses.part(need.places(need.cost ** (1 / 3) * math.sqrt(together / allowed)))
            for losses, need in zip(self.divisible, needs, strict=True)
        ]
        costs = max(float(self.integral.costs(np.array([epsilon]))[0]), 0.1 * contour.tilt * slope)
        smoothing = float(2 * allowed / np.float64(costs))
        integral = _integral(Sum((*parts, *self.fixed), self.variance), smoothing, contour)
        found = integral.epsilon(self.delta, epsilon)
        if found <= epsilon:
            self.integral = integral
        return min(epsilon, found)

    def _need(self, losses: Losses, part: Part, epsilon: float) -> _Need:
        """Where cells of a round are needed, and how much they cost in delta.

        A cell of mass p and width h between losses adds a variance of p h^2 / 6; the best density of cells is the third
        root of what a square of their width costs.
        """
        at, mass = losses.at, part.mass[-losses.at.size :]
        found = losses.losses(at)
        some = slice(None, None, 2)
        costs = np.interp(at, at[some], self.integral.costs(epsilon - found[some]))
        width, steepness = np.diff(at), np.abs(np.diff(found)) / np.diff(at)
        density = np.cbrt(
            (mass[1:] + mass[:-1]) / (2 * width) * np.maximum(costs[1:], costs[:-1]) * steepness**2
        )
        density = np.maximum(density, np.maximum(np.append(density[1:], 0.0), np.append(0.0, density[:-1])))
        density += EVEN * float(density @ width) / float(width.sum())
        return _Need(at, density, part.times * float(density @ width) ** 3 / 12)


def _integral(total: Sum, smoothing: float, contour: Contour) -> Integral:
    """The integral with at least so much variance of a Gaussian, a release of its own that only adds to the losses."""
    fewest = -2 * math.log(WRAPPED) * (contour.period / (2 * math.pi * MOST_FREQUENCIES)) ** 2
    return Integral(Sum(total.parts, max(total.variance, smoothing, fewest)), contour)


def _losses(
    history: History, tail: float, points: int, removing: bool
) -> tuple[float, list[Losses], list[Part]]:
    """The variance of a history's Gaussian part, its losses that can be divided, and those that are as they are."""
    variance = 0.0
    divisible: list[Losses] = []
    fixed: list[Part] = []
    for e, times in Counter(map(as_one_step, history)).items():
        if e.participation < 1:
            divisible.append(DrawnRounds(drawn_round(e, points, tail, removing), times))
        elif e.sample_rate == 1:
            variance += times * e.steps / max(e.noise_multiplier, 1e-150) ** 2
        elif e.noise_multiplier < SMALLEST_NOISE:
            fixed.append(telling(e._replace(steps=times * e.steps), removing))
        else:
            divisible.append(SampledSteps(e._replace(steps=times * e.steps), tail, removing))
    return variance, divisible, fixed


def as_one_step(e: Exposure) -> Exposure:
    """A round with participation below 1 is one sampled step, if it has one step or full batches only."""
    if e.participation < 1 and e.sample_rate == 1:
        return Exposure(1, e.participation, e.noise_multiplier / math.sqrt(e.steps), 1)
    if e.participation < 1 and e.steps == 1:
        return Exposure(1, e.participation * e.sample_rate, e.noise_multiplier, 1)
    return e
