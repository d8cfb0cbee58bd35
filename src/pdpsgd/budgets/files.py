"""Small files in, checked before use: size, encoding, nesting, and the type and range of every value in them.

A file comes from anybody: it may be cut off, of another kind, or made to break its reader. Whatever is wrong with it
ends in one sentence that names the file, the place in it, what was expected and what was found.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from pdpsgd.errors import PdpsgdError, fail, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SMALL = 2**26
"""Bytes of the largest settings, schema or result that is read."""
LARGE = 2**30
"""Bytes of the largest plan that is read: one that names ten million people has a fifth of that."""
DEEPEST = 64
"""Levels of nesting; no file of ours has ten."""


def read_text(path: str | os.PathLike[str], what: str, *, most: int = SMALL) -> str:
    """Read a file that holds text.

    Args:
        path: Where it is.
        what: What it should be, for errors: "a plan (JSON)".
        most: The largest size that is accepted, in bytes.

    Returns:
        The text.

    Raises:
        PdpsgdError: The file is not there, cannot be read, is too large, or is no UTF-8.
    """
    content = read_bytes(path, what, most=most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fail(
            f"Expected {what} at {str(path)!r}, as UTF-8 text. Got {kind_of(content) or 'something else'}: the byte "
            f"0x{content[error.start]:02x} in line {line} is no UTF-8."
        )


def read_bytes(path: str | os.PathLike[str], what: str, *, most: int) -> bytes:
    """Read a whole file, unless it is larger than `most` bytes."""
    try:
        with open(path, "rb") as file:
            content = _read_up_to(file, most + 1)
    except OSError as error:
        raise PdpsgdError(f"Expected {what} at {str(path)!r}. Got: {error.strerror or error}.") from error
    except ValueError as error:  # a null character in the name
        raise PdpsgdError(
            f"Expected {what} at {str(path)!r}, which is no name of a file: {error}."
        ) from error
    if len(content) > most:
        fail(f"Expected {what} of at most {most:,} bytes at {str(path)!r}. Got a larger file.")
    return content


def _read_up_to(file: BinaryIO, most: int) -> bytes:
    """Read in parts, since asking for `most` bytes at once would reserve memory for them."""
    parts = []
    while most > 0 and (part := file.read(min(most, 2**22))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def first_bytes(path: str | os.PathLike[str], what: str, count: int = 64) -> bytes:
    """Read the first bytes of a file, which tell its kind."""
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise PdpsgdError(f"Expected {what} at {str(path)!r}. Got: {error.strerror or error}.") from error


def kind_of(content: bytes) -> str | None:
    """Name what is no plain text by how it begins; None if nothing speaks against text."""
    known = {
        b"\x1f\x8b": "a gzip file",
        b"PK\x03\x04": "a zip file",
        b"PAR1": "a Parquet file",
        b"\x89PNG": "an image",
        b"BZh": "a bzip2 file",
        b"(\xb5/\xfd": "a zstd file",
        b"\xfd7zXZ": "an xz file",
        b"\xff\xfe": "UTF-16 text",
        b"\xfe\xff": "UTF-16 text",
    }
    return next((name for mark, name in known.items() if content.startswith(mark)), None)


def parse_json(text: str, place: str, what: str = "JSON") -> Any:
    """Parse JSON in which every key stands once, all numbers are finite, and nothing is nested deeply.

    Args:
        text: The text.
        place: The file it is from, for errors.
        what: What it should be, for errors.

    Returns:
        Plain values.

    Raises:
        PdpsgdError: The text is something else.
    """
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        got = "an empty file" if not text.strip() else f"something else: {error}"
        fail(f"Expected {what} in {place}. Got {got}.")
    except RecursionError:
        _fail_nested(what, place)
    except PdpsgdError as error:
        fail(f"Expected {what} in {place}. {error}")
    except ValueError as error:  # a whole number of thousands of digits
        fail(f"Expected {what} in {place}, with numbers that can be read. Got: {str(error).split(';')[0]}.")
    _check_values(found, what, place)
    return found


def parse_toml(text: str, place: str, what: str = "TOML") -> dict[str, Any]:
    """Parse TOML in which nothing is nested deeply; errors name the place."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        _fail_nested(what, place)
    except ValueError as error:  # TOMLDecodeError is one; others come from numbers and dates
        fail(f"Expected {what} in {place}. Got something else: {str(error).split(';')[0].removesuffix('.')}.")
    _check_values(found, what, place)
    return found


def lock(descriptor: int) -> bool:
    """Take the operating system's lock on an open file, until it is closed or the process ends.

    Returns:
        Whether this process has it now. Where a file system knows no locks, it has it, too.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


# --- the types and ranges of values -------------------------------------------------------------------------


def mapping(place: str, value: Any) -> dict[str, Any]:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        fail(f"Expected {place} to be an object. Got {shown(value)}.")
    return value


def entries(place: str, value: Any) -> list[Any]:
    """Check that a value is a list."""
    if not isinstance(value, list):
        fail(f"Expected {place} to be a list. Got {shown(value)}.")
    return value


def text(place: str, value: Any) -> str:
    """Check that a value is text."""
    if not isinstance(value, str):
        fail(f"Expected {place} to be a text. Got {shown(value)}.")
    return value


def number(place: str, value: Any) -> float:
    """Check that a value is a number that fits in double precision; "inf" stands for infinity."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(f"Expected {place} to be a number. Got {shown(value)}.")
    try:
        return float(value)
    except OverflowError:
        fail(f"Expected {place} to be a number that fits in double precision. Got {shown(value)}.")


def whole(place: str, value: Any, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """Check that a value is a whole number in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(f"Expected {place} to be a whole number of at least {least}. Got {shown(value)}.")
    if value > most:
        fail(f"Expected {place} to be a whole number of at most {most}. Got {shown(value)}.")
    return value


@dataclass(frozen=True)
class Optional:
    """A part that may be missing or null."""

    shape: Any


@dataclass(frozen=True)
class Nullable:
    """A part that has to be there and may be null."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object of any keys whose values all have one shape."""

    shape: Any


@dataclass(frozen=True)
class OneOf:
    """One of a few texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """A number from `least` to `most`; `infinite` says that it may be "inf", too."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    infinite: bool = False


ANY = object()
"""A part that nothing is asked of."""


def check_shape(place: str, value: Any, shape: Any) -> None:
    """Check that a value read from a file has the shape that its readers count on.

    Args:
        place: The file, and the place in it, for errors.
        value: What was read.
        shape: `str`, `bool`, `int` (at least 0), `Range`, `OneOf`, `ANY`; a list of one shape; a dictionary of shapes
            by key, beside which there may be others; `Each`, `Optional` or `Nullable` of a shape.

    Raises:
        PdpsgdError: Something is missing or of another type.

    >>> check_shape("result.json", {"steps": -1}, {"steps": int})
    Traceback (most recent call last):
        ...
    pdpsgd.errors.PdpsgdError: Expected result.json: steps to be a whole number of at least 0. Got -1.
    """
    if shape is ANY:
        return
    if isinstance(shape, (Optional, Nullable)):
        if value is not None:
            check_shape(place, value, shape.shape)
    elif isinstance(shape, Each):
        for key, part in mapping(place, value).items():
            check_shape(_inside(place, key), part, shape.shape)
    elif isinstance(shape, Mapping):
        found = mapping(place, value)
        for key, part in shape.items():
            if key not in found and not isinstance(part, Optional):
                fail(f"Expected {key!r} in {place}. Its entries are {shown(sorted(found))}.")
            check_shape(_inside(place, key), found.get(key), part)
    elif isinstance(shape, list):
        for index, part in enumerate(entries(place, value)):
            check_shape(f"{place}[{index}]", part, shape[0])
    else:
        _check_plain(place, value, shape)


def _check_plain(place: str, value: Any, shape: Any) -> None:
    if shape is str:
        text(place, value)
    elif shape is int:
        whole(place, value)
    elif isinstance(shape, OneOf):
        if text(place, value) not in shape.choices:
            fail(f"Expected {place} to be one of {', '.join(map(repr, shape.choices))}. Got {shown(value)}.")
    elif isinstance(shape, Range):
        _check_range(place, value, shape)
    elif not isinstance(value, bool):
        fail(f"Expected {place} to be true or false. Got {shown(value)}.")


def _check_range(place: str, value: Any, shape: Range) -> None:
    if value == "inf" and shape.infinite:
        return
    if shape.whole:
        whole(place, value, least=int(shape.least))
    elif value == "inf" or not shape.least <= number(place, value) <= shape.most:
        fail(f"Expected {place} to be a number from {shape.least:g} to {shape.most:g}. Got {shown(value)}.")


def _inside(place: str, key: str) -> str:
    name = key if len(key) <= 80 else f"{key[:80]}..."
    return f"{place}.{name}" if ": " in place else f"{place}: {name}"


def _check_values(found: Any, what: str, place: str) -> None:
    """Refuse values that are nested deeply, and text with half a character in it, which cannot be printed."""
    inside = [found]
    for _ in range(DEEPEST):
        parts = [part for value in inside for part in _parts(value)]
        for part in parts:
            if isinstance(part, str) and not part.isascii() and _is_torn(part):
                fail(f"Expected {what} in {place}, with text in Unicode. Got {shown(part)!a}.")
        inside = [part for part in parts if isinstance(part, (dict, list))]
        if not inside:
            return
    _fail_nested(what, place)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else [value]


def _is_torn(value: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in value)


def _fail_nested(what: str, place: str) -> NoReturn:
    fail(f"Expected {what} in {place}, nested at most {DEEPEST} deep. Got something nested deeper.")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        fail(f"Expected each key once. Got {shown(twice)} twice: which of the two is meant cannot be known.")
    return document


def _no_constant(name: str) -> NoReturn:
    fail(f'Expected finite numbers, or "inf" where no protection was asked. Got {name}.')
