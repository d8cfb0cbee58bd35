"""IDP-SGD (Boenisch et al. 2023, arXiv:2303.17046): Sample, and Scale with a clipping norm for each level."""

from __future__ import annotations

import numpy as np

from pdpsgd.accounting import Exposure
from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import MARGIN, Mechanism, Request, make_round, meet_targets
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import largest_within


def _sample(request: Request) -> list[Round]:
    return meet_targets(request, np.where(request.usable, request.epsilon, 0.0))


def _scale(request: Request) -> list[Round]:
    """One rate for all; noise sigma_l for level l is made by clipping to C_l = C * sigma_bar / sigma_l.

    sigma_bar is the harmonic mean over people, so that the average clipping norm is C.
    """
    if request.noise_multiplier is not None or request.schedule is not None or request.drawn == "round":
        fail("idp-scale takes `steps` and `batch_size` only: no given noise, schedule or draw once a round.")
    usable = np.flatnonzero(request.usable)
    if not usable.size:
        fail("Nobody allows anything: every budget is 0 or spent, so there is nobody to train on.")
    people = request.people[usable]
    if request.batch_size > people.sum():
        fail(
            f"Expected batch_size of at most the {int(people.sum()):,} people who can be used. "
            f"Got {request.batch_size:g}."
        )
    rate = request.batch_size / float(people.sum())
    spent = request.spent()
    inverse_noise = np.zeros(len(request.epsilon))
    guess = 1.0
    for level in sorted(usable, key=lambda i: (request.delta[i], request.epsilon[i])):
        history, delta = request.histories[level], float(request.delta[level])

        def cost(inverse: float, history=history, delta=delta) -> float:  # type: ignore[no-untyped-def]
            return request.accountant.epsilon(
                (*history, Exposure(1.0, rate, 1 / inverse, request.steps)), delta
            )

        target = float(request.epsilon[level]) * (1 - MARGIN)
        guess = largest_within(cost, target, guess or 1.0, base=float(spent[level]), highest=20.0)
        inverse_noise[level] = guess
    if not inverse_noise.any():
        fail("No noise keeps these budgets at this rate: ask for fewer steps or a smaller batch.")
    # A level that no noise can serve (practically no budget left) is clipped to nothing.
    mean = float(people @ inverse_noise[usable]) / float(people.sum())
    rates = np.where(inverse_noise > 0, rate, 0.0)
    clip_scales = np.where(inverse_noise > 0, inverse_noise / mean, 1.0)
    return [make_round(request, request.steps, 1 / mean, rates, clip_scales=clip_scales)]


SAMPLE = Mechanism(_sample, "each level at its own rate, under RDP as published", accountant="rdp")
SCALE = Mechanism(_scale, "one rate, a clipping norm for each level")
