"""The chained log: each entry's hash covers the one before and a digest of all rows that it wrote."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from typing import Any

import numpy as np
from sqlalchemy import Connection, select, update

from pdpsgd._typing import IdArray
from pdpsgd.ledger import schema
from pdpsgd.ledger.database import LedgerUnavailable

PART = 65_536
GENESIS = "0" * 64


def next_entry(connection: Connection) -> int:
    """Read the number that the next entry of the log will have."""
    return int(connection.execute(select(schema.ledger.c.entries)).scalar_one()) + 1


def append(connection: Connection, what: str, payload: dict[str, Any]) -> str:
    """Add an entry, move the head, and return it; within a transaction that holds the lock."""
    row = connection.execute(select(schema.ledger.c.entries, schema.ledger.c.head)).one()
    _check_is_last(connection, row.entries, row.head)
    entry, time, text = row.entries + 1, now(), canonical(payload)
    head = entry_hash(entry, time, what, text, row.head)
    connection.execute(
        schema.log.insert().values(
            entry=entry, time=time, what=what, payload=text, previous=row.head, hash=head
        )
    )
    moved = connection.execute(
        update(schema.ledger).where(schema.ledger.c.entries == row.entries).values(entries=entry, head=head)
    )
    if moved.rowcount != 1:
        raise LedgerUnavailable(
            "Another process has written to the ledger at the same time; nothing was written."
        )
    return head


def _check_is_last(connection: Connection, entries: int, head: str) -> None:
    """Refuse to write behind an entry that is not the log's last: the log was cut off, or the head moved."""
    e = schema.log.c
    last = connection.execute(select(e.entry, e.hash).order_by(e.entry.desc()).limit(1)).one_or_none()
    if ((0, GENESIS) if last is None else (last.entry, last.hash)) != (entries, head):
        raise LedgerUnavailable(
            f"The ledger was damaged or edited; nothing was written. Expected entry {entries} as the last of its log, "
            f"with the head as its hash. Got {'none' if last is None else f'entry {last.entry}'}. Put back a copy, or "
            "see what pdpsgd ledger check finds."
        )


def entry_hash(entry: int, time: str, what: str, payload: str, previous: str) -> str:
    """Compute the hash of an entry."""
    return hashlib.sha256(canonical([int(entry), time, what, payload, previous]).encode()).hexdigest()


def digest(*columns: IdArray | list[Any]) -> str:
    """Compute a digest of rows, column by column: text, whole numbers, doubles, or bytes."""
    total = hashlib.sha256()
    for column in columns:
        values = np.asarray(column, dtype=str) if isinstance(column, list) else np.asarray(column)
        if values.dtype.kind in "iu":
            total.update(b"i" + values.astype("<i8").tobytes())
        elif values.dtype.kind == "f":
            total.update(b"f" + values.astype("<f8").tobytes())
        elif values.dtype.kind == "U":
            total.update(b"t" + np.char.str_len(values).astype("<i8").tobytes())
            for start in range(0, values.size, PART):
                total.update("".join(values[start : start + PART].tolist()).encode())
        else:
            for value in values.tolist():
                total.update(b"b%d:" % len(value) + value)
    return total.hexdigest()


def canonical(value: Any) -> str:
    """Write a value as JSON that has one form only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
