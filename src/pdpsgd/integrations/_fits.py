"""Several fits on the same people in one process: each is a run of its own, and together they cost more than one.

Nothing here is written anywhere or pickled with an estimator: what is remembered of rows are keyed digests, under a key
that ends with the process.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd._typing import WordArray
from pdpsgd.budgets.budgets import as_read
from pdpsgd.engine.checks.held_out import more_than_chance, row_digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan

SHARE = 0.1
"""Of the smaller of two fits' rows that have an equal in the other, before it is asked whether chance explains them."""
FEWEST = 16
"""Rows that a column needs to be known by its order."""
ONE_FIT = ("base", "pipeline", "utils", "frozen", "compose")
"""Modules of scikit-learn that fit what they are given once; `_pipelines` says what they learn."""

_SEED = int.from_bytes(np.random.default_rng().bytes(8), "big")
_FITS: list[Fit] = []
_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Fit:
    """One fit: digests of its rows, of their order by columns and, where people are named, of ids; its cost at most."""

    rows: WordArray
    orders: frozenset[int]
    people: frozenset[int] | None
    epsilon: float

    @classmethod
    def of(cls, rows: Any, people: Budgets, plan: Plan) -> Fit:
        """Describe a fit of these rows, an array or a frame, by a plan."""
        ids = None
        if people.named:
            read = as_read(people.ids)
            names = (people.ids if read is None else read).tolist()
            ids = frozenset(hash((_SEED, str(name))) for name in names)
        costs = [x.epsilon if x.proven_epsilon is None else x.proven_epsilon for x in plan.levels if x.people]
        return cls(digests_of(rows), orders_of(rows), ids, max(costs))

    def shares_people_with(self, other: Fit) -> bool:
        """Tell whether somebody is in both: by ids where both have them, else by rows, more than by chance.

        Or by a column in which rows stand in the same order, whatever it was scaled by and whatever is beside it.
        """
        if self.people is not None and other.people is not None:
            return not self.people.isdisjoint(other.people)
        if not self.orders.isdisjoint(other.orders):
            return True
        few, many = sorted((self.rows, other.rows), key=len)
        return bool(more_than_chance(many, few, share=SHARE))


def digests_of(rows: Any) -> WordArray:
    """Return a word for each row of an array or a frame, the same for equal rows while this process lasts."""
    if not isinstance(rows, np.ndarray):
        words = (hash((_SEED, *map(str, row))) % 2**64 for row in rows.iter_rows())
        return np.fromiter(words, dtype=np.uint64, count=len(rows))
    import torch

    whole = np.require(rows, requirements=["C", "W"])  # torch wants to be able to write
    return row_digests((torch.from_numpy(whole),), seed=_SEED)


def orders_of(rows: Any) -> frozenset[int]:
    """Digest the order of rows by each column in which most differ; sorted columns say nothing of whose rows they are.

    Two columns of other people have one order with a chance below 1e-10, and one that is scaled has that of before.
    """
    columns = rows.T if isinstance(rows, np.ndarray) else (rows[name].to_numpy() for name in rows.columns)
    found = set()
    for column in columns:
        if column.dtype.kind not in "fiu" or len(column) < FEWEST or not np.isfinite(column).all():
            continue
        values, place = np.unique(column, return_inverse=True)
        moves = np.diff(place)
        if 2 * len(values) >= len(column) and (moves < 0).any() and (moves > 0).any():
            both = place.astype(np.int64).tobytes(), (len(values) - 1 - place).astype(np.int64).tobytes()
            found.add(hash((_SEED, min(both))))
    return frozenset(found)


@contextmanager
def counted(fit: Fit) -> Iterator[str | None]:
    """Count a fit from its beginning on, for as long as the process lasts; one that fails has not been.

    Yields what `other_fits` says of it: of two at once, in threads, the second is told of the first.
    """
    with _LOCK:
        said = other_fits(fit)
        _FITS.append(fit)
    try:
        yield said
    except BaseException:
        with _LOCK:
            _FITS.remove(fit)
        raise


def fits_so_far() -> list[Fit]:
    """Return all fits of this process."""
    with _LOCK:
        return list(_FITS)


def forget_fits() -> None:
    """Forget all fits, as a new process has none."""
    with _LOCK:
        _FITS.clear()


def other_fits(fit: Fit) -> str | None:
    """Say in a sentence what speaks against a fit because of others on the same people; None where nothing does."""
    around = fitted_by()
    if around is not None:
        return (
            f"It was fitted inside {around}, which fits several times on the same people, or looks at their records "
            "itself: what is promised holds for one fit alone."
        )
    before = [each for each in _FITS if each.shares_people_with(fit)]
    if not before:
        return None
    fits = "an earlier fit" if len(before) == 1 else f"{len(before)} earlier fits"
    total = fit.epsilon + sum(each.epsilon for each in before)
    return (
        f"Some of these people were trained on in {fits} of this process, too. This fit alone costs them up to epsilon "
        f"{fit.epsilon:.3g}, all together up to {total:.3g}: to release more than one, plan them together (a ledger)."
    )


def fitted_by() -> str | None:
    """Name what in scikit-learn is fitting around this call, if it may fit more than once; pipelines do not."""
    outermost = None
    for frame in _frames():
        module = str(frame.f_globals.get("__name__", "")).split(".")
        if module[0] == "sklearn" and len(module) > 1 and module[1] not in ONE_FIT:
            around = frame.f_locals.get("self")
            outermost = frame.f_code.co_name.lstrip("_") if around is None else type(around).__name__
    return outermost


def learning_from_outputs() -> str | None:
    """Name the estimator of scikit-learn that is being fitted on the outputs that are asked for; None if none is."""
    for frame in _frames():
        around, name = frame.f_locals.get("self"), frame.f_code.co_name
        module = str(frame.f_globals.get("__name__", ""))
        if around is not None and module.startswith("sklearn.") and name in ("fit", "fit_transform"):
            return type(around).__name__
    return None


def was_trained_on(rows: WordArray, trained: Fit) -> bool:
    """Tell whether rows are those that a fit was on, more than by chance."""
    few, many = sorted((rows, trained.rows), key=len)
    return bool(more_than_chance(many, few, share=SHARE))


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
