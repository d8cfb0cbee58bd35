"""DP-SGD with AdaPDP (Niu et al. 2021; the paper's second baseline): a fresh model and threshold each round."""

from __future__ import annotations

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.thresholded import threshold_rounds
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.thresholds import fixed_loss

LOSS = fixed_loss(0.2, 0.8)


def _rounds(request: Request) -> list[Round]:
    return threshold_rounds(request, LOSS, fresh_model=True)


MECHANISM = Mechanism(
    _rounds, "rounds with a threshold (loss_f with 0.2, 0.8), a fresh model each", default_rounds=10
)
