"""Damage to ledgers: rows, tables and pages that are not what they were; and what a ledger has in it."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path
from typing import Any

PAGE = 4096
TABLES = ("ledger", "people", "consents", "runs", "charges", "run_people", "log")
CELLS: list[Any] = [
    "", "x", "p1", "null", "[]", "{}", '{"run": 1}', "[" * 5000, "inf", "nan", -1, 0, 1, 3, 2**31, 2**63 - 1,
    2.5, -0.5, 1e308, float("inf"), b"", b"\xff", b"\xff\xfe\x00", "\x00", "é\u200b", "x" * 5000,
]  # fmt: skip


def damaged_pages(content: bytes, rng: random.Random) -> bytes:
    """Return a database that ends early, or of which a page is not what it was."""
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    at = rng.randrange(len(pages))
    how = rng.randrange(4)
    if how == 0:
        return b"".join(pages[:at])
    pages[at] = [rng.randbytes(PAGE), bytes(PAGE), pages[rng.randrange(len(pages))]][how - 1]
    return b"".join(pages)


def damage_ledger(path: Path, rng: random.Random) -> None:
    """Change one thing in a ledger's tables, past everything that watches over them."""
    with contextlib.closing(sqlite3.connect(path)) as plain:
        done = False
        while not done:  # a constraint may forbid it: then something else
            with contextlib.suppress(sqlite3.Error), plain:
                _damage(plain, rng)
                done = True
        plain.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if rng.random() < 0.05:
        path.with_name(path.name + "-wal").write_bytes(rng.randbytes(5000))


def _damage(plain: sqlite3.Connection, rng: random.Random) -> None:
    table = rng.choice(TABLES)
    names = [row[1] for row in plain.execute(f"PRAGMA table_info({table})")]
    column = rng.choice(names)
    keys = {"ledger": "id", "people": "number", "consents": "person", "runs": "number", "log": "entry"}
    key = keys.get(table, "run")
    values = plain.execute(f"SELECT DISTINCT {key} FROM {table}").fetchall()
    (row,) = rng.choice(values)
    how = rng.randrange(12)
    if how == 0:
        plain.execute(f"DELETE FROM {table} WHERE {key} = ?", (row,))
    elif how == 1:
        plain.execute(f"DROP TABLE {table}")
    elif how == 2:
        plain.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO {column}2")
    elif how == 3:
        plain.execute("UPDATE ledger SET schema_version = ?", (rng.choice([0, 2, 99, -1, "x"]),))
    elif how == 4:
        plain.execute(f"DELETE FROM {table}")
    elif how == 5:
        plain.execute(f"UPDATE {table} SET {column} = {column} || 'x' WHERE {key} = ?", (row,))
    else:
        plain.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (rng.choice(CELLS), row))


def what_is_kept(path: Path) -> bytes:
    """Return people, consents and charged runs of a ledger; of what is none, its bytes.

    A run that was reserved, and cancelled when it was refused, is in the log for good, and charges nobody.
    """
    queries = [
        "SELECT number, id FROM people ORDER BY number",
        "SELECT person, entry, epsilon, delta FROM consents ORDER BY person, entry",
        "SELECT number, name, state, attempt FROM runs WHERE state != 'cancelled' ORDER BY number",
    ]
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as plain:
            plain.text_factory = bytes
            return repr([plain.execute(query).fetchall() for query in queries]).encode()
    except (sqlite3.Error, ValueError):  # also names of columns that are no text
        return path.read_bytes()
