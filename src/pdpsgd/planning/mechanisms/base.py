"""What a mechanism is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.errors import fail
from pdpsgd.planning.levels import Levels
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import Segment, solve_participation, solve_rates
from pdpsgd.planning.thresholds import Loss

NOTHING_LEFT = 5e-3
"""A level with less than this share of its budget left has nothing left: the solver's tolerance is of that size."""
MARGIN = 1e-9
"""Targets are lowered by this share, so that rounding on the way into a plan never lifts a cost above its budget."""


@dataclass(frozen=True)
class Request:
    """Levels and public settings: all that a mechanism may look at."""

    levels: Levels
    steps: int
    batch_size: float
    accountant: Accountant
    rounds: int
    schedule: tuple[Segment, ...] | None
    noise_multiplier: float | None
    drawn: str
    loss: Loss | None
    exclude_below: float | None = None
    filter_noise: float | None = None

    def usable(self) -> BoolArray:
        """Return which levels allow anything and have some of it left."""
        return self.levels.usable() & (self.spent() < self.levels.epsilon * (1 - NOTHING_LEFT))

    def everybody(self) -> float:
        """Return the number of people who can be used, which is the batch of mechanisms without sampling."""
        people = float(self.levels.people[self.usable()].sum())
        if people == 0:
            fail(
                "Expected a budget that is left. Every budget is 0 or spent, so there is nobody to train on."
            )
        return people

    def spent(self) -> FloatArray:
        """Return what each level has spent in earlier plans and in the rounds so far."""
        return self.levels.spent(self.accountant)


@dataclass(frozen=True)
class Mechanism:
    """A named way from a request to rounds."""

    rounds: Callable[[Request], list[Round]]
    summary: str
    accountant: str | None = None
    """The accountant under which the mechanism is defined, if it is one only."""
    default_rounds: int = 1
    note: str | None = None
    """What is to be said under the plan's table."""


def meet_targets(
    request: Request, targets: FloatArray, *, threshold: float | None = None, fresh_model: bool = False
) -> list[Round]:
    """Compute the rounds in which every level reaches its target, sampled at every step or once a round.

    Args:
        request: levels and settings.
        targets: the total epsilon that each level may reach; 0 leaves a level out.
        threshold: the threshold of these rounds, to be stated in them.
        fresh_model: whether each of these rounds trains a model of its own.

    Returns:
        The rounds, each level's total at most its target.
    """
    segments = request.schedule or (Segment(request.steps),)
    levels, by = request.levels.up_to(targets * (1 - MARGIN)), request.accountant
    if request.drawn == "round":
        if request.noise_multiplier is not None or len(segments) > 1:
            fail('A given noise or schedule goes with drawn="step"; with drawn="round" leave both out.')
        rounds = [solve_participation(levels, request.steps, request.batch_size, by)]
    else:
        rounds = solve_rates(
            levels, segments, request.batch_size, by, noise_multiplier=request.noise_multiplier
        )
    return [replace(r, threshold=threshold, fresh_model=fresh_model) for r in rounds]
