"""Scores of canaries: one number each, the larger the more it looks as if the record was used.

For Dirac canaries the best score there is: the log-likelihood ratio of everything that was seen along the
canary's direction, with and without its record, at the plan's own (public) rates and noise. It is made of the
dot products of every step's noisy gradient with the canary's; without sampling it is their sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting.history import History
from pdpsgd.audit.canaries import Canaries
from pdpsgd.audit.conformance import Observation
from pdpsgd.audit.dirac_canaries import projections
from pdpsgd.audit.example_canaries import AttackedStep


class _OverRounds:
    """Log-odds that add up over steps; at the end of a round the chance to have been in it at all is put in."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self._ended: FloatArray = np.zeros(len(canaries))
        self._round: int | None = None
        self._in_round: FloatArray = np.zeros(len(canaries))

    def add(self, round_index: int, log_ratio: Callable[[], FloatArray]) -> None:
        """Take in one step's log-likelihood ratios."""
        if round_index != self._round:
            self._ended, self._round = self.now(), round_index
            self._in_round = np.zeros(len(self.canaries))
        self._in_round += log_ratio()

    def now(self) -> FloatArray:
        """Return each canary's log-likelihood ratio over all steps so far."""
        if self._round is None:
            return self._ended.copy()
        planned = self.canaries.plan.rounds[self._round]
        taking_part = np.asarray(planned.participation)[self.canaries.level]
        return np.asarray(self._ended + mixed(taking_part, self._in_round))


class LikelihoodScores:
    """Log-likelihood ratios of Dirac canaries, added up over a run."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self._sums = _OverRounds(canaries)

    def observe(self, seen: Observation) -> None:
        """Take in one step."""
        planned = self.canaries.plan.rounds[seen.round]
        rates = np.asarray(planned.sample_rates)[self.canaries.level]
        scales = np.asarray(planned.clip_scales)[self.canaries.level]
        with np.errstate(divide="ignore"):
            noise = planned.noise_multiplier / scales
        self._sums.add(seen.round, lambda: step_log_ratio(projections(seen), rates, noise))

    def scores(self) -> FloatArray:
        """Return each canary's log-likelihood ratio over all steps so far."""
        return self._sums.now()


class ExampleScores:
    """Log-likelihood ratios of example canaries, whose gradients are alike, added up over a run.

    A step's residual is a sum of contributions c_j of canaries that were sampled, and noise. What the others add is
    taken as normal, with the mean and variance that follow from their rates and from what the steps before told of
    their coins; given that, a canary's own part is there with its rate, or not at all. The approximation can make the
    attack weaker, never a bound wrong: scores decide only who is guessed.
    """

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self._sums = _OverRounds(canaries)

    def observe(self, seen: AttackedStep) -> None:
        """Take in one step."""
        self._sums.add(seen.round, lambda: self._log_ratio(seen))

    def scores(self) -> FloatArray:
        """Return each canary's log-likelihood ratio over all steps so far."""
        return self._sums.now()

    def _log_ratio(self, seen: AttackedStep) -> FloatArray:
        plan = self.canaries.plan
        planned = plan.rounds[seen.round]
        rate = np.asarray(planned.sample_rates)[self.canaries.level]
        there = rate * np.asarray(planned.participation)[self.canaries.level] * expit(self._sums.now())
        spread = there * (1 - there)
        noise = (planned.noise_multiplier * plan.max_grad_norm) ** 2
        residual = seen.dots - seen.products @ there
        # With S = noise I + sum of spread_j c_j c_j': the products c_i' S^-1 c_i and c_i' S^-1 residual.
        weighed = np.linalg.solve(
            np.eye(len(rate)) + seen.products * (spread / noise),
            np.column_stack([seen.products, residual]) / noise,
        )
        own = np.maximum(np.diagonal(weighed), 1e-300)
        left = np.maximum(
            1 - spread * own, 1e-12
        )  # of the variance along c_i, without what i itself adds to S
        precision, along = own / left, (weighed[:, -1] + there * own) / left
        return mixed(rate, along - precision / 2)


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
