"""IDP-SGD (Boenisch et al. 2023, arXiv:2303.17046): Sample, and Scale with a clipping norm for each level."""

from __future__ import annotations

import numpy as np

from pdpsgd.planning.mechanisms.base import Mechanism, Request, meet_targets
from pdpsgd.planning.mechanisms.one_rate import at_one_rate
from pdpsgd.planning.rounds import Round


def _sample(request: Request) -> list[Round]:
    return meet_targets(request, np.where(request.usable(), request.levels.epsilon, 0.0))


def _scale(request: Request) -> list[Round]:
    """One rate for all; noise sigma_l for level l is made by clipping to C_l = C * sigma_bar / sigma_l.

    sigma_bar is the harmonic mean over people, so that the average clipping norm is C.
    """
    found = at_one_rate(request, "idp-scale")
    # A level that no noise can serve (practically no budget left) is never sampled.
    mean = float(found.people @ found.inverse_noise) / float(found.people.sum())
    return [found.round(1 / mean, found.inverse_noise / mean)]


SAMPLE = Mechanism(_sample, "each level at its own rate, under RDP", accountant="rdp")
SCALE = Mechanism(_scale, "one rate, a clipping norm for each level")
