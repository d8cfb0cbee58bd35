"""Class counts cost what their plan says, together with training too, and adjust logits by closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pdpsgd import Budgets, PdpsgdError, PromiseBroken, plan
from pdpsgd.accounting.gaussian import gaussian_epsilon, gaussian_mu
from pdpsgd.engine.distributed import Ranks
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training.class_counts import adjust_logits, logit_adjustment, plan_counts, release_counts

PEOPLE = 900
LABELS = np.arange(PEOPLE) % 3
BUDGETS = Budgets(np.where(LABELS == 2, 1.0, 3.0), 1e-5)


def released(labels: np.ndarray[Any, Any] = LABELS, seed: int = 0, budgets: Budgets = BUDGETS) -> Any:
    return release_counts(
        plan_counts(budgets), budgets, labels, classes=3, source=RandomSource.from_seed(seed)
    )


@pytest.mark.parametrize("share", [0.01, 0.25])
def test_counts_cost_a_tenth_of_mu_or_what_share_says(share: float) -> None:
    made = plan_counts(BUDGETS, share=share)
    made.verify()
    for level in made.levels:
        mu = float(gaussian_mu(level.epsilon, level.delta))
        exact = float(gaussian_epsilon(math.sqrt(share) * mu, level.delta))
        assert level.proven_epsilon is not None
        assert exact * (1 - 1e-3) <= level.proven_epsilon <= exact * 1.01


def test_training_and_counts_together_keep_everybodys_promise() -> None:
    counted = plan_counts(BUDGETS)
    alone = plan(BUDGETS, steps=20, batch_size=100)
    both = plan(BUDGETS, steps=20, batch_size=100, history=[counted], history_fixed=True)
    both.verify()
    assert all(level.history for level in both.levels)
    assert alone.rounds[0].noise_multiplier < both.rounds[0].noise_multiplier
    assert both.rounds[0].noise_multiplier < 1.02 * alone.rounds[0].noise_multiplier


def test_one_person_is_one_count_of_their_own_level_and_moves_it_by_its_clipping_scale() -> None:
    """Exactly, on the grid of the noise: nothing is lost in sums before it."""
    other = LABELS.copy()
    other[0] = 1
    moved = released(other).counts - released().counts
    level = int(plan_counts(BUDGETS).level_of_person(BUDGETS)[0])
    wanted = np.zeros_like(moved)
    wanted[level, 0], wanted[level, 1] = -1, 1
    step = released().noise.max() * 2.0**-9  # the released sums are on a grid of the noise
    np.testing.assert_allclose(moved, wanted, atol=step)


def test_noise_on_counts_is_ten_over_mu() -> None:
    """Mean and spread of 60 x 6 released counts; at 5 standard errors, a false alarm in less than one of 100,000."""
    found = [released(seed=seed) for seed in range(60)]
    level = plan_counts(BUDGETS).level_of_person(BUDGETS)
    truth = np.zeros((2, 3))
    np.add.at(truth, (level, LABELS), 1)
    standard = np.array([(each.counts - truth) / each.noise[:, None] for each in found])
    assert abs(standard.mean()) < 5 / math.sqrt(standard.size)
    assert abs((standard**2).mean() - 1) < 5 * math.sqrt(2 / standard.size)
    mu = [float(gaussian_mu(x.epsilon, x.delta)) for x in plan_counts(BUDGETS).levels]
    np.testing.assert_allclose(found[0].noise, [10 / m for m in mu], rtol=1e-4)
    assert found[0].not_for_release
    assert release_counts(plan_counts(BUDGETS), BUDGETS, LABELS, classes=3).not_for_release is None


def test_people_who_allow_nothing_are_not_counted() -> None:
    budgets = Budgets(np.where(LABELS == 2, 0.0, 3.0), 1e-5)
    found = released(budgets=budgets)
    assert found.counts[0].tolist() == [0, 0, 0]
    assert np.isinf(found.noise[0])


def test_the_adjustment_is_the_ratio_of_shares() -> None:
    made = plan(BUDGETS, steps=20, batch_size=100)
    rates = np.array(made.rounds[0].sample_rates)  # one round, no clipping scales: influence is the rate
    counts = np.array([[0.0, 0.0, 300.0], [300.0, 300.0, 0.0]])
    seen = rates @ counts
    np.testing.assert_allclose(
        logit_adjustment(made, counts), np.log(np.full(3, 1 / 3)) - np.log(seen / seen.sum())
    )
    uniform = plan(BUDGETS, "dp-sgd", steps=20, batch_size=100)
    np.testing.assert_allclose(logit_adjustment(uniform, counts), 0, atol=1e-12)


def test_logits_move_by_the_adjustment_and_the_given_model_stays() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    before = model(inputs)
    moved = adjust_logits(model, [0.5, 0.0, -1.0])(inputs) - before
    torch.testing.assert_close(moved, torch.tensor([[0.5, 0.0, -1.0]]).expand(5, 3))
    torch.testing.assert_close(model(inputs), before)


@pytest.mark.parametrize(
    ("labels", "said"),
    [(LABELS[:-1], "each of the 900 people"), (LABELS + 1, "from 0 to 2"), (LABELS + 0.5, "whole-number")],
)
def test_labels_that_do_not_fit_are_refused(labels: np.ndarray[Any, Any], said: str) -> None:
    with pytest.raises(PdpsgdError, match=said):
        released(labels)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(PdpsgdError, match="share"):
        plan_counts(BUDGETS, share=1.0)
    with pytest.raises(PdpsgdError, match="no protection"):
        plan_counts(Budgets([math.inf, 1.0], 1e-5))
    with pytest.raises(PdpsgdError, match="nobody"):
        plan_counts(Budgets([0.0], 1e-5))
    trained = plan(BUDGETS, steps=20, batch_size=100)
    with pytest.raises(PdpsgdError, match="plan_counts"):
        release_counts(trained, BUDGETS, LABELS, classes=3)
    with pytest.raises(PdpsgdError, match="2 levels"):
        logit_adjustment(trained, [[1.0, 2.0]])
    excluded = plan(BUDGETS, "dp-sgd-exclude", steps=20, batch_size=100, exclude_below=2.0)
    with pytest.raises(PdpsgdError, match="class 2"):
        logit_adjustment(excluded, [[0.0, 0.0, 300.0], [300.0, 300.0, 0.0]])
    with pytest.raises(PdpsgdError, match="linear layer"):
        adjust_logits(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), [0.0, 0.0, 0.0])


def test_a_plan_with_less_noise_than_it_states_is_no_plan_of_counts() -> None:
    made = plan_counts(BUDGETS)
    (step,) = made.rounds
    quiet = replace(made, rounds=(replace(step, noise_multiplier=step.noise_multiplier / 20),))
    with pytest.raises(PromiseBroken):
        release_counts(quiet, BUDGETS, LABELS, classes=3)


@pytest.mark.parametrize("named", [True, False])
def test_counts_are_released_once_for_each_plan_and_people(named: bool) -> None:
    ids = [f"once{named}{i}" for i in range(90)]
    budgets = Budgets([1.0] * 40 + [3.0] * 50, 1e-5, ids=ids if named else None)
    labels = np.arange(90) % 3
    release_counts(plan_counts(budgets, share=0.02), budgets, labels, classes=3)
    with pytest.raises(PdpsgdError, match="Expected one release of class counts for each plan"):
        release_counts(plan_counts(budgets, share=0.02), budgets, labels, classes=3)
    release_counts(plan_counts(budgets, share=0.03), budgets, labels, classes=3)
    others = Budgets([1.0] * 40 + [3.0] * 50, 1e-5, ids=[f"{name}b" for name in ids] if named else None)
    release_counts(
        plan_counts(others, share=0.02), others, labels if named else labels[::-1].copy(), classes=3
    )


def test_several_processes_release_no_counts_each_with_noise_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdpsgd.training.class_counts.Ranks.join", lambda: Ranks(1, 2))
    with pytest.raises(PdpsgdError, match="run without torchrun"):
        released()
