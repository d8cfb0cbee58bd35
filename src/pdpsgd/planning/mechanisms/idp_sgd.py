"""IDP-SGD (Boenisch et al. 2023, arXiv:2303.17046): Sample, and Scale with a clipping norm for each level."""

from __future__ import annotations

import numpy as np

from pdpsgd.accounting.history import Exposure
from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import MARGIN, Mechanism, Request, meet_targets
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import check_batch_size, largest_within, usable_levels


def _sample(request: Request) -> list[Round]:
    return meet_targets(request, np.where(request.usable(), request.levels.epsilon, 0.0))


def _scale(request: Request) -> list[Round]:
    """One rate for all; noise sigma_l for level l is made by clipping to C_l = C * sigma_bar / sigma_l.

    sigma_bar is the harmonic mean over people, so that the average clipping norm is C.
    """
    if request.noise_multiplier is not None or request.schedule is not None or request.drawn == "round":
        fail(
            "Expected `steps` and `batch_size` only for idp-scale: no given noise, schedule or drawn='round'."
        )
    levels, by = request.levels, request.accountant
    usable = usable_levels(levels.up_to(np.where(request.usable(), levels.epsilon, 0.0)))
    used = levels.only(usable)
    check_batch_size(request.batch_size, used)
    people = float(used.people.sum())
    rate = request.batch_size / people
    spent = used.spent(by)
    inverse_noise = np.zeros(len(used))
    guess = 1.0
    for level in np.lexsort((used.epsilon, used.delta)).tolist():
        history, delta = used.histories[level], float(used.delta[level])

        def cost(inverse: float, history=history, delta=delta) -> float:  # type: ignore[no-untyped-def]
            return by.epsilon((*history, Exposure(1.0, rate, 1 / inverse, request.steps)), delta)

        target = float(used.epsilon[level]) * (1 - MARGIN)
        guess = largest_within(cost, target, guess or 1.0, base=float(spent[level]), highest=20.0)
        inverse_noise[level] = guess
    if not inverse_noise.any():
        fail("No noise keeps these budgets at this rate: ask for fewer steps or a smaller batch.")
    # A level that no noise can serve (practically no budget left) is never sampled.
    mean = float(used.people @ inverse_noise) / people
    rates, clip_scales = np.zeros(len(levels)), np.ones(len(levels))
    rates[usable] = np.where(inverse_noise > 0, rate, 0.0)
    clip_scales[usable] = np.where(inverse_noise > 0, inverse_noise / mean, 1.0)
    return [levels.round(request.steps, 1 / mean, rates, clip_scales=clip_scales)]


SAMPLE = Mechanism(_sample, "each level at its own rate, under RDP", accountant="rdp")
SCALE = Mechanism(_scale, "one rate, a clipping norm for each level")
