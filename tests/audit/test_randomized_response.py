"""As-published bookkeeping breaks its promise on three rounds of randomised response, and the attack shows
it."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from randomized_response import RandomizedResponse

SETTINGS = {"epsilon": 0.5, "threshold": 0.75}
RUNS = 1_000_000


def test_as_published_bookkeeping_is_caught():
    """At a confidence of 1 - 1e-6; the bound reaches 0.65 at least, well past the promise of 0.5."""
    mechanism = RandomizedResponse.as_published(**SETTINGS, rounds=3)
    measured = mechanism.measured_epsilon(RUNS, np.random.default_rng(1), significance=1e-6)
    assert 0.65 < measured <= mechanism.true_epsilon


def test_as_published_bookkeeping_reaches_the_stated_figure_at_95_percent():
    measured = RandomizedResponse.as_published(**SETTINGS, rounds=3).measured_epsilon(
        RUNS, np.random.default_rng(1), significance=0.05
    )
    assert measured == pytest.approx(0.69, abs=0.02)


def test_sound_bookkeeping_is_not_caught():
    """A false alarm has chance 1e-6."""
    mechanism = RandomizedResponse.sound(**SETTINGS, rounds=3)
    assert mechanism.true_epsilon == pytest.approx(0.5)
    assert mechanism.measured_epsilon(RUNS, np.random.default_rng(2), significance=1e-6) <= 0.5


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [RandomizedResponse.as_published, RandomizedResponse.sound])
def test_the_true_loss_is_that_of_exact_enumeration(make, rounds):
    mechanism = make(**SETTINGS, rounds=rounds)
    losses = [
        math.log(chance(mechanism, answers, has_record=True) / chance(mechanism, answers, has_record=False))
        for answers in itertools.product((0, 1), repeat=rounds)
    ]
    assert max(losses) == pytest.approx(mechanism.true_epsilon, abs=1e-12)
    assert max(losses) >= max(-loss for loss in losses)


def chance(mechanism: RandomizedResponse, answers: tuple[int, ...], *, has_record: bool) -> float:
    """The chance of these answers, by adding up every pattern of rounds that could have drawn the person."""
    honest = 1 / (1 + math.exp(-mechanism.threshold))
    total = 0.0
    for drawn in itertools.product((0, 1), repeat=len(answers)):
        pi = mechanism.participation
        weight = math.prod(pi if d else 1 - pi for d in drawn)
        first = drawn.index(1) if 1 in drawn else None
        used = [
            has_record and bool(d) and (not mechanism.come_back_until_drawn or r == first)
            for r, d in enumerate(drawn)
        ]
        ones = [honest if u else 1 - honest for u in used]
        total += weight * math.prod(p if a else 1 - p for p, a in zip(ones, answers, strict=True))
    return total
