"""Two batches of a loop: what goes with their sizes, and what one leaves for the next.

A replay keeps numbers as they were, the size of the batch among them. In a batch of another size they are others: if
examples of the first batch then come out otherwise, by a number that follows the size, the loop depends on the size.
Other differences may come from a schedule, or from random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import tensors
from pdpsgd.engine.checks.replay import Call, CannotTellError, Replay, memory_of
from pdpsgd.errors import fail

# By call on the way to the loss: the function's name, and its arguments that are numbers.
Numbers = list[tuple[str, list[float]]]
# Batches of two sizes are compared as closely as float32 allows; the sizes must differ by more.
SIZE_TOLERANCE = 2e-4
_POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)


class SizeOrScheduleError(CannotTellError):
    """A difference between two batches that comes from their sizes, or from a schedule."""


@dataclass
class Recorded:
    """One batch of a loop as it was recorded, for comparison with a batch of another size.

    Sensitive: it holds the batch.
    """

    size: int
    given: list[Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]
    gradients: Tensor
    scalar_gradients: list[float]
    own_reduction: str | None
    numbers_before: Numbers  # the model
    numbers_after: Numbers
    known: dict[int, Tensor]  # all tensors that came from it

    def tells_from(self, size: int) -> bool:
        """Whether a batch of this size is different enough to compare with."""
        return abs(math.log(size / self.size)) > 10 * SIZE_TOLERANCE

    def rows_for(self, size: int) -> Tensor:
        """Return which of its examples stand in a batch of another size: all in turn."""
        return torch.arange(size, device="cpu") % self.size


def check_nothing_is_kept(replay: Replay, wanted: Sequence[Tensor], earlier: Recorded) -> None:
    """Refuse a loop in which a tensor of an earlier batch is used for this one."""
    memory = {memory_of(leaf) for leaf in earlier.known.values()}
    own = {memory_of(leaf) for leaf in replay.known.values()}
    for leaf in (*wanted, *tensors([(call.args, call.kwargs) for call in replay.calls_for(wanted)])):
        kept = id(leaf) in earlier.known or (memory_of(leaf) in memory and memory_of(leaf) not in own)
        if kept and id(leaf) not in replay.given_ids and not isinstance(leaf, nn.Parameter):
            fail(
                "Expected each batch to be trained on by itself. Got a tensor of shape "
                f"{tuple(leaf.shape)} that was computed from an earlier batch and is used for this one: the earlier "
                "batch's people would move the model again, without noise. Keep nothing from batch to batch (running "
                "means, earlier losses) that the loss or the inputs depend on."
            )


def numbers_of(replay: Replay, wanted: Sequence[Tensor]) -> Numbers:
    """Return the numbers in the calls behind these tensors."""
    return [(call.name, list(numbers_in(call, replay))) for call in replay.calls_for(wanted)]


def follow_size(before: Numbers, after: Numbers, size_before: int, size_after: int) -> bool:
    """Whether a number in the calls for one batch, and for another, goes with the sizes of the two.

    As a power of the size, or as the size and a constant. Other differences may come from a schedule.
    """
    if [name for name, _ in before] != [name for name, _ in after]:
        return False
    pairs = [
        (one, other)
        for (_, old), (_, new) in zip(before, after, strict=True)
        if len(old) == len(new)
        for one, other in zip(old, new, strict=True)
        if one != other
    ]
    ratios = [(size_after / size_before) ** power for power in _POWERS]
    step = size_after - size_before
    return any(
        any(math.isclose(other, one * ratio, rel_tol=1e-6) for ratio in ratios)
        or (abs(step) > 2 and math.isclose(other - one, step, rel_tol=1e-9))
        or (abs(step) > 2 and one * other != 0 and math.isclose(1 / other - 1 / one, step, rel_tol=1e-6))
        for one, other in pairs
    )


def say_if_size_was_asked(replay: Replay, what: str) -> None:
    """Raise what a warning says, if the loop asked for the size and no function was given it."""
    if replay.asked_for_size and not replay.used_size:
        raise SizeOrScheduleError(
            f"In a batch of another size {what} is not the same. A schedule may do that, the size must not; which of "
            "them does could not be checked"
        )


def in_this_size(replay: Replay, earlier: Recorded) -> dict[int, Tensor]:
    """Return the examples of an earlier batch in place of this batch's."""
    keys = list(replay.given_by_id)
    if len(keys) != len(earlier.given):
        raise CannotTellError("batches are not alike")
    chosen = earlier.rows_for(replay.size)
    return {key: leaf[chosen] for key, leaf in zip(keys, earlier.given, strict=True)}


def numbers_in(call: Call, replay: Replay) -> Iterator[float]:
    """Yield the numbers among the arguments of a call, and the values of tensors of one number."""
    for leaf in (*call.args, *call.kwargs.values()):
        if isinstance(leaf, Tensor):
            if leaf.numel() == 1 and id(leaf) not in replay.known:
                yield float(leaf)
        elif isinstance(leaf, (int, float)):
            yield leaf
