"""What a table's columns may hold, declared in public: ranges, categories, classes.

Training must not learn ranges or categories from the private data, so a person states them, in a TOML file:

    label = "income"
    classes = ["low", "high"]
    id_column = "person"
    confirmed = true

    [columns.age]
    kind = "numeric"
    low = 0
    high = 120

    [columns.job]
    kind = "categorical"
    categories = ["nurse", "teacher"]

    [columns.remarks]
    kind = "ignored"

A column of kind "text" is free text, read by an encoder; it is then the only feature.

`draft_schema` writes a first version from the data. Its figures come from the data and are therefore not
private: until a person has replaced them by public knowledge, or confirmed that they are public, `confirmed`
stays false.
"""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narwhals as nw

from pdpsgd.budgets.files import number, parse_toml, read_text
from pdpsgd.budgets.readers import column_names, open_table
from pdpsgd.errors import check_one_of, fail, shown

KINDS = ("numeric", "categorical", "text", "ignored")
MOST_CATEGORIES = 50  # a text column with more distinct values is drafted as ignored: free text, or an id

NOT_PRIVATE = (
    "The ranges, categories and classes of the schema were read from the data and nobody has confirmed them "
    "as public knowledge: what they reveal is NOT covered by the privacy promise."
)
DRAFT_NOTICE = """\
# DRAFT. The ranges, categories and classes below were READ FROM THE DATA.
# They are therefore NOT PRIVATE: one person's record can show in a largest value or in a rare category.
# Replace each of them by what is publicly known (ages lie between 0 and 120, whoever is in the data), or
# confirm that it is public. Then set `confirmed = true`. Until then, every result says that its promise does
# not cover them.
"""


@dataclass(frozen=True)
class Numeric:
    """Numbers in a public range; values outside it count as its nearer end, missing ones as its middle."""

    low: float
    high: float


@dataclass(frozen=True)
class Categorical:
    """One of publicly known categories; anything else, missing values too, counts as "other"."""

    categories: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """Free text, which a frozen encoder with public weights turns into numbers."""


@dataclass(frozen=True)
class Ignored:
    """A column that training never sees."""


Column = Numeric | Categorical | Text | Ignored


@dataclass(frozen=True)
class Schema:
    """The public declaration of a table: its label and classes, and what each other column may hold.

    `confirmed` says that a person vouches for all of it being public knowledge.
    """

    label: str
    classes: tuple[str, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)
    id_column: str | None = None
    confirmed: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that training sees, in order."""
        return tuple(name for name, column in self.columns.items() if not isinstance(column, Ignored))

    @property
    def width(self) -> int:
        """The number of inputs that an encoded row has: one for a number, one for each category and one for "other"."""
        columns = (self.columns[name] for name in self.features)
        return sum(len(each.categories) + 1 if isinstance(each, Categorical) else 1 for each in columns)

    def to_toml(self) -> str:
        """Write the schema as a file, for people to read and edit; a draft says plainly that it is one."""
        head = [] if self.confirmed else [DRAFT_NOTICE]
        head += [f"label = {_quoted(self.label)}", f"classes = {_list(self.classes)}"]
        if self.id_column is not None:
            head.append(f"id_column = {_quoted(self.id_column)}")
        head.append(f"confirmed = {'true' if self.confirmed else 'false'}")
        return "\n".join([*head, *(_column_to_toml(name, c) for name, c in self.columns.items())]) + "\n"

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the schema") -> Schema:
        """Read a schema from TOML; errors name the place."""
        return cls.from_dict(parse_toml(text, source), source=source)

    def to_dict(self) -> dict[str, Any]:
        """Return what the file says, as plain values."""
        return parse_toml(self.to_toml(), "the schema")

    @classmethod
    def from_dict(cls, content: dict[str, Any], *, source: str = "the schema") -> Schema:
        """Make a schema from plain values, as in its file; errors name the place."""
        _check_keys(content, {"label": str, "classes": list}, {"id_column": str, "confirmed": bool}, source)
        columns = content.get("columns", {})
        if not isinstance(columns, dict):
            fail(
                f"Expected a table [columns.NAME] for each column in {source}. Got columns = {shown(columns)}."
            )
        return cls(
            label=content["label"],
            classes=tuple(map(text_of, content["classes"])),
            columns={name: _column(name, values, source) for name, values in columns.items()},
            id_column=content.get("id_column"),
            confirmed=content.get("confirmed", False),
        )

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file."""
        return cls.from_toml(read_text(path, "a schema (TOML)"), source=str(path))


def draft_schema(
    table: Any,
    *,
    label: str,
    id_column: str | None = None,
    leave_out: Iterable[str] = (),
    text: str | None = None,
) -> Schema:
    """Draft a schema from the data for a person to correct; it comes unconfirmed.

    Not private: what it says is computed from the data. `leave_out` names columns that are not features, such
    as those with budgets. Columns whose names speak of another epsilon, delta or id are ignored, too.
    `text` names a column of free text; all others are ignored then.
    """
    frame, source = open_table(table)
    not_features = {name for name in (id_column, *leave_out) if name is not None}
    for name in (label, *not_features, *([] if text is None else [text])):
        if name not in frame.columns:
            fail(f"Expected a column {name!r} in {source.name}. Its columns are {column_names(frame)}.")
    classes = _distinct(frame[label])
    if len(classes) > MOST_CATEGORIES:
        numeric = frame[label].dtype.is_numeric()
        remedy = (
            "To predict a number, add a column that says in which of a few ranges it lies, and predict that."
            if numeric
            else "Is it the column to be predicted? Then merge rare values, or name its classes in a schema."
        )
        fail(
            f"Expected a label with at most {MOST_CATEGORIES} classes in column {label!r} of {source.name}. "
            f"Got {len(classes):,} distinct values. {remedy}"
        )
    if text is not None:
        kinds: dict[str, Column] = {
            name: Ignored() for name in frame.columns if name not in (label, id_column)
        }
        return Schema(label=label, classes=classes, columns={**kinds, text: Text()}, id_column=id_column)
    columns = {
        name: Ignored() if name in not_features or is_no_feature(name) else _draft_column(frame[name])
        for name in frame.columns
        if name not in (label, id_column)
    }
    return Schema(label=label, classes=classes, columns=columns, id_column=id_column)


def is_no_feature(name: str) -> bool:
    """Whether a column, by its name, holds a budget or an id: a draft ignores it, and somebody may say otherwise."""
    return bool(re.search(r"(^|[^a-z])(eps|epsilon|delta|id|uuid)([^a-z]|$)", name.lower()))


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


def cells(series: nw.Series[Any]) -> list[Any]:
    """Return the values of a column, None where there is none: no value, not a number, or blank text."""
    pairs = zip(series.to_list(), series.is_null().to_list(), strict=True)
    return [None if missing or _blank(value) else value for value, missing in pairs]


def _blank(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else isinstance(value, float) and math.isnan(value)


def _draft_column(series: nw.Series[Any]) -> Column:
    if series.dtype.is_numeric():
        finite = [value for value in cells(series) if value is not None and math.isfinite(value)]
        if not finite:
            return Ignored()
        low, high = _rounded(min(finite), decimal.ROUND_FLOOR), _rounded(max(finite), decimal.ROUND_CEILING)
        return Numeric(low, high if high > low else low + max(1, abs(low)))
    if not all(value is None or isinstance(value, (str, bool)) for value in cells(series.unique())):
        return Ignored()  # dates, lists and the like
    categories = _distinct(series)
    return Categorical(categories) if 0 < len(categories) <= MOST_CATEGORIES else Ignored()


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


def _check(schema: Schema) -> None:
    if len(schema.classes) < 2:
        fail(f"Expected at least two classes of label {schema.label!r}. Got {list(schema.classes)}.")
    _check_distinct(f"classes of label {schema.label!r}", schema.classes)
    for name, column in schema.columns.items():
        if isinstance(column, Numeric):
            low, high = (number(f"{end} of column {name!r}", getattr(column, end)) for end in ("low", "high"))
            if not (low < high and math.isfinite(high - low)):
                fail(
                    f"Expected finite low < high for column {name!r}. "
                    f"Got low={column.low!r}, high={column.high!r}."
                )
        elif isinstance(column, Categorical):
            if not column.categories:
                fail(f"Expected at least one category for column {name!r}. Got none.")
            _check_distinct(f"categories of column {name!r}", column.categories)
    for role, taken in (("label", schema.label), ("id_column", schema.id_column)):
        if taken in schema.features:
            fail(f"Expected the {role} {taken!r} not to be a feature. It is declared in [columns], too.")


def _check_distinct(what: str, values: tuple[str, ...]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            fail(f"Expected distinct {what}. Got {value!r} twice.")
        seen.add(value)


def _column(name: str, values: Any, source: str) -> Column:
    place = f"[columns.{name}] of {source}"
    if not isinstance(values, dict):
        fail(f"Expected a table with a kind in {place}. Got {shown(values)}.")
    _check_keys(values, {"kind": str}, {"low": object, "high": object, "categories": list}, place)
    check_one_of(KINDS, **{f"kind in {place}": values["kind"]})
    if values["kind"] == "numeric":
        _check_keys(values, {"kind": str, "low": (int, float), "high": (int, float)}, {}, place)
        return Numeric(values["low"], values["high"])
    if values["kind"] == "categorical":
        _check_keys(values, {"kind": str, "categories": list}, {}, place)
        return Categorical(tuple(map(text_of, values["categories"])))
    return Text() if values["kind"] == "text" else Ignored()


def _check_keys(content: dict[str, Any], needed: dict[str, Any], allowed: dict[str, Any], place: str) -> None:
    accepted = {**needed, **allowed}
    for key in needed:
        if key not in content:
            fail(f"Expected {key!r} in {place}. Its entries are {', '.join(map(repr, content)) or 'none'}.")
    for key, value in content.items():
        if key == "columns" and key not in accepted:
            continue
        if key not in accepted:
            fail(f"Expected only {', '.join(map(repr, accepted))} in {place}. Got {key!r}.")
        if not isinstance(value, accepted[key]) or (isinstance(value, bool) and accepted[key] is not bool):
            fail(f"Expected another type of value for {key!r} in {place}. Got {shown(value)}.")


def _column_to_toml(name: str, column: Column) -> str:
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)
    if isinstance(column, Numeric):
        lines = ['kind = "numeric"', f"low = {column.low!r}", f"high = {column.high!r}"]
    elif isinstance(column, Categorical):
        lines = ['kind = "categorical"', f"categories = {_list(column.categories)}"]
    else:
        lines = [f'kind = "{"text" if isinstance(column, Text) else "ignored"}"']
    return "\n".join([f"\n[columns.{key}]", *lines])


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str) -> str:
    """Return a TOML basic string; JSON escapes all that TOML wants escaped, but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
