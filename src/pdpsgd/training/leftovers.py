"""What a model keeps beside its parameters and buffers: a batch in an attribute is as private as the records in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold parameters, buffers, submodules and hooks."""
DEEPEST = 6


def plain_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Copy the attributes of each module that hold no modules, before a run can write to them."""
    return {
        path: {
            name: copy.deepcopy(value)
            for name, value in vars(module).items()
            if name not in OF_TORCH and not _holds_modules(value)
        }
        for path, module in model.named_modules()
    }


def remove_leftovers(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put attributes that hold numbers back to what they were before training, and forget gradients.

    Guarantee: afterwards, no attribute of a module, beside parameters, buffers and what is named in the result, holds
    a tensor, an array or a number that was not there before training, as far as containers can be looked into.

    Args:
        model: The trained model; changed in place.
        before: What `plain_attributes` gave before training.

    Returns:
        Attributes that were left alone because they hold modules, too; nothing is known of what they keep.
    """
    model.zero_grad(set_to_none=True)
    unknown = []
    for path, module in model.named_modules():
        was = before.get(path, {})
        for name, value in list(_data_attributes(module)):
            if _holds_modules(value):
                unknown.append(f"attribute {f'{path}.{name}'.lstrip('.')} of the model")
            elif name in was:
                setattr(module, name, copy.deepcopy(was[name]))
            else:
                delattr(module, name)
    return unknown


def _data_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in OF_TORCH and any(_is_data(part) for part in _parts(value)):
            yield name, value


def _holds_modules(value: Any) -> bool:
    return any(isinstance(part, (nn.Module, nn.Parameter)) for part in _parts(value))


def _is_data(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, np.generic, int, float, complex)) and not isinstance(
        value, (bool, nn.Parameter)
    )


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    """Go through a value and all that it holds, as far as containers and plain objects can be looked into."""
    yield value
    if depth == DEEPEST or isinstance(value, (nn.Module, Tensor, np.ndarray, type)):
        return
    if isinstance(value, Mapping):
        inside: Any = [*value.keys(), *value.values()]
    elif hasattr(value, "__iter__") and hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values()) if not callable(value) else []
    for part in inside:
        yield from _parts(part, depth + 1)
