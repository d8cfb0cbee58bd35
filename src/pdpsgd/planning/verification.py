"""An accountant that shares no code with those that compute plans, to check what plans claim.

Everything is a distribution of the privacy loss under the upper distribution of a pair: with the record for
removing, without it for adding. The divergence is the mean of a function that grows with the loss, so that losses
may be rounded up, and mass may be moved up, never down (docs/theory.md, "The verifier"). Steps are discretized by
`verifier_steps`, rounds with participation below 1 by `drawn_rounds`; `contour` adds them up and reads off epsilon.
numpy and scipy only; nothing from `pdpsgd.accounting` but the description of a history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdpsgd.accounting.history import EarlierRun, Exposure, History, simplify, split
from pdpsgd.errors import PdpsgdError, PromiseBroken
from pdpsgd.planning import certificate_check
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.planning.verifier_directions import Direction, as_one_step
from pdpsgd.planning.verifier_steps import epsilon_of_one_step, has_closed_form

GRID_POINTS = (16, 64)
"""Per standard deviation of a step's loss: first try, and second try before a plan is called wrong."""
AGREEMENT = 2e-3
"""How far a plan's proven epsilon may lie below this accountant's before it is called a false claim."""
FAR = 2.0
"""Beyond so many times what is promised or claimed, a finer grid cannot bring the answer back."""
NEGLIGIBLE = 1e-6
"""Rounds whose total variation distance is below this share of delta are charged to delta and left out."""


@dataclass(frozen=True)
class Verification:
    """What the independent accountant finds for each level of a plan, at the level's delta."""

    epsilon: tuple[float, ...]
    promised: tuple[float, ...]

    @property
    def kept(self) -> bool:
        """Whether every level stays within its promise; levels that the plan does not sample may not."""
        return all(e <= p for e, p in zip(self.epsilon, self.promised, strict=True))


def verify(levels: Sequence[Level], rounds: Sequence[Round]) -> Verification:
    """Recompute what every level of a plan spends, and refuse a promise or a claim that does not hold.

    Guarantee: if this returns, each level's people have (epsilon, delta)-DP as promised, whatever the
    accountant that computed the plan did wrong.

    Raises:
        PromiseBroken: the rounds cost a level more than it is promised, or than the plan claims, as far as
            double precision can tell.
    """
    found = []
    known: dict[tuple[tuple[EarlierRun, ...], History, float], float] = {}
    for index, level in enumerate(levels):
        earlier, before = split(level.history)
        history = simplify(before + tuple(r.exposure(index) for r in rounds))
        exposed = history != simplify(before)
        key = (earlier, history, level.delta)
        for finer in range(len(GRID_POINTS)):
            epsilon = known[key] if key in known else _total(earlier, history, level.delta, finer)
            claim = math.inf if level.proven_epsilon is None else level.proven_epsilon
            broken = exposed and not epsilon <= level.epsilon
            false = claim < epsilon * (1 - AGREEMENT) - 1e-6
            if not (broken or false) or epsilon > FAR * (min(claim, level.epsilon) + AGREEMENT):
                break
        if broken:
            raise PromiseBroken(
                f"Level {index} is promised epsilon={level.epsilon:g} at delta={level.delta:g}; the plan's rounds cost "
                f"{epsilon:.6g}. Do not train with this plan."
            )
        if false:
            raise PromiseBroken(
                f"levels[{index}].proven_epsilon={level.proven_epsilon!r} is below the truth: the plan's rounds cost "
                f"{epsilon:.6g} at delta={level.delta:g}."
            )
        known[key] = epsilon
        found.append(epsilon)
    return Verification(tuple(found), tuple(level.epsilon for level in levels))


def _total(earlier: tuple[EarlierRun, ...], history: History, delta: float, finer: int) -> float:
    """What runs that were chosen after results cost together, or, if there is one or all were fixed, exactly."""
    if earlier and (history or len(earlier) > 1):
        fineness = certificate_check.FINENESS[finer]
        return certificate_check.epsilon_after(earlier, history, delta, fineness=fineness)
    alone = earlier[0].exposures if earlier else history
    return epsilon_upper_bound(alone, delta, points=GRID_POINTS[finer])


def epsilon_upper_bound(history: History, delta: float, *, points: int = GRID_POINTS[0]) -> float:
    """Compute the epsilon of a history at delta, for the worse of adding and removing.

    Guarantee: an upper bound, too high by about 0.01 % at the default number of grid points; infinite where
    double precision does not suffice for any.

    Args:
        history: what a person is exposed to.
        delta: at which delta.
        points: grid points per standard deviation of a step's loss.

    Returns:
        An upper bound on epsilon.

    Raises:
        PdpsgdError: the computation contradicts itself, so that there is no answer.

    >>> round(epsilon_upper_bound((Exposure(1.0, 64 / 60_000, 1.3, 20_000),), 1e-5), 3)
    0.481
    """
    counted, left = _without_negligible(simplify(history), delta)
    if not counted:
        return 0.0
    if left <= 0:
        return math.inf
    try:
        with np.errstate(all="ignore"):
            alone = as_one_step(counted[0])
            if len(counted) == 1 and has_closed_form(alone):
                return epsilon_of_one_step(alone, left)
            directions = [Direction(counted, left, points, removing) for removing in (True, False)]
            found = 0.0
            for direction in sorted(directions, key=lambda d: -d.rough):
                if not direction.rough <= found:
                    found = max(found, direction.epsilon())
            return found
    except PdpsgdError:
        raise
    except (
        ArithmeticError,
        MemoryError,
        TypeError,
        ValueError,
    ) as error:  # the latter two of grids beyond int64
        raise PdpsgdError(
            f"Expected rounds that double precision can verify. Got {_shown(counted)} at delta={delta:g}: "
            f"{type(error).__name__}."
        ) from error


def _without_negligible(history: History, delta: float) -> tuple[History, float]:
    """The rounds that matter, and the delta that is left for them.

    Replacing a round by one that does not depend on the person adds at most its total variation distance to delta:
    pi times the steps' sum of q (2 Phi(1/(2 sigma)) - 1).
    """
    counted, left = [], delta
    for exposure in sorted(history, key=_total_variation):
        distance = _total_variation(exposure)
        if distance <= NEGLIGIBLE * delta / len(history):
            left -= distance
        else:
            counted.append(exposure)
    if math.fsum(map(_total_variation, counted)) <= left:
        return (), left
    return tuple(counted), left


def _total_variation(e: Exposure) -> float:
    shift = math.inf if e.noise_multiplier == 0 else 0.5 / e.noise_multiplier
    per_step = e.sample_rate * math.erf(shift / math.sqrt(2))
    return e.participation * min(1.0, e.steps * per_step) * (1 + 1e-9)


def _shown(history: History) -> str:
    return "; ".join(
        f"participation {e.participation:g}, sample rate {e.sample_rate:g}, "
        f"noise multiplier {e.noise_multiplier:g}, {e.steps:g} steps"
        for e in history[:3]
    )
