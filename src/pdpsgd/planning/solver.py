"""The one solver behind all mechanisms: rates, participation or noise such that each level meets its target.

Targets are the epsilons of `Levels`; a level at 0 is left out. A search only ever proposes; the accountant was
asked at exactly the values returned, and answered at most the target. That keeps guesses (Gaussian limits,
interpolation between levels) out of every proof.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.gdp import delta_of_gaussian, total_mu
from pdpsgd.accounting.history import Exposure, Past
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.errors import check_positive, fail
from pdpsgd.planning.levels import Levels
from pdpsgd.planning.rounds import Round

TOLERANCE = 2e-3
"""A level's rate is final when it spends between 1 - TOLERANCE and 1 of its target."""
ANCHORS = 6
"""Levels that are solved for each trial noise; the others lie between them."""
SMALLEST_RATE = 1e-12
BATCH_TOLERANCE = 1e-3
"""How far the expected batch may be off the wanted one, relatively."""
NEAR = 0.1
"""A trial whose batch is further off is followed by one that looks at its anchors roughly."""


@dataclass(frozen=True)
class Segment:
    """Steps whose noise multiplier and batch size are given relative to what is being solved."""

    steps: int
    noise: float = 1.0
    batch_size: float = 1.0


def solve_rates(
    levels: Levels,
    segments: Sequence[Segment],
    batch_size: float,
    by: Accountant,
    *,
    noise_multiplier: float | None = None,
) -> list[Round]:
    """Find each level's rate, and the noise for which the expected batch is the wanted one.

    Guarantee: every level's total over its history and these rounds is at most its target, by the given
    accountant; and at least 99.8 % of it, except where a rate is capped at 1 or is practically 0.

    Args:
        levels: the levels, with their targets as epsilon.
        segments: one per round: its steps, and its noise and batch size relative to the others.
        batch_size: expected number of people in a batch.
        by: the accountant.
        noise_multiplier: given, the number of steps is found instead.

    Returns:
        One round per segment.

    Raises:
        PdpsgdError: no budget is left, or the batch does not fit the budgets.
    """
    check_positive(batch_size=batch_size)
    usable = usable_levels(levels)
    wanted = levels.only(usable)
    check_batch_size(batch_size, wanted)
    # At a batch of everybody any noise that is large enough will do: aim slightly below, at the smallest.
    aim = min(batch_size, 0.9995 * float(wanted.people.sum()))
    search = _RateSearch(wanted, by, tuple(segments), aim)
    sigma, segments = search.noise() if noise_multiplier is None else search.steps(noise_multiplier)
    rates = np.zeros(len(levels))
    rates[usable] = search.final_rates(sigma, segments)
    check_some_noise_serves(rates, wanted)
    return [levels.round(s.steps, sigma * s.noise, np.minimum(1.0, rates * s.batch_size)) for s in segments]


def usable_levels(levels: Levels) -> IntArray:
    """Return the levels with a target above 0, and refuse if there is none."""
    usable = np.flatnonzero(levels.epsilon > 0)
    if not usable.size:
        fail("Expected a budget that is left. Every budget is 0 or spent, so there is nobody to train on.")
    return usable


def check_some_noise_serves(found: FloatArray, levels: Levels) -> None:
    """Refuse budgets of which every level got nothing: its rate, or the inverse of its noise, is 0."""
    if not found.any():
        top = int(np.argmax(levels.epsilon))
        fail(
            "Expected budgets that some noise keeps. Got none, by this accountant: with the most noise that is tried, "
            f"these steps cost more than is left of epsilon={levels.epsilon[top]:g} at delta={levels.delta[top]:g}. "
            "Larger epsilons or deltas would help, or fewer steps or a smaller batch."
        )


def check_batch_size(batch_size: float, levels: Levels) -> None:
    """Refuse an expected batch of more people than there are on these levels."""
    people = float(levels.people.sum())
    if batch_size > people:
        fail(
            f"Expected batch_size of at most the {int(people):,} people who can be used. Got {batch_size:g}."
        )


def exposures(rate: float, sigma: float, segments: Sequence[Segment]) -> tuple[Exposure, ...]:
    """Return what a person with this rate is exposed to in the segments."""
    return tuple(Exposure(1.0, min(1.0, rate * s.batch_size), sigma * s.noise, s.steps) for s in segments)


@dataclass
class _RateSearch:
    """Search for noise (or steps) in the coordinate mu = rate * gain, in which levels hardly depend on the noise.

    gain = sqrt(sum of steps * batch^2 * (e^(1/sigma^2) - 1)) is the Gaussian limit's mu of a person with rate
    1. Each trial solves a few anchor levels exactly, lays the others between them, and moves the noise (or
    the steps) to where the expected batch fits; a handful of trials suffice.
    """

    levels: Levels
    by: Accountant
    segments: tuple[Segment, ...]
    batch_size: float

    def __post_init__(self) -> None:
        wanted = self.levels
        before = [total_mu(h) for h in wanted.histories]
        self.base = wanted.spent(self.by)
        self.mu = np.array(
            [_mu_for(t, d, m) for t, d, m in zip(wanted.epsilon, wanted.delta, before, strict=True)]
        )
        self.groups = _groups(wanted)
        self.slopes: dict[int, float] = {}

    def noise(self) -> tuple[float, tuple[Segment, ...]]:
        """Find the noise for which the expected batch is the wanted one: it grows with the noise."""
        log_sigma = self._fit(
            lambda x: (math.exp(x), self.segments), lowest=math.log(0.05), highest=math.log(1e6)
        )
        return math.exp(log_sigma), self.segments

    def steps(self, sigma: float) -> tuple[float, tuple[Segment, ...]]:
        """Find the number of steps for which the expected batch is the wanted one: it shrinks with them."""
        check_positive(noise_multiplier=sigma)
        share = np.array([s.steps for s in self.segments], dtype=float)
        share /= share.sum()

        def taking(log_total: float) -> tuple[Segment, ...]:
            counts = [max(1, round(math.exp(-log_total) * w)) for w in share]
            return tuple(replace(s, steps=n) for s, n in zip(self.segments, counts, strict=True))

        found = self._fit(lambda x: (sigma, taking(x)), lowest=-math.log(1e9), highest=-math.log(len(share)))
        return sigma, taking(found)

    def _fit(
        self, trial: Callable[[float], tuple[float, tuple[Segment, ...]]], *, lowest: float, highest: float
    ) -> float:
        """Where ln(expected batch) meets ln(batch size), for a trial in which the batch grows with x."""

        def gap(x: float) -> float:
            batch = self._expected_batch(*trial(x))  # so little noise that nobody can be sampled at all: 0
            return math.log(max(batch, sys.float_info.min) / self.batch_size)

        if gap(lowest) > 0:
            fail(
                f"Expected a larger batch_size, or more steps: under these budgets {self.batch_size:g} people a step "
                "would need next to no noise."
            )
        if gap(highest) < 0:
            fail(
                f"Expected a smaller batch_size, or more noise or fewer steps: these budgets do not allow "
                f"{self.batch_size:g} people a step."
            )
        x = brentq(gap, lowest, highest, xtol=1e-6)
        known: list[tuple[float, float]] = []
        for _ in range(20):
            near = bool(known) and abs(known[-1][1]) < NEAR
            if near:
                self._solve_anchors(*trial(x), tolerance=TOLERANCE, by=self.by)
            else:
                self._solve_anchors(*trial(x), tolerance=10 * TOLERANCE, by=self.by.rough)
            known.append((x, gap(x)))
            settled = len(known) > 1 and abs(known[-1][0] - known[-2][0]) < 1e-6
            if near and (abs(known[-1][1]) < BATCH_TOLERANCE or settled):
                break
            x = min(max(self._next(known, gap, lowest, highest), lowest), highest)
        return min(known, key=lambda point: abs(point[1]))[0]

    @staticmethod
    def _next(
        known: list[tuple[float, float]], gap: Callable[[float], float], lowest: float, highest: float
    ) -> float:
        below = max((p for p in known if p[1] <= 0), default=None)
        above = min((p for p in known if p[1] > 0), default=None)
        if below and above:
            under, over = min(-below[1], 2.0), min(above[1], 2.0)
            share = min(max(under / (under + over), 0.05), 0.95)
            return below[0] + share * (above[0] - below[0])
        # The anchors' mu stay put: where would the batch fit then? Not further than a factor of 4 at a time.
        low, high = max(lowest, known[-1][0] - 1.4), min(highest, known[-1][0] + 1.4)
        if gap(low) > 0:
            return low
        return high if gap(high) < 0 else float(brentq(gap, low, high, xtol=1e-7))

    def final_rates(self, sigma: float, segments: tuple[Segment, ...]) -> FloatArray:
        """Return every level's rate at this noise, each proven; a level starts from the rates around it."""
        gain = self._gain(sigma, segments)
        rates = np.zeros(len(self.levels))
        for group in self.groups:
            targets, place = np.unique(self.levels.epsilon[group], return_inverse=True)
            solved: dict[int, float] = {}
            for index in _refining(targets.size):
                level = int(group[np.flatnonzero(place == index)[0]])
                guess, slope = _from_nearest(np.log(targets), solved, index) or (
                    self.mu[level] / gain,
                    1.0,
                )
                solved[index] = self._rate(level, sigma, segments, guess, slope=slope)
            rates[group] = np.array([solved[i] for i in range(targets.size)])[place]
        return rates

    def _gain(self, sigma: float, segments: tuple[Segment, ...]) -> float:
        return total_mu(tuple(Exposure(1.0, s.batch_size, sigma * s.noise, s.steps) for s in segments))

    def _expected_batch(self, sigma: float, segments: tuple[Segment, ...]) -> float:
        return float(self.levels.people @ np.minimum(1.0, self.mu / self._gain(sigma, segments)))

    def _solve_anchors(
        self, sigma: float, segments: tuple[Segment, ...], *, tolerance: float, by: Accountant
    ) -> None:
        gain = self._gain(sigma, segments)
        for group in self.groups:
            first = np.unique(self.levels.epsilon[group], return_index=True)[1]
            chosen = first[np.unique(np.linspace(0, first.size - 1, ANCHORS).round().astype(int))]
            shift = []
            for anchor in group[chosen]:
                cost = self._cost(int(anchor), sigma, segments, by)
                rate = self._guess(int(anchor), cost, segments, self.mu[anchor] / gain, tolerance)
                # A level that cannot be sampled at all under this noise counts as (next to) nobody in the batch.
                shift.append(math.log(max(rate, SMALLEST_RATE) * gain / self.mu[anchor]))
            # What the Gaussian limit misses varies slowly with the target: interpolate it between the anchors.
            x = np.log(self.levels.epsilon[group[chosen]])
            between = PchipInterpolator(x, shift) if x.size > 1 else lambda _, only=shift[0]: only
            self.mu[group] *= np.exp(between(np.log(self.levels.epsilon[group])))

    def _rate(
        self, level: int, sigma: float, segments: tuple[Segment, ...], guess: float, *, slope: float
    ) -> float:
        """The level's rate at this noise, proven."""
        highest = 1.0 / min(s.batch_size for s in segments)
        return largest_within(
            self._cost(level, sigma, segments, self.by),
            float(self.levels.epsilon[level]),
            min(guess, highest),
            highest=highest,
            base=float(self.base[level]),
            slope=slope,
        )

    def _guess(
        self,
        level: int,
        cost: Callable[[float], float],
        segments: tuple[Segment, ...],
        guess: float,
        tolerance: float,
    ) -> float:
        """About the rate at which the level would spend what `_rate` aims at; above 1 if it may."""
        highest = 1.0 / min(s.batch_size for s in segments)
        target = float(self.levels.epsilon[level])
        if guess >= highest and cost(highest) <= target:
            return guess  # beyond a rate of 1 there is nothing to learn
        bracket = _Bracket(target, float(self.base[level]), tolerance, self.slopes.get(level, 1.0))
        found = bracket.search(cost, min(guess, highest), highest)
        self.slopes[level] = bracket.slope
        return min(found * bracket.correction(1 - TOLERANCE / 2), highest)

    def _cost(
        self, level: int, sigma: float, segments: tuple[Segment, ...], by: Accountant
    ) -> Callable[[float], float]:
        return lambda rate: _total(self.levels, level, exposures(rate, sigma, segments), by)


def largest_within(
    cost: Callable[[float], float],
    target: float,
    guess: float,
    *,
    highest: float = math.inf,
    base: float = 0.0,
    slope: float = 1.0,
    tolerance: float = TOLERANCE,
) -> float:
    """Find the largest x (nearly) with cost(x) <= target, for an increasing cost; 0 if there is none.

    Guarantee: cost(result) was computed and is at most the target, or the result is 0.

    Args:
        cost: the cost of x.
        target: what it may reach.
        guess: where to start.
        highest: the largest x allowed.
        base: cost(0).
        slope: d ln(cost) / d ln(x) as far as it is known; it speeds up the first correction.
        tolerance: how far below the target the cost may end, relatively.

    Returns:
        The x that was found.
    """
    return _Bracket(target, base, tolerance, slope).search(cost, min(guess, highest), highest)


class _Bracket:
    """The search of `largest_within`: points below and above the target, on a curve that is close to a power law.

    `height` is the cost in a measure that is nearly proportional to x, 1 at the target: squares add up in the Gaussian
    limit, so the base is taken off in squares. `slope` is d ln(height) / d ln(x), learned on the way.
    """

    def __init__(self, target: float, base: float, tolerance: float, slope: float = 1.0) -> None:
        self.target, self.base, self.tolerance, self.slope = target, base, tolerance, slope
        self.aim = 1 - tolerance / 2
        self.low: tuple[float, float] | None = None
        self.high: tuple[float, float] | None = None
        self._same_side = 0

    def search(self, cost: Callable[[float], float], x: float, highest: float) -> float:
        """Return an x whose cost was computed and is at most the target, or 0."""
        for _ in range(60):
            y = cost(x)
            self._add(x, y)
            if y <= self.target and (y >= self.target * (1 - self.tolerance) or x >= highest):
                return x
            if self.low and self.high and self.high[0] / self.low[0] < 1 + 1e-9:
                break
            x = min(self._next(), highest)
            if x < SMALLEST_RATE:
                return 0.0
        return self.low[0] if self.low else 0.0

    def correction(self, height: float) -> float:
        """Return the factor that would bring the last x below the target to this height."""
        if not self.low or self.low[1] <= 0:
            return 1.0
        return _power(height / self.low[1], 1 / self.slope)

    def _add(self, x: float, y: float) -> None:
        limits = max(self.target**2 - self.base**2, 1e-300)
        point = (x, math.sqrt(max(y * y - self.base * self.base, 0.0) / limits))
        last = self.low if y <= self.target else self.high
        other = self.high if y <= self.target else self.low
        self._same_side = self._same_side + 1 if last else 0
        against = last or other
        if against and 0 < point[1] != against[1] > 0 and x != against[0]:
            learned = math.log(point[1] / against[1]) / math.log(x / against[0])
            self.slope = min(max(learned, 0.05), 20.0)
        if y <= self.target:
            self.low = point
        else:
            self.high = point

    def _next(self) -> float:
        if self.low and self.high:
            if self._same_side > 1:  # interpolation creeps up from one side: halve
                self._same_side = 0
                return math.sqrt(self.low[0] * self.high[0])
            return _between(self.low, self.high, self.aim)
        if self.high:
            factor = _power(self.aim / self.high[1], 1 / self.slope) if self.high[1] > 0 else 0.5
            return self.high[0] * min(1 - self.tolerance / 8, max(factor, 1e-3))
        assert self.low
        factor = _power(self.aim / self.low[1], 1 / self.slope) if self.low[1] > 0 else 4.0
        return self.low[0] * max(1 + self.tolerance / 8, min(factor, 30.0))


def _power(base: float, exponent: float) -> float:
    """Raise a positive number to a power, or to the largest float there is: a level may allow 1e20."""
    return math.exp(min(exponent * math.log(base), 700.0)) if base > 0 else 0.0


def _between(low: tuple[float, float], high: tuple[float, float], aim: float) -> float:
    """Where between two brackets a power law through both would reach the aim, kept off the ends."""
    share = 0.5
    if 0 < low[1] < high[1]:
        share = math.log(aim / low[1]) / math.log(high[1] / low[1])
    share = min(max(share, 0.02), 0.98)
    return low[0] * (high[0] / low[0]) ** share


def _refining(count: int) -> list[int]:
    """0 .. count-1 in an order that starts with the ends and halves the gaps."""
    order, step = [0, count - 1] if count > 1 else [0], count - 1
    while step > 1:
        step = (step + 1) // 2
        order += range(0, count, step)
    return list(dict.fromkeys([*order, *range(count)]))


def _from_nearest(
    log_targets: FloatArray, solved: dict[int, float], index: int
) -> tuple[float, float] | None:
    """Rate and slope d ln(target) / d ln(rate) at a level, from the nearest solved levels on both sides."""
    below = max((i for i in solved if i < index and solved[i] > 0), default=None)
    above = min((i for i in solved if i > index and solved[i] > 0), default=None)
    if below is None or above is None or solved[above] <= solved[below]:
        return None
    points = sorted(i for i in solved if solved[i] > 0)
    near = points[max(0, points.index(below) - 1) : points.index(above) + 2]
    x, y = log_targets[near], np.log([solved[i] for i in near])
    curve = PchipInterpolator(x, y) if (np.diff(y) > 0).all() else lambda at: np.interp(at, x, y)
    slope = (log_targets[above] - log_targets[below]) / math.log(solved[above] / solved[below])
    return math.exp(float(curve(log_targets[index]))), slope


def _mu_for(target: float, delta: float, before: float) -> float:
    """The Gaussian mu that, on top of `before`, reaches the target: a guess to start from."""
    low, high = 0.0, 1.0
    while delta_of_gaussian(high, target) < delta:
        low, high = high, 2 * high
    total = brentq(lambda mu: delta_of_gaussian(mu, target) - delta, low, high, xtol=1e-15)
    return math.sqrt(max(total**2 - before**2, (1e-3 * total) ** 2))


def _total(levels: Levels, level: int, more: tuple[Exposure, ...], by: Accountant) -> float:
    """What the level has spent after these exposures as well."""
    return by.epsilon(levels.histories[level] + more, float(levels.delta[level]))


def _groups(levels: Levels) -> list[IntArray]:
    """Levels that share history and delta, so that one curve passes through them, each sorted by target."""
    members: dict[tuple[Past, float], list[int]] = {}
    for level, (history, delta) in enumerate(zip(levels.histories, levels.delta, strict=True)):
        members.setdefault((history, float(delta)), []).append(level)
    return [np.array(sorted(group, key=lambda i: levels.epsilon[i])) for group in members.values()]


def solve_participation(levels: Levels, steps: int, batch_size: float, by: Accountant) -> Round:
    """Find each level's participation, and the noise, of a round that is drawn once (Definition 4.1).

    The level that may spend most participates for certain and fixes the noise; the others participate with a
    probability; the rate inside the round makes the expected batch the wanted one.

    Guarantee: every level's total over its history and this round is at most its target, by the given
    accountant.

    Args:
        levels: the levels, with their targets as epsilon.
        steps: the steps of the round.
        batch_size: expected number of people in a batch.
        by: the accountant.

    Returns:
        The round.
    """
    usable = usable_levels(levels)
    wanted = levels.only(usable)
    search = _RateSearch(wanted, by, (Segment(steps),), batch_size)
    top = int(np.argmax(search.mu))
    # To start with: a small loss is proportional to the participation, and mu to the loss.
    participation = search.mu / search.mu[top]
    sigma = rate = 0.0
    for _ in range(8):
        previous, rate = rate, batch_size / float(wanted.people @ participation)
        if rate > 1:
            fail(
                f"Expected batch_size of at most {int(rate**-1 * batch_size):,}, the people expected in a round. "
                f"Got {batch_size:g}."
            )
        sigma = smallest_noise_multiplier(
            float(wanted.epsilon[top]),
            float(wanted.delta[top]),
            sample_rate=rate,
            steps=steps,
            history=wanted.histories[top],
            accounting=by,
            tolerance=TOLERANCE / 4,
        )
        participation = _participation(search, participation, rate, sigma, steps)
        if abs(previous / rate - 1) < TOLERANCE:
            break
    everyone = np.zeros(len(levels))
    everyone[usable] = participation
    return levels.round(steps, sigma, np.where(everyone > 0, rate, 0.0), participation=everyone)


def _participation(
    search: _RateSearch, guess: FloatArray, rate: float, sigma: float, steps: int
) -> FloatArray:
    """Each level's participation at this rate and noise; levels that are the same share one search."""
    levels = search.levels
    same = list(zip(levels.histories, levels.delta.tolist(), levels.epsilon.tolist(), strict=True))
    known: dict[tuple[Past, float, float], float] = {}
    for level, key in enumerate(same):
        if key not in known:
            known[key] = largest_within(
                lambda pi, level=level: _total(levels, level, (Exposure(pi, rate, sigma, steps),), search.by),  # type: ignore[misc]
                key[2],
                float(guess[level]),
                highest=1.0,
                base=float(search.base[level]),
            )
    return np.array([known[key] for key in same])
