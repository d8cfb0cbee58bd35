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

A column of kind "text" is free text, read by an encoder; it is then the only feature. One of kind "date" has days as
its range (low = 2020-01-01, high = 2029-12-31). A label that is a number has a public range instead of classes:
label_range = [0, 5000].

`draft_schema` (`data.drafting`) writes a first version from the data. Its figures come from the data and are therefore
not private: until a person has replaced them by public knowledge, or confirmed that they are public, `confirmed` stays
false.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdpsgd.budgets.files import number, parse_toml, read_text
from pdpsgd.data.cells import EPOCH, day_in, text_of
from pdpsgd.errors import check_one_of, fail, shown

KINDS = ("numeric", "date", "categorical", "text", "ignored")
TASKS = ("classification", "regression")

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
class Date:
    """Days, with or without a time, in a public range; they become numbers as `Numeric` ones do."""

    low: datetime.date
    high: datetime.date

    @property
    def in_days(self) -> Numeric:
        """The range as numbers: days since 1970."""
        return Numeric(*((each - EPOCH).days for each in (self.low, self.high)))


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


Column = Numeric | Date | Categorical | Text | Ignored


@dataclass(frozen=True)
class Schema:
    """The public declaration of a table: its label and classes, and what each other column may hold.

    A label that is a number has a `label_range` instead of classes. `confirmed` says that a person vouches for all of
    it being public knowledge.
    """

    label: str
    classes: tuple[str, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    id_column: str | None = None
    confirmed: bool = False
    label_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that training sees, in order."""
        return tuple(name for name, column in self.columns.items() if not isinstance(column, Ignored))

    @property
    def task(self) -> str:
        """What is predicted: a class ("classification") or a number ("regression")."""
        return "classification" if self.label_range is None else "regression"

    @property
    def outputs(self) -> int:
        """The number of outputs that a network for this table has: one for each class, or one number."""
        return len(self.classes) if self.label_range is None else 1

    @property
    def width(self) -> int:
        """The number of inputs that an encoded row has: one for a number, one for each category and one for "other"."""
        columns = (self.columns[name] for name in self.features)
        return sum(len(each.categories) + 1 if isinstance(each, Categorical) else 1 for each in columns)

    def to_toml(self) -> str:
        """Write the schema as a file, for people to read and edit; a draft says plainly that it is one."""
        head = [] if self.confirmed else [DRAFT_NOTICE]
        head.append(f"label = {_quoted(self.label)}")
        if self.label_range is None:
            head.append(f"classes = {_list(self.classes)}")
        else:
            head.append("label_range = [{!r}, {!r}]".format(*self.label_range))
        if self.id_column is not None:
            head.append(f"id_column = {_quoted(self.id_column)}")
        head.append(f"confirmed = {'true' if self.confirmed else 'false'}")
        return "\n".join([*head, *(_column_to_toml(name, c) for name, c in self.columns.items())]) + "\n"

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the schema") -> Schema:
        """Read a schema from TOML; errors name the place."""
        return cls.from_dict(parse_toml(text, source), source=source)

    def to_dict(self) -> dict[str, Any]:
        """Return what the file says, as plain values; days as text."""
        made = parse_toml(self.to_toml(), "the schema")
        for column in made.get("columns", {}).values():
            column |= {key: str(day) for key, day in column.items() if isinstance(day, datetime.date)}
        return made

    @classmethod
    def from_dict(cls, content: dict[str, Any], *, source: str = "the schema") -> Schema:
        """Make a schema from plain values, as in its file; errors name the place."""
        what = {"label_range": list} if "label_range" in content else {"classes": list}
        _check_keys(content, {"label": str, **what}, {"id_column": str, "confirmed": bool}, source)
        columns = content.get("columns", {})
        if not isinstance(columns, dict):
            fail(
                f"Expected a table [columns.NAME] for each column in {source}. Got columns = {shown(columns)}."
            )
        return cls(
            label=content["label"],
            classes=tuple(map(text_of, content.get("classes", ()))),
            columns={name: _column(name, values, source) for name, values in columns.items()},
            id_column=content.get("id_column"),
            confirmed=content.get("confirmed", False),
            label_range=tuple(content["label_range"]) if "label_range" in content else None,
        )

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file."""
        return cls.from_toml(read_text(path, "a schema (TOML)"), source=str(path))


def is_no_feature(name: str) -> bool:
    """Whether a column, by its name, holds a budget or an id: a draft ignores it, and somebody may say otherwise."""
    return bool(re.search(r"(^|[^a-z])(eps|epsilon|delta|id|uuid)([^a-z]|$)", name.lower()))


def _check(schema: Schema) -> None:
    if schema.label_range is not None:
        _check_label_range(schema)
    elif len(schema.classes) < 2:
        fail(f"Expected at least two classes of label {schema.label!r}. Got {list(schema.classes)}.")
    _check_distinct(f"classes of label {schema.label!r}", schema.classes)
    for name, column in schema.columns.items():
        if isinstance(column, Numeric):
            _check_range(f"column {name!r}", column.low, column.high)
        elif isinstance(column, Date):
            if not column.low < column.high:
                fail(f"Expected low < high for column {name!r}. Got {column.low}, {column.high}.")
        elif isinstance(column, Categorical):
            if not column.categories:
                fail(f"Expected at least one category for column {name!r}. Got none.")
            _check_distinct(f"categories of column {name!r}", column.categories)
    for role, taken in (("label", schema.label), ("id_column", schema.id_column)):
        if taken in schema.features:
            fail(f"Expected the {role} {taken!r} not to be a feature. It is declared in [columns], too.")


def _check_label_range(schema: Schema) -> None:
    if schema.classes:
        fail(f"Expected classes or a label_range of label {schema.label!r}, not both. Got both.")
    limits = schema.label_range or ()
    if len(limits) != 2:
        fail(f"Expected label_range = [low, high] of label {schema.label!r}. Got {shown(list(limits))}.")
    _check_range(f"label {schema.label!r}", *limits)


def _check_range(what: str, low: Any, high: Any) -> None:
    numbers = [number(f"{end} of {what}", value) for end, value in (("low", low), ("high", high))]
    if not (numbers[0] < numbers[1] and math.isfinite(numbers[1] - numbers[0])):
        fail(f"Expected finite low < high for {what}. Got low={low!r}, high={high!r}.")


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
    if values["kind"] == "date":
        _check_keys(
            values, {"kind": str, "low": (datetime.date, str), "high": (datetime.date, str)}, {}, place
        )
        return Date(*(_day(values[end], f"{end} in {place}") for end in ("low", "high")))
    if values["kind"] == "categorical":
        _check_keys(values, {"kind": str, "categories": list}, {}, place)
        return Categorical(tuple(map(text_of, values["categories"])))
    return Text() if values["kind"] == "text" else Ignored()


def _day(value: Any, place: str) -> datetime.date:
    found = day_in(value)
    if found is None:
        fail(f"Expected {place} to be a day, as in 2024-05-31. Got {shown(value)}.")
    return found


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
    elif isinstance(column, Date):
        lines = ['kind = "date"', f"low = {column.low.isoformat()}", f"high = {column.high.isoformat()}"]
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
