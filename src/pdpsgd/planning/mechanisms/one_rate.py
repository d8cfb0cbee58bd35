"""One sampling rate for all: how much noise each level needs by itself, for mechanisms that differ in the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.accounting.history import Exposure
from pdpsgd.errors import fail
from pdpsgd.planning.levels import Levels
from pdpsgd.planning.mechanisms.base import Request
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import check_batch_size, check_some_noise_serves, largest_within, usable_levels

VERIFIABLE = 1e-4
"""Targets are lowered by this share: at rate 1 costs are exact, and the verifier's finer grid adds 2.5e-5."""


@dataclass(frozen=True, eq=False)
class OneRate:
    """The levels that can be used at a common rate, and 1/sigma_l for the noise multiplier sigma_l each needs alone."""

    levels: Levels
    """All levels of the request."""
    usable: IntArray
    """Which of them have a budget; the arrays below follow these."""
    people: FloatArray
    inverse_noise: FloatArray
    """0 for a level that no noise can serve."""
    rate: float
    steps: int

    def round(
        self, noise_multiplier: float, clip_scales: FloatArray, spending_limits: FloatArray | None = None
    ) -> Round:
        """Make the one round with these clipping norms, relative to C; a level at 0 is left out."""
        used = clip_scales > 0
        rates, scales = np.zeros(len(self.levels)), np.ones(len(self.levels))
        rates[self.usable] = np.where(used, self.rate, 0.0)
        scales[self.usable] = np.where(used, clip_scales, 1.0)
        limits = None
        if spending_limits is not None:
            limits = np.zeros(len(self.levels))
            limits[self.usable] = np.where(used, spending_limits, 0.0)
        return self.levels.round(
            self.steps, noise_multiplier, rates, clip_scales=scales, spending_limits=limits
        )


def at_one_rate(request: Request, mechanism: str) -> OneRate:
    """Solve, for each level alone, the smallest noise multiplier at the rate that makes the batch the wanted one.

    Guarantee: `steps` steps at the rate with noise multiplier 1/inverse_noise keep every level's budget, on top of its
    history, by the request's accountant. With a batch of everybody (rate 1) 1/sigma_l is mu_l / sqrt(steps), with mu_l
    the Gaussian mechanism's at (epsilon_l, delta_l), but for a ten-thousandth.

    Args:
        request: levels and settings.
        mechanism: the name of the mechanism, for messages.

    Returns:
        The levels with their noise.
    """
    if request.noise_multiplier is not None or request.schedule is not None or request.drawn == "round":
        fail(
            f"Expected `steps` and `batch_size` only for {mechanism}: no given noise, schedule or drawn='round'."
        )
    levels, by = request.levels, request.accountant
    usable = usable_levels(levels.up_to(np.where(request.usable(), levels.epsilon, 0.0)))
    used = levels.only(usable)
    check_batch_size(request.batch_size, used)
    rate = request.batch_size / float(used.people.sum())
    spent = used.spent(by)
    inverse_noise = np.zeros(len(used))
    for level in range(len(used)):
        history, delta = used.histories[level], float(used.delta[level])

        def cost(inverse: float, history=history, delta=delta) -> float:  # type: ignore[no-untyped-def]
            return by.epsilon((*history, Exposure(1.0, rate, 1 / inverse, request.steps)), delta)

        target = float(used.epsilon[level]) * (1 - VERIFIABLE)
        guess = float(gaussian_mu(target, delta)) / (rate * math.sqrt(request.steps))
        inverse_noise[level] = largest_within(
            cost, target, min(guess, 20.0), base=float(spent[level]), highest=20.0
        )
    check_some_noise_serves(inverse_noise, used)
    return OneRate(levels, usable, used.people, inverse_noise, rate, request.steps)
