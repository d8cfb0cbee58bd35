"""The smallest mechanism on which as-published bookkeeping breaks its promise, and an attack that shows it.

Algorithm 1 of the paper lets people who were not drawn in a round keep their whole budget, so they come back
until they are drawn. Here the round is randomised response on one bit: whoever is drawn and has a record
answers 1 with chance e^tau/(1+e^tau), everybody else with chance 1/(1+e^tau). Which round drew the person
stays hidden, and that is not enough: the chance of being used at all grows with the rounds, and with it the
loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdpsgd.audit.bounds import one_run_epsilon
from pdpsgd.errors import check_positive


@dataclass(frozen=True)
class RandomizedResponse:
    """Rounds of randomised response at `threshold`, each drawing the person with chance `participation`.

    With `come_back_until_drawn` the person leaves after the first round that drew them (as published);
    without, everybody is drawn afresh in every round and pays in every round (sound).
    """

    rounds: int
    threshold: float
    participation: float
    come_back_until_drawn: bool

    @classmethod
    def as_published(cls, *, epsilon: float, threshold: float, rounds: int) -> RandomizedResponse:
        """What the paper's bookkeeping allows: a participation that keeps one round within epsilon,
        repeated."""
        check_positive(epsilon=epsilon, threshold=threshold, rounds=rounds)
        participation = min(1.0, math.expm1(epsilon) / math.expm1(threshold))
        return cls(rounds, threshold, participation, come_back_until_drawn=True)

    @classmethod
    def sound(cls, *, epsilon: float, threshold: float, rounds: int) -> RandomizedResponse:
        """Everybody pays in every round: each round may cost epsilon / rounds, drawn or not."""
        check_positive(epsilon=epsilon, threshold=threshold, rounds=rounds)
        participation = min(1.0, math.expm1(epsilon / rounds) / math.expm1(threshold))
        return cls(rounds, threshold, participation, come_back_until_drawn=False)

    @property
    def true_epsilon(self) -> float:
        """The real loss, exactly: the largest log-ratio of the chances of any answers with and without the
        record.

        It is reached at "1 in every round", where each round that used the record contributes a factor e^tau.

        >>> round(RandomizedResponse.as_published(epsilon=0.5, threshold=0.75, rounds=3).true_epsilon, 3)
        0.71
        """
        gain = math.expm1(self.threshold)
        if self.come_back_until_drawn:
            return math.log1p((1 - (1 - self.participation) ** self.rounds) * gain)
        return self.rounds * math.log1p(self.participation * gain)

    def simulate(
        self, runs: int, generator: np.random.Generator
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
        """Coins (whether the person's record was there) and the answers of every round, for many runs."""
        has_record = generator.random(runs) < 0.5
        drawn = generator.random((runs, self.rounds)) < self.participation
        if self.come_back_until_drawn:
            drawn &= np.cumsum(drawn, axis=1) == 1
        used = drawn & has_record[:, None]
        honest = math.exp(self.threshold) / (1 + math.exp(self.threshold))
        answers = generator.random((runs, self.rounds)) < np.where(used, honest, 1 - honest)
        return has_record, answers

    def measured_epsilon(self, runs: int, generator: np.random.Generator, *, significance: float) -> float:
        """The lower bound that an attack shows: guess "in" where every round answered 1, abstain otherwise.

        Guarantee: the runs are independent and each keeps its promise towards its own coin, so they are the
        canaries of `one_run_epsilon` (at delta 0); the rule is fixed in advance, so nothing else is to be
        paid for.
        """
        has_record, answers = self.simulate(runs, generator)
        guessed = answers.all(axis=1)
        return one_run_epsilon(
            canaries=runs,
            guesses=int(guessed.sum()),
            correct=int((guessed & has_record).sum()),
            delta=0.0,
            significance=significance,
        )
