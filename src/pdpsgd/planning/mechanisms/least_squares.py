"""Personal least squares: a linear model from sums of x x' and x y' that are released once, with noise."""

from __future__ import annotations

from dataclasses import replace

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.one_rate import at_one_rate
from pdpsgd.planning.rounds import Round

NAME = "least-squares"


def _rounds(request: Request) -> list[Round]:
    """One step of everybody, in which a person of level l weighs mu_l / mu_max, and noise 1 / mu_max.

    At full batch one step is one Gaussian mechanism, so that level l spends mu_l exactly. What is summed up is
    `training.least_squares.Statistics`.
    """
    once = replace(request, batch_size=request.everybody(), steps=1)
    found = at_one_rate(once, NAME)
    largest = float(found.inverse_noise.max())
    return [found.round(1 / largest, found.inverse_noise / largest)]


MECHANISM = Mechanism(
    _rounds,
    "for linear models: everybody's statistics once, with noise, and their solution; nothing to tune",
    note="Everybody is in the one release: number of steps and batch size do not apply.",
)
