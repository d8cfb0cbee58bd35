"""What the checks of a loop cannot tell from a recording is said with its reason, never passed over."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdpsgd.engine.checks.loop import LossCheck, check_inputs
from pdpsgd.engine.checks.replay import CannotTellError, Replay

ROWS = torch.linspace(-1, 1, 12).sin().view(4, 3)


def recording() -> Replay:
    return Replay(ROWS, len(ROWS))


def test_inputs_that_are_the_batchs_or_made_of_it_are_told_by_row() -> None:
    replay = recording()
    made = replay.run(torch.neg, (ROWS,), {})
    assert check_inputs(replay, (ROWS, made, torch.ones(4, 3)), views=1) == [ROWS, made]


def test_inputs_from_elsewhere_cannot_be_told() -> None:
    with pytest.raises(CannotTellError, match="called with what does not come from the batch"):
        check_inputs(recording(), ROWS.clone(), views=1)
    replay = recording()
    replay.too_long = True  # from then on nothing is recorded
    with pytest.raises(CannotTellError, match="takes too many operations"):
        check_inputs(replay, ROWS.clone(), views=1)


def test_rows_from_elsewhere_cannot_be_told_once_values_have_left_torch() -> None:
    """They may be made of those values."""
    replay = recording()
    replay.run(Tensor.tolist, (ROWS,), {})
    assert len(check_inputs(replay, (ROWS, torch.ones(3)), views=1)) == 1
    with pytest.raises(CannotTellError, match="taken out of torch before the model is called"):
        check_inputs(replay, (ROWS, torch.ones(4, 3)), views=1)


def test_inputs_that_come_out_otherwise_when_made_again_cannot_be_told() -> None:
    replay, count = recording(), itertools.count()
    made = replay.run(lambda rows: rows + next(count), (ROWS,), {})
    with pytest.raises(CannotTellError, match="does not come out alike when it is done again"):
        check_inputs(replay, made, views=1)


def check_of(replay: Replay, loss: Tensor, *outputs: Tensor) -> LossCheck:
    return LossCheck(replay, loss, {id(leaf): (leaf, leaf.detach().clone()) for leaf in outputs})


def test_a_loss_without_the_model_cannot_be_told() -> None:
    replay = recording()
    loss = replay.run(torch.mean, (ROWS,), {})
    with pytest.raises(CannotTellError, match="the model was not called"):
        check_of(replay, loss).examples_do_not_mix(lambda place: None)


class MixesBackward(torch.autograd.Function):
    """Nothing shows in what it gives."""

    @staticmethod
    def forward(ctx, outputs):
        return outputs * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def test_an_autograd_function_of_the_loops_own_cannot_be_told(private) -> None:
    run = private()
    inputs, targets = next(iter(run.loader))
    outputs = MixesBackward.apply(run.module(inputs))
    functional.cross_entropy(outputs, targets).backward()
    with pytest.warns(
        UserWarning, match="examples mix in the loss could not be checked: it has an autograd function"
    ):
        run.optimizer.step()
    run.engine.close()


@pytest.mark.parametrize("said", ["mean", "sum"])
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_called_neither(said: str) -> None:
    replay = recording()
    outputs = ROWS.clone().requires_grad_()
    replay.add(outputs)
    squares = replay.run(torch.square, (outputs,), {})
    total = replay.run(torch.sum, (squares,), {})
    size = replay.run(torch.sum, (replay.run(torch.ones_like, (squares,), {}),), {})
    root = replay.run(torch.sqrt, (size,), {})
    neither = replay.run(torch.div, (total, root), {})
    with pytest.raises(CannotTellError, match="otherwise for one, for two and for all examples"):
        check_of(replay, neither, outputs).is_reduced_by(said)
    one = total if said == "sum" else replay.run(torch.mean, (squares,), {})
    assert check_of(replay, one, outputs).is_reduced_by(said)


def test_a_loss_without_gradients_where_it_was_recorded_cannot_be_told() -> None:
    replay = recording()
    outputs = ROWS.clone().requires_grad_()
    replay.add(outputs)
    with torch.no_grad():
        cut_off = replay.run(torch.sum, (outputs,), {})
    with pytest.raises(CannotTellError, match="its last operation does not give the loss"):
        check_of(replay, cut_off, outputs).expected()
    total = replay.run(torch.sum, (outputs,), {})
    assert torch.equal(check_of(replay, total, outputs).expected()[id(outputs)], torch.ones(4, 3))
