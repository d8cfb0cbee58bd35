"""What is wrong with a ledger's tables, looked for after using them has failed: one sentence, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Column, Connection, Float, Integer, LargeBinary, func, inspect, select

from pdpsgd.errors import shown
from pdpsgd.ledger import schema
from pdpsgd.ledger.checking import check

SQLITE_TYPES: list[tuple[type[Any], tuple[str, ...], str]] = [
    (Integer, ("integer",), "a whole number"),
    (Float, ("real", "integer"), "a number"),
    (LargeBinary, ("blob",), "bytes"),
    (object, ("text",), "text"),
]
"""What SQLite says of the values of a sound column; it would let any column hold anything."""


def find_damage(connection: Connection) -> str | None:
    """Describe the first thing in a ledger that this program did not write; None if all is as it was written."""
    try:
        return next(_damage(connection), None)
    except Exception as error:  # whatever damaged rows may lead to
        return f"Its rows cannot be read ({type(error).__name__}: {shown(str(error))})"


def _damage(connection: Connection) -> Iterator[str]:
    found = inspect(connection)
    for table in schema.metadata.sorted_tables:
        if not found.has_table(table.name):
            yield f"Expected a table {table.name!r}. There is none"
        names = {column["name"] for column in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in names:
                yield f"Expected a column {column.name!r} in the table {table.name!r}. There is none"
    if connection.dialect.name == "sqlite":
        for table in schema.metadata.sorted_tables:
            for column in table.columns:
                yield from _of_another_type(connection, column)
    rows = connection.execute(select(func.count()).select_from(schema.ledger)).scalar_one()
    if rows != 1:
        yield f"Expected one row in the table 'ledger'. Got {rows}"
    for problem in check(connection, head=None, certificates=False).problems:
        yield problem.removesuffix(".")


def _of_another_type(connection: Connection, column: Column[Any]) -> Iterator[str]:
    """Values of another type than their column's."""
    plain = getattr(column.type, "impl", column.type)
    types, words = next((types, words) for kind, types, words in SQLITE_TYPES if isinstance(plain, kind))
    wrong = select(column, func.typeof(column)).where(func.typeof(column).not_in(types)).limit(1)
    text = str(wrong.compile(connection.engine, compile_kwargs={"literal_binds": True}))
    row = connection.exec_driver_sql(text).first()  # as it is: not converted to the column's type
    if row is not None:
        yield f"Expected {words} in the column {column.name!r} of {column.table.name!r}. Got {shown(row[0])} ({row[1]})"
