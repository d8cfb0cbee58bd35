"""`fit` tries losses on every class, whatever the first batch has, and models by each output."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

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
