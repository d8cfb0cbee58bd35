"""The one error of the project, the checks that raise it, and its warnings."""

from __future__ import annotations

import math
import sys
import warnings
from typing import NoReturn


class PdpsgdError(ValueError):
    """An input that cannot be used.

    The message quotes the value, says where it is, and what would be accepted.
    """


class PromiseBroken(PdpsgdError):
    """A plan that would spend more privacy loss than it promises, or that claims less than the truth."""


def fail(message: str) -> NoReturn:
    """Raise the project's error, also at the end of an expression."""
    raise PdpsgdError(message)


def warn(message: str) -> None:
    """Warn at the nearest line of the user's code: outside of this package, torch and the like."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inside(str(frame.f_globals.get("__name__"))):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in ("pdpsgd", "torch", "contextlib", "functools", "tqdm", "lightning")


def check_positive(**values: float) -> None:
    """Check that each keyword's value is a finite number above zero.

    >>> check_positive(steps=0)
    Traceback (most recent call last):
        ...
    pdpsgd.errors.PdpsgdError: Expected steps > 0 and finite. Got steps=0.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            fail(f"Expected {name} > 0 and finite. Got {name}={value!r}.")


def check_probability(**values: float) -> None:
    """Check that each keyword's value lies in [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            fail(f"Expected 0 <= {name} <= 1. Got {name}={value!r}.")


def check_one_of(choices: tuple[str, ...], **values: str) -> None:
    """Check that each keyword's value is one of the choices."""
    for name, value in values.items():
        if value not in choices:
            fail(f"Expected {name} to be one of {', '.join(map(repr, choices))}. Got {name}={value!r}.")
