"""Reservations: charged before any data is touched, then running, then finished or killed; or cancelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select, update

from pdpsgd._typing import IntArray
from pdpsgd.errors import fail, shown
from pdpsgd.ledger import schema
from pdpsgd.ledger.amounts import UNIT_B, UNIT_D, Amounts
from pdpsgd.ledger.charges import Charge
from pdpsgd.ledger.consents import current_allowed, people_count
from pdpsgd.ledger.database import insert
from pdpsgd.ledger.log import append, digest, next_entry
from pdpsgd.ledger.spending import add, charge_table, chunks, spent
from pdpsgd.ledger.values import CHARGED, STARTED, Run


def reserve(
    connection: Connection,
    *,
    token: str,
    name: str,
    numbers: IntArray,
    levels: IntArray,
    charges: Sequence[Charge],
    plan: str,
    people_digest: str,
    state: str = "reserved",
    must_fit: bool = True,
) -> int:
    """Charge everybody on the list, if it fits everybody, within a transaction that holds the lock.

    Args:
        connection: holds the lock.
        token: names the request; the same request twice is one reservation.
        name: for people to read.
        numbers: the people on the run's list.
        levels: the level of each of them.
        charges: what each level pays.
        plan: the plan as JSON, or empty.
        people_digest: the plan's digest of its people.
        state: `reserved`, or `finished` for what was run before the ledger began.
        must_fit: refuse if somebody would pay more than they allow.

    Returns:
        The run's number.
    """
    if len(charges) >= schema.NOT_THERE:
        fail(f"Expected fewer than {schema.NOT_THERE:,} levels. Got {len(charges):,}.")
    if numbers.size and np.bincount(numbers).max() > 1:
        fail("Expected each person once on a run's list. Somebody is on it twice, and would pay once only.")
    people = people_count(connection)
    everybody = np.full(people, schema.NOT_THERE, dtype=np.int64)
    everybody[numbers] = levels
    packed = chunks(everybody)
    known = _known_request(connection, token, (plan, people_digest), charges, packed)
    if known is not None:
        return known
    if must_fit:
        _check_fits(connection, everybody, charges, people)
    number = (
        int(connection.execute(select(func.coalesce(func.max(schema.runs.c.number), 0))).scalar_one()) + 1
    )
    entry = next_entry(connection)
    insert(connection, schema.runs, [(number, token, name, state, 0, plan, people_digest, entry)])
    rows = [(number, i, c.kind, c.mu, c.b, c.d, c.e, c.exposures) for i, c in enumerate(charges)]
    insert(connection, schema.charges, rows)
    insert(connection, schema.run_people, [(number, i, part) for i, part in enumerate(packed)])
    written = digest_of_run(token, name, plan, people_digest, [row[1:] for row in rows], packed)
    append(connection, "reserve" if state == "reserved" else "enter", {"run": number, "digest": written})
    return number


def _known_request(
    connection: Connection,
    token: str,
    plan: tuple[str, str],
    charges: Sequence[Charge],
    packed: Sequence[bytes],
) -> int | None:
    """Return the run that this very request has reserved before, or None; refuse another one under its token."""
    r, c, p = schema.runs.c, schema.charges.c, schema.run_people.c
    known = connection.execute(
        select(r.number, r.plan, r.people_digest).where(r.token == token)
    ).one_or_none()
    if known is None:
        return None
    paid = connection.execute(
        select(c.kind, c.mu, c.b, c.d, c.e, c.exposures).where(c.run == known.number).order_by(c.level)
    ).all()
    listed = b"".join(
        connection.execute(select(p.levels).where(p.run == known.number).order_by(p.chunk)).scalars()
    )
    asked = b"".join(packed)
    newcomers = asked[len(listed) :]  # enrolled since, and not on the list
    if (
        (known.plan, known.people_digest) != plan
        or [tuple(row) for row in paid] != [(x.kind, x.mu, x.b, x.d, x.e, x.exposures) for x in charges]
        or asked[: len(listed)] != listed
        or newcomers != b"\xff" * len(newcomers)
    ):
        fail(
            f"Expected the same request under the same token. Run {known.number} was reserved under {token!r} "
            "with another plan, other charges or other people. Take another token."
        )
    return int(known.number)


def digest_of_run(
    token: str,
    name: str,
    plan: str,
    people_digest: str,
    charges: Sequence[tuple[Any, ...]],
    packed: Sequence[bytes],
) -> str:
    """Compute the digest of all rows that a reservation writes."""
    texts = [token, name, plan, people_digest]
    amounts = list(zip(*charges, strict=True))
    level, kind, mu, b, d, e, exposures = amounts if amounts else ([],) * 7
    whole = [np.array(column, dtype=np.int64) for column in (level, b, d, e)]
    return digest(texts, list(kind), np.array(mu, dtype=float), *whole, list(exposures), _bytes(packed))


def start(connection: Connection, run: int) -> int:
    """Begin a reserved run: checked against what everybody allows now; return the attempt, 1."""
    row = _row(connection, run)
    _refuse_whole_series(connection, run)
    if row.state != "reserved":
        fail(f"Expected run {run} to be reserved, to start it. It is {_worded(row.state)}.")
    carrier = series_of(row.token)
    paying = run if carrier is None else carrier
    people = people_count(connection)
    total = spent(connection, people, STARTED, without=paying)
    mine = Amounts.zeros(people)
    add(connection, paying, charge_table(connection, paying), mine)
    _refuse_overspending(connection, total, mine, f"Run {run} was reserved, but")
    if carrier is not None and _row(connection, carrier).state == "reserved":
        _move(connection, carrier, "start", {"reserved"}, "running", attempt=1)
    return _move(connection, run, "start", {"reserved"}, "running", attempt=1)


def resume(connection: Connection, run: int) -> int:
    """Take a run over after its process has ended: the next attempt under the same reservation."""
    row = _row(connection, run)
    _refuse_whole_series(connection, run)
    if row.state not in ("running", "killed"):
        fail(f"Expected run {run} to be running or killed, to resume it. It is {_worded(row.state)}.")
    return _move(connection, run, "resume", {"running", "killed"}, "running", attempt=row.attempt + 1)


def tie(connection: Connection, run: int, attempt: int, key_name: str) -> None:
    """Note the key of the run's noise in the log, or compare it with the one noted: a charge pays for one of them."""
    row = _row(connection, run)
    if row.state != "running" or row.attempt != attempt:
        fail(
            f"Expected run {run} to be running as attempt {attempt}. It is "
            f"{_worded(row.state, remedy=False)}, attempt {row.attempt}: "
            "another process has taken it over."
        )
    entries = connection.execute(select(schema.log.c.payload).where(schema.log.c.what == "tie")).scalars()
    ties = (json.loads(payload) for payload in entries)
    noted = next((tied["key"] for tied in ties if tied["run"] == run), None)
    if noted is None:
        append(connection, "tie", {"run": run, "key": key_name})
    elif noted != key_name:
        fail(
            f"Run {run} was begun before, and has released steps: what it is charged for covers those. Go on from its "
            "checkpoint (its run folder, --resume), or reserve another run. Got a beginning with other noise."
        )


def finish(connection: Connection, run: int, attempt: int, *, state: str) -> int:
    """End a run as `finished` or `killed`; it stays charged in full."""
    row = _row(connection, run)
    if row.state == state and row.attempt == attempt:
        return attempt
    if row.state != "running" or row.attempt != attempt:
        fail(
            f"Expected run {run} to be running as attempt {attempt}. It is "
            f"{_worded(row.state, remedy=False)}, attempt {row.attempt}: "
            "another process has taken it over."
        )
    _move(connection, run, "finish" if state == "finished" else "kill", {"running"}, state, attempt=attempt)
    carrier = series_of(row.token)
    if carrier is not None and state == "finished":
        open_states = {_row(connection, member).state for member in members_of(connection, carrier)}
        if open_states == {"finished"}:
            _move(connection, carrier, "finish", {"running"}, "finished", attempt=1)
    return attempt


def cancel(connection: Connection, run: int) -> int:
    """Give back what a run has reserved, as long as it has not started: the sole refund."""
    row = _row(connection, run)
    if row.state != "reserved":
        stays = "nobody is charged for it" if row.state == "cancelled" else "what has started stays charged"
        fail(
            f"Expected run {run} to be reserved, to cancel it. It is {_worded(row.state, remedy=False)}: {stays}."
        )
    if series_of(row.token) is not None:
        fail(
            f"Run {run} belongs to a series, which has paid for it: cancel run {series_of(row.token)}, if none of its "
            "runs has started; else leave this one unused."
        )
    for member in members_of(connection, run):
        _move(connection, member, "cancel", {"reserved"}, "cancelled", attempt=0)
    return _move(connection, run, "cancel", {"reserved"}, "cancelled", attempt=0)


def series_of(token: str) -> int | None:
    """Return the series that pays for a run, or None for a run that pays for itself."""
    return int(token.split(":")[1]) if token.startswith("series:") else None


def members_of(connection: Connection, series: int) -> list[int]:
    """Return the runs of a series; nothing for any other run."""
    r = schema.runs.c
    query = (
        select(r.number).where(r.token.startswith(f"series:{series}:", autoescape=True)).order_by(r.number)
    )
    return [int(number) for number in connection.execute(query).scalars()]


def _refuse_whole_series(connection: Connection, run: int) -> None:
    members = members_of(connection, run)
    if members:
        fail(
            f"Expected one of the runs of series {run}, {members[0]} to {members[-1]}. Got the series, which only pays "
            "for them."
        )


def attempt_of(connection: Connection, run: int) -> tuple[str, int]:
    """Read a run's state and attempt."""
    row = _row(connection, run)
    return str(row.state), int(row.attempt)


def read_runs(connection: Connection, number: int | None = None) -> list[Run]:
    """Read all runs, or one, in order."""
    r, entries = schema.runs.c, schema.log.c
    query = select(r.number, r.name, r.state, r.attempt, r.token, r.people_digest, entries.time).join(
        schema.log, entries.entry == r.entry
    )
    if number is not None:
        query = query.where(r.number == number)
    found = [
        Run(
            number=row.number,
            name=row.name,
            state=row.state,
            attempt=row.attempt,
            people=_people_of(connection, row.number),
            time=row.time,
            token=row.token,
            people_digest=row.people_digest,
        )
        for row in connection.execute(query.order_by(r.number)).all()
    ]
    if number is not None and not found:
        fail(f"Expected a run of the ledger. There is no run {number}.")
    return found


def _people_of(connection: Connection, run: int) -> int:
    query = select(schema.run_people.c.levels).where(schema.run_people.c.run == run)
    parts = (np.frombuffer(row.levels, dtype="<u2") for row in connection.execute(query))
    return sum(int((part != schema.NOT_THERE).sum()) for part in parts)


def check_number(run: int) -> None:
    """Refuse what cannot be the number of a run."""
    if isinstance(run, bool) or not isinstance(run, int | np.integer) or not 0 < run < 2**31:
        fail(f"Expected a run of the ledger. There is no run {shown(run)}.")


def _row(connection: Connection, run: int) -> Any:
    check_number(run)
    r = schema.runs.c
    query = select(r.number, r.state, r.attempt, r.token).where(r.number == run)
    row = connection.execute(query).one_or_none()
    if row is None:
        fail(f"Expected a run of the ledger. There is no run {run}.")
    return row


def _worded(state: str, *, remedy: bool = True) -> str:
    """Write a state for a message, and what to do about it; one that is none, as damage may leave it, is cut off."""
    remedies = {
        "reserved": "",
        "running": ": resume it if its process has ended",
        "killed": ": resume it",
        "finished": ": reserve a new run",
        "cancelled": ": reserve a new run",
    }
    return shown(state) if state not in remedies else state + remedies[state] * remedy


def _move(connection: Connection, run: int, what: str, before: set[str], after: str, *, attempt: int) -> int:
    """Compare and set: nothing changes if another process was faster."""
    moved = connection.execute(
        update(schema.runs)
        .where(schema.runs.c.number == run, schema.runs.c.state.in_(before))
        .values(state=after, attempt=attempt)
    )
    if moved.rowcount != 1:
        fail(f"Another process has changed run {run} at the same time.")
    append(connection, what, {"run": run, "state": after, "attempt": attempt})
    return attempt


def _check_fits(connection: Connection, levels: IntArray, charges: Sequence[Charge], people: int) -> None:
    table = Amounts.zeros(schema.NOT_THERE + 1)
    for level, one in enumerate(charges):
        table.b[level], table.d[level], table.e[level] = one.b, one.d, one.e
    mine = Amounts(table.b[levels], table.d[levels], table.e[levels])
    _refuse_overspending(connection, spent(connection, people, CHARGED), mine, "Nothing was reserved:")


def _refuse_overspending(connection: Connection, total: Amounts, mine: Amounts, beginning: str) -> None:
    allows = current_allowed(connection)
    after = Amounts(total.b + mine.b, total.d + mine.d, total.e + mine.e)
    pays = (mine.b > 0) | (mine.d > 0) | (mine.e > 0)
    over = pays & ~allows.covers(after)
    if not over.any():
        return
    person = int(over.argmax())
    name = connection.execute(select(schema.people.c.id).where(schema.people.c.number == person)).scalar_one()
    columns = (("mu^2", UNIT_B, "b"), ("d", UNIT_D, "d"), ("epsilon set aside", UNIT_B, "e"))
    short = [
        f"{what} {getattr(after, key)[person] * unit:.6g} of {getattr(allows, key)[person] * unit:.6g}"
        for what, unit, key in columns
        if getattr(after, key)[person] > getattr(allows, key)[person]
    ]
    fail(
        f"{beginning} {int(over.sum()):,} people no longer allow it. {shown(name)} would come to {', '.join(short)}. "
        "Somebody has spent or changed a consent since the plan was made: cancel what is reserved, and plan again."
    )


def _bytes(packed: Sequence[bytes]) -> Any:
    column = np.empty(len(packed), dtype=object)
    column[:] = list(packed)
    return column
