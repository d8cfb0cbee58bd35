"""Numbers that leave torch inside a model, and classes that only later batches have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd.errors import PdpsgdError

cross_entropy = functional.cross_entropy


class Takes(nn.Module):
    """Takes a value out of torch, one way or another."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.way = nn.Linear(5, 8), nn.Linear(8, 3), way
        self.register_buffer("temperature", torch.tensor(2.0))
        self.kept = 0.0

    def forward(self, inputs):
        return self.second(self.first(self.way(self, inputs)).tanh())


def by_rows(self, inputs):
    return torch.stack([row * 2 if float(row.sum()) > 0 else row for row in inputs])


def asserted(self, inputs):
    assert inputs.abs().max() < 1e6
    if not inputs.isfinite().all():
        raise ValueError("not finite")
    return inputs


def repaired(self, inputs):
    return inputs.nan_to_num() if inputs.isnan().any() else inputs


def kept(self, inputs):
    self.kept = inputs.mean().item()
    return inputs


def branch(self, inputs):
    return inputs / 255 if inputs.max() > 100 else inputs


MIXING = {
    "whole number of the maximum": lambda self, x: x / (1 + int(x.abs().max()) // 50),
    "a test on the batch": branch,
    "a threshold of the mean": lambda self, x: x if float(x.mean()) < 5 else -x,
    "NumPy": lambda self, x: x / (1 + np.floor(x.detach().numpy().max() / 50).item()),
    "a list": lambda self, x: x / (1 + max(map(max, x.tolist())) // 50),
    "equal": lambda self, x: x * (1 + torch.equal(x, x.clamp(max=100))),
}
ORDINARY = {
    "nothing": lambda self, x: x,
    "a number of its own": lambda self, x: x / self.temperature.item(),
    "a test on its own number": lambda self, x: x / 2 if self.temperature > 1 else x,
    "row by row": by_rows,
    "assertions": asserted,
    "repaired": repaired,
    "a metric": kept,
    "its length": lambda self, x: x.view(len(x), -1),
}


def train(run, loss=cross_entropy):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        loss(run.module(inputs), targets).backward()
        run.optimizer.step()


@pytest.mark.parametrize("criterion", [None, cross_entropy], ids=["watched", "criterion"])
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_depends_on_a_number_of_the_batch_is_refused_though_the_batch_does_not_show_it(
    private, name, criterion
):
    run = private(module=Takes(MIXING[name]), criterion=criterion)
    with pytest.raises(PdpsgdError, match=r"takes a number out of torch .*test_values\.py:\d+"):
        train(run)
    assert run.engine.steps_taken == 0
    run.engine.close()


@pytest.mark.parametrize("criterion", [None, cross_entropy], ids=["watched", "criterion"])
@pytest.mark.parametrize("name", ORDINARY)
def test_other_values_may_leave_torch_without_a_word(private, name, criterion):
    run = private(module=Takes(ORDINARY[name]), criterion=criterion)
    train(run)
    assert run.engine.steps_left == 0


class Sized(nn.Module):
    """Depends on the number of examples."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(5, 3), factor

    def forward(self, inputs):
        return self.linear(inputs) * self.factor(len(inputs))


@pytest.mark.parametrize("criterion", [None, cross_entropy], ids=["watched", "criterion"])
@pytest.mark.parametrize(
    "factor",
    [lambda n: n / 20, lambda n: 2 if n > 13 else 1, lambda n: n**-0.5],
    ids=["size", "large batches", "root"],
)
def test_a_model_that_depends_on_the_size_of_the_batch_is_refused(private, factor, criterion):
    run = private(module=Sized(factor), criterion=criterion)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        train(run)
    assert run.engine.steps_taken == 0
    run.engine.close()


class OwnLoss(nn.Module):
    """Computes its loss itself; with `logits`, they tell how many classes there are."""

    def __init__(self, weights, *, logits):
        super().__init__()
        self.linear, self.weights, self.logits = nn.Linear(5, 3), weights, logits

    def forward(self, inputs, labels):
        logits = self.linear(inputs)
        loss = cross_entropy(logits, labels, weight=self.weights)
        return {"loss": loss, "logits": logits} if self.logits else {"loss": loss}


def rare(people, row):
    """Everybody in class 0, but for one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(people, 5, generator=generator), (torch.arange(people) == row).long() * 2


@pytest.mark.parametrize("logits", [True, False], ids=["with logits", "loss alone"])
def test_a_heavy_class_in_a_models_own_loss_is_found_no_later_than_it_occurs(private, helpers, logits):
    run = private(
        plan=helpers.plan(people=40, steps=20),
        module=OwnLoss(torch.tensor([1.0, 1.0, 50.0]), logits=logits),
        data=rare(40, 17),
    )

    stepped = []

    def loop():
        for inputs, labels in run.loader:
            run.optimizer.zero_grad()
            run.module(inputs, labels)["loss"].backward()
            run.optimizer.step()
            stepped.append(bool((labels == 2).any()))

    with pytest.raises(PdpsgdError, match="Examples mix"):
        loop()
    assert not any(stepped)
    assert not (logits and stepped)  # logits show how many classes there are
    run.engine.close()


def test_a_new_class_is_looked_at_when_it_comes(private, helpers):
    run = private(plan=helpers.plan(people=40, steps=20), data=rare(40, 17))

    def by_hand(outputs, targets):
        losses = cross_entropy(outputs, targets, reduction="none") * (1.0 + 49 * (targets == 2))
        return losses.sum() / (1.0 + 49 * (targets == 2)).sum()

    with pytest.raises(PdpsgdError, match="Examples mix in the loss"):
        train(run, by_hand)
    assert run.engine.steps_taken == 0  # made-up targets show it at once
    run.engine.close()


def test_new_classes_cost_an_ordinary_loop_nothing(private, helpers):
    run = private(plan=helpers.plan(people=40, steps=20), data=rare(40, 17))
    train(run)
    assert run.engine.steps_left == 0


RARELY = {
    "a little of the mean": lambda self, x: x + 1e-5 * x.mean(0),
    "a little, while it trains": lambda self, x: x + 1e-5 * x.mean(0) if self.training else x,
    "nothing where somebody is large": lambda self, x: torch.where((x > 1e3).any(), 0 * x, x),
    "nothing where something is missing": lambda self, x: torch.where(x.isnan().any(), 0.0 * x, x),
    "by its size, while it trains": lambda self, x: x * len(x) / 20 if self.training else x,
}


@pytest.mark.parametrize("name", RARELY)
def test_a_model_that_mixes_weakly_or_for_values_that_nobody_has_is_refused(private, name):
    run = private(module=Takes(RARELY[name]))
    with pytest.raises(PdpsgdError, match="Examples mix"):
        train(run)
    assert run.engine.steps_taken == 0
    run.engine.close()


ROBUST = {
    "clipped": lambda self, x: x.clamp(-3, 3),
    "missing filled": lambda self, x: x.nan_to_num(0.0),
    "normalized by row": lambda self, x: functional.layer_norm(x, (5,)),
    "dropout": lambda self, x: functional.dropout(x, 0.2, self.training),
    "noise": lambda self, x: x + torch.randn_like(x) if self.training else x,
}


@pytest.mark.parametrize("name", ROBUST)
def test_models_that_take_extremes_row_by_row_train_without_a_word(private, name):
    run = private(module=Takes(ROBUST[name]))
    train(run)
    assert run.engine.steps_left == 0
