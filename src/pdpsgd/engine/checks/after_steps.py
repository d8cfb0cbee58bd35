"""Sees weights, buffers and frozen parameters that somebody writes to after a step, where no noise is added.

To project weights, or to average them, after `optimizer.step()` is fine: that looks at what is released alone. To copy
something of a batch there is not, and nothing tells one from the other. So the verdict says what it assumes.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pdpsgd.engine._torch import own_buffers, own_parameters, versions
from pdpsgd.engine.observers import StepObserver

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch

FEW = 2**18  # numbers whose values are compared, at some steps, beside torch's counts of writes
OFTEN = 64
MOST_NAMES = 3


class AfterSteps(StepObserver):
    """Comparison of a module's tensors between the end of a `step()` and the next batch, or the verdict.

    Guarantee: none by itself. Writes that torch counts are seen after every step; others (through `.data`) after steps
    1, 2, 4, 8, 16, 32 and every 64th, in models of 262,144 numbers at most. To be told before whatever starts fresh
    models.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (place, held)
            for place, child in module.named_modules()
            for held in (own_parameters(child), own_buffers(child))
        ]
        self._all = [held.values() for _, held in self._held]  # these go along with what modules hold
        self._names: dict[str, None] = {}
        self._places: list[str] = []  # of what the last step left
        self._before: list[Tensor | None] = []  # what these are the places of
        self._left: list[Tensor | None] = []
        self._writes: list[int] = []
        self._values: dict[str, Tensor] = {}
        self._steps = 0

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is taken for granted of writes after a step, in a sentence."""
        self._look()
        if not self._names:
            return ()
        names = list(self._names)
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return (
            f"It is assumed that what writes to {', '.join(names[:MOST_NAMES])}{more} after optimizer.step() does not "
            "look at the data: no noise is added to it.",
        )

    def step_begins(self, step: int, round: int) -> None:
        """Look what was written since the last step; a fresh model has not been put there yet."""
        self._look()
        self._left, self._values = [], {}

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Look what was written between two batches of a step, and note what the step leaves."""
        self._look()
        self._left, self._values = [], {}
        batch.when_taken.append(self._note)

    def _note(self) -> None:
        self._steps += 1
        self._left = list(chain.from_iterable(self._all))
        self._writes = versions(self._left)
        if not _are_same(self._left, self._before):  # names take longer than all else here
            self._before, self._places = self._left, list(self._tensors())
        is_due = self._steps % OFTEN == 0 or (self._steps < OFTEN and self._steps & (self._steps - 1) == 0)
        if is_due and sum(0 if tensor is None else tensor.numel() for tensor in self._left) <= FEW:
            left = zip(self._places, self._left, strict=True)
            self._values = {name: tensor.detach().clone() for name, tensor in left if tensor is not None}

    def _look(self) -> None:
        """Name what was written to since the last step; once."""
        if not self._left:
            return
        there = list(chain.from_iterable(self._all))
        if not self._values and _are_same(there, self._left) and versions(there) == self._writes:
            return
        now = self._tensors()
        for name, tensor, writes in zip(self._places, self._left, self._writes, strict=True):
            if now.get(name) is not tensor or versions([tensor]) != [writes]:
                self._names[name] = None
        for name, value in self._values.items():
            if name not in self._names and not _same(now.get(name), value):
                self._names[name] = None

    def _tensors(self) -> dict[str, Tensor | None]:
        return {
            f"{place}.{name}" if place else name: tensor
            for place, held in self._held
            for name, tensor in held.items()
        }


def _are_same(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _same(tensor: Tensor | None, value: Tensor) -> bool:
    if tensor is None or tensor.shape != value.shape:
        return False
    return torch.equal(tensor, value) or bool(
        ((tensor == value) | ((tensor != tensor) & (value != value))).all()
    )
