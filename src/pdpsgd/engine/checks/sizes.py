"""Batches of a loop: what goes with their sizes, and what one leaves for the next.

A replay keeps numbers as they were, the size of the batch among them. In a batch of another size they are others: if
examples of the first batch then come out otherwise, by a number that follows the size, the loop depends on the size.
Other differences may come from a schedule, or from random numbers. By chance a schedule may look like the size for a
batch or two (0.6 and 0.7 of 24 and 28 rows). But a schedule goes one way, while sizes go up and down: so a number that
was the size itself is one at once, and a number that goes along once it has turned round with the sizes.
"""

from __future__ import annotations

import itertools
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
# A law by which a number goes with the size, and where the number stands: in which call, and which of its numbers.
Law = tuple[int, int, str]
UNSETTLED = (
    "Whether this loop depends on the size of the batch could not be checked: in all batches that were compared a "
    "number went along with the size, as a schedule may do for a while"
)


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
    before: Course  # of what happens before the model
    after: Course
    known: dict[int, Tensor]  # all tensors that came from it

    @property
    def waits(self) -> bool:
        """Whether a number went with the size so far, and further batches have to tell."""
        return self.before.waits or self.after.waits

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


class Course:
    """The numbers in the calls of a loop, batch by batch: does one of them go with the size?

    >>> def course(*batches: tuple[int, float]) -> bool | None:
    ...     (size, number), *later = batches
    ...     found = Course(size, [("mul", [number])])
    ...     return [found.goes_with_size(size, [("mul", [number])]) for size, number in later][-1]
    >>> course((24, 24.0), (28, 28.0))  # the size itself
    True
    >>> print(course((24, 0.6), (28, 0.7)))  # a share of 40, or a schedule
    None
    >>> course((24, 0.6), (28, 0.7), (20, 0.8)), course((24, 0.6), (28, 0.7), (20, 0.5))
    (False, True)
    """

    def __init__(self, size: int, numbers: Numbers) -> None:
        self.sizes, self.numbers = [size], numbers
        self.waits = False
        self._laws: set[Law] | None = None  # those that held in all batches
        self.kinds: set[str] = {"mean", "sum"}  # how the loss was reduced, by the gradients of all batches

    def goes_with_size(self, size: int, numbers: Numbers, *, kinds: set[str] | None = None) -> bool | None:
        """Take in a batch in which examples come out otherwise; None if further batches have to tell.

        Args:
            size: The size of the batch.
            numbers: Its numbers.
            kinds: How the loss was reduced, if gradients followed from it that the sizes alone explain.
        """
        if [name for name, _ in self.numbers] == [name for name, _ in numbers]:
            found = set(_laws(self.numbers, numbers, self.sizes[0], size))
            self._laws = found if self._laws is None else self._laws & found
        elif self._laws is None:
            self._laws = set()
        self.sizes.append(size)
        self.kinds &= kinds or set()
        explained = bool(self._laws or self.kinds)
        nothing_else = bool(self.kinds) and numbers == self.numbers
        told = not explained or nothing_else or self._is_size or _turns(self.sizes)
        self.waits = not told
        return explained if told else None

    def is_contradicted(self) -> None:
        """Take in that examples came out alike in a batch of another size: no number goes with it."""
        if self.waits:
            self._laws, self.kinds, self.waits = set(), set(), False

    @property
    def _is_size(self) -> bool:
        return any(law == "itself" for _, _, law in self._laws or ())


def _laws(before: Numbers, after: Numbers, size_before: int, size_after: int) -> Iterator[Law]:
    """Yield by which laws which numbers go with the size; where the size stays, all laws ask for the same number."""
    for place, ((_, old), (_, new)) in enumerate(zip(before, after, strict=True)):
        if len(old) == len(new):
            for index, (one, other) in enumerate(zip(old, new, strict=True)):
                yield from ((place, index, law) for law in _laws_of(one, other, size_before, size_after))


def _laws_of(one: float, other: float, before: int, after: int) -> Iterator[str]:
    for power in _POWERS:
        if math.isclose(other, one * (after / before) ** power, rel_tol=1e-6) and one != 0:
            yield f"power {power}"
            if math.isclose(one, before**power, rel_tol=1e-6):
                yield "itself"
    if math.isclose(other - one, after - before, rel_tol=1e-9):
        yield "and a constant"
    if one * other != 0 and math.isclose(1 / other - 1 / one, after - before, rel_tol=1e-6):
        yield "one over it and a constant"


def _turns(sizes: Sequence[int]) -> bool:
    """Tell whether sizes went up and down.

    >>> _turns([24, 28, 28, 32]), _turns([24, 28, 28, 24])
    (False, True)
    """
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    return any(step > 0 for step in steps) and any(step < 0 for step in steps)


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
