"""What nobody names follows from what people allow and from the plan's noise; what is far off is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import pdpsgd
from pdpsgd.planning.advice import rate_for

PEOPLE = 400


@pytest.fixture(scope="module")
def records() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(PEOPLE, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.sum(1) > 0).long()


def fit(records, **options):
    torch.manual_seed(0)
    budgets = pdpsgd.Budgets(np.resize([1.0, 4.0], PEOPLE), 1e-4)
    return pdpsgd.fit(nn.Linear(6, 2), records, budgets, progress=False, seed=1, **options)


def test_the_defaults_follow_from_the_plan_without_a_word(records, recwarn):
    result = fit(records, steps=60)
    assert result.settings["learning_rate"] == rate_for(result.plan, 14)
    assert result.plan.max_grad_norm > 1  # 400 people have much signal for 14 parameters
    assert 100 < result.plan.rounds[0].expected_batch_size < PEOPLE
    assert not recwarn.list
    by_hand = fit(records, steps=60, learning_rate=result.settings["learning_rate"])
    assert not recwarn.list
    assert torch.equal(by_hand.model.weight, result.model.weight)


def test_a_learning_rate_that_is_far_off_is_warned_of_with_the_one_to_take(records):
    rate = fit(records, steps=60).settings["learning_rate"]
    with pytest.warns(UserWarning, match=f"below what suits this plan.*About {rate:g} is usual"):
        fit(records, steps=60, learning_rate=rate / 20)
    with pytest.warns(UserWarning, match="Momentum 0.9 makes every step count 10 times"):
        fit(records, steps=60, learning_rate=rate, momentum=0.9)


def test_momentum_without_a_learning_rate_gets_a_smaller_one(records, recwarn):
    plain = fit(records, steps=60).settings["learning_rate"]
    assert fit(records, steps=60, momentum=0.9).settings["learning_rate"] == pytest.approx(
        plain / 10, rel=0.06
    )
    assert fit(records, steps=60, optimizer="adam").settings["learning_rate"] == 0.01
    assert not recwarn.list


def test_a_list_of_sixty_people_is_trained_on_with_the_defaults():
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    budgets = pdpsgd.Budgets(np.resize([0.5, 2.0, 8.0], 60), 1e-3)
    result = pdpsgd.fit(nn.Linear(3, 2), (inputs, (inputs[:, 0] > 0).long()), budgets, progress=False)
    assert result.plan.rounds[0].expected_batch_size < 60
    assert max(result.plan.rounds[0].sample_rates) > 0.9  # nearly everybody who allows most, at every step


def test_a_run_that_starts_from_an_earlier_model_takes_a_quarter_of_the_learning_rate(records, tmp_path):
    first = fit(records, steps=60, run_folder=tmp_path / "first")
    again = fit(records, steps=60, start=tmp_path / "first")
    assert again.settings["learning_rate"] == pytest.approx(first.settings["learning_rate"] / 4, rel=0.06)
