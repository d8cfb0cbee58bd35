"""What a refused command wrote, taken back: people whom it enrolled, and its run, which was cancelled unstarted."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection

from sqlalchemy import Connection, delete, func, select, update

from pdpsgd.ledger import schema

OF_A_REFUSED_COMMAND = (["enroll"], ["enroll", "reserve", "cancel"])
"""What the last entries of the log have to be to be taken back, and no others."""


class OwnEntries(threading.local):
    """The hashes of the entries by which this thread enrolled people: it may take these back, and no others."""

    def __init__(self) -> None:
        self.enrolled: set[str] = set()


def undo(connection: Connection, since: str, run: int | None, *, own: Collection[str]) -> bool:
    """Put the ledger back to before a refused command, if the last entries since then are what that command wrote.

    Guarantee: no run that has started, and nothing that another process wrote, is touched. Whoever is forgotten here
    was enrolled by whoever asks, after that head, and was charged for nothing.

    Args:
        connection: within a transaction that holds the lock.
        since: the head before the command; what others have written since then stays.
        run: the run that it reserved and cancelled, if it got so far.
        own: the hashes of the entries by which whoever asks has enrolled people.

    Returns:
        Whether it was put back; else nothing was changed.
    """
    e = schema.log.c
    before = connection.execute(select(e.entry).where(e.hash == since)).scalar()
    if before is None:
        return False
    later = connection.execute(
        select(e.entry, e.what, e.payload, e.previous, e.hash).where(e.entry > before).order_by(e.entry)
    ).all()
    mine = next((row for row in reversed(later) if row.hash in own), None)
    if mine is None:
        return False
    last = [row for row in later if row.entry >= mine.entry]
    reserved = {json.loads(row.payload)["run"] for row in last if row.what != "enroll"}
    if [row.what for row in last] not in OF_A_REFUSED_COMMAND or reserved - {run}:
        return False
    connection.execute(delete(schema.people).where(schema.people.c.entry == mine.entry))
    connection.execute(delete(schema.consents).where(schema.consents.c.entry == mine.entry))
    for number in reserved:
        connection.execute(delete(schema.runs).where(schema.runs.c.number == number))
        connection.execute(delete(schema.charges).where(schema.charges.c.run == number))
        connection.execute(delete(schema.run_people).where(schema.run_people.c.run == number))
    connection.execute(delete(schema.log).where(e.entry >= mine.entry))
    connection.execute(update(schema.ledger).values(entries=mine.entry - 1, head=mine.previous))
    if not connection.execute(select(func.count()).select_from(schema.people)).scalar_one():
        connection.execute(update(schema.ledger).values(ids=""))
    return True


def give_back(connection: Connection) -> bool:
    """Make an unused ledger unusable, so that its file can go: whoever waits for the lock then finds no ledger.

    Guarantee: a ledger with anything in its log but its own creation is not touched, so no charge is ever lost.
    """
    if connection.execute(select(schema.ledger.c.entries)).scalar_one() > 1:
        return False
    connection.execute(delete(schema.ledger))
    return True
