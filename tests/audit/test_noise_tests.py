"""Tests of the noise: silent on the engine's own, loud on noise of the right variance that is wrong otherwise.

False-alarm rates: 1e-6 where sound noise has to pass, the default 1e-3 where faults have to be found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from torch import nn

from pdpsgd.audit.auditing import noise_conformance
from pdpsgd.audit.conformance import FALSE_ALARM_RATE, Conformance
from pdpsgd.audit.noise_tests import KEPT, NoiseSample, noise_checks
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round

sys.path.insert(0, str(Path(__file__).parent))
import faults

SIZES = {"0.weight": 2048, "0.bias": 32, "2.weight": 320, "2.bias": 10}


def run(*, steps: int = 100, tamper: faults.Tamper | None = None, **options) -> Conformance:
    levels = tuple(Level(epsilon, 1e-5, 3, proven_epsilon=epsilon) for epsilon in (1.0, 2.0))
    rounds = [Round(steps // 2, noise, 3.0, (1.0, 1.0), (0.3, 0.7), (0.5, 1.0)) for noise in (0.8, 3.0)]
    plan = Plan("by-hand", levels, tuple(rounds), max_grad_norm=2.0).remember_proof()
    return noise_conformance(
        plan,
        make_model=lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
        input_shape=(64,),
        tamper=tamper,
        seed=1,
        **options,
    )


@pytest.fixture(scope="module")
def noise() -> list[np.ndarray]:
    """The noise of a hundred steps of the real engine, in standard deviations."""
    kept: list[np.ndarray] = []

    def keep(step: int, flat: np.ndarray) -> np.ndarray:
        kept.append(flat.copy())
        return flat

    outcome = run(tamper=faults.noise_changed(keep), false_alarm_rate=1e-6)
    assert outcome.passed, outcome.alarms
    assert (outcome.steps, outcome.canaries, len(outcome.checks)) == (100, 0, 14)
    return kept


def found(noise: list[np.ndarray], fault) -> set[str]:
    """The kinds of checks that notice a fault."""
    sample = NoiseSample(tuple(SIZES))
    for step, flat in enumerate(noise):
        parts = torch.from_numpy(np.ascontiguousarray(fault(step, flat))).split(list(SIZES.values()))
        sample.add(parts, standard_deviation=1.0)
    checks = noise_checks(sample)
    return {check.kind for check in Conformance(checks, FALSE_ALARM_RATE, len(noise), 0).alarms}


@pytest.mark.parametrize(
    ("fault", "noticed_by"),
    [
        (faults.used_for_two_steps(), "correlation of two steps"),
        (faults.used_again_once(), "correlation of two steps"),
        (faults.telescoping(), "variance of sums over steps"),
        (faults.ten_numbers_of_the_last_step(), "correlation of two numbers"),
        (faults.shared_between_layers, "correlation of two numbers"),
        (faults.a_layer_copied_from_anywhere, "a tensor's noise found elsewhere"),
        (faults.alternating_variance, "variance of even against odd steps"),
        (faults.unsteady_variance, "spread of the variances of steps"),
        (faults.uneven_layers, "variance of a tensor"),
        (faults.few_directions, "determinant of all steps"),
        (faults.student_10, "fourth moment"),
        (faults.tails_cut_at_4, "values beyond 4 deviations"),
        (faults.rounded_to_halves, "distance from the normal distribution"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_found(noise, fault, noticed_by):
    assert noticed_by in found(noise, fault)


def test_sound_noise_is_silent(noise):
    assert found(noise, lambda step, flat: flat) == set()


def test_a_fault_in_the_engine_is_found_and_named():
    outcome = run(tamper=faults.noise_changed(faults.used_for_two_steps()), steps=20)
    assert "correlation of two steps" in {check.kind for check in outcome.alarms}


def test_false_alarms_are_no_more_frequent_than_stated():
    """100 samples at a rate of 0.1 each; more alarms than the limit have probability 1e-6 if the rate is right."""
    generator = np.random.default_rng(7)
    alarms = 0
    for _ in range(100):
        sample = NoiseSample(("a", "b", "c"))
        for _ in range(17):
            parts = [torch.from_numpy(generator.standard_normal(size)) for size in (60, 25, 4)]
            sample.add(parts, standard_deviation=1.0)
        alarms += not Conformance(noise_checks(sample), 0.1, 17, 0).passed
    assert alarms <= binom.isf(1e-6, 100, 0.1)


def test_one_step_is_enough_for_a_verdict():
    outcome = run(steps=2, false_alarm_rate=1e-6)
    assert outcome.passed


def test_the_variance_of_large_tensors_is_taken_of_all_their_numbers():
    sample = NoiseSample(("large", "small"))
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0)), torch.ones(3)
    sample.add(values, standard_deviation=2.0)
    assert sample.values.shape == (1, KEPT)
    assert sample.parts[1] == ("small", slice(KEPT - 3, KEPT))
    first = noise_checks(sample)[0]
    energy = float(sum(part.double().square().sum() for part in values)) / 4
    assert first.observed == pytest.approx(energy / 20_003)
    assert first.p_value == pytest.approx(2 * chi2.cdf(energy, 20_003))
