"""Names values that leave torch, where no gradient and no row can be followed: `int(x.max())`, `if x.any()`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

LEAVING = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "equal",
    "allclose",
    "is_nonzero",
)
_TORCH = str(Path(torch.__file__).parent)


def leaves_torch(function: Any) -> bool:
    """Whether a torch function gives values as numbers of Python or NumPy."""
    return getattr(function, "__name__", "") in LEAVING


class Leaving(TorchFunctionMode):
    """Record of the values that leave torch, in order; with `instead`, others are given in their place."""

    def __init__(self, *, instead: list[Any] | None = None) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.places: list[str] = []
        self._instead = list(instead or [])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not leaves_torch(function):
            return result
        self.values.append(result.copy() if isinstance(result, np.ndarray) else result)
        self.places.append(_place())
        return self._instead.pop(0) if self._instead else result


def altered(value: Any, *, large: bool = False) -> Any:
    """Return another value of the same kind, much larger or about as large.

    >>> altered(True), altered(3), altered([0.5, [1]])
    (False, 4, [1.25, [2]])
    """
    if isinstance(value, list):
        return [altered(part, large=large) for part in value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 1000 * value + 1000 if large else value + 1
    if isinstance(value, float):
        return 1000 * value + 1000 if large else 1.5 * value + 0.5
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return (value * (1000 if large else 1.5) + 1).astype(value.dtype)
    return value


def same_values(one: list[Any], other: list[Any]) -> bool:
    """Whether the same values left torch, in the same order."""
    if len(one) != len(other):
        return False
    return all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )


def _place() -> str:
    """Return file and line of the code that took the value."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
