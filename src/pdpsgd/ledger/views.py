"""What a ledger tells about one person, and about all of them by tier."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.gaussian import for_distinct, gaussian_epsilon
from pdpsgd.errors import fail, shown
from pdpsgd.ledger import schema
from pdpsgd.ledger.amounts import UNIT_B, UNIT_D, Amounts
from pdpsgd.ledger.consents import current, people_count
from pdpsgd.ledger.database import columns as columns_of
from pdpsgd.ledger.reservations import read_runs, series_of
from pdpsgd.ledger.spending import add, charge_table, levels_of_run, spent
from pdpsgd.ledger.values import (
    CHARGED,
    STARTED,
    Consent,
    Person,
    PersonCharge,
    Statement,
    Tier,
    TierShare,
)


def read_person(connection: Connection, name: str) -> Person:
    """Read one person: their id, consents, and two bytes for each run."""
    p = schema.people.c
    row = connection.execute(select(p.number, p.kappa, p.set_aside).where(p.id == name)).one_or_none()
    if row is None:
        fail(f"Expected somebody of the ledger. {shown(name)} is not enrolled.")
    taken = _charges(connection, row.number)
    consents = _consents(connection, row.number, row.kappa, taken)
    last, charged = consents[-1], [charge for _, charge, _ in taken if charge.state in CHARGED]
    c = schema.consents.c
    allows = connection.execute(
        select(c.allowed_b, c.allowed_d, c.allowed_e)
        .where(c.person == row.number)
        .order_by(c.entry.desc())
        .limit(1)
    ).one()
    amounts = [amount for _, charge, amount in taken if charge.state in CHARGED]
    b, d, e = (sum(x) for x in zip(*amounts, strict=True)) if amounts else (0, 0, 0)
    fits = d < allows.allowed_d and b < allows.allowed_b
    left = _epsilon(max(allows.allowed_b - b, 0) if fits else 0, 0, last.delta, row.kappa)
    return Person(
        id=name,
        kappa=row.kappa,
        set_aside=row.set_aside,
        epsilon=last.epsilon,
        delta=last.delta,
        spent_epsilon=_epsilon(b, e, last.delta, row.kappa),
        spent_d=d * UNIT_D,
        left_epsilon=float("inf") if np.isinf(last.epsilon) else left,
        consents=consents,
        charges=tuple(charged),
    )


def read_kinds(connection: Connection) -> IntArray:
    """Number the kinds of accounts: people of one kind allowed the same at the same time, and had the same charges.

    Whoever has changed what they allow is of a kind of their own.
    """
    people = people_count(connection)
    c = schema.consents.c
    person, *said = columns_of(
        connection, select(c.person, c.entry, c.epsilon, c.delta).order_by(c.person), [int, int, float, float]
    )
    own = schema.people.c
    fixed = columns_of(connection, select(own.kappa, own.set_aside).order_by(own.number), [float, float])
    first = np.searchsorted(person, np.arange(people))
    changed = np.bincount(person, minlength=people) > 1
    runs = [levels_of_run(connection, run.number, people) for run in read_runs(connection)]
    kind = np.where(changed, 1 + np.arange(people), 0)
    for column in (*(each[first] for each in said), *fixed, *runs):
        # Two columns at a time: a table of all of them would need several times the memory.
        pair = np.stack([kind, np.unique(column, return_inverse=True)[1].reshape(-1)], axis=1)
        kind = np.unique(pair, axis=0, return_inverse=True)[1].reshape(-1)
    return kind


def read_number(connection: Connection, name: str) -> int | None:
    """Find a person's number, by id."""
    found = connection.execute(select(schema.people.c.number).where(schema.people.c.id == name)).scalar()
    return None if found is None else int(found)


def read_tiers(connection: Connection) -> list[Tier]:
    """Sum everybody up by what they allow now."""
    now = current(connection)
    if not len(now):
        return []
    kappa = _kappas(connection)
    used = spent(connection, people_count(connection), CHARGED)
    epsilon = _epsilons(used, now.delta, kappa)
    left = np.where(now.allowed.b > 0, 1 - used.b / np.maximum(now.allowed.b, 1), 0.0).clip(0)
    out = (now.allowed.left_after(used).b == 0) | (now.allowed.left_after(used).d == 0)
    pairs, place = _tiers_of(now.epsilon, now.delta)
    tiers = []
    for index, (e, d) in enumerate(pairs):
        members = place == index
        tiers.append(
            Tier(
                float(e), float(d), int(members.sum()), float(epsilon[members].mean()), float(epsilon[members].max()),
                float(left[members].mean()), int(out[members].sum()),
            )
        )  # fmt: skip
    return tiers


def read_timeline(connection: Connection) -> list[dict[str, Any]]:
    """Compute what was left after each charged run: the mean share of mu^2, of what is allowed now."""
    now = current(connection)
    counted = (now.allowed.b > 0) & np.isfinite(now.epsilon)
    if not counted.any():
        return []
    pairs, place = _tiers_of(now.epsilon[counted], now.delta[counted])
    total, found = Amounts.zeros(len(now)), []
    for run in read_runs(connection):
        if run.state not in CHARGED or series_of(run.token) is not None:
            continue
        add(connection, run.number, charge_table(connection, run.number), total)
        left = (1 - total.b[counted] / now.allowed.b[counted]).clip(0)
        tiers = [
            {"epsilon": float(e), "delta": float(d), "share_left": float(left[place == index].mean())}
            for index, (e, d) in enumerate(pairs)
        ]
        found.append(
            {
                "run": run.number,
                "name": run.name,
                "time": run.time,
                "share_left": float(left.mean()),
                "by_tier": tiers,
            }
        )
    return found


def read_statement(connection: Connection, run: int) -> Statement:
    """Compute what a run takes of what its people allow: before it, by it, and what is left after it.

    Of a run of a series, what the whole series takes.
    """
    found = read_runs(connection, run)[0]
    paying = series_of(found.token) or run
    now = current(connection)
    kappa = _kappas(connection)
    before = spent(connection, len(now), CHARGED, without=paying)
    mine = Amounts.zeros(len(now))
    add(connection, paying, charge_table(connection, paying), mine)
    listed = levels_of_run(connection, run, len(now)) != schema.NOT_THERE
    after = Amounts(before.b + mine.b, before.d + mine.d, before.e + mine.e)
    left = now.allowed.left_after(after)
    gone = (left.b == 0) | (left.d == 0)
    rest = Amounts(np.where(gone, 0, left.b), left.d, np.zeros_like(left.e))
    columns = [
        _epsilons(before, now.delta, kappa),
        _epsilons(mine, now.delta, kappa),
        np.where(np.isinf(now.epsilon), np.inf, _epsilons(rest, now.delta, kappa)),
        before.b / np.maximum(now.allowed.b, 1),
        mine.b / np.maximum(now.allowed.b, 1),
    ]
    unused = (mine.b == 0) & (mine.d == 0) & (mine.e == 0)
    # What is reserved only may be canceled yet: at a start, it does not count either.
    taken = spent(connection, len(now), STARTED, without=paying)
    total = Amounts(taken.b + mine.b, taken.d + mine.d, taken.e + mine.e)
    over = listed & ~now.allowed.covers(total)
    above, changed = over & unused, over & ~unused
    withdrawn = int((above & (now.epsilon == 0)).sum())
    pairs, place = _tiers_of(now.epsilon[listed], now.delta[listed])
    tiers = []
    for index, (epsilon, delta) in enumerate(pairs):
        members = np.flatnonzero(listed)[place == index]
        means = [float(column[members].mean()) for column in columns]
        tiers.append(
            TierShare(
                epsilon=float(epsilon),
                delta=float(delta),
                people=members.size,
                spent_before=means[0],
                this_run=means[1],
                left=means[2],
                share_before=means[3],
                share_this_run=means[4],
                unused=int(unused[members].sum()),
            )
        )
    return Statement(
        found.number, found.name, tuple(tiers), int(above.sum()) - withdrawn, withdrawn, int(changed.sum())
    )


def _kappas(connection: Connection) -> FloatArray:
    query = select(schema.people.c.kappa).order_by(schema.people.c.number)
    return columns_of(connection, query, [float])[0]


MOST_TIERS = 12


def _tiers_of(epsilon: FloatArray, delta: FloatArray) -> tuple[FloatArray, IntArray]:
    """Find the tiers, and everybody's place among them: each pair its own, or ranges if there are many."""
    code = np.unique(epsilon, return_inverse=True)[1] * (1 + np.unique(delta).size)
    code = code + np.unique(delta, return_inverse=True)[1]
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    if first.size > MOST_TIERS:
        return _coarser(epsilon, delta)
    return np.stack([epsilon[first], delta[first]], axis=1), place.reshape(-1)


def _coarser(epsilon: FloatArray, delta: FloatArray) -> tuple[FloatArray, IntArray]:
    """Tiers at quantiles of epsilon, each named by the least that its people allow."""
    edges = np.unique(
        np.quantile(
            epsilon[np.isfinite(epsilon)], np.linspace(0, 1, MOST_TIERS, endpoint=False), method="lower"
        )
    )
    place = np.maximum(np.searchsorted(edges, epsilon, side="right") - 1, 0)
    smallest = np.array([delta[place == index].min(initial=1.0) for index in range(edges.size)])
    return np.stack([edges, smallest], axis=1), place


def _epsilons(used: Amounts, delta: FloatArray, kappa: FloatArray) -> FloatArray:
    found = for_distinct(gaussian_epsilon, np.sqrt(used.b * UNIT_B), (1 - kappa) * delta) + used.e * UNIT_B
    return np.where((used.b > 0) | (used.e > 0), found, 0.0)


def _epsilon(b: int, e: int, delta: float, kappa: float) -> float:
    """What b and e cost, as the epsilon at which delta_sqrt(b) is (1 - kappa) delta."""
    if b == 0 and e == 0:
        return 0.0
    return float(gaussian_epsilon(np.sqrt(b * UNIT_B), (1 - kappa) * delta)) + e * UNIT_B


Taken = tuple[int, PersonCharge, tuple[int, int, int]]
"""The entry at which a run started (or was reserved), the charge, and its amounts."""


def _charges(connection: Connection, number: int) -> list[Taken]:
    chunk, place = divmod(number, schema.CHUNK)
    r, p, entries = schema.runs.c, schema.run_people.c, schema.log.c
    query = (
        select(
            r.number,
            r.name,
            r.state,
            r.entry,
            entries.time,
            func.substr(p.levels, 2 * place + 1, 2).label("level"),
        )
        .join(schema.run_people, (p.run == r.number) & (p.chunk == chunk))
        .join(schema.log, entries.entry == r.entry)
        .order_by(r.number)
    )
    found: list[Taken] = []
    for row in connection.execute(query):
        level = int.from_bytes(bytes(row.level), "little") if len(bytes(row.level)) == 2 else schema.NOT_THERE
        if level == schema.NOT_THERE:
            continue
        c = schema.charges.c
        one = connection.execute(select(schema.charges).where(c.run == row.number, c.level == level)).one()
        if one.b == one.d == one.e == 0:
            continue
        charge = PersonCharge(
            row.number, row.name, row.state, row.time, one.kind, one.mu, one.d * UNIT_D, one.e * UNIT_B
        )
        found.append((row.entry, charge, (one.b, one.d, one.e)))
    return found


def _consents(connection: Connection, number: int, kappa: float, taken: list[Taken]) -> tuple[Consent, ...]:
    c, entries = schema.consents.c, schema.log.c
    query = (
        select(schema.consents, entries.time)
        .join(schema.log, entries.entry == c.entry)
        .where(c.person == number)
        .order_by(c.entry)
    )
    rows = list(connection.execute(query))
    ends = [*(row.entry for row in rows[1:]), float("inf")]
    found = []
    for row, end in zip(rows, ends, strict=True):
        amounts = [amount for entry, charge, amount in taken if charge.state in STARTED and entry < end]
        b, d, e = (sum(x) for x in zip(*amounts, strict=True)) if amounts else (0, 0, 0)
        kept = b <= row.allowed_b and d <= row.allowed_d and e <= row.allowed_e
        found.append(Consent(row.time, row.epsilon, row.delta, _epsilon(b, e, row.delta, kappa), kept))
    return tuple(found)
