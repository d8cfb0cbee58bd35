"""People and what they allow: enrolment, changes, and who is who."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select, update

from pdpsgd._typing import FloatArray, IdArray, IntArray
from pdpsgd.accounting.certificates import allowance
from pdpsgd.budgets.budgets import WRITTEN_ALIKE, Budgets, as_read
from pdpsgd.errors import fail, shown
from pdpsgd.ledger import schema
from pdpsgd.ledger.amounts import Amounts, allowed
from pdpsgd.ledger.database import columns, insert
from pdpsgd.ledger.log import append, digest, next_entry

FEW = 500
"""So many people are looked up one by one; for more, everybody is read once."""


@dataclass(frozen=True, eq=False)
class CurrentConsents:
    """What everybody allows now, in the order of their numbers."""

    epsilon: FloatArray
    delta: FloatArray
    allowed: Amounts

    def __len__(self) -> int:
        return int(self.epsilon.size)


def enroll(connection: Connection, budgets: Budgets, *, kappa: float, set_aside: float) -> int:
    """Add people who are not in the ledger yet, with what they allow; return how many there are now.

    kappa and set_aside are fixed here, before anybody's first charge; nothing changes them later.
    """
    ids = _texts(connection, budgets, first=True)
    if connection.dialect.name == "sqlite" and ids.size > schema.CHUNK:
        connection.exec_driver_sql(
            "PRAGMA cache_size = -65536"
        )  # the index of ids stays in memory while it grows
    start, entry = people_count(connection), next_entry(connection)
    if start:
        everybody = all_ids(connection)
        _check_written_alike(ids, everybody)
        known = np.isin(ids, everybody)
        if known.any():
            fail(
                f"Expected people who are not in the ledger yet. {shown(str(ids[known][0]))} is, and "
                f"{int(known.sum()) - 1:,} more of these. What they allow is changed with `pdpsgd ledger consent`."
            )
    numbers = np.arange(start, start + ids.size)
    kappas, asides = (np.full(ids.size, float(x)) for x in (kappa, set_aside))
    for part in _parts(ids.size):
        entries = [entry] * (part.stop - part.start)
        rows = (
            numbers[part].tolist(),
            ids[part].tolist(),
            kappas[part].tolist(),
            asides[part].tolist(),
            entries,
        )
        insert(connection, schema.people, zip(*rows, strict=True))
    written = _write_consents(connection, entry, numbers, budgets, kappas, asides)
    payload = {
        "people": int(ids.size),
        "first": start,
        "digest": digest(numbers, ids, kappas, asides),
        "consents": written,
    }
    append(connection, "enroll", payload)
    return start + int(ids.size)


def _check_written_alike(ids: IdArray, everybody: IdArray) -> None:
    """Refuse newcomers whose ids are written like those of people who are there: they would be charged for less."""
    new, old = (as_read(each) for each in (ids, everybody))
    if new is None and old is None:
        return
    place = {name: index for index, name in enumerate((everybody if old is None else old).tolist())}
    for name, read in zip(ids.tolist(), (ids if new is None else new).tolist(), strict=True):
        known = place.get(read)
        if known is not None and everybody[known] != name:
            fail(
                f"Expected one way to write each id. Got {shown(str(name))}, and {shown(str(everybody[known]))} is in "
                f"the ledger: they {WRITTEN_ALIKE}. What this person has spent stands under the latter: correct the "
                "list."
            )


def strangers(connection: Connection, budgets: Budgets) -> Budgets | None:
    """Return those of a list whom the ledger does not know, or None; refuse whoever allows something else there."""
    ids = _texts(connection, budgets, first=False)
    places = _places_of(connection, ids)
    known = places >= 0
    if known.any():
        now = current(connection, places[known])
        other = (now.epsilon != budgets.epsilon[known]) | (now.delta != budgets.delta[known])
        if other.any():
            number = int(other.argmax())
            one = int(np.flatnonzero(known)[number])
            more = f" (and {int(other.sum()) - 1:,} more)" if other.sum() > 1 else ""
            fail(
                f"Expected what people allow as the ledger has it. {shown(str(ids[one]))} allows epsilon "
                f"{now.epsilon[number]:g} at delta {now.delta[number]:g} there, and {budgets.epsilon[one]:g} at "
                f"{budgets.delta[one]:g} in this list{more}. A list never changes what somebody has allowed. If they "
                "changed it, record that first, with pdpsgd ledger consent FILE; else correct the list."
            )
    if known.all():
        return None
    new = ~known
    return Budgets(budgets.epsilon[new], budgets.delta[new], ids=budgets.ids[new], allow_infinite=True)


def knows_some(connection: Connection, ids: IdArray) -> bool:
    """Whether any of these ids is in the ledger; ids of the other kind (numbers, text) are other people's."""
    kind = "numbers" if ids.dtype.kind in "iu" else "text"
    if kind != id_kind(connection):
        return False
    return bool((_places_of(connection, texts_of(connection, ids)) >= 0).any())


def change(connection: Connection, budgets: Budgets) -> int:
    """Replace what these people allow, for every run that starts from now on; return how many changed."""
    ids = _texts(connection, budgets, first=False)
    numbers = numbers_of(connection, ids)
    now = current(connection, numbers)
    other = (now.epsilon != budgets.epsilon) | (now.delta != budgets.delta)
    if not other.any():
        return 0
    if not other.all():
        changed = Budgets(
            budgets.epsilon[other], budgets.delta[other], ids=budgets.ids[other], allow_infinite=True
        )
        return change(connection, changed)
    kappas, asides = _fixed_terms(connection, numbers)
    entry = next_entry(connection)
    written = _write_consents(connection, entry, numbers, budgets, kappas, asides)
    append(connection, "consent", {"people": int(ids.size), "consents": written})
    return int(ids.size)


def current(connection: Connection, numbers: IntArray | None = None) -> CurrentConsents:
    """Read the latest consent of everybody, in the order of their numbers, or of these few people."""
    epsilon, delta, b, d, e = _latest(
        connection, ("epsilon", "delta", "allowed_b", "allowed_d", "allowed_e"), numbers
    )
    return CurrentConsents(epsilon, delta, Amounts(b, d, e))


def current_allowed(connection: Connection, *, with_e: bool = True) -> Amounts:
    """Read what everybody allows now, and nothing else: of a million people, each column takes a while."""
    set_aside = with_e and connection.execute(select(func.max(schema.consents.c.allowed_e))).scalar()
    b, d, *e = _latest(connection, ("allowed_b", "allowed_d", *(("allowed_e",) if set_aside else ())))
    return Amounts(b, d, e[0] if e else np.zeros_like(b))


def current_deltas(connection: Connection) -> FloatArray:
    """Read everybody's delta."""
    return _latest(connection, ("delta",))[0]


def _latest(connection: Connection, names: Sequence[str], numbers: IntArray | None = None) -> list[Any]:
    """Read columns of everybody's latest consent; of few people only those, in the order of `numbers`."""
    c = schema.consents.c
    kinds = [float if name in ("epsilon", "delta") else np.int64 for name in names]
    few = numbers is not None and numbers.size <= FEW
    rows = connection.execute(select(func.count()).select_from(schema.consents)).scalar_one()
    if not few and rows == people_count(connection):  # nobody has changed anything: rows are in order
        query = select(*(c[name] for name in names)).order_by(c.person)
        found = columns(connection, query, kinds)
        return found if numbers is None else [column[numbers] for column in found]
    query = select(c.person, *(c[name] for name in names)).order_by(c.person, c.entry)
    if few:
        assert numbers is not None
        query = query.where(c.person.in_(numbers.tolist()))
    person, *found = columns(connection, query, [np.int64, *kinds])
    last = _last_of_each(person)
    found = [column[last] for column in found]
    return found if numbers is None else [column[np.searchsorted(person[last], numbers)] for column in found]


def _last_of_each(person: IntArray) -> IntArray:
    return np.flatnonzero(np.append(person[1:] != person[:-1], True)) if person.size else person


def people_count(connection: Connection) -> int:
    """Count the people; their numbers are 0 to one less."""
    return int(connection.execute(select(func.count()).select_from(schema.people)).scalar_one())


def all_ids(connection: Connection) -> IdArray:
    """Read everybody's id, in the order of their numbers."""
    query = select(schema.people.c.id).order_by(schema.people.c.number)
    return columns(connection, query, [str])[0]


def named_ids(connection: Connection, ids: IdArray) -> IdArray:
    """Give ids as they were enrolled: whole numbers where they were whole numbers."""
    return ids.astype(np.int64) if id_kind(connection) == "numbers" else ids


def id_kind(connection: Connection) -> str:
    """Read whether ids are text or numbers; empty before anybody is enrolled."""
    return str(connection.execute(select(schema.ledger.c.ids)).scalar_one())


def numbers_of(connection: Connection, ids: IdArray) -> IntArray:
    """Look people up by id; refuse whoever is not in the ledger."""
    numbers = _places_of(connection, ids)
    if (numbers < 0).any():
        stranger = ids[numbers < 0][0]
        fail(
            f"Expected people of the ledger. {shown(str(stranger))} is not one of them"
            f"{f' (nor are {int((numbers < 0).sum()) - 1:,} more)' if (numbers < 0).sum() > 1 else ''}: "
            "enroll them first, or leave them out (people set aside to test on are in no ledger)."
        )
    return numbers


def _places_of(connection: Connection, ids: IdArray) -> IntArray:
    """Look people up by id; -1 for whoever is not in the ledger."""
    if ids.size <= FEW:
        query = select(schema.people.c.id, schema.people.c.number).where(schema.people.c.id.in_(ids.tolist()))
        known = {row.id: row.number for row in connection.execute(query)}
        numbers = np.array([known.get(name, -1) for name in ids.tolist()], dtype=np.int64)
    else:
        everybody = all_ids(connection)
        if np.array_equal(everybody, ids):
            return np.arange(ids.size)
        order = np.argsort(everybody, kind="stable")
        place = np.minimum(np.searchsorted(everybody[order], ids), max(order.size - 1, 0))
        numbers = (
            np.where(everybody[order][place] == ids, order[place], -1)
            if order.size
            else np.full(ids.size, -1)
        )
    return numbers


def texts_of(connection: Connection, ids: IdArray) -> IdArray:
    """Write ids as the ledger keeps them; refuse numbers among text, and the other way round."""
    if np.asarray(ids).ndim != 1:
        fail(f"Expected a list of ids. Got {shown(ids)}.")
    kind = "numbers" if np.asarray(ids).dtype.kind in "iu" else "text"
    known = id_kind(connection)
    if known and kind != known:
        fail(
            f"Expected ids that are {known}, as those in the ledger. Got {kind}, such as {shown(ids.tolist()[0])}."
        )
    return ids if ids.dtype.kind == "U" else np.array([str(name) for name in ids.tolist()], dtype=str)


def consents_digest(connection: Connection, entry: int) -> str:
    """Compute the digest of the consents that an entry wrote, from the rows as they are now."""
    c = schema.consents.c
    query = (
        select(c.person, c.epsilon, c.delta, c.allowed_b, c.allowed_d, c.allowed_e)
        .where(c.entry == entry)
        .order_by(c.person)
    )
    whole = np.int64
    return digest(*columns(connection, query, [whole, float, float, whole, whole, whole]))


def _texts(connection: Connection, budgets: Budgets, *, first: bool) -> IdArray:
    if not budgets.named:
        fail("Expected people with ids: over time, a place on a list says nothing about who somebody is.")
    texts = texts_of(connection, budgets.ids)
    if first and not id_kind(connection):
        kind = "numbers" if budgets.ids.dtype.kind in "iu" else "text"
        connection.execute(update(schema.ledger).values(ids=kind))
    return texts


def _fixed_terms(connection: Connection, numbers: IntArray) -> tuple[FloatArray, FloatArray]:
    c = schema.people.c
    query = select(c.number, c.kappa, c.set_aside)
    if numbers.size <= FEW:
        query = query.where(c.number.in_(numbers.tolist()))
    found, kappa, aside = columns(connection, query.order_by(c.number), [np.int64, float, float])
    place = np.searchsorted(found, numbers)
    return kappa[place], aside[place]


def _write_consents(
    connection: Connection,
    entry: int,
    numbers: IntArray,
    budgets: Budgets,
    kappas: FloatArray,
    asides: FloatArray,
) -> str:
    order = np.argsort(numbers, kind="stable")
    epsilon, delta = budgets.epsilon[order], np.ascontiguousarray(budgets.delta[order])
    found = allowance(epsilon, delta, kappa=kappas[order], set_aside=asides[order])
    amounts, people = allowed(found, epsilon), numbers[order]
    for part in _parts(people.size):
        entries = [entry] * (part.stop - part.start)
        shown: list[Any] = [
            column[part].tolist() for column in (epsilon, delta, amounts.b, amounts.d, amounts.e)
        ]
        insert(connection, schema.consents, zip(people[part].tolist(), entries, *shown, strict=True))
    return digest(people, epsilon, delta, amounts.b, amounts.d, amounts.e)


def _parts(size: int) -> list[slice]:
    return [slice(start, min(start + schema.CHUNK, size)) for start in range(0, size, schema.CHUNK)]
