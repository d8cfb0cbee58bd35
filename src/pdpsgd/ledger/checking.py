"""`check`: chain, digests, states, sums, allowances and certificates, all computed again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from pdpsgd.accounting.certificates import allowance
from pdpsgd.errors import shown
from pdpsgd.ledger import schema
from pdpsgd.ledger.amounts import Amounts, allowed
from pdpsgd.ledger.charges import is_confirmed
from pdpsgd.ledger.consents import consents_digest, people_count
from pdpsgd.ledger.database import columns
from pdpsgd.ledger.log import GENESIS, digest, entry_hash
from pdpsgd.ledger.reservations import digest_of_run
from pdpsgd.ledger.series import check_series
from pdpsgd.ledger.spending import add, charge_table
from pdpsgd.ledger.values import Check

STATE_AFTER = {"reserve": "reserved", "enter": "finished"}


Tell = Callable[[str, int, int], None]
"""Is told what is checked, how many of it are done, and of how many."""


def check(connection: Connection, *, head: str | None, certificates: bool, tell: Tell | None = None) -> Check:
    """Compute everything again, and say what does not fit."""
    tell = tell or (lambda *_: None)
    row = connection.execute(select(schema.ledger)).one()
    problems = [*_chain(connection, row)]
    if head is not None:
        problems += _noted_head(connection, row, head)
    problems += [*_rows(connection, tell), *_extra_rows(connection), *_allowances(connection)]
    problems += _sums(connection, tell)
    confirmed = 0
    if certificates:
        problems += check_series(connection)
        found = [*_certificates(connection, tell)]
        confirmed = len(found) - sum(problem is not None for problem in found)
        problems += [problem for problem in found if problem is not None]
    runs = connection.execute(select(func.count()).select_from(schema.runs)).scalar_one()
    return Check(row.head, row.entries, people_count(connection), runs, confirmed, tuple(problems))


def _entries(connection: Connection) -> list[Any]:
    return list(connection.execute(select(schema.log).order_by(schema.log.c.entry)))


def _told(rows: list[Any], what: str, tell: Tell) -> Iterator[Any]:
    for place, row in enumerate(rows):
        tell(what, place, len(rows))
        yield row
    tell(what, len(rows), len(rows))


def _chain(connection: Connection, ledger: Any) -> Iterator[str]:
    previous, expected = GENESIS, 0
    for row in _entries(connection):
        expected += 1
        if row.entry != expected:
            yield f"The log jumps from entry {expected - 1} to {row.entry}: entries were deleted."
            expected = row.entry
        if row.previous != previous:
            yield f"Entry {row.entry} of the log does not follow the one before."
        if row.hash != entry_hash(row.entry, row.time, row.what, row.payload, row.previous):
            yield f"Entry {row.entry} of the log ({row.what}) was changed."
        previous = row.hash
    if (ledger.entries, ledger.head) != (expected, previous):
        yield (
            f"The ledger says {ledger.entries} entries and head {ledger.head[:12]}; "
            f"the log ends at {expected}, {previous[:12]}."
        )


def _noted_head(connection: Connection, ledger: Any, head: str) -> Iterator[str]:
    known = connection.execute(select(schema.log.c.entry).where(schema.log.c.hash == head)).scalar()
    if known is None and head != GENESIS:
        yield (
            f"The noted head {head[:12]} is not in the log: this is an older copy of the ledger, or another one. "
            f"It ends at {ledger.head[:12]} with entry {ledger.entries}."
        )


def _rows(connection: Connection, tell: Tell) -> Iterator[str]:
    """Rows against the digests in the log, and the states that the log leads to."""
    states: dict[int, tuple[str, int]] = {}
    for row in _told(_entries(connection), "rows by the log", tell):
        payload = _payload(row)
        if payload is None:
            yield f"Entry {row.entry} of the log cannot be read."
        elif row.what == "enroll" and _people_digest(connection, row.entry) != payload.get("digest"):
            yield f"People of entry {row.entry} (enroll, {row.time}) were changed or deleted."
        if payload is not None and row.what in ("enroll", "consent"):
            if consents_digest(connection, row.entry) != payload.get("consents"):
                yield f"Consents of entry {row.entry} ({row.what}, {row.time}) were changed or deleted."
        elif payload is not None and row.what in STATE_AFTER:
            states[payload["run"]] = (STATE_AFTER[row.what], 0)
            if not _is_as_written(connection, payload["run"], row.entry, payload.get("digest")):
                yield f"Run {payload['run']} ({row.time}), its plan, charges or people were changed or deleted."
        elif payload is not None and "state" in payload:
            states[payload["run"]] = (payload["state"], payload["attempt"])
    r = schema.runs.c
    found = {
        row.number: (row.state, row.attempt)
        for row in connection.execute(select(r.number, r.state, r.attempt))
    }
    for number in sorted(states.keys() | found.keys()):
        if number not in found:
            yield f"Run {number} was deleted."
        elif states.get(number) != found[number]:
            logged = (
                "not in the log"
                if number not in states
                else "{}, attempt {} in the log".format(*states[number])
            )
            yield "Run {} is {}, attempt {}, but {}.".format(number, *found[number], logged)


def _extra_rows(connection: Connection) -> Iterator[str]:
    """Rows that no entry of the log accounts for."""
    entries = {row.entry: row.what for row in _entries(connection)}
    for table, whats in ((schema.people, {"enroll"}), (schema.consents, {"enroll", "consent"})):
        for (entry,) in connection.execute(select(table.c.entry).distinct()):
            if entries.get(entry) not in whats:
                yield f"Rows of {table.name} name entry {entry}, which did not write them."
    for table in (schema.charges, schema.run_people):
        missing = select(table.c.run).distinct().where(table.c.run.not_in(select(schema.runs.c.number)))
        for (run,) in connection.execute(missing):
            yield f"Rows of {table.name} name run {run}, which there is not."
    numbers = select(func.min(schema.people.c.number), func.max(schema.people.c.number))
    kind, has_people = (
        connection.execute(select(schema.ledger.c.ids)).scalar_one(),
        people_count(connection) > 0,
    )
    if kind not in (("text", "numbers") if has_people else ("",)):
        yield f"The ids of people are of the kind {shown(kind)}, which is none."
    low, high = connection.execute(numbers).one()
    if low is not None and (low, high) != (0, people_count(connection) - 1):
        yield f"People are numbered {low} to {high}, and there are {people_count(connection)}: somebody was deleted."


def _allowances(connection: Connection) -> Iterator[str]:
    """What each consent allows, from epsilon, delta, kappa and what was set aside."""
    c, p = schema.consents.c, schema.people.c
    query = select(
        c.person, c.entry, c.epsilon, c.delta, c.allowed_b, c.allowed_d, c.allowed_e, p.kappa, p.set_aside
    ).join(schema.people, p.number == c.person)
    whole = np.int64
    kinds = [whole, whole, float, float, whole, whole, whole, float, float]
    person, entry, epsilon, delta, b, d, e, kappa, aside = columns(connection, query, kinds)
    if not person.size:
        return
    legal = (kappa > 0) & (kappa < 1) & (aside >= 0)
    found = allowed(
        allowance(epsilon, delta, kappa=np.where(legal, kappa, 0.5), set_aside=np.where(legal, aside, 0.0)),
        epsilon,
    )
    # Another machine's last digits may differ: a part in 1e9 is no fraud.
    wrong = ~legal
    for stored, again in ((b, found.b), (d, found.d), (e, found.e)):
        wrong |= stored > again + np.abs(again) // 1_000_000_000 + 2
    if wrong.any():
        first = int(wrong.argmax())
        yield (
            f"{int(wrong.sum())} consents allow more than epsilon and delta do, the first of person number "
            f"{person[first]} in entry {entry[first]}."
        )


def _sums(connection: Connection, tell: Tell) -> Iterator[str]:
    """At each start, nobody who paid came above what they allowed then."""
    people = people_count(connection)
    allows, total = Amounts.zeros(people), Amounts.zeros(people)
    for row in _told(_entries(connection), "sums at each start", tell):
        payload = _payload(row) or {}
        if row.what in ("enroll", "consent"):
            _apply_consents(connection, row.entry, allows)
        elif row.what == "start" or row.what == "enter":
            mine = Amounts.zeros(people)
            add(connection, payload["run"], charge_table(connection, payload["run"]), mine)
            for whole, part in ((total.b, mine.b), (total.d, mine.d), (total.e, mine.e)):
                whole += part
            over = ((mine.b > 0) | (mine.d > 0) | (mine.e > 0)) & ~allows.covers(total)
            if row.what == "start" and over.any():
                yield f"When run {payload['run']} started, {int(over.sum())} people came above what they allowed."


def _apply_consents(connection: Connection, entry: int, allows: Amounts) -> None:
    c = schema.consents.c
    query = select(c.person, c.allowed_b, c.allowed_d, c.allowed_e).where(c.entry == entry)
    person, b, d, e = columns(connection, query, [np.int64] * 4)
    known = person < len(allows)
    for column, values in ((allows.b, b), (allows.d, d), (allows.e, e)):
        column[person[known]] = values[known]


def _certificates(connection: Connection, tell: Tell) -> Iterator[str | None]:
    """Every charge, from its exposures, by the independent computation; the same exposures once."""
    known: dict[tuple[Any, ...], bool] = {}
    query = select(schema.charges).order_by(schema.charges.c.run, schema.charges.c.level)
    for row in _told(list(connection.execute(query)), "certificates", tell):
        key = (row.kind, row.mu, row.b, row.d, row.e, row.exposures)
        if key not in known:
            known[key] = is_confirmed(*key)
        yield (
            None
            if known[key]
            else f"The charge of run {row.run}, level {row.level} is below what its exposures cost."
        )


def _people_digest(connection: Connection, entry: int) -> str:
    p = schema.people.c
    query = select(p.number, p.id, p.kappa, p.set_aside).where(p.entry == entry).order_by(p.number)
    return digest(*columns(connection, query, [np.int64, str, float, float]))


def _is_as_written(connection: Connection, run: int, entry: int, digest: object) -> bool:
    """Tell whether a run's rows are those of its entry, and its people in their places."""
    r, p = schema.runs.c, schema.run_people.c
    chunks = connection.execute(select(p.chunk).where(p.run == run).order_by(p.chunk)).scalars().all()
    in_place = list(chunks) == list(range(len(chunks)))  # any other are charges of nobody, or of others
    entered = connection.execute(select(r.entry).where(r.number == run)).scalar()
    return in_place and entered == entry and _run_digest(connection, run) == digest


def _run_digest(connection: Connection, run: int) -> str | None:
    row = connection.execute(select(schema.runs).where(schema.runs.c.number == run)).one_or_none()
    if row is None:
        return None
    c, p = schema.charges.c, schema.run_people.c
    charges = connection.execute(
        select(c.level, c.kind, c.mu, c.b, c.d, c.e, c.exposures).where(c.run == run).order_by(c.level)
    )
    packed = connection.execute(select(p.levels).where(p.run == run).order_by(p.chunk)).scalars()
    return digest_of_run(
        row.token,
        row.name,
        row.plan,
        row.people_digest,
        [tuple(x) for x in charges],
        [bytes(x) for x in packed],
    )


def _payload(row: Any) -> dict[str, Any] | None:
    try:
        payload = json.loads(row.payload)
    except json.JSONDecodeError:
        return None
    return payload if isinstance(payload, dict) else None
