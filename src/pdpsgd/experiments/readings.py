"""Other readings of the paper's Algorithm 1, to see which of them gives its printed accuracies.

They change the rounds of an as-published plan. By none of them is more claimed than by the plan; what is provable
is stated by the noise and the rates that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdpsgd.accounting import Exposure, accountant
from pdpsgd.noise_search import smallest_noise_multiplier
from pdpsgd.plans import Plan


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
    # Whatever the coins, nobody is in more than all of the rounds.
    real = tuple(Exposure(1.0, max(r.sample_rates), r.noise_multiplier, r.steps) for r in rounds)
    provable = by.epsilon(real, delta)
    levels = tuple(
        replace(level, provable_epsilon=provable, provable_delta=delta) for level in planned.levels
    )
    return replace(planned, rounds=tuple(rounds), levels=levels)


READINGS: dict[str, Callable[[Plan, float], Plan]] = {
    "epochs": _in_epochs,
    "sum": _with_noise_for_the_sum,
    "epochs, sum": lambda planned, batch: _with_noise_for_the_sum(_in_epochs(planned, batch), batch),
}
"""Other readings of Algorithm 1: rounds are epochs; noise is searched for the sum of thresholds."""
