"""Every level's rate such that everything it allows is spent by the end: the default."""

from __future__ import annotations

import numpy as np

from pdpsgd.planning.mechanisms.base import Mechanism, Request, meet_targets
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    return meet_targets(request, np.where(request.usable(), request.levels.epsilon, 0.0))


MECHANISM = Mechanism(_rounds, "each level at its own rate; everything is spent by the end")
