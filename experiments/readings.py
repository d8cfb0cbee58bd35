"""Other readings of the paper's Algorithm 1, to see which of them gives its printed accuracies.

They change the rounds of an as-published plan. By none of them is more claimed than by the plan; what is provable
is stated by the noise and the rates that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from pdpsgd.accounting import Exposure
from pdpsgd.accounting.registry import accountant
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.planning.plans import Plan


def _in_epochs(planned: Plan, batch_size: float) -> Plan:
    """An as-published plan with rounds of as many passes over those who were drawn, instead of as many steps."""
    by, delta = accountant(planned.accountant), planned.levels[0].delta
    people = [level.people for level in planned.levels]
    drawn = [sum(n * part for n, part in zip(people, r.participation, strict=True)) for r in planned.rounds]
    rounds = []
    for r, inside in zip(planned.rounds, drawn, strict=True):
        steps = max(1, round(planned.steps * inside / sum(drawn)))
        sigma = smallest_noise_multiplier(
            r.threshold or 0.0, delta, sample_rate=max(r.sample_rates), steps=steps, accounting=by
        )
        rounds.append(replace(r, steps=steps, noise_multiplier=sigma))
    return replace(planned, rounds=tuple(rounds))


def _with_noise_for_the_sum(planned: Plan, batch_size: float) -> Plan:
    """An as-published plan with the noise of another reading of the paper, to see what accuracy that gives.

    The noise of a round is searched with the history of all rounds, for the sum of the thresholds so far, as if
    everybody were drawn at the rate batch size / people. That is neither what somebody spends who is drawn in some
    of the rounds, nor the rate at which they are. What is provable is stated by the rates that there are.
    """
    by, delta = accountant(planned.accountant), planned.levels[0].delta
    rate = batch_size / sum(level.people for level in planned.levels)
    supposed: tuple[Exposure, ...] = ()
    allowed, rounds = 0.0, []
    for r in planned.rounds:
        allowed += r.threshold or 0.0
        sigma = smallest_noise_multiplier(
            allowed, delta, sample_rate=rate, steps=r.steps, history=supposed, accounting=by
        )
        supposed = (*supposed, Exposure(1.0, rate, sigma, r.steps))
        rounds.append(replace(r, noise_multiplier=sigma))
    return replace(planned, rounds=tuple(rounds))


def _with_weighted_batches(planned: Plan, batch_size: float) -> Plan:
    """Return an as-published plan whose batches are sampled from everybody, each person with a weight.

    The paper's appendix has a weighted sampler for batches, its Algorithm 1 draws people once a round. Those who are
    charged for a round are the same as there, those who are exposed to it are not.
    """
    # Imported here, because the command line's help reads this module.
    from pdpsgd.accounting.theorems import participation_for
    from pdpsgd.planning.as_published import NOTHING_LEFT

    epsilon = np.array([level.epsilon for level in planned.levels])
    people = np.array([level.people for level in planned.levels], dtype=float)
    left, rounds = epsilon.copy(), []
    for r in planned.rounds:
        tau = r.threshold or 0.0
        weights = np.where(left > NOTHING_LEFT, participation_for(left, tau), 0.0)
        rates = np.minimum(1.0, weights * batch_size / float(people @ weights))
        rounds.append(
            replace(
                r,
                participation=(1.0,) * len(people),
                sample_rates=tuple(rates.tolist()),
                expected_batch_size=float(people @ rates),
            )
        )
        left = np.maximum(left - tau * np.array(r.participation), 0.0)
    return replace(planned, rounds=tuple(rounds))


def provable_for_anybody(planned: Plan) -> float:
    """What is provable for anybody, whatever the coins: nobody is in more than all of the rounds."""
    by, delta = accountant(planned.accountant), planned.levels[0].delta
    worst = tuple(Exposure(1.0, max(r.sample_rates), r.noise_multiplier, r.steps) for r in planned.rounds)
    return by.epsilon(worst, delta)


def keeps_thresholds(reading: str | None) -> bool:
    """Whether each round still costs at most its threshold, as the plan's own claims suppose."""
    return reading in (None, "epochs")


def _in_turn(*changes: Callable[[Plan, float], Plan]) -> Callable[[Plan, float], Plan]:
    def changed(planned: Plan, batch_size: float) -> Plan:
        return reduce(lambda made, change: change(made, batch_size), changes, planned)

    return changed


READINGS: dict[str, Callable[[Plan, float], Plan]] = {
    "epochs": _in_epochs,
    "sum": _with_noise_for_the_sum,
    "epochs, sum": _in_turn(_in_epochs, _with_noise_for_the_sum),
    "epochs, sum, weights": _in_turn(_in_epochs, _with_noise_for_the_sum, _with_weighted_batches),
}
"""Other readings of Algorithm 1: rounds are epochs; noise is searched for the sum of thresholds; weighted batches."""
