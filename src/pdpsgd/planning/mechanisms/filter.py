"""Gradient descent with individual filters (Feldman and Zrnic 2021): whose norms have spent their budget is out."""

from __future__ import annotations

from dataclasses import replace

from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.one_rate import at_one_rate
from pdpsgd.planning.rounds import Round

FILTER_NOISE = 0.9
"""Noise, as a share of what would keep everybody in to the end whatever their gradients are."""


def _rounds(request: Request) -> list[Round]:
    """Everybody in every step, clipped to C_l in proportion to mu_l, with less noise than would last to the end.

    A step costs a person the square of their clipped gradient's norm over the noise, and whoever has spent
    B_l = mu_l^2 contributes nothing from then on. People with small gradients, who would have kept much of their
    budget, allow for the smaller noise. Noise, divisor and B_l are public and fixed; who is out is not.
    """
    share = FILTER_NOISE if request.filter_noise is None else request.filter_noise
    if not 0 < share <= 1:
        fail(f"Expected 0 < filter_noise <= 1. Got {share!r}.")
    found = at_one_rate(replace(request, batch_size=request.everybody()), "pdp-gd-filter")
    largest = float(found.inverse_noise.max())
    limits = request.steps * found.inverse_noise**2
    return [found.round(share / largest, found.inverse_noise / largest, limits)]


MECHANISM = Mechanism(
    _rounds,
    "everybody in every step; whoever's own gradients have spent their budget is out",
    note="Everybody is in every step: no batch size applies.",
)
