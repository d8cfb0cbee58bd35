"""Personal least squares: the solution of noised statistics, by the engine, against numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import pdpsgd
from pdpsgd.data.benchmarks import load
from pdpsgd.engine.noising import Recording, WithoutNoise, released_by
from pdpsgd.ledger import Ledger
from pdpsgd.models.networks import linear_model
from pdpsgd.training.least_squares import RIDGE

PEOPLE, FEATURES, CLASSES = 60, 6, 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = 3 * torch.randn(PEOPLE, FEATURES, generator=generator)
    return inputs, (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def make_budgets() -> pdpsgd.Budgets:
    return pdpsgd.Budgets([1.0] * 20 + [2.0] * 40)


def expected_sums(
    plan: pdpsgd.Plan, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted sums of x x' and y x', from their definition."""
    x, y = (part.numpy().astype(float) for part in data)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    centered = np.eye(CLASSES)[y.astype(int)] - 1 / CLASSES
    weights = np.repeat(plan.rounds[0].clip_scales, [20, 40])
    return (x * weights[:, None]).T @ x, (centered * weights[:, None]).T @ x


def test_the_model_is_the_ridge_solution_of_the_weighted_sums() -> None:
    data = make_data()
    with released_by(WithoutNoise()):
        result = pdpsgd.fit(
            linear_model(FEATURES, CLASSES), data, make_budgets(), mechanism="least-squares", progress=False
        )
    moments, products = expected_sums(result.plan, data)
    noise = result.plan.rounds[0].noise_multiplier / np.sqrt(0.5)
    solved = products @ np.linalg.inv(moments + RIDGE * np.sqrt(2 * FEATURES) * noise * np.eye(FEATURES))
    head = result.model[-1]
    assert head.weight.detach().numpy() == pytest.approx(solved, rel=5e-3, abs=5e-3)
    assert not head.bias.any()


def test_one_release_in_which_nobody_moves_more_than_their_weight_and_noise_is_the_plans() -> None:
    data, recording = make_data(), Recording()
    with released_by(recording):
        result = pdpsgd.fit(
            linear_model(FEATURES, CLASSES),
            data,
            make_budgets(),
            mechanism="least-squares",
            seed=1,
            progress=False,
        )
    assert sorted(recording.totals) == [0]
    (total,) = recording.totals[0]
    moments, products = expected_sums(result.plan, data)
    share = np.sqrt(0.5 / (1 - 1 / CLASSES))
    wanted = -np.concatenate(((np.sqrt(0.5) * moments).ravel(), (share * products).ravel()))
    assert total.numpy() == pytest.approx(wanted, rel=3e-3, abs=0.06)  # clipped a little below, for rounding
    plan = result.plan
    plan.verify()
    mu = [level.epsilon for level in plan.levels]
    assert [level.proven_epsilon for level in plan.levels] == pytest.approx(mu, rel=1e-3)
    assert plan.steps == 1
    for person, weight in ((0, plan.rounds[0].clip_scales[0]), (59, 1.0)):
        others = np.arange(PEOPLE) != person
        again = Recording()
        with released_by(again):
            pdpsgd.fit(
                linear_model(FEATURES, CLASSES),
                tuple(part[others] for part in data),
                make_budgets(),
                record_ids=np.arange(PEOPLE)[others],
                mechanism="least-squares",
                seed=1,
                progress=False,
            )
        moved = float((again.totals[0][0] - total).norm())
        assert 0.98 * weight < moved <= weight


def test_digits_are_learned_without_tuning_and_the_run_folder_is_that_of_any_run(tmp_path) -> None:
    digits = load("digits")
    ids = [f"p{i}" for i in range(len(digits.train_inputs))]
    budgets = pdpsgd.Budgets([2.0] * 700 + [4.0] * (len(ids) - 700), ids=ids)
    ledger = Ledger.create(tmp_path / "people.ledger")
    result = pdpsgd.fit(
        linear_model(64, 10),
        (digits.train_inputs, digits.train_targets),
        budgets,
        record_ids=ids,
        mechanism="least-squares",
        test_data=(digits.test_inputs, digits.test_targets),
        ledger=ledger,
        spend="all",
        run_folder=tmp_path / "run",
        progress=False,
    )
    assert result.accuracy > 0.6  # not seeded: 0.78 and more were seen, and guessing has 0.1
    assert result.verdict.note is None
    again = pdpsgd.load_run(tmp_path / "run").predict(digits.test_inputs.numpy())
    truth = digits.test_targets.numpy()
    assert np.mean(np.asarray(again).astype(int) == truth) == pytest.approx(result.accuracy)
    assert json.loads((tmp_path / "run/public/result.json").read_text())["steps"] == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), {}, "Expected a linear model"),
        (linear_model(6, 3), {"learning_rate": 0.5}, "Expected no learning_rate with least-squares"),
        (linear_model(6, 3), {"steps": 10}, "Expected no steps with least-squares"),
        (linear_model(6, 3), {"loss": "squared-error"}, "Expected classes to tell apart"),
        (linear_model(9000, 3), {}, "at most 8,192 features"),
    ],
)
def test_what_is_refused(model, options, message) -> None:
    with pytest.raises(pdpsgd.PdpsgdError, match=message):
        pdpsgd.fit(model, make_data(), make_budgets(), mechanism="least-squares", progress=False, **options)
