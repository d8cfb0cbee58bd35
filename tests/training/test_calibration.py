"""Probabilities: figures that say how far they can be relied on, and calibration by other people or by the plan."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.rounds import Round
from pdpsgd.training.predict import load_run
from pdpsgd.training.probability_figures import (
    probability_figures,
    probability_sentences,
    reliability,
    stated,
)
from pdpsgd.training.temperature import Calibration, fit_calibration
from pdpsgd.training.temperature_by_steps import CalibrationLayer, PrivateCalibration, calibrating_steps


def softmax(logits):
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def overconfident(people=4000, classes=3, temperature=2.5, seed=0):
    """Logits of a model that is too sure, and classes as they really are."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(people, classes)) * 1.5
    bias = np.linspace(-0.5, 0.5, classes)
    true = softmax(logits + bias)
    drawn = (random.random((people, 1)) > true.cumsum(1)).sum(1)
    return logits * temperature, drawn.clip(0, classes - 1), bias


def test_log_loss_is_that_of_scikit_learn():
    logits, classes, _ = overconfident()
    found = probability_figures(logits, classes)
    assert found.log_loss == pytest.approx(log_loss(classes, softmax(logits)), rel=1e-6)


def test_the_calibration_error_is_the_mean_difference_over_bins():
    logits, classes, _ = overconfident(classes=2)
    found = probability_figures(logits, classes)
    said, right = stated(softmax(logits), classes)
    order = np.argsort(said)
    parts = [(said[part].mean() - right[part].mean(), len(part)) for part in np.array_split(order, 10)]
    by_hand = sum(abs(gap) * size for gap, size in parts) / len(said)
    assert found.calibration_error == pytest.approx(by_hand, abs=0.003)  # bins differ by a record or two
    assert sum(each.records for each in found.bins) == len(classes)


def test_one_logit_says_the_same_as_two_columns():
    logits, classes, _ = overconfident(classes=2)
    single = probability_figures(logits[:, 1] - logits[:, 0], classes)
    both = probability_figures(logits, classes)
    assert single.log_loss == pytest.approx(both.log_loss)
    assert single.calibration_error == pytest.approx(both.calibration_error)


def test_probabilities_that_are_not_finite_have_no_figures():
    assert probability_figures(np.array([[np.nan, 0.0]]), np.array([0])) is None


def test_equal_probabilities_share_a_bin():
    (only,) = reliability(np.full(50, 0.3), np.arange(50) < 10)
    assert (only.said, only.found, only.records) == (pytest.approx(0.3), 0.2, 50)


def test_a_model_that_is_too_sure_is_told_so_and_a_good_one_is_not():
    logits, classes, _ = overconfident()
    as_data = {"probabilities": json.loads(json.dumps(_plain(probability_figures(logits, classes))))}
    said = " ".join(probability_sentences(as_data))
    assert "--calibrate" in said
    again = " ".join(probability_sentences(as_data, calibrated=True))
    assert "--calibrate" not in again  # it was done already
    assert "too sure" in said
    assert "--calibrate" in said
    fitted = fit_calibration(logits, classes, fitted_on="all")
    good = {"probabilities": _plain(probability_figures(fitted.apply(logits), classes))}
    assert len(probability_sentences(good)) == 1
    assert probability_sentences({"accuracy": 0.5}) == []


def test_few_test_people_are_not_told_shares_of_one_or_two():
    logits, classes, _ = overconfident(classes=2)
    few = {"probabilities": _plain(probability_figures(logits[:12], classes[:12]))}
    assert [each["records"] for each in few["probabilities"]["bins"]] == [12]
    (only,) = probability_sentences(few)
    assert "too few" in only
    some = probability_figures(logits[:70], classes[:70])
    assert all(each.records >= 20 for each in some.bins)
    assert len(some.bins) == 3
    assert len(probability_figures(logits[:2000], classes[:2000]).bins) == 10


def test_a_small_bin_is_never_the_example():
    bins = [
        {"said": 0.9, "found": 0.0, "records": 2},
        {"said": 0.6, "found": 0.5, "records": 60},
        {"said": 0.1, "found": 0.1, "records": 60},
    ]
    figures = {"probabilities": {"log_loss": 0.5, "calibration_error": 0.06, "bins": bins}}
    said = " ".join(probability_sentences(figures))
    assert "60.0% on average, it is so for 50.0% of 60 records" in said


def _plain(found):
    from dataclasses import asdict

    return asdict(found)


def test_calibration_finds_temperature_and_biases():
    logits, classes, bias = overconfident(people=20_000)
    fitted = fit_calibration(logits, classes, fitted_on="all")
    assert fitted.temperature == pytest.approx(2.5, rel=0.05)
    assert np.allclose(fitted.bias, bias, atol=0.08)
    before, after = (probability_figures(each, classes) for each in (logits, fitted.apply(logits)))
    assert after.log_loss < before.log_loss - 0.1
    assert after.calibration_error < 0.02


def test_two_classes_agree_with_logistic_regression():
    logits, classes, _ = overconfident(classes=2)
    margin = (logits[:, 1] - logits[:, 0])[:, None]
    other = LogisticRegression(C=1e6).fit(margin, classes)
    fitted = fit_calibration(logits, classes, fitted_on="all")
    assert 1 / fitted.temperature == pytest.approx(float(other.coef_[0, 0]), rel=0.01)
    assert fitted.bias[1] - fitted.bias[0] == pytest.approx(float(other.intercept_[0]), abs=0.01)
    single = fitted.apply(margin[:, 0])
    both = fitted.apply(logits)
    assert np.allclose(single, both[:, 1] - both[:, 0], atol=1e-5)


def test_classes_that_are_apart_leave_everything_finite():
    logits = np.array([[4.0, -4.0], [-4.0, 4.0]] * 20)
    fitted = fit_calibration(logits, np.array([0, 1] * 20), fitted_on="all")
    assert 0.01 < fitted.temperature < 1
    assert np.isfinite(fitted.apply(logits)).all()


def test_outputs_of_other_classes_are_refused():
    with pytest.raises(PdpsgdError, match="Expected outputs of 3 classes"):
        Calibration(1.0, (0.0, 0.0, 0.0), "all").apply(np.zeros((2, 4)))


# --- by other people -----------------------------------------------------------------------------------


def test_other_people_calibrate_a_run_and_predict_uses_it(problem, tmp_path):
    result = problem.fit(calibrate=problem.test, test_data=problem.test, run_folder=tmp_path / "run")
    plain = problem.fit(test_data=problem.test)
    assert torch.equal(
        torch.cat([p.reshape(-1) for p in result.model.parameters()]),
        torch.cat([p.reshape(-1) for p in plain.model.parameters()]),
    )  # training is the same
    assert result.calibration.fitted_on == "50 people outside the list"
    assert result.evaluation.probabilities.log_loss < plain.evaluation.probabilities.log_loss
    loaded = load_run(tmp_path / "run")
    assert loaded.description.calibration == result.calibration
    with torch.no_grad():
        outputs = result.model.eval()(problem.test_inputs)
    expected = torch.softmax(result.calibration.apply(outputs), 1)
    assert np.allclose(loaded.predict_proba(problem.test_inputs), expected.numpy(), atol=1e-6)
    written = json.loads((tmp_path / "run" / "public" / "result.json").read_text())
    assert written["calibration"]["temperature"] == result.calibration.temperature
    assert written["evaluation"]["probabilities"]["bins"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibrate": "people"}, "Expected calibrate to be 'steps'"),
        ({"calibrate": "steps", "loss": "squared-error"}, "Expected a loss whose outputs are logits"),
        ({"calibrate": "steps", "loss": "binary-cross-entropy"}, "one output per class"),
        ({"calibrate": (torch.zeros(0, 5), torch.zeros(0).long())}, "at least one person"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_anything_is_written(problem, tmp_path, options, message):
    with pytest.raises(PdpsgdError, match=message):
        problem.fit(**options, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- by the plan's last steps --------------------------------------------------------------------------


def test_the_last_tenth_calibrates_and_the_plan_stays_the_same(problem):
    plan = problem.plan(steps=(40,), noise=0.01)
    result = problem.fit(plan=plan, calibrate="steps", test_data=problem.test)
    assert result.plan is not None
    assert result.plan.digest == plan.digest
    assert "last 4 steps" in result.calibration.fitted_on
    assert result.calibration.temperature != 1.0
    assert set(result.model.state_dict()) == set(problem.model().state_dict())


def test_the_model_does_not_move_while_its_calibration_is_fitted(problem, monkeypatch):
    seen = []
    original = PrivateCalibration.update

    def spy(self, step, planned):
        seen.append(torch.cat([p.detach().clone().reshape(-1) for p in self.module.network.parameters()]))
        original(self, step, planned)

    monkeypatch.setattr(PrivateCalibration, "update", spy)
    problem.fit(plan=problem.plan(steps=(40,)), calibrate="steps", weight_decay=0.1)
    assert len(seen) == 4
    assert all(torch.equal(seen[0], each) for each in seen)


def test_gradients_stay_within_the_clipping_norm_for_logits_within_the_span():
    """Clipping would count confident mistakes for less, and so make the temperature too small."""
    random = torch.Generator().manual_seed(0)
    for norm in (0.1, 1.0, 3.0):
        layer = CalibrationLayer(4, norm)
        for _ in range(100):
            logits = torch.randn(1, 4, generator=random)
            logits = logits * (10 / logits.sub(logits.mean()).norm())
            layer.zero_grad()
            nn.functional.cross_entropy(layer(logits), torch.tensor([3])).backward()
            assert layer.free.grad.norm() <= norm


@pytest.mark.parametrize(("people", "noise", "share"), [(4000, 2.0, 0.7), (300, 20.0, None)])
def test_noised_gradients_find_what_exact_ones_find_or_stay_where_they_are(people, noise, share):
    """With enough people most of the gain in log loss is had; with few and much noise, little is lost."""
    logits, classes, _ = overconfident(people=people)
    exact = fit_calibration(logits, classes, fitted_on="all")
    inputs, targets = torch.tensor(logits, dtype=torch.float32), torch.tensor(classes)
    planned = Round(300, noise, people / 4, (1.0,), (0.25,), (1.0,))
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.rounds import Level

    plan = Plan("dp-sgd", (Level(1.0, 1e-5, people, proven_epsilon=1.0),), (planned,))
    fitted = PrivateCalibration(nn.Identity(), 3, plan)
    random = torch.Generator().manual_seed(1)
    for step in range(fitted.begin, plan.steps):
        drawn = torch.rand(people, generator=random) < 0.25
        fitted.layer.zero_grad()
        loss = nn.functional.cross_entropy(fitted.layer(inputs[drawn]), targets[drawn], reduction="sum")
        loss.backward()
        free = fitted.layer.free
        free.grad += torch.randn(free.shape, generator=random) * noise
        free.grad /= people / 4
        fitted.update(step, planned)
    losses = [
        probability_figures(each, classes).log_loss
        for each in (logits, fitted.result().apply(logits), exact.apply(logits))
    ]
    if share is None:
        assert losses[1] < losses[0] + 0.02
    else:
        assert losses[0] - losses[1] > share * (losses[0] - losses[2])


def test_a_run_that_was_stopped_while_calibrating_goes_on_to_the_same_numbers(problem, tmp_path, monkeypatch):
    plan = problem.plan(steps=(40,))
    whole = problem.fit(plan=plan, calibrate="steps")
    original = PrivateCalibration.update

    def stop(self, step, planned):
        original(self, step, planned)
        if step == 38:
            raise KeyboardInterrupt

    monkeypatch.setattr(PrivateCalibration, "update", stop)
    again = {"plan": plan, "calibrate": "steps", "run_folder": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        problem.fit(**again)
    monkeypatch.setattr(PrivateCalibration, "update", original)
    resumed = problem.fit(**again, resume=True)
    assert resumed.calibration == whole.calibration
    assert torch.equal(
        torch.cat([p.reshape(-1) for p in resumed.model.parameters()]),
        torch.cat([p.reshape(-1) for p in whole.model.parameters()]),
    )


def test_plans_of_several_models_or_few_steps_cannot_calibrate_by_steps(problem):
    with pytest.raises(PdpsgdError, match="trains one model"):
        calibrating_steps(problem.plan(steps=(20, 20), fresh=True))
    with pytest.raises(PdpsgdError, match="Expected 20 steps or more"):
        calibrating_steps(problem.plan(steps=(19,)))
    assert calibrating_steps(problem.plan(steps=(20, 20))) == 4


def test_the_temperature_is_the_minimum_of_the_log_loss():
    logits, classes, _ = overconfident(people=500)
    fitted = fit_calibration(logits, classes, fitted_on="all")

    def loss(log_temperature):
        moved = Calibration(math.exp(float(log_temperature[0])), fitted.bias, "")
        return probability_figures(moved.apply(logits), classes).log_loss

    best = minimize(loss, [0.0], method="Nelder-Mead").x[0]
    assert math.exp(best) == pytest.approx(fitted.temperature, rel=0.02)


# --- other people are others ---------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["calibrate", "test_data"])
@pytest.mark.parametrize("copied", [False, True])
def test_people_who_are_trained_on_are_neither_calibrated_nor_tested_on(problem, tmp_path, argument, copied):
    others = tuple(part.clone() for part in problem.data) if copied else problem.data
    with pytest.raises(
        PdpsgdError, match=r"Expected other people to (test|calibrate) on, who are not trained on"
    ):
        problem.fit(**{argument: others}, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    problem.fit(**{argument: problem.test}, run_folder=tmp_path / "run")


def test_test_people_with_ids_of_the_list_are_refused(problem):
    many = {"records_per_person": 1, "record_ids": [f"p{i}" for i in range(100)], "test_data": problem.test}
    with pytest.raises(PdpsgdError, match=r"test people who are not on the list\. Got 'p7'"):
        problem.fit(**many, test_ids=["q1", "p7"] * 25)
    problem.fit(**many, test_ids=["q1", "q2"] * 25)
