"""Figures for classes of unequal size agree with scikit-learn, and a model that learned nothing is called that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pdpsgd
from pdpsgd.training.class_figures import (
    area_under_curve,
    balanced_accuracy,
    class_sentences,
    majority_share,
)


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_figures_agree_with_scikit_learn(seed, number):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(seed)
    classes = np.concatenate([np.arange(number), rng.integers(0, number, 20)])
    scores = rng.integers(0, 5, (len(classes), number)).astype(np.float64)  # with ties
    chosen = scores.argmax(1)
    own = balanced_accuracy(chosen == classes, classes)
    assert own == pytest.approx(metrics.balanced_accuracy_score(classes, chosen))
    one_against_rest = [
        metrics.roc_auc_score(
            classes == each, scores[:, 1] - scores[:, 0] if number == 2 else scores[:, each]
        )
        for each in ([1] if number == 2 else range(number))
    ]
    assert area_under_curve(scores, classes) == pytest.approx(np.mean(one_against_rest))
    assert majority_share(classes) == pytest.approx(np.bincount(classes).max() / len(classes))


def test_a_single_class_and_scores_that_are_no_numbers_have_no_curve():
    assert area_under_curve(np.zeros((3, 2)), np.zeros(3, dtype=np.int64)) is None
    assert area_under_curve(np.full((2, 2), np.nan), np.arange(2)) is None


def test_a_model_that_always_answers_the_largest_class_is_called_that():
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([1.0, 0.0]))
    targets = torch.tensor([0] * 94 + [1] * 6)
    found = pdpsgd.evaluate(network, (torch.zeros(100, 1), targets))
    assert (found.accuracy, found.majority, found.balanced_accuracy, found.auc) == (0.94, 0.94, 0.5, 0.5)
    said = " ".join(class_sentences(found.to_dict(), ("well", "ill")))
    assert "no better than always answering the largest class, which is right for 94.0%" in said
    assert "Recall by class: well 100.0%, ill 0.0%" in said


def test_a_model_that_learned_something_is_not_scolded():
    targets = torch.tensor([0, 0, 0, 1])
    inputs = torch.nn.functional.one_hot(targets, 2).float()
    said = " ".join(class_sentences(pdpsgd.evaluate(nn.Identity(), (inputs, targets)).to_dict()))
    assert "no better" not in said
    assert "AUC 1.000" in said
