"""What people do without personalization: leave the strict people out, and train the others by uniform DP-SGD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.errors import fail
from pdpsgd.planning.levels import Levels
from pdpsgd.planning.mechanisms import dp_sgd
from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    """Uniform DP-SGD on those who allow at least tau: others have rate 0, so no outcome depends on their records."""
    able = np.where(request.usable(), request.levels.epsilon, 0.0)
    tau = request.exclude_below
    if tau is None:
        tau = strongest_threshold(request.levels.up_to(able))
    if not np.any(able >= tau):
        fail(f"Expected exclude_below up to the largest epsilon left, {able.max():g}. Got {tau:g}.")
    kept = request.levels.up_to(np.where(able >= tau, able, 0.0))
    return [replace(r, threshold=tau) for r in dp_sgd.MECHANISM.rounds(replace(request, levels=kept))]


def strongest_threshold(levels: Levels) -> float:
    """Return the epsilon that leaves the most signal: people at it or above, times the mu that they have in common.

    Public things only. Somebody who asks for no protection counts with the largest finite epsilon.
    """
    finite = levels.epsilon[(levels.epsilon > 0) & np.isfinite(levels.epsilon) & (levels.delta > 0)]
    if not finite.size:
        return float(levels.epsilon.max())

    def signal(tau: float) -> float:
        kept = (levels.epsilon >= tau) & (levels.delta > 0)
        return float(levels.people[kept].sum() * gaussian_mu(tau, levels.delta[kept].min()))

    return float(max(np.unique(finite), key=signal))


MECHANISM = Mechanism(_rounds, "uniform DP-SGD without the people below a threshold")
