"""What a mechanism is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.accounting import Accountant, Exposure, History
from pdpsgd.errors import fail
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import Demand, Segment, Solution, solve_participation, solve_rates
from pdpsgd.planning.thresholds import Loss

NOTHING_LEFT = 5e-3
"""A level with less than this share of its budget left has nothing left: the solver's tolerance is of that size."""
MARGIN = 1e-9
"""Targets are lowered by this share, so that rounding on the way into a plan never lifts a cost above its
budget."""


@dataclass(frozen=True)
class Request:
    """Levels and public settings: all that a mechanism may look at."""

    epsilon: FloatArray
    delta: FloatArray
    people: FloatArray
    histories: tuple[History, ...]
    steps: int
    batch_size: float
    accountant: Accountant
    rounds: int
    schedule: tuple[Segment, ...] | None
    noise_multiplier: float | None
    drawn: str
    loss: Loss | None

    @property
    def usable(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Levels that allow anything and have some of it left."""
        return (self.epsilon > 0) & (self.delta > 0) & (self.spent() < self.epsilon * (1 - NOTHING_LEFT))

    def spent(self) -> FloatArray:
        """What each level has spent in earlier plans and in the rounds so far."""
        return np.array(self.accountant.epsilons(self.histories, self.delta.tolist()))

    def demand(self, targets: FloatArray) -> Demand:
        """Ask the solver for these totals; 0 leaves a level out."""
        return Demand(self.histories, targets * (1 - MARGIN), self.delta, self.people, self.accountant)

    def after(self, rounds: Sequence[Round]) -> Request:
        """The request that is left after these rounds."""
        histories = tuple(h + tuple(r.exposure(i) for r in rounds) for i, h in enumerate(self.histories))
        return replace(self, histories=histories)


@dataclass(frozen=True)
class Mechanism:
    """A named way from a request to rounds."""

    rounds: Callable[[Request], list[Round]]
    summary: str
    accountant: str | None = None
    """The accountant that belongs to the mechanism as it was published, if any."""
    default_rounds: int = 1


def meet_targets(
    request: Request, targets: FloatArray, *, threshold: float | None = None, fresh_model: bool = False
) -> list[Round]:
    """The rounds in which every level reaches its target, drawn at every step or once a round."""
    segments = request.schedule or (Segment(request.steps),)
    if request.drawn == "round":
        if request.noise_multiplier is not None or len(segments) > 1:
            fail('A given noise or schedule goes with drawn="step"; with drawn="round" leave both out.')
        sigma, rate, participation = solve_participation(
            request.demand(targets), request.steps, request.batch_size
        )
        rates = np.where(participation > 0, rate, 0.0)
        return [
            make_round(
                request,
                request.steps,
                sigma,
                rates,
                participation,
                threshold=threshold,
                fresh_model=fresh_model,
            )
        ]
    solution = solve_rates(request.demand(targets), segments, request.batch_size, request.noise_multiplier)
    return rounds_of(request, solution, threshold=threshold, fresh_model=fresh_model)


def rounds_of(
    request: Request, solution: Solution, *, threshold: float | None = None, fresh_model: bool = False
) -> list[Round]:
    """A solution as rounds of a plan, one for each segment."""
    return [
        make_round(
            request,
            segment.steps,
            solution.noise_multiplier * segment.noise,
            np.minimum(1.0, solution.rates * segment.batch_size),
            threshold=threshold,
            fresh_model=fresh_model,
        )
        for segment in solution.segments
    ]


def make_round(
    request: Request,
    steps: int,
    noise_multiplier: float,
    sample_rates: FloatArray,
    participation: FloatArray | None = None,
    clip_scales: FloatArray | None = None,
    *,
    threshold: float | None = None,
    fresh_model: bool = False,
) -> Round:
    """A round as a plan holds it, with its expected batch size."""
    ones = np.ones_like(sample_rates)
    participation = ones if participation is None else participation
    return Round(
        steps=int(steps),
        noise_multiplier=float(noise_multiplier),
        expected_batch_size=float(request.people @ (participation * sample_rates)),
        participation=tuple(participation.tolist()),
        sample_rates=tuple(sample_rates.tolist()),
        clip_scales=tuple((ones if clip_scales is None else clip_scales).tolist()),
        threshold=threshold,
        fresh_model=fresh_model,
    )


def uniform_exposure(rate: float, sigma: float, steps: int) -> Exposure:
    """What everybody is exposed to when all are treated alike."""
    return Exposure(1.0, rate, sigma, steps)
