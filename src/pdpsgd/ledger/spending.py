"""What everybody has spent: summed from the charges each time, never stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from sqlalchemy import Connection, select

from pdpsgd._typing import IntArray
from pdpsgd.errors import fail
from pdpsgd.ledger import schema
from pdpsgd.ledger.amounts import LARGEST, Amounts


def spent(
    connection: Connection, people: int, states: Iterable[str], *, without: int | None = None
) -> Amounts:
    """Sum the charges of all runs in these states, for everybody.

    Args:
        connection: within a transaction.
        people: how many people the ledger has.
        states: whose runs count.
        without: a run that is left out.

    Returns:
        The sums, exactly.
    """
    query = select(schema.runs.c.number).where(schema.runs.c.state.in_(list(states)))
    numbers = [row.number for row in connection.execute(query) if row.number != without]
    total = Amounts.zeros(people)
    largest = 0
    for run in numbers:
        table = charge_table(connection, run)
        largest += int(max(column.max(initial=0) for column in (table.b, table.d, table.e)))
        if largest >= (1 << 63) - LARGEST:  # the next charge is added to this
            fail(
                "The sum of all charges no longer fits into the ledger's integers: begin a new ledger for new people."
            )
        add(connection, run, table, total)
    return total


def charge_table(connection: Connection, run: int) -> Amounts:
    """Read a run's charges by level; whoever is not there is charged nothing."""
    table = Amounts.zeros(schema.NOT_THERE + 1)
    for row in connection.execute(select(schema.charges).where(schema.charges.c.run == run)):
        table.b[row.level], table.d[row.level], table.e[row.level] = row.b, row.d, row.e
    return table


def add(connection: Connection, run: int, table: Amounts, total: Amounts) -> None:
    """Add a run's charges to everybody's total."""
    query = select(schema.run_people.c.chunk, schema.run_people.c.levels).where(
        schema.run_people.c.run == run
    )
    for row in connection.execute(query):
        first = row.chunk * schema.CHUNK
        levels = np.frombuffer(row.levels, dtype="<u2")[: max(len(total) - first, 0)]
        part = slice(first, first + levels.size)
        total.b[part] += table.b[levels]
        total.d[part] += table.d[levels]
        total.e[part] += table.e[levels]


def levels_of_run(connection: Connection, run: int, people: int) -> IntArray:
    """Read everybody's level in a run; NOT_THERE for who is not on its list."""
    everybody = np.full(people, schema.NOT_THERE, dtype=np.int64)
    query = select(schema.run_people.c.chunk, schema.run_people.c.levels).where(
        schema.run_people.c.run == run
    )
    for row in connection.execute(query):
        first = row.chunk * schema.CHUNK
        levels = np.frombuffer(row.levels, dtype="<u2")[: max(people - first, 0)]
        everybody[first : first + levels.size] = levels
    return everybody


def chunks(levels: IntArray) -> list[bytes]:
    """Pack everybody's level, two bytes each, in chunks."""
    packed = levels.astype("<u2")
    return [packed[start : start + schema.CHUNK].tobytes() for start in range(0, packed.size, schema.CHUNK)]
