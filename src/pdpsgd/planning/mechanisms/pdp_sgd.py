"""PDP-SGD (the paper's Algorithm 1) with sound bookkeeping: rounds with a threshold, one model."""

from __future__ import annotations

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.thresholded import threshold_rounds
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.thresholds import adaptive_loss, fixed_loss

FIXED_LOSS = fixed_loss(0.7, 0.3)


def _fixed(request: Request) -> list[Round]:
    return threshold_rounds(request, FIXED_LOSS)


def _adaptive(request: Request) -> list[Round]:
    return threshold_rounds(request, adaptive_loss)


FIXED = Mechanism(_fixed, "rounds with a threshold (loss_f with 0.7, 0.3), one model", default_rounds=10)
ADAPTIVE = Mechanism(_adaptive, "rounds with a threshold (loss_a), one model", default_rounds=10)
