"""DP-SGD with the sampling mechanism (Jorgensen et al. 2015; the paper's first baseline): one threshold."""

from __future__ import annotations

from dataclasses import replace

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.thresholded import threshold_rounds
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.thresholds import fixed_loss

LOSS = fixed_loss(0.2, 0.8)


def _rounds(request: Request) -> list[Round]:
    return threshold_rounds(replace(request, rounds=1), LOSS)


MECHANISM = Mechanism(_rounds, "one round; everybody up to one threshold (loss_f with 0.2, 0.8)")
