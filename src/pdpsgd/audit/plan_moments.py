"""Sums over a run, and the moments they have if the plan is followed: the statistics of the conformance test."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.stats import binom

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.history import Exposure
from pdpsgd.audit import betting


@dataclass
class RoundSums:
    """Sums over the steps of a round, for orthogonal canaries whose contributions do not change.

    `products` are the squared lengths of contributions (tensors x canaries), `dots` the summed projections on
    them, `squares` the summed squares of each canary's centered projection over all tensors.
    """

    products: FloatArray
    dots: FloatArray
    squares: FloatArray
    steps: int = 0

    def add(self, dots: FloatArray, expected_rates: FloatArray) -> None:
        """Add one step; `expected_rates` are the canaries' sampling rates (zero for one without a record)."""
        lengths = np.sqrt(np.maximum(self.products.sum(axis=0), 1e-300))
        self.dots += dots
        self.squares += (dots.sum(axis=0) / lengths - expected_rates * lengths) ** 2
        self.steps += 1


@dataclass
class Mean:
    """The sum of a projection over the run, and the moments it has under the plan."""

    value: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    lambdas: FloatArray | None = None
    log_moments: FloatArray | None = None
    _parts: list[tuple[float, FloatArray, FloatArray, FloatArray, int]] = field(default_factory=list)

    def add(
        self,
        *,
        value: float,
        gaussian_variance: float,
        weights: FloatArray,
        rates: FloatArray,
        steps_like_this: int,
        significance: float,
    ) -> None:
        """Add one step whose contributions were fixed before its sampling and noise."""
        variance = gaussian_variance + float((rates * (1 - rates) * weights**2).sum())
        if variance == 0:
            return
        if self.lambdas is None or self.log_moments is None:
            # Chosen from the first step's contributions, before its noise, so it may be used from the first
            # step on.
            self.lambdas = betting.bets(variance * steps_like_this, significance=significance)
            self.log_moments = np.zeros_like(self.lambdas)
        expected = float((rates * weights).sum())
        self.value += value
        self.expected += expected
        self.variance += variance
        self.log_moments += betting.log_moment_gaussian(self.lambdas, gaussian_variance)
        self.log_moments += betting.log_moment_draws(self.lambdas, weights, rates)

    def add_round(
        self,
        *,
        value: float,
        gaussian_variance: float,
        weights: FloatArray,
        rates: FloatArray,
        participation: FloatArray,
        steps: int,
    ) -> None:
        """Add a whole round in which contributions stay the same."""
        mean = participation * rates
        # Variance of steps * participation: draws within the round, and of taking part at all.
        draws = steps * participation * rates * (1 - rates)
        draws = draws + (steps * rates) ** 2 * participation * (1 - participation)
        self.value += value
        self.expected += float((steps * mean * weights).sum())
        self.variance += gaussian_variance + float((draws * weights**2).sum())
        self._parts.append((gaussian_variance, weights, rates, participation, steps))

    def settle(self, significance: float) -> None:
        """Add up the moments of whole rounds; all of this was known before the run."""
        if self.variance == 0:
            return
        self.lambdas = betting.bets(self.variance, significance=significance)
        self.log_moments = np.zeros_like(self.lambdas)
        for gaussian_variance, weights, rates, participation, steps in self._parts:
            self.log_moments += betting.log_moment_gaussian(self.lambdas, gaussian_variance)
            self.log_moments += betting.log_moment_rounds(self.lambdas, weights, rates, participation, steps)

    def p_value(self) -> float:
        """Return how likely a sum at least so far from its expectation is if the plan is followed."""
        if self.lambdas is None or self.log_moments is None:
            return 1.0
        return betting.p_value(self.value - self.expected, self.lambdas, self.log_moments)


@dataclass
class Square:
    """A sum of squares over canaries (and steps), and the distribution of each under the plan."""

    value: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    largest: float = 0.0
    count: int = 0
    parts: list[tuple[int, FloatArray, FloatArray, float]] = field(default_factory=list)

    def add(
        self, value: float, count: int, probabilities: FloatArray, means: FloatArray, variance: float
    ) -> None:
        """Add `count` squares, summed in `value`, of a variable with these means and probabilities plus noise."""
        second = float(probabilities @ means**2)
        fourth = float(probabilities @ means**4)
        self.value += value
        self.expected += count * (second + variance)
        self.variance += count * (fourth - second**2 + 4 * variance * second + 2 * variance**2)
        self.largest = max(self.largest, variance)
        self.count += count
        self.parts.append((count, probabilities, means, variance))

    def p_value(self, significance: float) -> float:
        """Return how likely a sum at least so far from its expectation is if the plan is followed."""
        lambdas = betting.bets(self.variance, significance=significance)
        lambdas = np.minimum(lambdas, 0.25 / self.largest)
        log_moments = np.zeros_like(lambdas)
        for count, probabilities, means, variance in self.parts:
            log_moments += count * betting.log_moment_square(
                lambdas, probabilities=probabilities, means=means, variance=variance
            )
        return betting.p_value(self.value, lambdas, log_moments)


def add_squares(
    squares: tuple[Square, Square], seen: RoundSums, members: IntArray, exposure: Exposure, noise: float
) -> None:
    """Add squares of single steps, and of sums over the round, of one level's canaries that have a record."""
    spread, persistence = squares
    rate, participation, steps = exposure.sample_rate, exposure.participation, seen.steps
    lengths = np.sqrt(seen.products[:, members].sum(axis=0))
    length = float(lengths[0])
    if participation == 1:
        probabilities, means = np.array([1 - rate, rate]), np.array([-rate, 1 - rate]) * length
        spread.add(float(seen.squares[members].sum()), members.size * steps, probabilities, means, noise**2)
    times = np.arange(steps + 1)
    probabilities = participation * binom.pmf(times, steps, rate)
    probabilities[0] += 1 - participation
    means = np.asarray((times - steps * participation * rate) * length, dtype=np.float64)
    sums = seen.dots[:, members].sum(axis=0) / lengths - steps * participation * rate * length
    persistence.add(float((sums**2).sum()), members.size, probabilities, means, steps * noise**2)
