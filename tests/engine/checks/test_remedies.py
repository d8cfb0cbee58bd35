"""Refusals name the line to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import pdpsgd


def private(network: nn.Module, **more):
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    engine = pdpsgd.PrivacyEngine()
    plan = pdpsgd.plan(pdpsgd.Budgets([2.0] * 40), steps=6, batch_size=20)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return engine.make_private(
        module=network,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data),
        plan=plan,
        budgets=pdpsgd.Budgets([2.0] * 40),
        **more,
    )


def train(module, optimizer, loader, loss) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()


def test_weights_of_classes():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    with pytest.raises(pdpsgd.PdpsgdError, match=r"\(loss_none \* w\[y\]\)\.mean\(\)"):
        train(*private(nn.Linear(3, 2), criterion=weighted), weighted)
    w = torch.tensor([1.0, 5.0])

    def instead(outputs, y):
        return (functional.cross_entropy(outputs, y, reduction="none") * w[y]).mean()

    train(*private(nn.Linear(3, 2), criterion=instead), instead)


def test_accumulation_by_hand():
    module, _, loader = private(nn.Linear(3, 2))

    def accumulate() -> None:
        for x, y in loader:
            functional.cross_entropy(module(x), y).backward()

    with pytest.raises(pdpsgd.PdpsgdError, match=r"make_private\(\.\.\., max_physical_batch_size=64\)"):
        accumulate()


def test_a_penalty_in_the_loss():
    network = nn.Linear(3, 2)
    module, optimizer, loader = private(network)

    def penalized(outputs, y):
        return functional.cross_entropy(outputs, y) + 0.01 * network.weight.square().sum()

    with pytest.raises(pdpsgd.PdpsgdError, match=r"weight_decay=0\.01"):
        train(module, optimizer, loader, penalized)


def test_a_compiled_module():
    with pytest.raises(pdpsgd.PdpsgdError, match="compile what make_private gives back"):
        private(torch.compile(nn.Linear(3, 2), backend="eager"))


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
def test_epochs_without_steps_are_said_once_and_epochs_that_add_up_are_not(steps_per_epoch):
    module, optimizer, loader = private(nn.Linear(3, 2), steps_per_epoch=steps_per_epoch)

    def epoch() -> int:
        steps = 0
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            steps += 1
        return steps

    passes = [6] if steps_per_epoch is None else [3, 3]
    assert [epoch() for _ in passes] == passes
    with pytest.warns(
        UserWarning, match="All 6 steps of the plan are taken, so this pass over the loader is empty"
    ):
        assert epoch() == 0
    assert epoch() == 0  # not a word more
