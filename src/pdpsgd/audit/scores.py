"""Scores of canaries: one number each, the larger the more it looks as if the record was used.

For Dirac canaries the best score there is: the log-likelihood ratio of everything that was seen along the
canary's direction, with and without its record, at the plan's own (public) rates and noise. It is made of the
dot products of every step's noisy gradient with the canary's; without sampling it is their sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting.history import History
from pdpsgd.audit.canaries import Canaries
from pdpsgd.audit.conformance import Observation
from pdpsgd.audit.dirac_canaries import projections


class LikelihoodScores:
    """Log-likelihood ratios of Dirac canaries, added up over a run."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self._ended = np.zeros(len(canaries))
        self._round: int | None = None
        self._in_round = np.zeros(len(canaries))

    def observe(self, seen: Observation) -> None:
        """Take in one step."""
        if seen.round != self._round:
            self._end_round()
            self._round = seen.round
        planned = self.canaries.plan.rounds[seen.round]
        rates = np.asarray(planned.sample_rates)[self.canaries.level]
        scales = np.asarray(planned.clip_scales)[self.canaries.level]
        with np.errstate(divide="ignore"):
            noise = planned.noise_multiplier / scales
        self._in_round += step_log_ratio(projections(seen), rates, noise)

    def scores(self) -> FloatArray:
        """Return each canary's log-likelihood ratio over all steps so far."""
        self._end_round()
        return self._ended.copy()

    def _end_round(self) -> None:
        if self._round is not None:
            planned = self.canaries.plan.rounds[self._round]
            self._ended += mixed(np.asarray(planned.participation)[self.canaries.level], self._in_round)
        self._round = None
        self._in_round = np.zeros(len(self.canaries))


class ProjectionScores:
    """Projections of example canaries on their own gradients, added up over a run, in units of contributions.

    On a real network other records lie along the same directions, so there is no exact likelihood to compare.
    """

    def __init__(self, canaries: Canaries) -> None:
        self._total = np.zeros(len(canaries))

    def observe(self, seen: Observation) -> None:
        """Take in one step."""
        lengths = seen.products if seen.products.ndim == 2 else np.diagonal(seen.products, axis1=1, axis2=2)
        squared = lengths.sum(axis=0)
        self._total += seen.dots.sum(axis=0) / np.sqrt(np.maximum(squared, 1e-12))

    def scores(self) -> FloatArray:
        """Return each canary's summed projection."""
        return self._total.copy()


def simulated_scores(
    history: History, canaries: int, generator: np.random.Generator
) -> tuple[BoolArray, FloatArray]:
    """Return coins and scores of Dirac canaries with this history, if the plan is followed, without training.

    Given everything else, Dirac canaries are independent: what lies along each is its draws and noise alone.
    """
    coins = generator.random(canaries) < 0.5
    scores = np.zeros(canaries)
    for participation, rate, sigma, steps in history:
        if rate == 0 or participation == 0:
            continue
        taking_part = coins & (generator.random(canaries) < participation)
        in_round = np.zeros(canaries)
        for _ in range(steps):
            drawn = taking_part & (generator.random(canaries) < rate)
            seen = drawn + sigma * generator.standard_normal(canaries)
            in_round += step_log_ratio(seen, np.float64(rate), np.float64(sigma))
        scores += mixed(np.float64(participation), in_round)
    return coins, scores


def step_log_ratio(seen: FloatArray, rates: npt.ArrayLike, noise: npt.ArrayLike) -> FloatArray:
    """Return log(1 - q + q exp((2x - 1) / (2 s^2))): the evidence of one step's projection x for the record."""
    exponent = (2 * seen - 1) / (2 * np.square(noise))
    return mixed(np.asarray(rates), exponent)


def mixed(probability: npt.ArrayLike, exponent: FloatArray) -> FloatArray:
    """Return log(1 - p + p e^x)."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-np.asarray(probability)), np.log(probability) + exponent))
