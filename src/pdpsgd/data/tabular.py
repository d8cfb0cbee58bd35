"""Own data without writing Python: a table and its public schema in, tensors out.

The encoding depends on the schema and on one row at a time, never on other rows, so one person's record
cannot change how another's is seen. A numeric column becomes one feature, its range mapped to [-1, 1]; a
value outside the range counts as its nearer end, a missing one as its middle (0). So does a date, by its day. A
categorical column becomes one feature of 0 or 1 for each category and one for "other", where unknown and missing values
go. A label must be one of the classes, or a number, which its range maps to [-1, 1] as well.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.readers import Frame, Source, as_array, column_names, open_table
from pdpsgd.data.cells import cells, days_of, key_of, numbers_of, places_of
from pdpsgd.data.drafting import MOST_CATEGORIES, draft_schema
from pdpsgd.data.remarks import Remarks
from pdpsgd.data.schema import (
    NOT_PRIVATE,
    Categorical,
    Column,
    Date,
    Ignored,
    Numeric,
    Schema,
    Text,
    is_no_feature,
)
from pdpsgd.errors import fail, shown
from pdpsgd.sampling.record_choice import HOW_TO_HAVE_MANY

if TYPE_CHECKING:
    import torch

__all__ = ["Categorical", "Date", "Ignored", "Numeric", "Schema", "TabularData", "draft_schema", "encode"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TabularData:
    """An encoded table; inputs, targets and ids are aligned by row.

    `ids` are the values of the id column, or the rows' positions where there is none (`named` is false). `notes` are
    what a reader of any result must be told.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: npt.NDArray[Any]
    classes: tuple[str, ...]
    feature_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    named: bool = True
    mapped: bool = False
    """Whether the tensors lie in a file (`data.lazy_table`)."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.inputs.shape[1:])


def encode(
    table: Any,
    schema: Schema,
    *,
    leave_out: Collection[str] = (),
    people: npt.ArrayLike | None = None,
    repeated_ids: bool = False,
) -> TabularData:
    """Encode a pandas or polars frame, or a CSV or Parquet file, by a schema.

    `leave_out` names columns that must not be features (budgets). With `people`, the ids on the public list,
    a record of anybody else is refused; somebody on the list without a record is legal. With `repeated_ids` a person
    may have several rows.

    Guarantee: each row of the result is a function of the schema and of that row alone.
    """
    import torch

    frame, source = open_table(table)
    check_left_out(schema, leave_out)
    return TabularData(
        inputs=torch.from_numpy(encode_features(frame, schema, source)),
        targets=torch.from_numpy(encode_label(frame, schema, source)),
        ids=_ids(frame, schema, source, people, repeated_ids=repeated_ids),
        classes=schema.classes,
        feature_names=feature_names(schema),
        named=schema.id_column is not None,
        notes=(*([] if source.remark is None else [source.remark]), *notes_on(frame, schema, leave_out)),
    )


def encode_features(frame: Frame, schema: Schema, source: Source, remarks: Remarks | None = None) -> Floats:
    """Encode the features of a table, which needs no label and no ids; `remarks` counts what is unusual in it."""
    missing = [name for name in schema.features if name not in frame.columns]
    if len(missing) == 1:
        _require(frame, missing[0], source)
    if missing:
        fail(
            f"Expected the columns {', '.join(map(repr, missing))}, as the schema says, in {source.name}. Its columns "
            f"are {column_names(frame)}."
        )
    parts = [encode_column(frame, name, schema.columns[name], source, remarks) for name in schema.features]
    if not parts:
        fail("Expected at least one numeric or categorical column in the schema. Got none.")
    return np.concatenate(parts, axis=1)


def encode_column(
    frame: Frame, name: str, column: Column, source: Source, remarks: Remarks | None = None
) -> Floats:
    """Encode one column by its declaration, each row by itself."""
    if isinstance(column, (Numeric, Date)):
        read, limits = (days_of, column.in_days) if isinstance(column, Date) else (numbers_of, column)
        numbers = read(frame[name], source)
        if remarks is not None:
            remarks.see_numbers(name, numbers, limits)
        return encode_numbers(numbers, limits)
    if isinstance(column, Text):  # the numbers of texts, until an encoder has read them
        return np.arange(len(frame), dtype=np.float32)[:, None]
    assert isinstance(column, Categorical)
    values = cells(frame[name])
    if remarks is not None:
        remarks.see_categories(name, values, column)
    return _encode_categories(values, column)


def encode_numbers(values: FloatArray, column: Numeric) -> Floats:
    """Map the range of a column to [-1, 1], missing values to its middle; one feature."""
    low, high = float(column.low), float(column.high)
    scaled = (np.clip(values, low, high) - low) * (2 / (high - low)) - 1
    return np.where(np.isnan(scaled), 0, np.clip(scaled, -1, 1)).astype(np.float32)[:, None]


def _encode_categories(values: list[Any], column: Categorical) -> Floats:
    place = places_of(column.categories, "categories")
    other = len(place)
    indices = [other if value is None else place.get(key_of(value), other) for value in values]
    encoded = np.zeros((len(values), other + 1), dtype=np.float32)
    encoded[np.arange(len(values)), indices] = 1
    return encoded


def encode_label(
    frame: Frame, schema: Schema, source: Source
) -> npt.NDArray[np.int64] | npt.NDArray[np.float32]:
    """Encode the label: the number of its class, or a number from -1 to 1 where it has a range."""
    _require(frame, schema.label, source)
    if schema.label_range is not None:
        numbers = numbers_of(frame[schema.label], source)
        missing = np.flatnonzero(np.isnan(numbers))
        if missing.size:
            fail(
                f"Expected a number in column {schema.label!r} of {source.row(int(missing[0]))}, to learn from. It is "
                "missing. A person whose record is left out may stay on the list."
            )
        return encode_numbers(numbers, Numeric(*schema.label_range))[:, 0]
    place = places_of(schema.classes, "classes")
    targets = np.empty(len(frame), dtype=np.int64)
    for index, value in enumerate(cells(frame[schema.label])):
        target = None if value is None else place.get(key_of(value))
        if target is None:
            got = "It is missing." if value is None else f"Got {value!r}."
            fail(
                f"Expected one of the classes {', '.join(map(repr, schema.classes))} in column "
                f"{schema.label!r} of {source.row(index)}. {got} "
                f"A person whose record is left out may stay on the list."
            )
        targets[index] = target
    return targets


def check_left_out(schema: Schema, leave_out: Collection[str]) -> None:
    """Refuse a schema in which a column of budgets is a feature."""
    for name in leave_out:
        if name in schema.features:
            fail(
                f"Expected the schema to ignore column {name!r}, which holds budgets. It is a feature there."
            )


def feature_names(schema: Schema) -> tuple[str, ...]:
    """Name the inputs of an encoded row, in order."""
    return tuple(label for name in schema.features for label in _names(name, schema.columns[name]))


def _ids(
    frame: Frame, schema: Schema, source: Source, people: npt.ArrayLike | None, *, repeated_ids: bool
) -> npt.NDArray[Any]:
    ids = np.arange(len(frame)) if schema.id_column is None else raw_ids(frame, schema, source)
    check_ids(ids, source, people=people, repeated_ids=repeated_ids)
    return ids


def raw_ids(frame: Frame, schema: Schema, source: Source) -> npt.NDArray[Any]:
    """Return the id column; a missing id, or something that nobody can be known by, is refused with its row."""
    assert schema.id_column is not None
    _require(frame, schema.id_column, source)
    series = frame[schema.id_column]
    if series.dtype.is_integer() and not series.is_null().any():
        return as_array(series)
    for index, person in enumerate(cells(series)):
        if person is None:
            fail(f"Expected an id in column {schema.id_column!r} of {source.row(index)}. It is missing.")
        if not isinstance(person, Hashable):
            fail(
                f"Expected a whole number or text in column {schema.id_column!r} of {source.row(index)}, to know "
                f"the person by. Got {shown(person)}."
            )
    return as_array(series)


def check_ids(
    ids: npt.NDArray[Any], source: Source, *, people: npt.ArrayLike | None, repeated_ids: bool
) -> None:
    """Refuse ids that occur twice, unless people may have several rows, and people who are not on a list.

    Args:
        ids: The person of each row.
        source: Where the rows are from.
        people: The list, if there is one.
        repeated_ids: Whether a person may have several rows.

    Raises:
        PdpsgdError: With the rows.
    """
    if people is None and (repeated_ids or _all_different(ids)):
        return
    listed = None if people is None else set(np.asarray(people).tolist())
    first_row: dict[Any, int] = {}
    for index, person in enumerate(ids.tolist()):
        if person in first_row and not repeated_ids:
            fail(
                f"Expected one record per person. Got {person!r} in {source.row(index)} and in "
                f"row {source.first_row + first_row[person]}. {HOW_TO_HAVE_MANY}"
            )
        if listed is not None and person not in listed:
            fail(f"Expected every record's person to be on the list. Got {person!r} in {source.row(index)}.")
        first_row.setdefault(person, index)


def _all_different(ids: npt.NDArray[Any]) -> bool:
    """Tell whether millions of whole numbers are all different, without an object for each."""
    return ids.dtype.kind in "iu" and np.unique(ids).size == ids.size


def _require(frame: Frame, name: str, source: Source) -> None:
    if name not in frame.columns:
        known = column_names(frame)
        fail(f"Expected a column {name!r}, as the schema says, in {source.name}. Its columns are {known}.")


def _names(name: str, column: Column) -> tuple[str, ...]:
    if isinstance(column, Categorical):
        return (*(f"{name}={category}" for category in column.categories), f"{name}=(other)")
    return (name,)


def notes_on(frame: Frame, schema: Schema, leave_out: Collection[str]) -> tuple[str, ...]:
    """Say what a reader of any result must be told: what was read from the data, and which columns are left out."""
    known = {schema.label, schema.id_column, *schema.columns, *leave_out}
    unknown = [name for name in frame.columns if name not in known]
    notes = [] if schema.confirmed else [NOT_PRIVATE, *left_out(schema, leave_out)]
    if unknown:
        notes.append(
            f"Columns that the schema does not declare are left out: {', '.join(map(repr, unknown))}."
        )
    return tuple(notes)


def left_out(schema: Schema, budgets: Collection[str] = ()) -> tuple[str, ...]:
    """Say which columns a draft leaves out, and why; columns of budgets need no word."""
    ignored = [name for name, column in schema.columns.items() if isinstance(column, Ignored)]
    guessed = [name for name in ignored if name not in budgets and is_no_feature(name)]
    notes = []
    if guessed:
        names = ", ".join(map(repr, guessed))
        notes.append(
            f"Columns named like budgets or ids are left out, unless a schema says otherwise: {names}."
        )
    others = [name for name in ignored if name not in budgets and name not in guessed]
    if others and not any(isinstance(each, Text) for each in schema.columns.values()):
        notes.append(
            f"Columns of free text, of more than {MOST_CATEGORIES} categories or without values are left out, unless a "
            f"schema says otherwise: {', '.join(map(repr, others))}."
        )
    return tuple(notes)
