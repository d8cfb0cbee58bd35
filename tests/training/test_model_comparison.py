"""Two models on the same test people: figures agree with scikit-learn, intervals with theory and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

from pdpsgd.errors import PdpsgdError
from pdpsgd.training.model_comparison import Figure, compare_models


def softmax(logits):
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def made_up(people=400, classes=2, seed=0, help=1.0):
    random = np.random.default_rng(seed)
    truth = random.integers(0, classes, people)
    signal = np.eye(classes)[truth]
    return signal + random.normal(size=signal.shape), help * signal + random.normal(size=signal.shape), truth


@pytest.mark.parametrize("classes", [2, 3])
def test_figures_are_those_of_scikit_learn(classes):
    first, second, truth = made_up(classes=classes)
    made = compare_models(("a", "b"), (first, second), truth)
    found = {figure.name: figure for figure in made.groups[0].figures}
    for logits, at in ((first, "first"), (second, "second")):
        odds = softmax(logits)
        expected = {
            "accuracy": (logits.argmax(1) == truth).mean(),
            "balanced accuracy": balanced_accuracy_score(truth, logits.argmax(1)),
            "log loss": log_loss(truth, odds),
        }
        if classes == 2:
            expected["AUC"] = roc_auc_score(truth, odds[:, 1])
        else:
            each = [roc_auc_score(truth == c, logits[:, c]) for c in range(classes)]
            expected["AUC"] = float(np.mean(each))
        for name, value in expected.items():
            assert getattr(found[name], at) == pytest.approx(value, rel=1e-9), name


def test_intervals_of_the_accuracy_are_those_of_the_normal_approximation():
    """The paired difference has variance var(right_b - right_a) / n; a bootstrap of 2,000 is within some percent."""
    first, second, truth = made_up(people=2000, help=1.2)
    (figure,) = [
        f
        for f in compare_models(("a", "b"), (first, second), truth).groups[0].figures
        if f.name == "accuracy"
    ]
    gap = (second.argmax(1) == truth).astype(float) - (first.argmax(1) == truth)
    error = gap.std() / np.sqrt(len(gap))
    assert figure.difference == pytest.approx(gap.mean())
    assert figure.high - figure.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_a_better_model_is_called_better_and_equal_ones_are_not():
    first, second, truth = made_up(people=2000, help=3.0)
    assert (
        "By accuracy runs/feb is better"
        in compare_models(("runs/jan", "runs/feb"), (first, second), truth).answer()
    )
    same = compare_models(("runs/jan", "runs/feb"), (first, first), truth)
    assert same.answer().count("no difference is shown") == 2


def test_people_with_many_records_are_drawn_whole():
    """Each person's records twice over say no more than once: the interval stays as wide."""
    first, second, truth = made_up(people=500)
    alone = compare_models(("a", "b"), (first, second), truth)
    twice = compare_models(
        ("a", "b"),
        (np.repeat(first, 2, 0), np.repeat(second, 2, 0)),
        np.repeat(truth, 2),
        people=np.repeat(np.arange(500), 2),
    )
    assert twice.groups[0].people == 500
    for one, other in zip(alone.groups[0].figures, twice.groups[0].figures, strict=True):
        assert other.high - other.low == pytest.approx(one.high - one.low, rel=1e-6)


def test_groups_are_classes_tiers_and_subgroups_of_ten_or_more():
    first, second, truth = made_up(people=100)
    made = compare_models(
        ("a", "b"),
        (first, second),
        truth,
        groups={"tier": ["1"] * 60 + ["2"] * 40, "sex": ["f"] * 95 + ["m"] * 5},
        class_names=("no", "yes"),
    )
    assert [(g.kind, g.name) for g in made.groups] == [
        ("all", "all"),
        ("class", "no"),
        ("class", "yes"),
        ("tier", "1"),
        ("tier", "2"),
        ("sex", "f"),
    ]
    recall = made.groups[1].figures[0]
    assert recall.first == pytest.approx((first.argmax(1) == 0)[truth == 0].mean())
    assert made.to_dict()["groups"][0]["figures"][0]["name"] == "accuracy"


def test_other_numbers_of_records_are_refused():
    first, second, truth = made_up(people=20)
    with pytest.raises(PdpsgdError, match="Expected finite outputs for all 20"):
        compare_models(("a", "b"), (first, second[:-1]), truth)


def test_errors_of_numbers_are_those_of_scikit_learn_and_their_intervals_those_of_theory():
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    from pdpsgd.training.model_comparison import compare_numbers

    random = np.random.default_rng(0)
    truth = random.normal(50, 10, 3000)
    first, second = (truth + random.normal(0, spread, 3000) for spread in (5.0, 4.0))
    made = compare_numbers(("a", "b"), (first, second), truth, groups={"half": ["x", "y"] * 1500})
    found = {figure.name: figure for figure in made.groups[0].figures}
    for answers, at in ((first, "first"), (second, "second")):
        expected = {
            "RMSE": mean_squared_error(truth, answers) ** 0.5,
            "MAE": mean_absolute_error(truth, answers),
            "R^2": r2_score(truth, answers),
        }
        for name, value in expected.items():
            assert getattr(found[name], at) == pytest.approx(value, rel=1e-9), name
    gap = np.abs(second - truth) - np.abs(first - truth)
    width = found["MAE"].high - found["MAE"].low
    assert width == pytest.approx(2 * 1.96 * gap.std() / np.sqrt(3000), rel=0.1)
    assert all(figure.verdict == "second is better" for figure in found.values())
    assert "b is better" in made.answer()
    assert [group.name for group in made.groups] == ["all", "x", "y"]
    same = compare_numbers(("a", "b"), (first, first), truth)
    assert "no difference is shown" in same.answer()


def test_numbers_without_spread_have_no_r_squared_and_others_are_refused():
    from pdpsgd.training.model_comparison import compare_numbers

    flat = np.full(20, 3.0)
    made = compare_numbers(("a", "b"), (flat + 1, flat + 2), flat)
    assert [figure.name for figure in made.groups[0].figures] == ["RMSE", "MAE"]
    with pytest.raises(PdpsgdError, match="finite predictions"):
        compare_numbers(("a", "b"), (flat, flat * np.nan), flat)


@pytest.mark.parametrize(
    ("figures", "written"),
    [
        ((55.31, 57.36, 0.2486, 2.05), "+2.05 (+0.25 to +2.05)"),
        ((41234.0, 40900.0, -1200.4, 531.2), "-334 (-1,200 to +531)"),
        ((0.0212, 0.0213, -0.0001, 0.0003), "+0.00010 (-0.00010 to +0.00030)"),
        ((0.0, 0.0, 0.0, 0.0), "+0.000 (+0.000 to +0.000)"),
    ],
)
def test_an_error_its_difference_and_its_interval_have_the_same_decimals(figures, written):
    figure = Figure("RMSE", *figures)
    assert f"{figure.change(figure.difference)} ({figure.interval})" == written
