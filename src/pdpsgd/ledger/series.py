"""Series: runs whose plans are fixed together, each used once or not, in any order, under one certificate.

The series is one run of the ledger that pays for all; its members are runs that cost nothing more. A certificate of
all of them together is smaller than one for each: inside a series nothing is chosen by results, so that everything
composes exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from pdpsgd._typing import IntArray
from pdpsgd.accounting import accountant
from pdpsgd.accounting.history import Exposure, History, simplify
from pdpsgd.errors import fail
from pdpsgd.ledger import schema
from pdpsgd.ledger.charges import Charge, charge_of, member_charge
from pdpsgd.ledger.consents import people_count
from pdpsgd.ledger.reservations import reserve, series_of
from pdpsgd.ledger.spending import levels_of_run
from pdpsgd.planning.planner import prove
from pdpsgd.planning.plans import Plan

MOST_RUNS = 1_000


def split(plan: Plan, runs: int) -> list[Plan]:
    """Split a plan into equal runs with the same rates and noise; together they cost what the plan costs.

    Guarantee: steps of all runs compose to the steps of the plan.
    """
    if not 1 <= runs <= MOST_RUNS or len(plan.rounds) != 1 or plan.rounds[0].steps % runs:
        fail(
            f"Expected a plan of one round, whose steps can be shared by {runs} runs. Got {len(plan.rounds)} rounds "
            f"and {plan.steps} steps."
        )
    only = plan.rounds[0]
    levels = tuple(replace(level, proven_epsilon=None) for level in plan.levels)
    part = replace(plan, rounds=(replace(only, steps=only.steps // runs),), levels=levels)
    return [prove(part, accountant(plan.accountant))] * runs


def reserve_series(
    connection: Connection,
    *,
    token: str,
    name: str,
    plans: Sequence[Plan],
    numbers: Sequence[IntArray],
    texts: Sequence[str],
    share_of_d: float,
) -> list[int]:
    """Charge everybody once for all runs of a series, within a transaction that holds the lock.

    Args:
        connection: holds the lock.
        token: names the request.
        name: for people to read.
        plans: what each run executes, with its people.
        numbers: the people of each plan, in its order.
        texts: each plan as the ledger keeps it.
        share_of_d: how much of KAPPA delta the series takes.

    Returns:
        The number of the series, then those of its runs.
    """
    people = people_count(connection)
    levels = np.full((people, len(plans)), schema.NOT_THERE, dtype=np.int64)
    for place, (plan, listed) in enumerate(zip(plans, numbers, strict=True)):
        assert plan.roster is not None
        levels[listed, place] = plan.roster.level
    everybody = np.flatnonzero((levels != schema.NOT_THERE).any(axis=1))
    kinds, kind_of = np.unique(levels[everybody], axis=0, return_inverse=True)
    costs = [_joint_charge(plans, kind, share_of_d) for kind in kinds.tolist()]
    carrier = reserve(
        connection,
        token=token,
        name=f"{name} (series of {len(plans)})".strip(),
        numbers=everybody,
        levels=kind_of.reshape(-1),
        charges=costs,
        plan="",
        people_digest="",
    )
    members = []
    for place, (plan, listed, text) in enumerate(zip(plans, numbers, texts, strict=True)):
        assert plan.roster is not None
        exposures = [simplify(_exposures(plan, level)) for level in range(len(plan.levels))]
        members.append(
            reserve(
                connection,
                token=f"series:{carrier}:{place}",
                name=f"{name} {place + 1}".strip(),
                numbers=listed,
                levels=plan.roster.level,
                charges=[member_charge(history) for history in exposures],
                plan=text,
                people_digest=plan.people_digest or "",
            )
        )
    return [carrier, *members]


def check_series(connection: Connection) -> Iterator[str]:
    """Find members whose exposures their series has not paid for."""
    r = schema.runs.c
    members: dict[int, list[int]] = {}
    for row in connection.execute(select(r.number, r.token).order_by(r.number)):
        carrier = series_of(row.token)
        if carrier is not None:
            members.setdefault(carrier, []).append(row.number)
    people = people_count(connection)
    for carrier, runs in members.items():
        columns = [levels_of_run(connection, run, people) for run in (carrier, *runs)]
        stated = [_stated(connection, run) for run in (carrier, *runs)]
        for kind in np.unique(np.stack(columns, axis=1), axis=0).tolist():
            paid = stated[0].get(kind[0], ())
            used = tuple(
                e for one, level in zip(stated[1:], kind[1:], strict=True) for e in one.get(level, ())
            )
            if simplify(used) != paid:
                yield f"Series {carrier} has not paid for what its runs expose people to."
                break


def _joint_charge(plans: Sequence[Plan], kind: Sequence[int], share_of_d: float) -> Charge:
    there = [(plan, level) for plan, level in zip(plans, kind, strict=True) if level != schema.NOT_THERE]
    history = simplify(tuple(e for plan, level in there for e in _exposures(plan, level)))
    return charge_of(
        history, delta=min(plan.levels[level].delta for plan, level in there), share_of_d=share_of_d
    )


def _exposures(plan: Plan, level: int) -> History:
    return tuple(r.exposure(level) for r in plan.rounds)


def _stated(connection: Connection, run: int) -> dict[int, Any]:
    c = schema.charges.c
    rows = connection.execute(select(c.level, c.exposures).where(c.run == run))
    return {row.level: tuple(Exposure(*entry) for entry in json.loads(row.exposures)) for row in rows}
