"""ProPer (Ebadi, Sands and Schneider 2015): every step costs all alike, and whoever has spent their budget is out."""

from __future__ import annotations

import numpy as np

from pdpsgd._typing import IntArray
from pdpsgd.accounting.history import Exposure
from pdpsgd.planning.mechanisms.base import MARGIN, Mechanism, Request
from pdpsgd.planning.mechanisms.one_rate import VERIFIABLE, OneRate, at_one_rate
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    """One rate and one noise for all, such that the last to leave stay to the end; one round between two exits.

    The time at which a level leaves follows from its budget alone, so it is public and part of the plan. (ProPer
    itself lets records leave silently in the middle of an interaction; here nobody's exit depends on data.)
    """
    found = at_one_rate(request, "proper")
    noise = 1 / float(found.inverse_noise.max())
    last = _last_steps(request, found, noise)
    exits = np.unique(last[last > 0])
    levels, rounds = found.levels, []
    for begin, end in zip((0, *exits[:-1].tolist()), exits.tolist(), strict=True):
        rates = np.zeros(len(levels))
        rates[found.usable] = np.where(last >= end, found.rate, 0.0)
        rounds.append(levels.round(end - begin, noise, rates))
    return rounds


def _last_steps(request: Request, found: OneRate, noise: float) -> IntArray:
    """The largest number of steps that each level's budget allows, at most all of them."""
    used, by = found.levels.only(found.usable), request.accountant
    last = np.zeros(len(used), dtype=np.int64)
    for level in np.flatnonzero(found.inverse_noise > 0).tolist():
        target = float(used.epsilon[level]) * (1 - max(MARGIN, VERIFIABLE))

        def fits(steps: int, level: int = level, target: float = target) -> bool:
            more = Exposure(1.0, found.rate, noise, steps)
            return by.epsilon((*used.histories[level], more), float(used.delta[level])) <= target

        share = (found.inverse_noise[level] * noise) ** 2
        low, high = 0, request.steps + 1
        for guess in (int(share * request.steps * slack) for slack in (0.99, 1.0, 1.01)):
            if low < guess < high:
                low, high = (guess, high) if fits(guess) else (low, guess)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        last[level] = low
    return last


MECHANISM = Mechanism(_rounds, "one cost for all; a level is out when its budget is spent")
