"""Stretching (Alaggan, Gambs and Kermarrec 2015, arXiv:1504.06998): everybody's part shrunk by their own budget."""

from __future__ import annotations

import numpy as np

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.one_rate import at_one_rate
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    """Clip level l to C_l = C epsilon_l / epsilon_max; the noise is what the neediest level asks for.

    Stretching multiplies person i's record by epsilon_i / epsilon_max before a function of bounded sensitivity. Of
    a sum of gradients that is a clipping norm. The published proof is for Laplace noise, which is linear in epsilon;
    Gaussian noise is not quite, so that some levels keep a little: `idp-scale` is the form without that loss.
    """
    found = at_one_rate(request, "stretching")
    epsilon = found.levels.epsilon[found.usable]
    served = found.inverse_noise > 0
    scales = np.where(served, epsilon / epsilon[served].max(), 0.0)
    noise = float((scales[served] / found.inverse_noise[served]).max())
    return [found.round(noise, scales)]


MECHANISM = Mechanism(_rounds, "one rate, clipping norms in proportion to epsilon")
