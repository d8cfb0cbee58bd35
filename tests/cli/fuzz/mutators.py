"""Damage to the content of files: of any kind, and of each kind by what is in it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = [
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "9" * 400,
    "0x10",
    "1.5",
    "-0.0",
    "2e9",
    str(2**63),
]
TEXTS = [
    "",
    "x",
    " ",
    "two words",
    "é\u200b",
    "a" * 300,
    "../..",
    ".",
    "people.csv",
    "none/there.csv",
    "null",
    "[]",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2.5,
    -0.5,
    1e308,
    -1e308,
    2**31,
    2**63,
    10**400,
    "",
    "x",
    "inf",
    "nan",
    "1",
    "\ud800",
    "\0",
    "x" * 5000,
    [],
    {},
    [[]],
    [1, "a"],
    {"a": 1},
    [None],
]


def _deep() -> Any:
    value: Any = []
    for _ in range(500):
        value = [value]
    return value


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return a file's content, damaged without regard to its kind."""
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            lambda: b"",
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + rng.randbytes(rng.randint(1, 40)) + content[at:],
            lambda: content[:at] + content[at // 2 :],
            lambda: gzip.compress(content, mtime=0),
            lambda: content.decode("latin1").encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content + content,
            lambda: rng.choice([b"[", b"{", b'{"a":', b"a = ["]) * 100_000,
            lambda: b"\0" * 100,
            lambda: rng.randbytes(1000),
            lambda: content.replace(b"\n", b"\r"),
        ]
    )()


def damaged_json(document: Any, rng: random.Random) -> Any:
    """Return a JSON document in which one value is missing, another, or too many."""
    places = list(_places(document))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.append(holder[key])
    elif how == 1:
        holder[f"{key}2"] = holder.pop(key)
    elif how == 2:
        holder[key] = _deep()
    else:
        holder[key] = rng.choice(VALUES)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        yield document, key
        yield from _places(document[key])


def damaged_toml(text: str, rng: random.Random) -> str:
    """Return TOML in which one line is missing, twice, or has another value."""
    lines = text.splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")])
    name = lines[at].partition("=")[0]
    literals = [
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "9" * 400,
        "9" * 5000,
        '""',
        '"x"',
        '"\\u0000"',
        "[]",
        "{}",
        "true",
    ]
    literals += [
        "1979-05-27",
        "[[1]]",
        '["a", "a"]',
        "{a = 1}",
        "'" + "x" * 400 + "'",
        "[" * 200 + "]" * 200,
        "2.5",
    ]
    lines[at : at + 1] = rng.choice(
        [[], [lines[at], lines[at]], [f"{name}2 = 1"], *([[f"{name}= {rng.choice(literals)}"]] * 6)]
    )
    return "\n".join(lines) + "\n"


def damaged_table(text: str, rng: random.Random) -> str:
    """Return a CSV table in which a cell, a row or a column is not what it was."""
    rows = [line.split(",") for line in text.splitlines()]
    at, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    cells = [*NUMBERS, *TEXTS, '"', '"a', "a\nb", "1,2", "1e-5", "0", "high", "p1", "2020-01-01", "true"]
    how = rng.randrange(8)
    if how == 0:
        rows = rows[:1]
    elif how == 1:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif how == 2:
        rows = [[*row, row[column]] for row in rows]
    elif how == 3:
        rows.append(rows[at])
    elif how == 4:
        value = rng.choice(cells)
        rows = [rows[0], *([*row[:column], value, *row[column + 1 :]] for row in rows[1:])]
    else:
        rows[at][column] = rng.choice(cells)
    return "\n".join(",".join(row) for row in rows) + rng.choice(["", "\n", "\n\n"])


def damaged_arrays(content: bytes, rng: random.Random) -> bytes:
    """Return an .npz file in which one array is missing, or of another type, shape or range."""
    arrays = dict(np.load(io.BytesIO(content)))
    name = rng.choice(list(arrays))
    array = arrays.pop(name)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: array[:0],
        lambda: array[:-1],
        lambda: array[..., None],
        lambda: np.array(5),
        lambda: array.astype(str),
        lambda: array.astype(object),
        lambda: np.full(array.shape, np.nan),
        lambda: np.full(array.shape, -1),
        lambda: np.full(array.shape, 2_000_000_000),
        lambda: np.full(array.shape, 2**63, dtype=np.uint64),
        lambda: np.full(array.shape, 1 + 2j),
        lambda: np.full(array.shape, "2020-01-01", dtype="datetime64[D]"),
        lambda: np.zeros(array.shape, dtype=[("a", "i4")]),
        lambda: np.full(array.shape, True),
    ]
    changed = rng.choice(changes)()
    if changed is not None:
        arrays[name] = changed
    if rng.random() < 0.3:
        arrays.pop("classes", None)
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def damaged_parquet(content: bytes, rng: random.Random) -> bytes:
    """Return a Parquet table in which one column is of another type."""
    import polars as pl

    frame = pl.read_parquet(io.BytesIO(content))
    name, rows = rng.choice(frame.columns), len(frame)
    types: list[Any] = [
        pl.Boolean,
        pl.Int128,
        pl.Decimal(20, 2),
        pl.Date,
        pl.Datetime,
        pl.Duration,
        pl.Time,
        pl.Null,
    ]
    types += [pl.Categorical, pl.Binary, pl.List(pl.Int64), pl.Struct({"a": pl.Int64}), pl.UInt64, pl.Float32]
    value: Any = rng.choice([None, 1, 0, -1])
    with contextlib.suppress(Exception):
        column = pl.Series(name, [value] * rows, dtype=pl.Int64).cast(rng.choice(types), strict=False)
        frame = frame.with_columns(column)
    if rng.random() < 0.2:
        frame = frame[:0]
    made = io.BytesIO()
    frame.write_parquet(made)
    return made.getvalue()


def damage_checkpoint(path: Path, rng: random.Random) -> None:
    """Damage a checkpoint so that its checksum is right."""
    import torch

    from pdpsgd.engine import checkpoints

    saved = checkpoints.load(path)
    tensors, state = (
        dict(saved.tensors),
        json.loads(json.dumps(checkpoints._to_json(dict(saved.state), "state"))),
    )
    key = saved.key
    how = rng.randrange(5)
    if how == 0:
        name = rng.choice(sorted(tensors))
        shapes = [(), (0,), (2, 2), (1,)]
        options = [
            None,
            *(torch.zeros(shape) for shape in shapes),
            tensors[name].double(),
            tensors[name].int(),
        ]
        chosen = rng.choice(options)
        if chosen is None:
            del tensors[name]
        else:
            tensors[name] = chosen
    elif how == 1:
        key = rng.choice([b"", b"x", bytes(33)])
    else:
        state = damaged_json(state, rng)
    to_json = checkpoints._to_json
    checkpoints._to_json = lambda value, *_: state  # type: ignore[assignment]
    try:
        checkpoints.save(path, tensors, {}, key)
    finally:
        checkpoints._to_json = to_json


def as_text(change: Callable[[str, random.Random], str]) -> Callable[[bytes, random.Random], bytes]:
    """Apply a change of text to a file's content."""
    return lambda content, rng: change(content.decode(), rng).encode()


def damaged_json_file(content: bytes, rng: random.Random) -> bytes:
    """Return a file of JSON in which one value is not what it was."""
    return json.dumps(damaged_json(json.loads(content), rng)).encode()


def damaged_json_lines(content: bytes, rng: random.Random) -> bytes:
    """Return lines of JSON, one of which is not what it was."""
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = damaged_json_file(lines[at], rng)
    return b"\n".join(lines) + b"\n"
