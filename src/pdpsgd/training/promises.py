"""What each person of a run was promised: the lines of `promises.csv` in a run folder, written and read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdpsgd.errors import fail, shown

if TYPE_CHECKING:
    from pdpsgd._typing import IntArray
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan

AT_ONCE = 2**16
"""People whose promises are written together."""


@dataclass(frozen=True)
class Promise:
    """One person's line: what they asked for, and their level of the plan."""

    id: str
    epsilon: float
    delta: float
    level: int


def promise_lines(plan: Plan, budgets: Budgets, levels: IntArray) -> Iterator[str]:
    """Yield the lines of the file, some at a time: there may be millions."""
    proven = [tuple(map(_number, (level.proven_epsilon, level.delta))) for level in plan.levels]
    yield "id,asked_epsilon,asked_delta,proven_epsilon,proven_delta,level\n"
    for start in range(0, len(budgets), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        columns = (each[part].tolist() for each in (budgets.ids, budgets.epsilon, budgets.delta, levels))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            (name, _number(epsilon), _number(delta), *proven[level], level)
            for name, epsilon, delta, level in zip(*columns, strict=True)
        )
        yield text.getvalue()


def read_promises(path: Path, plan: Plan) -> Iterator[Promise]:
    """Yield each person's line.

    Args:
        path: The file.
        plan: The plan of the run.

    Yields:
        The lines, in the order of the list.

    Raises:
        PdpsgdError: If a line cannot be read; or, once all are read, if they are not of the plan's people: each of its
            levels has to have as many as the plan says.
    """
    people = [0] * len(plan.levels)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                promise = _promise(row, len(people), f"line {number} of {str(path)!r}")
                people[promise.level] += 1
                yield promise
    except (UnicodeDecodeError, csv.Error) as error:
        fail(f"Expected what each person was promised, as text (CSV), in {str(path)!r}. Got: {error}.")
    for level, (found, known) in enumerate(zip(people, plan.levels, strict=True)):
        if found != known.people:
            fail(
                f"Expected the plan's {plan.people:,} people in {str(path)!r}, {known.people:,} of them on level "
                f"{level}. Got {sum(people):,}, {found:,} of them on it: is the file of another run, or cut off?"
            )


def _promise(row: dict[str, str], levels: int, place: str) -> Promise:
    try:
        promise = Promise(
            row["id"], float(row["asked_epsilon"]), float(row["asked_delta"]), int(row["level"])
        )
        if not 0 <= promise.level < levels:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        fail(
            f"Expected id, asked_epsilon, asked_delta and a level from 0 to {levels - 1} in {place}. Got "
            f"{shown(dict(row))}."
        )
    return promise


def _number(value: float | None) -> str:
    """Write a number with all its digits, in whichever precision it is.

    >>> import numpy
    >>> _number(numpy.float64(0.5)), _number(None)
    ('0.5', '')
    """
    return "" if value is None else repr(float(value))
