"""What a cell of a table holds: text, a number, a day, or nothing; and columns of them as arrays."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import Any

import narwhals as nw
import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.readers import Source
from pdpsgd.errors import fail

EPOCH = datetime.date(1970, 1, 1)
MISSING_WORDS = {"na", "n/a", "nan", "null", "none", "?", "-"}  # what people write into a column of numbers


def text_of(value: Any) -> str:
    """Write a value as in a schema: text without blanks around it, whole numbers without a fraction.

    >>> text_of(" nurse"), text_of(3.0), text_of(True)
    ('nurse', '3', 'true')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def key_of(value: Any) -> str:
    """Return what a cell and a category are compared by: a number always written in the same way.

    Guarantee: depends on this cell alone. A reader takes a column for numbers or for text by looking at all rows, so
    that a cell comes as 1, as 1.0 or as "01": all of them are the same, whatever other people's cells hold.

    >>> key_of(" nurse"), key_of(3), key_of("03"), key_of("1.50"), key_of(True)
    ('nurse', '3', '3', '1.5', 'true')
    """
    text = text_of(value)
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return str(int(number)) if number.is_integer() else str(number)


def places_of(names: Sequence[str], what: str) -> dict[str, int]:
    """Number categories or classes by their keys; refuses two that are the same number."""
    places: dict[str, int] = {}
    for index, name in enumerate(names):
        if key_of(name) in places:
            fail(
                f"Expected {what} that differ as numbers, too. Got {names[places[key_of(name)]]!r} and {name!r}."
            )
        places[key_of(name)] = index
    return places


def cells(series: nw.Series[Any]) -> list[Any]:
    """Return the values of a column, None where there is none: no value, not a number, or blank text."""
    pairs = zip(series.to_list(), series.is_null().to_list(), strict=True)
    return [None if missing or _blank(value) else value for value, missing in pairs]


def _blank(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else isinstance(value, float) and math.isnan(value)


def as_floats(series: nw.Series[Any]) -> FloatArray:
    """Return a column of numbers as floats, NaN where a value is missing."""
    if str(series.dtype) in ("Int128", "UInt128") or series.dtype.is_decimal():
        return np.array([math.nan if v is None else float(v) for v in cells(series)])
    missing = series.is_null()
    filled = series.cast(nw.Float64)
    return np.asarray((filled.fill_null(math.nan) if missing.any() else filled).to_numpy(), dtype=np.float64)


def numbers_of(series: nw.Series[Any], source: Source) -> FloatArray:
    """Return a column as floats, NaN where a value is missing; text that is no number is refused with its row."""
    if series.dtype.is_numeric():
        return as_floats(series)
    values = [number_in(value) for value in cells(series)]
    bad = next((index for index, value in enumerate(values) if value is None), None)
    if bad is not None:
        fail(
            f"Expected a number in column {series.name!r} of {source.row(bad)}. Got {series[bad]!r}. "
            "Correct it, leave it empty, or declare the column categorical or ignored in the schema."
        )
    return np.array(values, dtype=np.float64)


def number_in(value: Any) -> float | None:
    """Return the number in a cell, NaN if it is missing, None if it is something else."""
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING_WORDS):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def day_in(value: Any) -> datetime.date | None:
    """Return the day in a cell: a date or time, or text as in 2024-05-31, with or without a time, or as in 31.5.2024.

    None if it is none. With slashes, nobody knows whether the day or the month comes first.

    >>> day_in("2024-05-31 12:30"), day_in("31.5.2024"), day_in("5/31/2024")
    (datetime.date(2024, 5, 31), datetime.date(2024, 5, 31), None)
    """
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    if not isinstance(value, str):
        return None
    dotted = re.fullmatch(r"\s*(\d{1,2})\.(\d{1,2})\.(\d{4})\s*", value)
    try:
        if dotted is not None:
            return datetime.date(int(dotted[3]), int(dotted[2]), int(dotted[1]))
        if not re.match(r"\s*\d{4}-\d{2}-\d{2}", value):
            return None
        return datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00")).date()
    except ValueError:
        return None


def days_of(series: nw.Series[Any], source: Source) -> FloatArray:
    """Return a column of dates as days since 1970, NaN where one is missing; what is no date is refused."""
    values = np.full(len(series), math.nan)
    for index, value in enumerate(cells(series)):
        if value is None or (isinstance(value, str) and value.strip().lower() in MISSING_WORDS):
            continue
        day = day_in(value)
        if day is None:
            fail(
                f"Expected a date, as in 2024-05-31, in column {series.name!r} of {source.row(index)}. Got "
                f"{series[index]!r}. Correct it, leave it empty, or declare the column categorical or ignored in the "
                "schema."
            )
        values[index] = (day - EPOCH).days
    return values
