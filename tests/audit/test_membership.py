"""Membership inference by tier, on shadow models that follow the plan."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from pdpsgd.audit.canaries import Tier, tiers_of
from pdpsgd.audit.membership import (
    area_under_curve,
    confidences,
    likelihood_ratio_scores,
    membership_by_tier,
    proven_limit,
    true_positive_rate_at,
)
from pdpsgd.audit.shadow import clipped_sums, train_shadow_models
from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round


def plan_of(people: int, *, noise: float, steps: int, rates=(0.5, 0.5), clip_scales=(1.0, 1.0)) -> Plan:
    # What the levels claim to prove is made up, so that the plan is not refused.
    levels = (
        Level(1.0, 1e-5, people // 2, proven_epsilon=1.0),
        Level(8.0, 1e-5, people - people // 2, proven_epsilon=8.0),
    )
    drawn = sum(level.people * rate for level, rate in zip(levels, rates, strict=True))
    return Plan("by-hand", levels, (Round(steps, noise, drawn, (1.0, 1.0), rates, clip_scales),))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def test_shadow_models_sum_what_the_engine_sums():
    torch.manual_seed(1)
    people, models = 12, 3
    inputs, targets = 4 * torch.randn(people, 6), torch.randint(3, (people,))
    plan = plan_of(people, noise=1.0, steps=1, clip_scales=(0.3, 1.0))
    level = np.repeat([0, 1], people // 2)
    made = [network() for _ in range(models)]
    parameters = {name: value.detach() for name, value in stack_module_state(made)[0].items()}
    drawn = np.random.default_rng(0).random((models, people)) < 0.5
    drawn[2] = False

    def loss(own, one, target):
        return nn.functional.cross_entropy(functional_call(made[0], own, (one[None],)), target[None])

    per_example = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))
    sums = clipped_sums(per_example, parameters, inputs, targets, drawn, level, plan.rounds[0], plan)
    for index, model in enumerate(made[:2]):
        watched = copy.deepcopy(model)
        engine = ClippedGradients(watched)
        batch = torch.from_numpy(np.flatnonzero(drawn[index]))
        nn.functional.cross_entropy(watched(inputs[batch]), targets[batch]).backward()
        norms = torch.from_numpy(np.array([0.3, 1.0], dtype=np.float32)[level[batch.numpy()]])
        engine.clipped_sum(norms, largest_clip_norm=1.0)
        for name, parameter in watched.named_parameters():
            torch.testing.assert_close(
                sums[name][index], engine.sums[parameter].float(), rtol=1e-4, atol=1e-5
            )
    assert all((value[2] == 0).all() for value in sums.values())


def test_shadow_models_get_the_planned_noise():
    """Rate 0: what is left is noise alone; the false alarm has a chance below 1e-6."""
    plan = plan_of(10, noise=2.0, steps=3, rates=(1e-9, 1e-9))
    zero = {"init": 0.0}

    def make():
        model = nn.Linear(50, 20)
        for parameter in model.parameters():
            nn.init.constant_(parameter, zero["init"])
        return model

    shadows = train_shadow_models(
        make,
        nn.functional.cross_entropy,
        torch.zeros(10, 50),
        torch.zeros(10, dtype=torch.long),
        plan=plan,
        level_of_person=[0] * 5 + [1] * 5,
        models=4,
        learning_rate=plan.rounds[0].expected_batch_size,
    )
    moved = torch.cat([value.flatten() for value in shadows.parameters.values()])
    deviation = float(moved.std()) / (2.0 * 3**0.5)
    assert abs(deviation - 1) < 5 / (2 * moved.numel()) ** 0.5


def test_area_and_rates_are_those_of_the_definition():
    inside, outside = np.array([0.9, 0.8, 0.3]), np.array([0.7, 0.3, 0.2, 0.1])
    pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
    assert area_under_curve(inside, outside) == pytest.approx(np.mean(pairs))
    assert true_positive_rate_at(inside, outside, 0.0) == pytest.approx(2 / 3)
    assert true_positive_rate_at(inside, outside, 0.5) == pytest.approx(1.0)


def test_confidence_is_the_log_odds_of_the_right_class():
    logits = torch.tensor([[[1.0, 2.0, 0.5]]])
    p = torch.softmax(logits[0, 0].double(), 0)[1]
    assert confidences(logits, torch.tensor([1]))[0, 0] == pytest.approx(float(torch.log(p / (1 - p))))


def test_a_models_own_value_does_not_tell_on_itself():
    """Pure noise: scores of members and non-members are alike; the false alarm has a chance below 1e-6."""
    generator = np.random.default_rng(3)
    members = generator.random((16, 2000)) < 0.5
    scores = likelihood_ratio_scores(generator.normal(size=members.shape), members)
    area = area_under_curve(scores[members], scores[~members])
    assert abs(area - 0.5) < 5 * np.sqrt(1 / (6 * 16_000))


def test_members_with_a_shift_are_found():
    generator = np.random.default_rng(4)
    members = generator.random((16, 500)) < 0.5
    values = generator.normal(size=members.shape) + 2 * members
    scores = likelihood_ratio_scores(values, members)
    assert area_under_curve(scores[members], scores[~members]) > 0.85


def test_too_few_shadow_models_are_refused():
    with pytest.raises(PdpsgdError, match="at least 4"):
        likelihood_ratio_scores(np.zeros((3, 5)), np.ones((3, 5), dtype=bool))


def test_no_attack_can_pass_the_proven_limit():
    assert proven_limit(0.0, 0.0, 0.01) == pytest.approx(0.01)
    assert proven_limit(1.0, 1e-5, 0.01) == pytest.approx(np.e * 0.01 + 1e-5)
    assert proven_limit(20.0, 1e-5, 0.01) < 1
    assert proven_limit(None, 1e-5, 0.01) is None


def test_the_tier_that_allows_more_is_found_more_easily():
    """Hardly any noise; one tier is drawn often and one hardly ever. Random labels make people memorable."""
    torch.manual_seed(0)
    people = 80
    inputs, targets = torch.randn(people, 30), torch.randint(2, (people,))
    plan = plan_of(people, noise=0.05, steps=60, rates=(0.002, 0.6))
    level = np.repeat([0, 1], people // 2)
    shadows = train_shadow_models(
        lambda: nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2)),
        nn.functional.cross_entropy,
        inputs,
        targets,
        plan=plan,
        level_of_person=level,
        models=24,
        learning_rate=2.0,
    )
    strict, generous = membership_by_tier(shadows, inputs, targets, level, tiers_of(plan))
    assert generous.auc > 0.8
    assert strict.auc < 0.65
    assert generous.true_positive_rates[0.01] > strict.true_positive_rates[0.01]
    rising = [y for _, y in generous.roc]
    assert rising == sorted(rising)


def test_tiers_without_people_are_left_out():
    torch.manual_seed(0)
    plan = plan_of(10, noise=1.0, steps=1)
    inputs, targets = torch.randn(10, 6), torch.randint(3, (10,))
    shadows = train_shadow_models(
        network,
        nn.functional.cross_entropy,
        inputs,
        targets,
        plan=plan,
        level_of_person=[0] * 10,
        models=4,
        learning_rate=0.1,
    )
    tiers = tiers_of(plan)
    assert isinstance(tiers[0], Tier)
    assert len(membership_by_tier(shadows, inputs, targets, [0] * 10, tiers)) == 1
