"""Refuses models that write to buffers or frozen parameters while they train: no noise is ever added to those.

A batch may reach the released model through the noisy clipped sum only. A buffer that the forward pass changes (a
running mean, an observer's maximum, a memory of earlier batches) would be a second way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pdpsgd.engine._torch import own_buffers, own_parameters, version, versions
from pdpsgd.engine.fingerprints import fingerprint_value
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch


# Up to this many numbers are compared one by one at every batch; more of them at some batches, by a checksum.
_FEW = 2**18
_OFTEN = 64


class BufferWatch(StepObserver):
    """Comparison of buffers, parameters and extra state between a batch and its step.

    Guarantee: a step whose batch changed one of them, as torch counts changes, is refused before anything of it
    is released: parameters may change in the step, or after it; so is one that changed what `get_extra_state` gives.
    Writes through `.data`, which torch does not count, are found in buffers and frozen parameters: at every batch
    where there are at most 262,144 numbers, else at batches 1, 2, 4, 8, 16, 32 and every 64th.
    """

    def __init__(self, module: nn.Module, *, trainable: Iterable[nn.Parameter]) -> None:
        self._modules = list(module.named_modules())
        self._trainable = frozenset(map(id, trainable))  # a tensor's own hash is slow
        self._trained_or_none = self._trainable | {id(None)}
        self._with_extra_state = [
            (name, child)
            for name, child in self._modules
            if type(child).get_extra_state is not nn.Module.get_extra_state
        ]
        # These go along with what modules hold.
        self._held = [
            held.values()
            for _, child in self._modules
            for held in (own_buffers(child), own_parameters(child))
        ]
        self._before: tuple[list[Tensor | None], list[int]] = ([], [])
        self._values: dict[str, Tensor] = {}
        self._extra: dict[str, str] = {}
        self._batches = 0

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Note what is there, and look again when the loop steps."""
        self.start()
        empty = (
            batch.size == 0
        )  # a check that held the batch would keep its records until the next garbage collection
        batch.when_stepped.append(lambda: self.check(empty=empty))

    def start(self) -> None:
        """Note the state of all of them: a batch is yielded."""
        self._before = self._now()
        self._values = {}
        if not self._trained_or_none.issuperset(map(id, self._before[0])):
            kept = {n: tensor for n, tensor in self._tensors().items() if id(tensor) not in self._trainable}
            if self._is_due(sum(tensor.numel() for tensor in kept.values())):
                self._values = {name: _content(tensor) for name, tensor in kept.items()}
        self._extra = self._extra_states()

    def check(self, *, empty: bool) -> None:
        """Refuse the batch if anything has changed since it was yielded."""
        (tensors, writes), (before, writes_before) = self._now(), self._before
        if writes != writes_before or not all(map(is_, tensors, before)):
            self._refuse_what_changed()
        now = self._tensors() if self._values else {}
        for name, value in self._values.items():
            if not _same(_content(now[name]), value):
                _refuse(name)
        for name, digest in self._extra_states().items():
            if digest != self._extra[name]:
                _refuse(_join(name, "get_extra_state()"))
        self._batches += not empty

    def _now(self) -> tuple[list[Tensor | None], list[int]]:
        """Return all tensors, and how often each was written to, in little time."""
        tensors: list[Tensor | None] = list(chain.from_iterable(self._held))
        return tensors, versions(tensors)

    def _refuse_what_changed(self) -> None:
        writes = {id(tensor): count for tensor, count in zip(*self._before, strict=True)}
        names = self._tensors()
        changed = [name for name, tensor in names.items() if writes.get(id(tensor)) != version(tensor)]
        name = next(
            iter(changed or names), "a buffer"
        )  # none has changed where one is gone, or two changed places
        _refuse_write(name) if id(names.get(name)) in self._trainable else _refuse(name)

    def _is_due(self, numbers: int) -> bool:
        """Tell whether values are compared at this batch, and not only torch's counts of changes."""
        batch = self._batches + 1
        return numbers <= _FEW or batch % _OFTEN == 0 or (batch < _OFTEN and batch & (batch - 1) == 0)

    def _extra_states(self) -> dict[str, str]:
        return {name: fingerprint_value(child.get_extra_state()) for name, child in self._with_extra_state}

    def _tensors(self) -> dict[str, Tensor]:
        parameters = {
            _join(place, name): parameter
            for place, child in self._modules
            for name, parameter in own_parameters(child).items()
            if parameter is not None
        }
        return self._buffers() | parameters

    def _buffers(self) -> dict[str, Tensor]:
        return {
            _join(place, name): buffer
            for place, child in self._modules
            for name, buffer in own_buffers(child).items()
            if buffer is not None
        }


def _refuse(name: str) -> None:
    fail(
        f"Expected buffers and frozen parameters to stay as they are between a batch and its step. Got a change of "
        f"{name}: what the model keeps there of the batch would be released without noise. Put the module that "
        "holds it into evaluation mode (module.eval()), or remove it; what does not depend on the data can be "
        "changed after optimizer.step()."
    )


def _refuse_write(name: str) -> None:
    fail(
        f"Expected the model's parameters to change in optimizer.step(), where noise is added. Got a change of {name} "
        "between a batch and its step: if it depends on the batch, it is released without noise. Do what does not "
        "depend on the data (projections, weight decay) after optimizer.step()."
    )


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _content(tensor: Tensor) -> Tensor:
    """Return a copy of a small tensor, and a checksum of the bits of a large one."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= _FEW:
        return flat.clone()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in torch.split(flat, _FEW):
        bits = part.contiguous().view(torch.uint8).to(torch.int64)
        total = total * 31 + (bits * torch.arange(1, len(bits) + 1, device=flat.device)).sum()
    return total


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN stays NaN
