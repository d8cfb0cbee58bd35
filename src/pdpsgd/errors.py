"""The one error of the project, the checks that raise it, and its warnings."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

ALIKE = 0.8
"""How alike names are (1: the same) that one is proposed for the other: one letter in five is off."""
SHORTEST = 3
"""Letters that an abbreviation has at least."""
LONGEST = 160
"""Characters of a value that an error message quotes."""


class PdpsgdError(ValueError):
    """An input that cannot be used.

    The message quotes the value, says where it is, and what would be accepted.
    """


class PromiseBroken(PdpsgdError):
    """A plan that would spend more privacy loss than it promises, or that claims less than the truth."""


def fail(message: str) -> NoReturn:
    """Raise the project's error, also at the end of an expression."""
    raise PdpsgdError(message)


def shown(value: Any) -> str:
    """Write a value for an error message; a long one is cut off.

    >>> shown([1, "a"]), shown("x" * 1000)[:12], shown(10**5000)
    ("[1, 'a']", "'xxxxxxxxxxx", 'a number of about 5,000 digits')
    """
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        digits = int(abs(value).bit_length() * math.log10(2)) if isinstance(value, int) else 0
        return f"a number of about {round(digits, -2):,} digits" if digits else f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def closest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Find the names that somebody may have meant: a slip of the fingers away, or abbreviated.

    None is better than a wrong one.

    >>> closest("incme", ["income", "age"]), closest("Patient-ID", ["patient_id"]), closest("eps", ["epsilon", "age"])
    (['income'], ['patient_id'], ['epsilon'])
    >>> closest("epsilon", ["region", "person"]), closest("id", ["hid", "sid"])
    ([], [])
    """
    plain: dict[str, list[str]] = {}
    for each in known:
        plain.setdefault(_plain(each), []).append(each)
    asked = _plain(name)
    begin_alike = [each for each in plain if each[:1] == asked[:1]]  # few slips are in the first letter
    found = [asked] if asked in plain else get_close_matches(asked, begin_alike, n=most, cutoff=ALIKE)
    if not found and len(asked) >= SHORTEST:
        found = [each for each in plain if len(each) >= SHORTEST and each.startswith(asked)]
        found += [each for each in plain if len(each) >= SHORTEST and asked.startswith(each)]
        found = found if len(found) <= most else []
    return [each for key in found for each in plain[key]][:most]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def is_it(name: str, known: Iterable[str]) -> str:
    """Ask whether a known name was meant, as the end of a message; empty where none is close."""
    found = closest(name, known)
    return f" Is it {found[0]!r}?" if found else ""


def warn(message: str) -> None:
    """Warn at the nearest line of the user's code: outside of this package, torch and the like."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inside(str(frame.f_globals.get("__name__"))):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in (
        "pdpsgd",
        "torch",
        "contextlib",
        "functools",
        "tqdm",
        "lightning",
        "sklearn",
    )


def check_positive(**values: float) -> None:
    """Check that each keyword's value is a finite number above zero.

    >>> check_positive(steps=0)
    Traceback (most recent call last):
        ...
    pdpsgd.errors.PdpsgdError: Expected steps > 0 and finite. Got steps=0.
    """
    for name, value in values.items():
        if not (_is_finite(value) and value > 0):
            fail(f"Expected {name} > 0 and finite. Got {name}={shown(value)}.")


def check_not_negative(**values: float) -> None:
    """Check that each keyword's value is a finite number of at least zero."""
    for name, value in values.items():
        if not (_is_finite(value) and value >= 0):
            fail(f"Expected {name} >= 0 and finite. Got {name}={shown(value)}.")


def check_probability(**values: float) -> None:
    """Check that each keyword's value lies in [0, 1]."""
    for name, value in values.items():
        if not (_is_finite(value) and 0 <= value <= 1):
            fail(f"Expected 0 <= {name} <= 1. Got {name}={shown(value)}.")


def check_one_of(choices: tuple[str, ...], **values: str) -> None:
    """Check that each keyword's value is one of the choices."""
    for name, value in values.items():
        if value not in choices:
            fail(f"Expected {name} to be one of {', '.join(map(repr, choices))}. Got {name}={shown(value)}.")


def _is_finite(value: Any) -> bool:
    """Tell whether a value is a number that fits in double precision."""
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError, ValueError):
        return False
