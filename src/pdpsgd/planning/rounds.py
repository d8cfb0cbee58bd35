"""The plain values of a plan: its levels and its rounds, with their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdpsgd.accounting.history import Exposure, Past
from pdpsgd.errors import check_positive, fail

MOST = 2**53
"""Steps and people are counted in double precision, which is exact up to here."""


LARGEST_LIMIT = 2**20
"""Of what a filter lets a person spend, mu^2: an epsilon in the hundreds of thousands."""


@dataclass(frozen=True)
class Level:
    """People who share a level: a budget that is at most what each of them allows.

    `proven_epsilon` is what the plan's rounds cost them at `delta`, together with `history` (earlier plans on
    the same people); None where nothing is proven.
    """

    epsilon: float
    delta: float
    people: int
    proven_epsilon: float | None = None
    history: Past = ()


@dataclass(frozen=True)
class Round:
    """Steps with the same noise multiplier and sampling rates; the tuples follow the plan's levels."""

    steps: int
    noise_multiplier: float
    expected_batch_size: float
    participation: tuple[float, ...]
    sample_rates: tuple[float, ...]
    clip_scales: tuple[float, ...]
    threshold: float | None = None
    fresh_model: bool = False
    spending_limits: tuple[float, ...] | None = None
    """With a filter: the most that a person of a level spends in the round, as a sum of squares of norm over noise."""

    def exposure(self, level: int) -> Exposure:
        """Return what a person of this level is exposed to in this round.

        Noise of standard deviation sigma * C against a gradient of norm at most C_l is a noise multiplier of
        sigma * C / C_l for that person. A filter ends the spending of a person at their limit B_l, so that the round
        is at most one Gaussian mechanism with mu^2 = B_l (docs/theory.md, "Filters").
        """
        scale = self.clip_scales[level]
        if self.spending_limits is not None and scale > 0:
            limit, norm = self.spending_limits[level], scale / self.noise_multiplier
            if limit < self.steps * (norm * norm):
                rate = self.sample_rates[level] if limit > 0 else 0.0
                noise = 1 / math.sqrt(limit) if limit > 0 else math.inf
                return Exposure(self.participation[level], rate, noise, 1)
        sigma = self.noise_multiplier / scale if scale > 0 else math.inf
        return Exposure(
            self.participation[level], self.sample_rates[level] if scale > 0 else 0.0, sigma, self.steps
        )


def _shortened(number: int) -> str:
    """A whole number, or its number of digits where they are too many to print."""
    return (
        repr(number)
        if abs(number) < 10**20
        else f"a number of {int(number).bit_length() * 3 // 10} digits or so"
    )


def check_level(place: str, level: Level) -> None:
    """Refuse a level whose values are no budget."""
    if not level.epsilon >= 0:
        fail(f"Expected {place}.epsilon >= 0 (or inf). Got {level.epsilon!r}.")
    if not 0 <= level.delta < 1:
        fail(f"Expected 0 <= {place}.delta < 1. Got {level.delta!r}.")
    if not 0 <= level.people <= MOST:
        fail(f"Expected {place}.people from 0 to 2^53. Got {_shortened(level.people)}.")
    if level.proven_epsilon is not None and not level.proven_epsilon >= 0:
        fail(f"Expected {place}.proven_epsilon >= 0 or null. Got {level.proven_epsilon!r}.")


def check_round(place: str, r: Round, levels: tuple[Level, ...]) -> None:
    """Refuse a round that does not fit the levels, or draws people who allow nothing."""
    if not 1 <= r.steps <= MOST:
        fail(f"Expected {place}.steps from 1 to 2^53. Got {_shortened(r.steps)}.")
    check_positive(**{f"{place}.noise_multiplier": r.noise_multiplier})
    check_positive(**{f"{place}.expected_batch_size": r.expected_batch_size})
    for name in ("participation", "sample_rates", "clip_scales"):
        values = getattr(r, name)
        if len(values) != len(levels):
            fail(
                f"Expected {place}.{name} to have one value for each of the {len(levels)} levels. Got {len(values)}."
            )
        highest = math.inf if name == "clip_scales" else 1.0
        for index, value in enumerate(values):
            if not (0 <= value <= highest and math.isfinite(value)):
                accepted = "[0, 1]" if highest == 1 else "[0, inf)"
                fail(f"Expected {place}.{name}[{index}] in {accepted}. Got {value!r}.")
    for index, level in enumerate(levels):
        if (level.epsilon == 0 or level.delta == 0) and not r.exposure(index).costs_nothing:
            fail(
                f"Expected {place} never to sample level {index}, whose people allow epsilon={level.epsilon!r} at "
                f"delta={level.delta!r}: nothing. Got sample rate {r.sample_rates[index]!r}."
            )
    if r.spending_limits is not None:
        _check_limits(place, r, r.spending_limits)
    drawn = math.fsum(level.people * r.participation[i] * r.sample_rates[i] for i, level in enumerate(levels))
    if not np.isclose(drawn, r.expected_batch_size, rtol=1e-6, atol=1e-9):
        fail(
            f"Expected {place}.expected_batch_size to be the people times their rates, {drawn!r}. "
            f"Got {r.expected_batch_size!r}."
        )


def _check_limits(place: str, r: Round, limits: tuple[float, ...]) -> None:
    """Refuse limits that are none, and a filter where people are sampled: there it proves nothing."""
    if len(limits) != len(r.sample_rates):
        fail(
            f"Expected {place}.spending_limits to have one value for each of the {len(r.sample_rates)} levels. "
            f"Got {len(limits)}."
        )
    for index, limit in enumerate(limits):
        if not 0 <= limit <= LARGEST_LIMIT:
            fail(f"Expected {place}.spending_limits[{index}] from 0 to 2^20. Got {limit!r}.")
    for name in ("participation", "sample_rates"):
        for index, value in enumerate(getattr(r, name)):
            if value not in (0, 1):
                fail(
                    f"Expected {place}.{name}[{index}] of 0 or 1 with spending_limits: a filter needs everybody in "
                    f"every step. Got {value!r}."
                )
