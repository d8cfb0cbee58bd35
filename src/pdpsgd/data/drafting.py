"""A first schema of a table, read from its data for a person to correct; it comes unconfirmed."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterable
from typing import Any

import narwhals as nw
import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.readers import Source, column_names, open_table
from pdpsgd.data.cells import as_floats, cells, day_in, number_in, numbers_of, text_of
from pdpsgd.data.schema import TASKS, Categorical, Column, Date, Ignored, Numeric, Schema, Text, is_no_feature
from pdpsgd.errors import check_one_of, fail, is_it

MOST_CATEGORIES = 50  # a text column with more distinct values is drafted as ignored: free text, or an id
MOST_NUMERIC_CLASSES = 20  # a label of numbers with more distinct values is asked about: classes, or numbers?


def draft_schema(
    table: Any,
    *,
    label: str,
    id_column: str | None = None,
    leave_out: Iterable[str] = (),
    text: str | None = None,
    task: str | None = None,
) -> Schema:
    """Draft a schema from the data for a person to correct; it comes unconfirmed.

    Not private: what it says is computed from the data. Columns whose names speak of another epsilon, delta or id are
    ignored.

    Args:
        table: A pandas or polars frame, or a CSV or Parquet file.
        label: The column to be predicted.
        id_column: The column with person ids.
        leave_out: Columns that are not features, such as those with budgets.
        text: A column of free text; all others are ignored then.
        task: "classification" or "regression". By default a label is classes, unless it is many different numbers:
            then it has to be said.

    Returns:
        The draft.

    Raises:
        PdpsgdError: A column is missing, or the label has too many classes, or is no number where one is expected.
    """
    frame, source = open_table(table)
    not_features = {name for name in (id_column, *leave_out) if name is not None}
    for name in (label, *not_features, *([] if text is None else [text])):
        if name not in frame.columns:
            hint = is_it(name, frame.columns)
            fail(f"Expected a column {name!r} in {source.name}. Its columns are {column_names(frame)}.{hint}")
    predicted = _draft_label(frame[label], source, task)
    if text is not None:
        kinds: dict[str, Column] = {
            name: Ignored() for name in frame.columns if name not in (label, id_column)
        }
        return Schema(label=label, columns={**kinds, text: Text()}, id_column=id_column, **predicted)
    columns = {
        name: Ignored() if name in not_features or is_no_feature(name) else draft_column(frame[name])
        for name in frame.columns
        if name not in (label, id_column)
    }
    return Schema(label=label, columns=columns, id_column=id_column, **predicted)


def _draft_label(series: nw.Series[Any], source: Source, task: str | None) -> dict[str, Any]:
    """Read the classes of a label, or its range, from the data; ask where it could be either."""
    if task is not None:
        check_one_of(TASKS, task=task)
    label = series.name
    if task == "regression":
        drafted = _draft_numbers(numbers_of(series, source))
        if drafted is None:
            fail(f"Expected numbers in column {label!r} of {source.name}, to predict them. Got none.")
        return {"label_range": (drafted.low, drafted.high)}
    classes = _distinct(series)
    are_numbers = all(_number_first(each)[0] == 0 for each in classes)
    if task is None and are_numbers and len(classes) > MOST_NUMERIC_CLASSES:
        merge = (
            ""
            if len(classes) <= MOST_CATEGORIES
            else f", on a column of at most {MOST_CATEGORIES} of them, such as ranges that the numbers lie in"
        )
        fail(
            f"Expected to know what column {label!r} of {source.name} is: it has {len(classes):,} distinct numbers. "
            "To predict a number, say --task regression (task='regression'). To predict classes, say --task "
            f"classification (task='classification'){merge}."
        )
    if len(classes) > MOST_CATEGORIES:
        fail(
            f"Expected a label with at most {MOST_CATEGORIES} classes in column {label!r} of {source.name}. Got "
            f"{len(classes):,} distinct values. Is it the column to be predicted? Then merge rare values, or name its "
            "classes in a schema."
        )
    return {"classes": classes}


def draft_column(series: nw.Series[Any]) -> Column:
    """Read what a column may hold from its values: not private."""
    if series.dtype.is_numeric():
        return _draft_numbers(as_floats(series)) or Ignored()
    different = [value for value in cells(series.unique()) if value is not None]
    if all(isinstance(value, str) for value in different):
        numbers = [number_in(value) for value in different]
        codes = any(re.match(r"\s*0\d", value) for value in different)  # 00501 is no number
        if None not in numbers and not codes:
            return _draft_numbers(np.array(numbers, dtype=np.float64)) or Ignored()
    days = [day for day in map(day_in, different) if day is not None]
    if days and len(days) == len(different):
        return _draft_dates(days)
    if not all(isinstance(value, (str, bool)) for value in different):
        return Ignored()  # times, lists and the like
    categories = _distinct(series)
    return Categorical(categories) if 0 < len(categories) <= MOST_CATEGORIES else Ignored()


def _draft_numbers(values: FloatArray) -> Numeric | None:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low = _rounded(float(finite.min()), decimal.ROUND_FLOOR)
    high = _rounded(float(finite.max()), decimal.ROUND_CEILING)
    return Numeric(low, high if high > low else low + max(1, abs(low)))


def _draft_dates(days: list[datetime.date]) -> Date:
    """Take whole years, from the first to the last."""
    return Date(datetime.date(min(days).year, 1, 1), datetime.date(max(days).year, 12, 31))


def _distinct(series: nw.Series[Any]) -> tuple[str, ...]:
    texts = {text_of(value) for value in cells(series.unique()) if value is not None}
    return tuple(sorted(texts, key=_number_first))


def _number_first(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)


def _rounded(value: float, rounding: str) -> float:
    """Round to two significant digits, away from the data: for a person to start from, not to hide anything."""
    rounded = float(decimal.Context(prec=2, rounding=rounding).create_decimal(repr(float(value))))
    return int(rounded) if rounded.is_integer() else rounded
