"""Makes a model forget what it kept of a batch in plain attributes: no noise is ever added to those.

A model may keep activations for somebody to look at (`self.attention = weights`), or a mask that it makes once. Kept
beyond the batch, such a tensor would carry people's records, without noise, into later steps or into a saved model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from pdpsgd.engine._torch import version
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch

_OWN = frozenset(vars(nn.Module()))  # torch's own: parameters, buffers, hooks, the mode
_CONTAINERS = (list, dict, set, deque)
_NOTED = (Tensor, *_CONTAINERS)
_NESTED = 4
_LARGEST = 256  # larger ones, vocabularies say, are not looked through
Attributes = dict[str, Any]


class PlainAttributes(StepObserver):
    """Tensors in plain attributes of a module, put back to what they were before each batch.

    Guarantee: a tensor (or array) that a batch leaves in a plain attribute, alone or in lists, dictionaries, sets
    and queues, is gone when the next batch is yielded or the run is closed, unless the loop has set the attribute
    itself since; a step whose batch writes in place to a tensor that was there before is refused.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [(place, vars(child), _is_of_torch(child)) for place, child in module.named_modules()]
        # torch's own layers never set attributes that they have: somebody's hook adds new ones.
        self._layers = [attributes for _, attributes, of_torch in named if of_torch]
        self._others = [(place, attributes) for place, attributes, of_torch in named if not of_torch]
        self._layers_before: list[Attributes] = []
        self._others_before: list[Attributes] = []
        self._containers: list[tuple[Any, Any]] = []  # with the parts that they had
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._left: list[Callable[[], None]] = []  # what takes away what the last batch has left

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Forget what the batch before has left, and note what is there."""
        self.forget()
        if not self._layers_before or list(map(len, self._layers)) != list(map(len, self._layers_before)):
            self._layers_before = [dict(attributes) for attributes in self._layers]
        self._others_before, self._containers, self._tensors = [], [], []
        for place, attributes in self._others:
            self._others_before.append(dict(attributes))
            for name, value in attributes.items():
                if isinstance(value, _NOTED) and name not in _OWN:
                    self._note(f"{place}.{name}".lstrip("."), value)
        batch.when_stepped.append(self.check)

    def check(self) -> None:
        """Refuse a write in place, and remember what else the batch has changed."""
        for place, tensor, writes in self._tensors:
            if version(tensor) != writes:
                _refuse(place)
        for attributes, before in zip(self._layers, self._layers_before, strict=True):
            if len(attributes) != len(before):
                self._remember(attributes, before)
        for (_, attributes), before in zip(self._others, self._others_before, strict=True):
            if len(attributes) != len(before) or not all(map(is_, attributes.values(), before.values())):
                self._remember(attributes, before)
        for container, parts in self._containers:
            if not _has(container, parts) and (_holds_tensors(container) or _holds_tensors(parts)):
                self._left.append(_refilling(container, parts))

    def _remember(self, attributes: Attributes, before: Attributes) -> None:
        for name, value in attributes.items():
            if name not in _OWN and value is not before.get(name, _missing) and _holds_tensors(value):
                self._left.append(_putting_back(attributes, name, before))

    def forget(self) -> None:
        """Take away what the last batch has left."""
        for take_away in self._left:
            take_away()
        self._left.clear()

    def _note(self, place: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((place, value, version(value)))
        elif isinstance(value, (*_CONTAINERS, tuple)) and depth < _NESTED and len(value) <= _LARGEST:
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for part in value.values() if isinstance(value, dict) else value:
                self._note(place, part, depth + 1)


_missing = object()


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _putting_back(attributes: Attributes, name: str, before: Attributes) -> Callable[[], None]:
    left = attributes[name]

    def put_back() -> None:
        if attributes.get(name, _missing) is not left:
            return  # the loop has set it since
        if name in before:
            attributes[name] = before[name]
        else:
            del attributes[name]

    return put_back


def _refilling(container: Any, parts: Any) -> Callable[[], None]:
    left = container.copy()

    def refill() -> None:
        if _has(container, left):  # else the loop has changed it since
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(parts)

    return refill


def _has(container: Any, parts: Any) -> bool:
    """Tell whether a list, dictionary, set or queue has exactly these parts, the very same objects."""
    if isinstance(container, dict):
        return container.keys() == parts.keys() and all(map(is_, container.values(), parts.values()))
    if isinstance(container, set):
        return container == parts
    return len(container) == len(parts) and all(map(is_, container, parts))


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    if depth < _NESTED and isinstance(value, (list, tuple, set, deque, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return any(_holds_tensors(part, depth + 1) for part in parts)
    return False


def _refuse(place: str) -> None:
    fail(
        "Expected tensors in the module's attributes to stay as they are between a batch and its step. Got a change "
        f"of {place}: what the model keeps of the batch there would be used, or saved, without noise. Put the module "
        "that holds it into evaluation mode (module.eval()), or remove it."
    )
