"""A loop whose loss or model mixes examples is refused at its first batch, though nobody names the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode

from pdpsgd.engine.checks.watch import LossWatch
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError

WEIGHTS = torch.tensor([1.0, 5.0, 9.0])

MIXING = {
    "class weights": lambda outputs, targets: functional.cross_entropy(outputs, targets, weight=WEIGHTS),
    "ignored targets": lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=0),
    "batch penalty": lambda outputs, targets: functional.cross_entropy(outputs, targets) + outputs.std(),
    "centred": lambda outputs, targets: functional.cross_entropy(outputs - outputs.mean(0), targets),
    "contrastive": lambda outputs, targets: (outputs @ outputs.T).logsumexp(1).mean(),
    "hardest": lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none").max(),
    "own class shares": lambda outputs, targets: (
        functional.cross_entropy(outputs, targets, reduction="none") / torch.bincount(targets)[targets]
    ).mean(),
}

HONEST = {
    "module": lambda outputs, targets: nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, targets),
    "gathered": lambda outputs, targets: -outputs.log_softmax(1).gather(1, targets[:, None]).mean(),
    "one-hot": lambda outputs, targets: (outputs - functional.one_hot(targets, 3).float()).square().mean(),
    "divided by its size": lambda outputs, targets: (
        functional.cross_entropy(outputs, targets, reduction="sum") / len(targets)
    ),
    "weighted, not normalised": lambda outputs, targets: functional.cross_entropy(
        outputs, targets, weight=WEIGHTS, reduction="none"
    ).mean(),
    "several terms": lambda outputs, targets: (
        functional.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean() + 1.0
    ),
}


def watched_by(run):
    """Whether torch's functions still go by a watch of this run."""
    mode = _get_current_function_mode()
    return isinstance(mode, LossWatch) and mode.owner() is run.engine


def loop(run, loss):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        loss(run.module(inputs), targets).backward()
        run.optimizer.step()


@pytest.mark.parametrize("name", MIXING)
def test_a_loop_whose_loss_mixes_examples_is_refused(private, flat, name):
    run = private()
    before = flat(run.module).clone()
    with pytest.raises(PdpsgdError, match="Examples mix in the loss of this loop"):
        loop(run, MIXING[name])
    assert run.engine.steps_taken == 0
    assert torch.equal(flat(run.module), before)
    run.engine.close()


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loss_passes_without_a_word_and_unchanged(private, flat, name):
    watched, unwatched = private(), private(engine=PrivacyEngine(watch_loop=False))
    loop(watched, HONEST[name])
    loop(unwatched, HONEST[name])
    assert torch.equal(flat(watched.module), flat(unwatched.module))
    assert not watched_by(watched)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: functional.cross_entropy(functional.dropout(outputs), targets),
        lambda outputs, targets: -outputs.log_softmax(1)[torch.arange(len(targets)), targets].mean(),
    ],
    ids=["random numbers", "a tensor of the batch's size from elsewhere"],
)
def test_where_nothing_can_be_told_a_warning_says_so(private, loss):
    run = private()
    with pytest.warns(UserWarning, match="could not be checked"):
        loop(run, loss)
    assert run.engine.steps_left == 0


class Centred(nn.Module):
    """A model of one's own that subtracts the batch's mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.linear(inputs - inputs.mean(0))


def test_a_model_that_mixes_examples_is_refused_when_it_is_first_called(private):
    run = private(module=Centred())
    with pytest.raises(PdpsgdError, match="Examples mix in this model or loss"):
        run.train()
    run.engine.close()


def test_an_abandoned_first_batch_is_watched_again(private):
    run = private()
    next(iter(run.loader))
    with pytest.raises(PdpsgdError, match="Examples mix"):
        loop(run, MIXING["centred"])
    run.engine.close()
    assert not watched_by(run)


def summed(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum")


MEANS = {
    "mean": functional.cross_entropy,
    "sum divided by its size": lambda outputs, targets: summed(outputs, targets) / len(targets),
    "sum times its size's inverse": lambda outputs, targets: (1 / len(targets)) * summed(outputs, targets),
}
SUMS = {
    "sum": summed,
    "sum divided by a constant": lambda outputs, targets: summed(outputs, targets) / 1000,
}


@pytest.mark.parametrize("said", ["mean", "sum"])
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_a_loss_reduced_otherwise_than_was_said_is_refused(private, said, name):
    run = private(loss_reduction=said)
    truly, loss = ("mean", MEANS[name]) if name in MEANS else ("sum", SUMS[name])
    if truly == said:
        loop(run, loss)
        assert run.engine.steps_left == 0
        return
    with pytest.raises(PdpsgdError, match=f'is a {truly}, .*say make_private.*loss_reduction="{truly}"'):
        loop(run, loss)
    # A sum over its size may be a sum over a constant: a batch of another size tells.
    assert run.engine.steps_taken == ("sum" in name and truly == "mean")
    run.engine.close()


@pytest.mark.parametrize("said", ["mean", "sum"])
def test_what_a_batch_of_another_size_settles_does_not_depend_on_what_the_loop_draws_beside_it(private, said):
    """Then gradients cannot be compared; that the number went along with the size can."""

    def loss(outputs, targets):
        torch.rand(())
        return summed(outputs, targets) / len(targets)

    run = private(loss_reduction=said)
    if said == "mean":
        loop(run, loss)
        assert run.engine.steps_left == 0
        return
    with pytest.raises(PdpsgdError, match=r"is a mean, .*A batch of another size showed it"):
        loop(run, loss)
    assert run.engine.steps_taken == 1
    run.engine.close()
