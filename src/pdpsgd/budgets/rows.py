"""Rows of a table that hold budgets: numbers, also as text, or words; and all that is wrong with them at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from pdpsgd._typing import BoolArray, IdArray
from pdpsgd.errors import check_not_negative, fail, shown

MOST_SHOWN = 8
NEVER = "0: this person's record is never used"

Words = Mapping[str, float]


def check_words(mapping: Words) -> dict[str, float]:
    """Check a mapping from words to the epsilon that each stands for."""
    if not isinstance(mapping, Mapping) or not mapping:
        fail(f"Expected epsilon_map as {{word: epsilon}}. Got {shown(mapping)}.")
    for word, epsilon in mapping.items():
        check_not_negative(**{f"epsilon of {word!r}": epsilon})
    return {str(word).strip(): float(epsilon) for word, epsilon in mapping.items()}


def check_rows(
    names: Sequence[str], words: Mapping[str, Words], allow_infinite: bool, frame: Any, source: Any
) -> None:
    """Refuse all rows of a table together that hold no budget; the first column holds epsilon.

    Args:
        names: The columns of epsilon and, if there is one, of delta.
        words: By column, the words in it and what they stand for.
        allow_infinite: Whether an infinite epsilon is accepted.
        frame: The table.
        source: Where it is from.

    Raises:
        PdpsgdError: Rows and their number, with what is in them.
    """
    for place, name in enumerate(names):
        series = frame[name]
        missing = series.is_null().to_numpy()
        known = words.get(name)
        if known is None:
            good = _are_budgets(series, 1.0 if place else math.inf, allow_infinite)
        else:
            good = np.array([_word(value) in known for value in series.to_list()], dtype=bool)
        bad = np.flatnonzero(missing | ~good).tolist()
        if not bad or (known is None and len(bad) == len(series) and not missing.any()):
            continue  # a column of another kind has a sentence of its own
        if len(bad) == 1 and missing[bad[0]]:
            hint = "" if place else " 0 means that this person's record is never used."
            fail(f"Expected a value in column {name!r} of {source.row(bad[0])}. It is missing.{hint}")
        if len(bad) == 1 and known is None:
            continue  # one has a sentence of its own
        expected = (
            f"one of the words {', '.join(map(repr, known))}"
            if known is not None
            else "0 <= delta < 1"
            if place
            else f"a number >= 0 ({NEVER})"
        )
        rows = (f"row {i + source.first_row}: {'missing' if missing[i] else shown(series[i])}" for i in bad)
        listed = ", ".join(row for row, _ in zip(rows, range(MOST_SHOWN), strict=False))
        more = f" and {len(bad) - MOST_SHOWN:,} more" if len(bad) > MOST_SHOWN else ""
        remedy = (
            " Who has not said what they allow has not agreed: leave their rows out." if missing.any() else ""
        )
        fail(
            f"Expected {expected} in column {name!r} of {source.name}. Got something else in {len(bad):,} of "
            f"{len(series):,} rows: {listed}{more}.{remedy}"
        )


def numbers_in(column: IdArray, words: Words | None) -> IdArray:
    """Replace words by what they stand for, and text that reads as numbers, all of it, by numbers."""
    if words is not None:
        return np.array([words[_word(value)] for value in column.tolist()], dtype=np.float64)
    if column.dtype.kind not in "OUT" or not all(isinstance(value, str) for value in column.tolist()):
        return column
    numbers = np.array([number_or_nan(value) for value in column.tolist()], dtype=np.float64)
    return column if np.isnan(numbers).any() else numbers


def words_remedy(column: IdArray) -> str:
    """Say how words are read, where a column has few of them and nothing else."""
    found = Counter(value.strip() for value in column.tolist() if isinstance(value, str))
    if not 1 <= len(found) <= MOST_SHOWN or any(not math.isnan(number_or_nan(word)) for word in found):
        return ""
    example = ",".join(f"{word}=EPSILON" for word in sorted(found))
    return f" Where words stand for budgets, say for which (--epsilon-map {example}; epsilon_map=)."


def number_or_nan(value: Any) -> float:
    """Return the number in a cell; NaN if there is none.

    >>> number_or_nan(" 0.5"), number_or_nan("1_0"), number_or_nan("low")
    (0.5, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal, str)):
        return math.nan
    if isinstance(value, str) and "_" in value:
        return math.nan  # a slip of the pen, which Python takes for ten
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _are_budgets(series: Any, most: float, allow_infinite: bool) -> BoolArray:
    """Tell of each row whether it holds a number from 0 up to, but without, `most`."""
    from pdpsgd.budgets.readers import as_array

    if series.dtype.is_numeric() and not series.dtype.is_decimal():
        values = np.asarray(as_array(series), dtype=np.float64)
    else:
        values = np.array([number_or_nan(value) for value in series.to_list()], dtype=np.float64)
    return ((values >= 0) & (values < most)) | (allow_infinite and most == math.inf) & (values == math.inf)
