"""The conformance test: silent on correct training, loud on every planted fault.

False-alarm rates: every run of the test here has 1e-6, so each assertion that correct training passes fails
by chance at most once in a million seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

from pdpsgd.audit.canaries import add_canaries
from pdpsgd.audit.conformance import Conformance, ConformanceTest
from pdpsgd.audit.dirac_canaries import dirac_steps, tensor_names
from pdpsgd.audit.example_canaries import example_steps
from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling.source import RandomSource

sys.path.insert(0, str(Path(__file__).parent))
import faults

RARELY = 1e-6


def plan_of(
    *,
    steps: int = 150,
    noise: float = 0.7,
    people: tuple[int, ...] = (10, 10),
    rates: tuple[float, ...] = (0.15, 0.4),
    participation: tuple[float, ...] = (1.0, 1.0),
    clip_scales: tuple[float, ...] = (1.0, 1.0),
    rounds: int = 1,
) -> Plan:
    # What the levels claim to prove is made up, so that the plan is not refused.
    levels = tuple(Level(1.0 + i, 1e-5, count, proven_epsilon=1.0 + i) for i, count in enumerate(people))
    drawn = sum(n * p * q for n, p, q in zip(people, participation, rates, strict=True))
    one = Round(steps, noise, drawn, participation, rates, clip_scales)
    return Plan("by-hand", levels, (one,) * rounds).remember_proof()


def conformance(
    plan: Plan | None = None,
    *,
    per_tier: int = 60,
    seed: int = 1,
    source: type[RandomSource] = RandomSource,
    tamper: faults.Tamper | None = None,
    rate: float = RARELY,
    layers: int = 2,
) -> Conformance:
    canaries = add_canaries(plan or plan_of(), per_tier, np.random.default_rng(seed))
    test = ConformanceTest(canaries, tensor_names(layers), orthogonal=True, false_alarm_rate=rate)
    for seen in dirac_steps(canaries, layers=layers, source=source.from_seed(seed), tamper=tamper):
        test.observe(seen)
    return test.result()


def kinds(outcome: Conformance) -> set[str]:
    return {check.kind for check in outcome.alarms}


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(),
        plan_of(clip_scales=(0.5, 1.5)),
        plan_of(participation=(0.5, 0.7), rounds=3, steps=20),
        plan_of(rates=(0.0, 1.0)),
        plan_of(noise=0.1, steps=30),
    ],
    ids=["plain", "clip scales", "drawn once a round", "edge rates", "little noise"],
)
def test_correct_training_passes(plan):
    outcome = conformance(plan)
    assert outcome.passed, outcome.alarms


def test_false_alarms_are_no_more_frequent_than_stated():
    """100 short runs at a rate of 0.1 each; more alarms than the limit would have chance 1e-6 if the rate is
    right."""
    plan = plan_of(steps=8)
    alarms = sum(not conformance(plan, per_tier=10, seed=s, rate=0.1).passed for s in range(100))
    assert alarms <= binom.isf(1e-6, 100, 0.1)


def test_half_the_noise_is_caught():
    outcome = conformance(source=faults.HalfTheNoise)
    assert {"noise", "spread"} <= kinds(outcome)
    assert outcome.alarms[-1].observed == pytest.approx(0.5, abs=0.05)


def test_noise_forgotten_on_one_layer_is_caught_on_that_layer():
    outcome = conformance(tamper=faults.no_noise_on_the_last_tensor)
    assert {check.tensor for check in outcome.alarms if check.kind == "noise"} == {"layers.1.weight"}


def test_clipping_left_out_on_one_layer_is_caught_on_that_layer():
    outcome = conformance(tamper=faults.no_clipping_on_the_first_tensor)
    assert {c.tensor for c in outcome.alarms if c.kind == "in" and c.tensor} == {"layers.0.weight"}


def test_a_tier_sampled_at_twice_its_rate_is_caught_in_that_tier():
    outcome = conformance(tamper=faults.sampled_by(faults.first_tier_at_twice_its_rate))
    assert {check.tier for check in outcome.alarms if check.kind == "in"} == {"1"}


def test_a_level_drawn_at_another_levels_rate_is_caught_in_that_tier():
    outcome = conformance(tamper=faults.sampled_by(faults.first_level_at_the_rate_of_the_last))
    assert {check.tier for check in outcome.alarms if check.kind == "in"} == {"1"}


def test_people_drawn_once_and_kept_are_caught():
    outcome = conformance(tamper=faults.sampled_by(faults.drawn_once_and_kept))
    assert "persistence" in kinds(outcome)


def test_a_rate_made_up_for_by_a_norm_is_caught():
    """The mean is as planned, the spread is not; little noise makes it show in CI time."""
    outcome = conformance(plan_of(noise=0.5), tamper=faults.twice_the_norm_at_half_the_rate)
    assert "spread" in kinds(outcome)


@pytest.mark.parametrize("fault", [faults.divided_by_the_drawn_batch, faults.sum_divided_by_the_drawn_batch])
def test_normalising_by_the_drawn_batch_is_caught_with_few_people(fault):
    plan = plan_of(people=(1, 1), steps=400)
    assert conformance(plan, per_tier=3, seed=2).passed
    assert not conformance(plan, per_tier=3, seed=2, tamper=fault).passed


def test_records_used_although_not_supplied_are_caught():
    def everybody_supplied(engine):
        people = engine.execution._record_of_person
        people[people == -1] = 0  # another person's record stands in for the missing ones
        engine.execution._everybody_supplied = False

    assert not conformance(tamper=everybody_supplied).passed


def test_a_test_too_weak_to_notice_a_doubled_rate_says_so():
    weak = conformance(plan_of(steps=5, noise=5.0), per_tier=5)
    assert weak.passed
    assert weak.underpowered_tiers == ("1", "2")
    assert conformance().underpowered_tiers == ()


def examples_conformance(**options) -> Conformance:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    canaries = add_canaries(plan_of(noise=0.3, steps=150), 12, np.random.default_rng(3))
    inputs, targets = 3 * torch.randn(len(canaries), 20), torch.randint(5, (len(canaries),))
    source = options.pop("source", RandomSource).from_seed(5)
    names = tuple(name for name, _ in network.named_parameters())
    test = ConformanceTest(canaries, names, orthogonal=False, false_alarm_rate=RARELY)
    for seen in example_steps(
        canaries,
        module=network,
        criterion=lambda outputs, labels: 5 * nn.functional.cross_entropy(outputs, labels),
        examples=(inputs, targets),
        source=source,
        **options,
    ):
        test.observe(seen)
    return test.result()


def test_a_real_network_with_mislabelled_examples_passes():
    outcome = examples_conformance()
    assert outcome.passed, outcome.alarms


def test_a_real_network_with_noise_forgotten_on_its_last_bias_is_caught():
    outcome = examples_conformance(tamper=faults.no_noise_on_the_last_tensor)
    assert {check.tensor for check in outcome.alarms if check.kind == "noise"} == {"2.bias"}


def test_a_real_network_with_half_the_noise_is_caught_on_every_tensor():
    outcome = examples_conformance(source=faults.HalfTheNoise)
    assert len([check for check in outcome.alarms if check.kind == "noise"]) == 4


def test_a_real_network_with_clipping_left_out_on_its_first_layer_is_caught():
    outcome = examples_conformance(tamper=faults.no_clipping_on_the_first_tensor)
    assert "0.weight" in {check.tensor for check in outcome.alarms if check.kind == "in"}


def test_a_real_network_with_a_level_at_another_levels_rate_is_caught():
    outcome = examples_conformance(tamper=faults.sampled_by(faults.first_level_at_the_rate_of_the_last))
    assert "1" in {check.tier for check in outcome.alarms}


def test_examples_refuse_plans_that_draw_once_a_round():
    canaries = add_canaries(plan_of(participation=(0.5, 0.5)), 2, np.random.default_rng(0))
    with pytest.raises(PdpsgdError, match="Dirac canaries"):
        ConformanceTest(canaries, ("weight",), orthogonal=False)


def test_no_step_no_verdict():
    canaries = add_canaries(plan_of(), 2, np.random.default_rng(0))
    with pytest.raises(PdpsgdError, match="at least one step"):
        ConformanceTest(canaries, ("weight",), orthogonal=True).result()
