"""`fit` tries losses on every class, whatever the first batch has, and models by each output."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.errors import PdpsgdError

WEIGHTS = torch.tensor([1.0, 1.0, 20.0])


def imbalanced(problem):
    """One person in twenty in the heavy class, as the first four rows of a batch rarely show."""
    return problem.inputs, torch.where(torch.arange(100) % 20 == 19, 2, 0)


MIXING = {
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "an ignored class": nn.CrossEntropyLoss(ignore_index=2),
    "times its size": lambda outputs, targets: functional.cross_entropy(outputs, targets) * len(targets) / 28,
    "twice in large batches": lambda outputs, targets: (
        functional.cross_entropy(outputs, targets) * (1 + (len(targets) > 25))
    ),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_mixes_only_for_rare_classes_or_sizes_is_refused(problem, name, seed):
    with pytest.raises(PdpsgdError, match=r"Examples mix in this loss|is a sum"):
        problem.fit(data=imbalanced(problem), loss=MIXING[name], seed=seed)


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda outputs, targets: functional.cross_entropy(
            outputs, targets, weight=WEIGHTS, reduction="none"
        ).mean(),
    ],
    ids=["mean", "label smoothing", "weights in a plain mean"],
)
def test_an_ordinary_loss_trains_without_a_word_on_the_same_data(problem, loss):
    problem.fit(data=imbalanced(problem), loss=loss)


def share_of_a_mean(outputs, targets):
    return functional.cross_entropy(outputs, targets) * 0.9


def of_squares(outputs, targets):
    return functional.mse_loss(outputs.softmax(1)[:, 0], (targets == 0).float())


def unknown_to_made_up_rows(outputs, targets):
    assert len(outputs) < 4 or not torch.allclose(outputs, outputs[:1].expand_as(outputs))
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "powers"),
    [
        (functional.cross_entropy, False),
        ("cross-entropy", False),
        (share_of_a_mean, True),
        (of_squares, True),
    ],
)
@pytest.mark.parametrize("limit", [None, 16])
def test_a_mean_does_not_round_somebody_s_gradient_by_the_number_of_rows(
    problem, monkeypatch, loss, powers, limit
):
    """The gradient of a person has the same bits in batches of any size that the run has; weights stay the same."""
    bits, sizes = {}, set()
    whole = PrivateOptimizer._add

    def noting(self, batch):
        if batch.size:
            found = self._gradients.per_example_gradients(loss_reduction=self._loss_reduction)
            rows = torch.cat([part.flatten(1) for part in found.values()], 1)
            sizes.add(batch.size)
            for place, person in enumerate(batch.records.tolist()):
                if person >= 0:
                    bits.setdefault(person, set()).add(rows[place].numpy().tobytes())
        whole(self, batch)

    monkeypatch.setattr(PrivateOptimizer, "_add", noting)
    result = problem.fit(
        loss=loss, learning_rate=1e-30, max_physical_batch_size=limit, model=nn.Linear(5, 3), momentum=0.0
    )
    assert limit is not None or len(sizes) > 1
    assert all(size & (size - 1) == 0 for size in sizes) or not powers
    assert len(bits) > 50
    assert all(len(each) == 1 for each in bits.values())
    assert result.verdict.assumed == ()


def test_a_mean_that_cannot_be_tried_is_assumed_to_round_alike(problem):
    (assumed,) = problem.fit(loss=unknown_to_made_up_rows).verdict.assumed
    assert assumed.startswith("It is assumed that the loss rounds a row of its mean alike")


class OwnLoss(nn.Module):
    """Computes its loss itself, beside logits that swamp it."""

    def __init__(self, weight):
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.weight = nn.Linear(5, 3), weight

    def forward(self, inputs, labels):
        logits = self.linear(inputs)
        return {"loss": functional.cross_entropy(logits, labels, weight=self.weight), "logits": 1000 * logits}


@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weighted"])
def test_a_models_own_loss_is_looked_at_by_itself(problem, weight):
    inputs, targets = imbalanced(problem)
    data = torch.utils.data.StackDataset(
        torch.utils.data.StackDataset(inputs=inputs, labels=targets), targets
    )
    options = {"model": OwnLoss(weight), "data": data, "test_data": None, "test_tiers": None}

    def loss(outputs, targets):
        return outputs["loss"]

    if weight is None:
        problem.fit(loss=loss, **options)
        return
    with pytest.raises(PdpsgdError, match="Examples mix in this model or loss"):
        problem.fit(loss=loss, **options)
