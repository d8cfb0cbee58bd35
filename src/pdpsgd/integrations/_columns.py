"""Arrays and frames of scikit-learn's users as a public schema and the inputs that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import narwhals as nw
import numpy as np
import numpy.typing as npt

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.readers import Source
from pdpsgd.data.drafting import draft_column
from pdpsgd.data.schema import Categorical, Column, Ignored, Numeric
from pdpsgd.data.tabular import encode_column
from pdpsgd.errors import fail, shown

Floats = npt.NDArray[np.float32]
Columns = dict[str, Column]

SOURCE = Source("X")


def frame_of(X: Any) -> nw.DataFrame[Any] | None:
    """Return a pandas or polars frame as one of narwhals; None for anything else, also columns without names."""
    if not all(isinstance(name, str) for name in getattr(X, "columns", [None])):
        return None
    found = nw.from_native(X, eager_only=True, pass_through=True)
    return found if isinstance(found, nw.DataFrame) else None


def has_words(frame: nw.DataFrame[Any]) -> bool:
    """Tell whether some column is not of numbers."""
    return any(not frame[name].dtype.is_numeric() for name in frame.columns)


def declare(
    X: Any, names: Sequence[str], ranges: Any, categories: Mapping[Any, Sequence[Any]] | None
) -> tuple[Columns, list[str]]:
    """Say what each column may hold: as declared, or else as the data has it.

    Args:
        X: An array of numbers, or a frame of narwhals.
        names: The names of its columns.
        ranges: One (low, high) for all columns of numbers, one for each, or a mapping by name or place.
        categories: The categories of other columns, by name or place.

    Returns:
        The columns, and the names of those whose range or categories were read from the data.

    Raises:
        PdpsgdError: A name is unknown, or a range is none.
    """
    known = _by_name(categories or {}, names, "categories")
    limits = _ranges(ranges, names, [name for name in names if name not in known])
    columns: Columns = {}
    learned = []
    for place, name in enumerate(names):
        if name in known:
            columns[name] = Categorical(tuple(map(str, known[name])))
        elif name in limits:
            columns[name] = limits[name]
        else:
            learned.append(name)
            columns[name] = _learned(X, place, name)
    if all(isinstance(column, Ignored) for column in columns.values()):
        fail("Expected at least one column with values in X. Got none.")
    return columns, learned


def encode(X: Any, columns: Columns) -> Floats:
    """Encode rows, each by itself, as `pdpsgd.data.tabular` does.

    Guarantee: each row of the result is a function of the columns' declaration and of that row alone.
    """
    if isinstance(X, np.ndarray):
        return _encode_array(X, columns)
    parts = [
        encode_column(X, name, column, SOURCE)
        for name, column in columns.items()
        if not isinstance(column, Ignored)
    ]
    return np.concatenate(parts, axis=1)


def _encode_array(X: FloatArray, columns: Columns) -> Floats:
    used = [place for place, column in enumerate(columns.values()) if isinstance(column, Numeric)]
    limits = [column for column in columns.values() if isinstance(column, Numeric)]
    low, high = (np.array([float(getattr(each, end)) for each in limits]) for end in ("low", "high"))
    scaled = (np.clip(X[:, used], low, high) - low) * (2 / (high - low)) - 1
    return np.where(np.isnan(scaled), 0, np.clip(scaled, -1, 1)).astype(np.float32)


def _learned(X: Any, place: int, name: str) -> Column:
    if not isinstance(X, np.ndarray):
        return draft_column(X[name])
    finite = X[np.isfinite(X[:, place]), place]
    if not finite.size:
        return Ignored()
    low, high = float(finite.min()), float(finite.max())
    return Numeric(low, high if high > low else low + max(1.0, abs(low)))


def _ranges(ranges: Any, names: Sequence[str], numeric: Sequence[str]) -> dict[str, Numeric]:
    if ranges is None:
        return {}
    if isinstance(ranges, Mapping):
        return {name: _range(each, name) for name, each in _by_name(ranges, names, "feature_ranges").items()}
    try:
        given = np.asarray(ranges, dtype=np.float64)
    except (TypeError, ValueError):
        given = np.empty(0)
    if given.shape == (2,):
        given = np.broadcast_to(given, (len(numeric), 2))
    if given.shape != (len(numeric), 2):
        fail(
            f"Expected feature_ranges as (low, high) for all columns, one pair for each of the {len(numeric)} columns "
            f"of numbers, or {{name: (low, high)}}. Got {shown(ranges)}."
        )
    return {name: _range(each, name) for name, each in zip(numeric, given.tolist(), strict=True)}


def _range(limits: Any, name: str) -> Numeric:
    try:
        low, high = (float(each) for each in limits)
    except (TypeError, ValueError):
        fail(f"Expected (low, high) for column {name!r} in feature_ranges. Got {shown(limits)}.")
    if not (low < high and np.isfinite(high - low)):
        fail(f"Expected finite low < high for column {name!r} in feature_ranges. Got {shown(limits)}.")
    return Numeric(low, high)


def _by_name(given: Mapping[Any, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """Look columns up by name, or by place where a whole number is given."""
    found = {}
    for key, value in given.items():
        is_place = isinstance(key, (int, np.integer)) and 0 <= key < len(names)
        name = names[key] if is_place and key not in names else key
        if name not in names:
            fail(
                f"Expected columns of X in {what}. Got {shown(key)}; they are {', '.join(map(repr, names[:20]))}."
            )
        found[str(name)] = value
    return found
