"""DP-SGD (Abadi et al. 2016) for people who differ: the strictest budget for all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdpsgd.accounting.calibration import smallest_noise_multiplier
from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import Mechanism, Request, make_round, meet_targets
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    usable = request.usable
    if not usable.any():
        fail("Nobody allows anything: every budget is 0 or spent, so there is nobody to train on.")
    epsilon, delta = request.epsilon[usable].min(), request.delta[usable].min()
    people = float(request.people[usable].sum())
    if request.batch_size > people:
        fail(
            f"Expected batch_size of at most the {int(people):,} people who can be used. Got {request.batch_size:g}."
        )
    rate = request.batch_size / people
    histories = {request.histories[i] for i in np.flatnonzero(usable)}
    if request.noise_multiplier is not None or request.schedule is not None:
        return _as_one_level(request, usable, float(epsilon), float(delta))
    sigma = max(
        smallest_noise_multiplier(
            float(epsilon),
            float(delta),
            sample_rate=rate,
            steps=request.steps,
            history=history,
            accounting=request.accountant,
        )
        for history in histories
    )
    return [make_round(request, request.steps, sigma, np.where(usable, rate, 0.0))]


def _as_one_level(
    request: Request, usable: npt.NDArray[np.bool_], epsilon: float, delta: float
) -> list[Round]:
    """A given noise (how many steps?) or a schedule: solve for everybody as one level, then give all its
    rate."""
    from dataclasses import replace

    strictest = int(np.flatnonzero(usable)[np.argmax(request.spent()[usable])])
    alone = replace(
        request,
        epsilon=np.array([epsilon]),
        delta=np.array([delta]),
        people=np.array([request.people[usable].sum()]),
        histories=(request.histories[strictest],),
    )
    return [
        make_round(request, r.steps, r.noise_multiplier, np.where(usable, r.sample_rates[0], 0.0))
        for r in meet_targets(alone, alone.epsilon)
    ]


MECHANISM = Mechanism(_rounds, "the strictest person's budget for all, one rate")
