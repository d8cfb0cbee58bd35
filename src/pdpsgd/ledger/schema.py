"""The tables of a ledger, and their version."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA_VERSION = 1
"""A ledger of another version is refused."""
CHUNK = 65_536
"""People in one row of `run_people`, two bytes each."""
NOT_THERE = 65_535
"""The level of somebody who is not on a run's list."""

metadata = MetaData()
_whole = BigInteger().with_variant(Integer, "sqlite")
_double = Float(53)

ledger = Table(
    "ledger",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("ids", String(8), nullable=False),
    Column("entries", _whole, nullable=False),
    Column("head", String(64), nullable=False),
)
people = Table(
    "people",
    metadata,
    Column("number", _whole, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
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
    Column("token", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("state", String(10), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("plan", Text, nullable=False),
    Column("people_digest", Text, nullable=False),
    Column("entry", _whole, nullable=False),
)
charges = Table(
    "charges",
    metadata,
    Column("run", _whole, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(10), nullable=False),
    Column("mu", _double, nullable=False),
    Column("b", _whole, nullable=False),
    Column("d", _whole, nullable=False),
    Column("e", _whole, nullable=False),
    Column("exposures", Text, nullable=False),
)
run_people = Table(
    "run_people",
    metadata,
    Column("run", _whole, primary_key=True, autoincrement=False),
    Column("chunk", Integer, primary_key=True, autoincrement=False),
    Column("levels", LargeBinary, nullable=False),
)
log = Table(
    "log",
    metadata,
    Column("entry", _whole, primary_key=True, autoincrement=False),
    Column("time", String(32), nullable=False),
    Column("what", String(16), nullable=False),
    Column("payload", Text, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)
