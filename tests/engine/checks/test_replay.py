"""What cannot be replayed on other examples, or on fewer, is said and never passed off as seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdpsgd.engine.checks import replay as recording
from pdpsgd.engine.checks.exchanges import only
from pdpsgd.engine.checks.replay import CannotTellError, Replay

ROWS = torch.linspace(-1, 1, 12).sin().view(4, 3)


def same(leaf: Tensor) -> Tensor:
    return leaf


def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Replay, Any]:
    """One call on a batch, which is among the arguments."""
    replay = Replay(ROWS, len(ROWS))
    return replay, replay.run(function, args, kwargs)


def alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """The same call for the first example alone."""
    replay, result = recorded(function, *args, **kwargs)
    return replay.again(only(0), [result], alone=True)[0]


def test_what_treats_examples_by_themselves_is_replayed_for_one() -> None:
    assert torch.equal(alone(torch.add, ROWS, torch.ones(3)), ROWS[:1] + 1)
    assert torch.equal(alone(torch.sum, ROWS, 0, out=torch.zeros(3)), ROWS[0])
    assert torch.equal(alone(torch.cat, [ROWS] * 3), ROWS[:1].repeat(3, 1))
    assert torch.equal(alone(Tensor.__getitem__, ROWS, slice(0, 1)), ROWS[:1])


def test_a_tensor_of_the_batchs_size_from_elsewhere_cannot_be_told() -> None:
    """An example alone would meet all of its rows."""
    with pytest.raises(
        CannotTellError, match="uses tensors of the batch's size that do not come from the batch"
    ):
        alone(torch.add, ROWS, torch.ones(4, 3))


def test_writing_to_a_tensor_of_the_batchs_size_cannot_be_told() -> None:
    with pytest.raises(CannotTellError, match="writes to tensors of the batch's size"):
        alone(Tensor.add_, torch.zeros(4, 3), ROWS)


def test_examples_that_are_put_together_or_taken_out_one_by_one_cannot_be_told() -> None:
    with pytest.raises(CannotTellError, match="puts the examples together one by one"):
        alone(torch.cat, [ROWS] * 4)
    with pytest.raises(CannotTellError, match="takes examples out one by one"):
        alone(Tensor.__getitem__, ROWS, slice(1, 2))


def test_random_numbers_cannot_be_told_for_one_example_and_are_drawn_again_for_all() -> None:
    replay, result = recorded(functional.dropout, ROWS, 0.5)
    assert torch.equal(replay.again(same, [result])[0], result)
    with pytest.raises(CannotTellError, match="draws random numbers"):
        replay.again(only(0), [result], alone=True)


def test_an_error_says_for_whom_it_cannot_be_done() -> None:
    replay, result = recorded(Tensor.__getitem__, ROWS, 3)
    assert torch.equal(replay.again(same, [result])[0], ROWS[3])
    with pytest.raises(CannotTellError, match=r"cannot be done for a single example \(IndexError\)"):
        replay.again(only(0), [result], alone=True)
    with pytest.raises(CannotTellError, match=r"cannot be done with other examples \(IndexError\)"):
        replay.again(only(0, 1), [result])


def test_what_was_not_recorded_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, result = recorded(torch.neg, ROWS)
    with pytest.raises(CannotTellError, match="does not come from the batch by torch's functions"):
        replay.again(same, [result, torch.ones(3)])
    monkeypatch.setattr(recording, "MOST_CALLS", 1)
    replay = Replay(ROWS, len(ROWS))
    first = replay.run(torch.neg, (ROWS,), {})
    assert torch.equal(replay.again(same, [first])[0], -ROWS)
    replay.run(torch.abs, (ROWS,), {})
    with pytest.raises(CannotTellError, match="takes too many operations"):
        replay.again(same, [first])
