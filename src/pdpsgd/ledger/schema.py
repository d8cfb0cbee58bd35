"""The tables of a ledger, and their version."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Float, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

SCHEMA_VERSION = 1
"""A ledger of another version is refused."""
CHUNK = 65_536
"""People in one row of `run_people`, two bytes each."""
NOT_THERE = 65_535
"""The level of somebody who is not on a run's list."""


class _Checked(TypeDecorator[Any]):
    """A column whose values are of its type: in an edited SQLite file any column can hold anything."""

    impl: type[TypeEngine[Any]] = Text
    cache_ok = True
    accepted: tuple[type, ...] = (str,)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Raise for a value of another type, which this program did not write; `damage` finds and names it."""
        if value is not None and not isinstance(value, self.accepted):
            raise TypeError(f"Expected {self.impl} in a column of the ledger. Got a {type(value).__name__}.")
        return value


class _Words(_Checked):
    impl = String
    cache_ok = True


class _Whole(_Checked):
    impl = BigInteger
    cache_ok = True
    accepted = (int,)

    def load_dialect_impl(self, dialect: Any) -> Any:
        """Use SQLite's integers, which have 64 bits anyway."""
        return dialect.type_descriptor(Integer() if dialect.name == "sqlite" else BigInteger())


class _Small(_Checked):
    impl = Integer
    cache_ok = True
    accepted = (int,)


class _Double(_Checked):
    impl = Float
    cache_ok = True
    accepted = (float, int)


metadata = MetaData()
_whole, _small, _double, _text = _Whole(), _Small(), _Double(53), _Checked()

ledger = Table(
    "ledger",
    metadata,
    Column("id", _Words(32), primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("ids", _Words(8), nullable=False),
    Column("entries", _whole, nullable=False),
    Column("head", _Words(64), nullable=False),
)
people = Table(
    "people",
    metadata,
    Column("number", _whole, primary_key=True, autoincrement=False),
    Column("id", _text, nullable=False, unique=True),
    Column("kappa", _double, nullable=False),
    Column("set_aside", _double, nullable=False),
    Column("entry", _whole, nullable=False),
)
consents = Table(
    "consents",
    metadata,
    Column("person", _whole, primary_key=True, autoincrement=False),
    Column("entry", _whole, primary_key=True, autoincrement=False),
    Column("epsilon", _double, nullable=False),
    Column("delta", _double, nullable=False),
    Column("allowed_b", _whole, nullable=False),
    Column("allowed_d", _whole, nullable=False),
    Column("allowed_e", _whole, nullable=False),
    sqlite_with_rowid=False,
)
runs = Table(
    "runs",
    metadata,
    Column("number", _whole, primary_key=True, autoincrement=False),
    Column("token", _text, nullable=False, unique=True),
    Column("name", _text, nullable=False),
    Column("state", _Words(10), nullable=False),
    Column("attempt", _small, nullable=False),
    Column("plan", _text, nullable=False),
    Column("people_digest", _text, nullable=False),
    Column("entry", _whole, nullable=False),
)
charges = Table(
    "charges",
    metadata,
    Column("run", _whole, primary_key=True, autoincrement=False),
    Column("level", _small, primary_key=True, autoincrement=False),
    Column("kind", _Words(10), nullable=False),
    Column("mu", _double, nullable=False),
    Column("b", _whole, nullable=False),
    Column("d", _whole, nullable=False),
    Column("e", _whole, nullable=False),
    Column("exposures", _text, nullable=False),
)
run_people = Table(
    "run_people",
    metadata,
    Column("run", _whole, primary_key=True, autoincrement=False),
    Column("chunk", _small, primary_key=True, autoincrement=False),
    Column("levels", LargeBinary, nullable=False),
)
log = Table(
    "log",
    metadata,
    Column("entry", _whole, primary_key=True, autoincrement=False),
    Column("time", _Words(32), nullable=False),
    Column("what", _Words(16), nullable=False),
    Column("payload", _text, nullable=False),
    Column("previous", _Words(64), nullable=False),
    Column("hash", _Words(64), nullable=False),
)
