"""Example canaries: what an attacker has of a step, scores from it, and bounds that show something."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.canaries import Canaries, add_canaries, tiers_of
from pdpsgd.audit.example_canaries import AttackedStep, OtherPeople, attacked_steps, mislabeled
from pdpsgd.audit.membership import confidences
from pdpsgd.audit.one_run import one_run_bounds
from pdpsgd.audit.scores import ExampleScores
from pdpsgd.planning.plans import Plan

PEOPLE, CLASSES = 60, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def records(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    return torch.randn(count, 30, generator=generator) + functional.one_hot(targets, 30), targets


def attacked(
    made: Plan, per_tier: int, *, people: OtherPeople, seed: int = 1
) -> tuple[Canaries, list[AttackedStep]]:
    generator = np.random.default_rng(seed)
    canaries = add_canaries(made, per_tier, generator)
    examples = mislabeled(*records(len(canaries), 2), classes=CLASSES, generator=generator)
    steps = attacked_steps(
        canaries,
        module=network(),
        criterion=functional.cross_entropy,
        examples=examples,
        others=people,
        seed=seed,
    )
    return canaries, list(steps)


@pytest.mark.parametrize("many", [None, 3])
def test_without_noise_what_is_left_is_the_canaries_that_were_sampled(many):
    honest = plan(Budgets(np.repeat([10.0, 20.0], PEOPLE // 2)), steps=6, batch_size=25)
    made = honest.prefix(6)  # claims nothing
    made = replace(
        made,
        rounds=tuple(replace(r, noise_multiplier=1e-6) for r in made.rounds),
        levels=tuple(replace(level, epsilon=math.inf) for level in made.levels),
    )
    inputs, targets = records(PEOPLE, 1)
    people = OtherPeople.in_order(inputs, targets)
    if many is not None:
        person = np.concatenate([np.arange(20), np.arange(20), np.zeros(20, dtype=np.int64)])
        people = OtherPeople(inputs, targets, person, records_per_person=many)
    generator = np.random.default_rng(1)
    canaries = add_canaries(made, 8, generator, tiers=tiers_of(honest))
    examples = mislabeled(*records(len(canaries), 2), classes=CLASSES, generator=generator)
    steps = attacked_steps(
        canaries,
        module=network(),
        criterion=functional.cross_entropy,
        examples=examples,
        others=people,
        seed=1,
    )
    sampled = 0.0
    for seen in steps:
        there = np.linalg.lstsq(seen.products, seen.dots, rcond=1e-6)[0]
        assert there == pytest.approx(np.round(there), abs=0.02)
        assert set(np.round(there)) <= {0.0, 1.0}
        assert not np.round(there)[~canaries.has_record].any()
        sampled += float(np.round(there).sum())
    assert sampled > 0


def test_mislabeled_examples_show_much_of_a_large_epsilon_and_never_more_than_is_proven():
    made = plan(Budgets(np.full(PEOPLE, 20.0), delta=1e-9), steps=30, batch_size=20)
    people = OtherPeople.in_order(*records(PEOPLE, 1))
    measured = []
    for seed in (1, 2, 3):
        canaries, steps = attacked(made, 100, people=people, seed=seed)
        scores = ExampleScores(canaries)
        for seen in steps:
            scores.observe(seen)
        (bound,) = one_run_bounds(canaries, scores.scores(), significance=1e-4)
        measured.append(bound.measured)
        assert bound.measured <= made.levels[0].proven_epsilon  # false in 1e-4 of correct runs at most
    assert min(measured) > 0


def test_scores_of_a_run_that_used_nobody_tell_nothing_of_the_coins():
    made = plan(Budgets(np.full(PEOPLE, 20.0), delta=1e-9), steps=30, batch_size=20)
    canaries, steps = attacked(made, 100, people=OtherPeople.in_order(*records(PEOPLE, 1)))
    other_coins = add_canaries(made, 100, np.random.default_rng(9))
    scores = ExampleScores(canaries)
    for seen in steps:
        scores.observe(seen)
    (bound,) = one_run_bounds(other_coins, scores.scores(), significance=1e-4)
    assert bound.measured == 0


def test_made_up_records_are_canaries_only_where_others_do_not_suffice():
    inputs = torch.arange(10.0)[:, None]
    target = AuditTarget(
        make_model=network,
        inputs=inputs,
        targets=torch.zeros(10, dtype=torch.int64),
        level_of_person=np.zeros(10, dtype=np.int64),
        spare_inputs=inputs,
        spare_targets=torch.zeros(10, dtype=torch.int64),
        classes=2,
        made_up=4,
    )
    generator = np.random.default_rng(0)
    assert sorted(target.canary_examples(6, generator)[0][:, 0].tolist()) == [0, 1, 2, 3, 4, 5]
    assert set(target.canary_examples(8, generator)[0][:, 0].tolist()) >= {0, 1, 2, 3, 4, 5}
    with pytest.raises(PdpsgdError, match="spare records"):
        target.canary_examples(11, generator)


def test_a_number_is_mislabeled_by_the_far_end_of_its_range():
    _, wrong = mislabeled(
        torch.zeros(3, 1), torch.tensor([-0.5, 0.2, 1.0]), classes=0, generator=np.random.default_rng(0)
    )
    assert wrong.tolist() == [1, -1, -1]


def test_confidence_in_the_right_answer_of_one_logit_and_of_a_number():
    one_logit = confidences(torch.tensor([[[2.0], [2.0]]]), torch.tensor([1, 0]))
    assert one_logit.tolist() == [[2, -2]]
    two = confidences(torch.tensor([[[0.0, 2.0], [0.0, 2.0]]]), torch.tensor([1, 0]))
    assert two == pytest.approx(one_logit)
    numbers = confidences(torch.tensor([[[0.5], [0.5]]]), torch.tensor([0.5, -0.5]))
    assert numbers.tolist() == [[0, -1]]
