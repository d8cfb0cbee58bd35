"""Rounds that each ask for a threshold of what is left: the common part of Sampling, AdaPDP and PDP-SGD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import NOTHING_LEFT, Request, meet_targets
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.thresholds import Loss, best_threshold


def threshold_rounds(request: Request, loss: Loss, *, fresh_model: bool = False) -> list[Round]:
    """Up to `request.rounds` rounds; round r lets each level reach min(epsilon, spent + tau_r).

    Guarantee: everybody pays in every round, drawn or not, and what is spent is recomputed over the whole
    history at the full delta (docs/everybody-pays.md); so no level passes its epsilon. Rounds in which nobody
    has anything left are dropped.
    """
    if request.schedule is not None:
        fail(
            "A schedule of rounds goes with pdp-sgd-exact: this mechanism chooses its own rounds. "
            "Give `rounds` instead."
        )
    request = replace(request, loss=request.loss or loss)
    rounds: list[Round] = []
    for steps in split_evenly(request.steps, request.rounds):
        made = _next_round(replace(request, steps=steps).after(rounds), fresh_model=fresh_model)
        if not made:
            break
        rounds += made
    return rounds


def _next_round(request: Request, *, fresh_model: bool) -> list[Round]:
    spent = request.spent()
    remaining = np.maximum(0.0, request.epsilon - spent)
    left = (request.delta > 0) & (remaining > NOTHING_LEFT * request.epsilon)
    people = float(request.people[left].sum())
    if people == 0:
        return []
    assert request.loss is not None
    tau = best_threshold(remaining[left], request.people[left], request.loss)
    targets = np.where(left, np.minimum(request.epsilon, spent + tau), 0.0)
    # Few people may be left in a late round: the batch then is at most half of them.
    request = replace(request, batch_size=min(request.batch_size, people / 2))
    return meet_targets(request, targets, threshold=tau, fresh_model=fresh_model)


def split_evenly(steps: int, rounds: int) -> list[int]:
    """Whole numbers that differ by at most one and sum to `steps`.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    rounds = min(rounds, steps)
    return [steps // rounds + (r < steps % rounds) for r in range(rounds)]
