"""The conformance test: does training do what its plan says?

A lower bound on epsilon from one run is far below the truth, so it cannot notice that noise is half of what
it should be. But the auditor knows more than an attacker: the coins, each canary's contribution c_i, its rate
q_i and the noise. If the plan is followed, the noisy sum of a step is exactly

    sum over canaries with a record of B_i c_i  +  sigma C N(0, I),      B_i = 1 with probability q_i,

so whatever is projected out of it has a known distribution. Checked are, for every tier,

- in: along the contributions of canaries with a record, tensor by tensor, the mean is the rate times the
  clipped length (a wrong rate, a wrong clipping norm, clipping left out on one layer);
- out: along those of canaries without one, it is zero (somebody without a record contributes nothing);
- spread: a step's values spread as draws and noise do (noise too small, a rate made up for by a norm);
- persistence: so do their sums over a round (people drawn once and kept, where the plan draws afresh);

and for every tensor, the noise where no canary contributes (noise too small, or forgotten on a layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.audit import betting
from pdpsgd.audit.bounds import bonferroni
from pdpsgd.audit.canaries import Canaries
from pdpsgd.audit.plan_moments import Mean, RoundSums, Square, add_squares
from pdpsgd.errors import fail

FALSE_ALARM_RATE = 1e-3
"""Of the whole test; each check gets an even share of it."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What one step shows, tensor by tensor, before division by the expected batch size.

    `dots` are the products of the noisy sum with each canary's contribution (tensors x canaries); `products`
    those of the contributions with each other: their squared lengths (tensors x canaries) where canaries are
    orthogonal, else a matrix for each tensor. `noise_energy` is the squared length of what lies outside all
    contributions, in `noise_dimensions`; where a tensor has no such room (`noise_only` false) it is the whole
    squared length.
    """

    round: int
    dots: FloatArray
    products: FloatArray
    noise_energy: FloatArray
    noise_dimensions: IntArray
    noise_only: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Check:
    """One comparison: what the plan implies, what was seen, and how likely that is under the plan.

    `expected` and `observed` are in standard deviations that the plan implies (for noise: the standard
    deviation of the noise as a multiple of the planned one).
    """

    kind: str
    tier: str | None
    tensor: str | None
    expected: float
    observed: float
    p_value: float

    @property
    def subject(self) -> str:
        """What was looked at, in words."""
        parts = [f"tier {self.tier}"] * (self.tier is not None) + [str(self.tensor)] * (
            self.tensor is not None
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Conformance:
    """The outcome of a conformance test.

    Guarantee: if training follows the plan, the probability that `passed` is false is at most `false_alarm_rate`.
    The converse is not claimed: `underpowered_tiers` names the tiers where even twice the planned rate would not be
    noticed.
    """

    checks: tuple[Check, ...]
    false_alarm_rate: float
    steps: int
    canaries: int

    @property
    def each(self) -> float:
        """The share of the false-alarm rate that each check has."""
        return bonferroni(self.false_alarm_rate, max(1, len(self.checks)))

    @property
    def alarms(self) -> tuple[Check, ...]:
        """The checks that training by the plan would not fail."""
        return tuple(check for check in self.checks if check.p_value <= self.each)

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against training having followed the plan."""
        return not self.alarms

    @property
    def underpowered_tiers(self) -> tuple[str, ...]:
        """Tiers whose canaries separate too little for a doubled rate to be noticed reliably."""
        needed = betting.deviations_needed(self.each) + 3
        best: dict[str, float] = {}
        for check in self.checks:
            if check.kind == "in" and check.tier is not None:
                best[check.tier] = max(best.get(check.tier, 0.0), check.expected)
        return tuple(tier for tier, separation in best.items() if separation < needed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and for the report."""
        return {
            "passed": self.passed,
            "false_alarm_rate": self.false_alarm_rate,
            "steps": self.steps,
            "canaries": self.canaries,
            "blind_tiers": list(self.underpowered_tiers),
            "alarms": [_as_dict(check) for check in self.alarms],
            "checks": [_as_dict(check) for check in self.checks],
        }


@dataclass
class ConformanceTest:
    """A test that takes in a run step by step and compares it with the canaries' plan."""

    canaries: Canaries
    tensors: tuple[str, ...]
    orthogonal: bool
    false_alarm_rate: float = FALSE_ALARM_RATE
    _steps: int = field(default=0, init=False)
    _means: dict[tuple[str, int, str | None], Mean] = field(default_factory=dict, init=False)
    _rounds: dict[int, RoundSums] = field(default_factory=dict, init=False)
    _energy: FloatArray = field(init=False)
    _dimensions: IntArray = field(init=False)
    _noise_only: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.tensors)
        self._energy, self._dimensions = np.zeros(size), np.zeros(size, dtype=np.int64)
        self._noise_only = np.ones(size, dtype=bool)
        rounds = self.canaries.plan.rounds
        if not self.orthogonal and any(p not in (0.0, 1.0) for r in rounds for p in r.participation):
            fail(
                "Expected Dirac canaries for a plan that draws once a round. Got example canaries, whose "
                "exact check needs fresh draws at every step."
            )

    def observe(self, seen: Observation) -> None:
        """Take in one step."""
        planned = self.canaries.plan.rounds[seen.round]
        noise = planned.noise_multiplier * self.canaries.plan.max_grad_norm
        self._steps += 1
        self._energy += seen.noise_energy / noise**2
        self._dimensions += seen.noise_dimensions
        self._noise_only &= seen.noise_only
        if self.orthogonal:
            empty = RoundSums(seen.products, np.zeros_like(seen.dots), np.zeros(len(self.canaries)))
            sums = self._rounds.setdefault(seen.round, empty)
            sums.add(seen.dots, self.canaries.has_record * self._rates(seen.round))
            return
        for place, rates, side, members in self._groups(seen.round):
            for tensor, name in enumerate(self._parts):
                products = _part(seen.products, tensor)
                weights = products[members].sum(axis=0)
                drawn = self.canaries.has_record
                self._mean(side, place, name).add(
                    value=float(_part(seen.dots, tensor)[members].sum()),
                    gaussian_variance=noise**2 * float(products[np.ix_(members, members)].sum()),
                    weights=weights[drawn],
                    rates=rates[drawn],
                    steps_like_this=self.canaries.plan.steps,
                    significance=self._share,
                )

    def result(self) -> Conformance:
        """Return what the run showed."""
        if self._steps == 0:
            fail("Expected at least one step to compare with the plan. Got none.")
        checks = self._orthogonal_checks() if self.orthogonal else self._mean_checks()
        return Conformance(
            checks=(*checks, *self._noise_checks()),
            false_alarm_rate=self.false_alarm_rate,
            steps=self._steps,
            canaries=len(self.canaries),
        )

    @property
    def _parts(self) -> tuple[str | None, ...]:
        """The parts that are tested by themselves: every tensor, and all of them together."""
        return (*self.tensors, None) if len(self.tensors) > 1 else self.tensors

    @property
    def _share(self) -> float:
        tiers = len(self.canaries.tiers)
        looks = 2 * tiers * len(self._parts) + 2 * tiers + len(self.tensors)
        return bonferroni(self.false_alarm_rate, looks)

    def _rates(self, round_index: int) -> FloatArray:
        planned = self.canaries.plan.rounds[round_index]
        rates = np.asarray(planned.sample_rates) * (np.asarray(planned.participation) > 0)
        return np.asarray(rates[self.canaries.level])

    def _groups(self, round_index: int) -> list[tuple[int, FloatArray, str, IntArray]]:
        """Return the canaries with a record, and without, of every tier."""
        rates = self._rates(round_index)
        groups = []
        for place in range(len(self.canaries.tiers)):
            of_tier = self.canaries.tier == place
            for side, has_record in (("in", self.canaries.has_record), ("out", ~self.canaries.has_record)):
                members = np.flatnonzero(of_tier & has_record)
                if members.size:
                    groups.append((place, rates, side, members))
        return groups

    def _mean(self, side: str, tier: int, tensor: str | None) -> Mean:
        return self._means.setdefault((side, tier, tensor), Mean())

    def _mean_checks(self) -> list[Check]:
        return [
            Check(
                kind=side,
                tier=self.canaries.tiers[tier].name,
                tensor=tensor,
                expected=mean.expected / math.sqrt(mean.variance),
                observed=mean.value / math.sqrt(mean.variance),
                p_value=mean.p_value(),
            )
            for (side, tier, tensor), mean in self._means.items()
            if mean.variance > 0
        ]

    def _orthogonal_checks(self) -> list[Check]:
        spread: dict[int, Square] = {}
        persistence: dict[int, Square] = {}
        for index, seen in self._rounds.items():
            planned = self.canaries.plan.rounds[index]
            noise = planned.noise_multiplier * self.canaries.plan.max_grad_norm
            participation = np.asarray(planned.participation)[self.canaries.level]
            for place, rates, side, members in self._groups(index):
                for tensor, name in enumerate(self._parts):
                    lengths = _part(seen.products, tensor)[members]
                    self._mean(side, place, name).add_round(
                        value=float(_part(seen.dots, tensor)[members].sum()),
                        gaussian_variance=seen.steps * noise**2 * float(lengths.sum()),
                        weights=lengths if side == "in" else np.zeros(0),
                        rates=rates[members] if side == "in" else np.zeros(0),
                        participation=participation[members] if side == "in" else np.zeros(0),
                        steps=seen.steps,
                    )
                if side == "in":
                    squares = (spread.setdefault(place, Square()), persistence.setdefault(place, Square()))
                    for level in np.unique(self.canaries.level[members]):
                        some = members[self.canaries.level[members] == level]
                        add_squares(squares, seen, some, planned.exposure(int(level)), noise)
        checks = self._settled_means()
        for kind, squares_of_tier in (("spread", spread), ("persistence", persistence)):
            for place, square in squares_of_tier.items():
                if square.count:
                    deviation = math.sqrt(square.variance)
                    checks.append(
                        Check(
                            kind=kind,
                            tier=self.canaries.tiers[place].name,
                            tensor=None,
                            expected=square.expected / deviation,
                            observed=square.value / deviation,
                            p_value=square.p_value(self._share),
                        )
                    )
        return checks

    def _settled_means(self) -> list[Check]:
        for mean in self._means.values():
            mean.settle(self._share)
        return self._mean_checks()

    def _noise_checks(self) -> list[Check]:
        checks = []
        for place, name in enumerate(self.tensors):
            energy, dimensions = self._energy[place], int(self._dimensions[place])
            if dimensions == 0:
                continue
            low, high = float(chi2.cdf(energy, dimensions)), float(chi2.sf(energy, dimensions))
            # With contributions in it the energy can only be larger, so a small one stays just as telling.
            p_value = min(1.0, 2 * min(low, high)) if self._noise_only[place] else low
            ratio = math.sqrt(energy / dimensions)
            checks.append(Check("noise", None, name, 1.0, ratio, p_value))
        return checks


def _part(values: FloatArray, tensor: int) -> FloatArray:
    """Return the values of one tensor; past the last, of all tensors together."""
    return np.asarray(values[tensor] if tensor < len(values) else values.sum(axis=0))


def _as_dict(check: Check) -> dict[str, Any]:
    return {
        "kind": check.kind,
        "tier": check.tier,
        "tensor": check.tensor,
        "expected": check.expected,
        "observed": check.observed,
        "p_value": check.p_value,
    }
