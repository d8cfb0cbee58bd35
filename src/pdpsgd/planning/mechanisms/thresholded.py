"""Rounds that each ask for a threshold of what is left: the common part of Sampling, AdaPDP and PDP-SGD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.base import NOTHING_LEFT, Request, meet_targets
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.thresholds import Loss, best_threshold


def threshold_rounds(request: Request, loss: Loss, *, fresh_model: bool = False) -> list[Round]:
    """Compute up to `request.rounds` rounds; round r lets each level reach min(epsilon, spent + tau_r).

    Guarantee: everybody pays in every round, sampled or not, and what is spent is recomputed over the whole
    history at the full delta (docs/everybody-pays.md); so no level passes its epsilon. Rounds in which nobody
    has anything left are dropped.
    """
    if request.schedule is not None:
        fail(
            "A schedule of rounds goes with pdp-sgd-exact: this mechanism chooses its own rounds. "
            "Give `rounds` instead."
        )
    request.everybody()  # refused where nothing is left for anybody
    request = replace(request, loss=request.loss or loss)
    rounds: list[Round] = []
    for steps in split_evenly(request.steps, request.rounds):
        left = replace(request, steps=steps, levels=request.levels.after(rounds))
        found = _next_round(left, fresh_model=fresh_model)
        if not found:
            break
        rounds += found
    return rounds


def _next_round(request: Request, *, fresh_model: bool) -> list[Round]:
    levels, spent = request.levels, request.spent()
    remaining = np.maximum(0.0, levels.epsilon - spent)
    left = (levels.delta > 0) & (remaining > NOTHING_LEFT * levels.epsilon)
    people = float(levels.people[left].sum())
    if people == 0:
        return []
    assert request.loss is not None
    tau = best_threshold(remaining[left], levels.people[left], request.loss)
    targets = np.where(left, np.minimum(levels.epsilon, spent + tau), 0.0)
    # Few people may be left in a late round: the batch then is at most half of them.
    request = replace(request, batch_size=min(request.batch_size, people / 2))
    return meet_targets(request, targets, threshold=tau, fresh_model=fresh_model)


def split_evenly(steps: int, rounds: int) -> list[int]:
    """Split `steps` into whole numbers that differ by at most one.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    rounds = min(rounds, steps)
    return [steps // rounds + (r < steps % rounds) for r in range(rounds)]
