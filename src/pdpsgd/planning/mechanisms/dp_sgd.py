"""DP-SGD (Abadi et al. 2016) for people who differ: the strictest budget for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pdpsgd._typing import IntArray
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.planning.levels import Levels
from pdpsgd.planning.mechanisms.base import Mechanism, Request, meet_targets
from pdpsgd.planning.mechanisms.one_rate import VERIFIABLE
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import check_batch_size, usable_levels


def _rounds(request: Request) -> list[Round]:
    usable = usable_levels(request.levels.up_to(np.where(request.usable(), request.levels.epsilon, 0.0)))
    used = request.levels.only(usable)
    check_batch_size(request.batch_size, used)
    if request.noise_multiplier is not None or request.schedule is not None:
        return _as_one_level(request, usable)
    rate = request.batch_size / float(used.people.sum())
    # With everybody in every step costs are exact, and the verifier's grid needs room.
    target = float(used.epsilon.min()) * (1 - VERIFIABLE if rate == 1 else 1)
    sigma = max(
        smallest_noise_multiplier(
            target,
            float(used.delta.min()),
            sample_rate=rate,
            steps=request.steps,
            history=history,
            accounting=request.accountant,
        )
        for history in set(used.histories)
    )
    return [request.levels.round(request.steps, sigma, _at(usable, rate, len(request.levels)))]


def _as_one_level(request: Request, usable: IntArray) -> list[Round]:
    """A given noise (how many steps?) or a schedule: solve for everybody as one level, then give all its rate."""
    used = request.levels.only(usable)
    strictest = used.histories[int(np.argmax(used.spent(request.accountant)))]
    one = Levels(
        used.epsilon.min(keepdims=True),
        used.delta.min(keepdims=True),
        used.people.sum(keepdims=True),
        (strictest,),
    )
    return [
        request.levels.round(r.steps, r.noise_multiplier, _at(usable, r.sample_rates[0], len(request.levels)))
        for r in meet_targets(replace(request, levels=one), one.epsilon)
    ]


def _at(usable: IntArray, rate: float, levels: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rates = np.zeros(levels)
    rates[usable] = rate
    return rates


MECHANISM = Mechanism(_rounds, "the strictest person's budget for all, one rate")
