"""Refuses a `collate_fn` in which records mix or change places, before training begins.

With mixup in the collation, or padding to the longest record of the batch, a record's row depends on who else was
sampled, and clipping that row does not bound its effect on the rows of others. Where rows are sorted, the weight 0 of a
placeholder, which holds somebody's record, goes to another row, and that record counts although nobody sampled it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pdpsgd.engine.batches import has_rows, named_tensors, seeded
from pdpsgd.engine.records import DatasetRecords, Records
from pdpsgd.errors import PdpsgdError, fail, warn

CHECKED_RECORDS = 16
FEWER_RECORDS = 5

Collate = Callable[[list[Any]], Any]


def check_collation(records: Records, *, by_place: bool) -> None:
    """Refuse a collation in which records mix, or that puts them into another order.

    Some records, spread over the data, are collated, in two orders; then again with each of them in turn replaced by
    another, every time under another seed: the rows at the places of the others must not change. From then on every
    batch must have rows of the same shape: a length set by the longest record puts that record's length into all other
    rows. With `by_place` (clipping norms differ between rows) there must be a row for each record, in the order of the
    records, whatever random numbers are drawn.

    Guarantee: none by itself. What mixes only for rare records can stay unseen.
    """
    if not isinstance(records, DatasetRecords) or records.collate is default_collate or len(records) < 2:
        return
    try:
        records.shapes = _checked(records, by_place=by_place)
    except PdpsgdError:
        raise
    except Exception as error:  # a user's function may raise anything
        _warn(f"it cannot be tried on a few records ({type(error).__name__}: {error})")


def collation_is_unseen(records: Records) -> bool:
    """Tell whether batches are collated by code that could not be checked."""
    return (
        isinstance(records, DatasetRecords)
        and records.collate is not default_collate
        and records.shapes is None
        and len(records) > 1
    )


def _checked(records: DatasetRecords, *, by_place: bool) -> RowShapes | None:
    """Return the shapes of rows; None if the collation cannot be checked."""
    items, collate = records.some_items(CHECKED_RECORDS), records.collate
    first, fewer = _Collated.of(collate, items), _Collated.of(collate, items[:FEWER_RECORDS])
    rows = [name for name in first.with_rows if name in fewer.with_rows]
    if by_place:
        _check_order(collate, items, rows)
    if not rows:
        _warn("it gives no tensor with a row for each record")
        return None
    if first.rows(rows) != _Collated.of(collate, items).rows(rows):
        _warn("it gives something else every time, with the same random numbers of torch, NumPy and Python")
        return None
    told = [
        _keeps_apart(collate, some, row, rows, fewer)
        for some in (items, items[::-1])
        for row in range(len(items))
    ]
    if not all(told):
        _warn("how many random numbers it draws depends on the records")
    return RowShapes({name: first.parts[name].shape[1:] for name in rows})


def _keeps_apart(
    collate: Collate, items: Sequence[Any], row: int, rows: Sequence[str], fewer: _Collated
) -> bool:
    """Refuse a collation that changes other rows with this one; returns whether it could be told."""
    before = _Collated.of(collate, items, seed=row)
    after = _Collated.of(collate, [*items[:row], items[row - 1], *items[row + 1 :]], seed=row)
    if any(name not in after.parts or before.parts[name].shape != after.parts[name].shape for name in rows):
        _refuse_lengths()
    if before.next_random != after.next_random:
        return False  # later records got other random numbers, because of this one's length, say
    were, are = before.rows(rows), after.rows(rows)
    if (Counter(were) - Counter(are)).total() > 1 or before.shared(fewer) != after.shared(fewer):
        fail(
            "Expected a collate_fn that gives each record a row of its own, whatever the others are. Got one "
            "in which replacing a record changes the rows of others, or what all of them share: it mixes records, "
            "or computes something over them. Do to each record what has to be done in the dataset's __getitem__, "
            "with constants that are public."
        )
    if [*were[:row], *were[row + 1 :]] != [*are[:row], *are[row + 1 :]]:
        _refuse_order("sorts or shuffles records")
    return True


@dataclass(frozen=True)
class _Collated:
    """Collated records, and the next random numbers after collating."""

    size: int
    parts: dict[str, Tensor]
    is_list_of_records: bool
    next_random: tuple[float, float, float]

    @classmethod
    def of(cls, collate: Collate, items: Sequence[Any], seed: int = 0) -> _Collated:
        with seeded(seed):
            batch = collate(copy.deepcopy(list(items)))  # it may change them
            # on the default device, where a collate function draws, too
            following = (float(torch.rand(())), random.random(), float(np.random.random()))  # noqa: NPY002
        a_list = isinstance(batch, (list, tuple)) and len(batch) == len(items)
        return cls(len(items), named_tensors(batch), a_list, following)

    @property
    def with_rows(self) -> list[str]:
        """Return the names of the tensors that have a row for each record."""
        return [name for name, part in self.parts.items() if has_rows(part, self.size)]

    def rows(self, names: Sequence[str]) -> list[bytes]:
        """Return the rows in their order, all tensors together."""
        flat = [_bytes(self.parts[name]) for name in names]
        return [b"".join(part[index].tobytes() for part in flat) for index in range(self.size)]

    def shared(self, fewer: _Collated) -> dict[str, bytes]:
        """Return the bytes of tensors that are shared by all records."""
        if self.is_list_of_records:
            return {}
        names = [n for n in self.parts if n.count(".") <= 1 and n in fewer.parts and n not in self.with_rows]
        return {name: self.parts[name].detach().cpu().numpy().tobytes() for name in names}


@dataclass(frozen=True)
class RowShapes:
    """Shapes of rows by the name of their tensor."""

    of: dict[str, torch.Size]

    def check(self, batch: Any) -> None:
        """Refuse a batch with rows of another shape."""
        found = named_tensors(batch)
        if any(name not in found or found[name].shape[1:] != shape for name, shape in self.of.items()):
            _refuse_lengths()


def _check_order(collate: Collate, items: Sequence[Any], rows: Sequence[str]) -> None:
    """Refuse a collation whose rows do not follow the order of the records (a fixed permutation fails one of two)."""
    size, kept = len(items), bool(rows)
    before = _Collated.of(collate, items).parts
    for order in ([*range(1, size), 0], [1, 0, *range(2, size)]):
        after = _Collated.of(collate, [items[place] for place in order]).parts
        kept &= all(name in after and _equal(before[name][order], after[name]) for name in rows)
    if not kept:
        _refuse_order("sorts, mixes or randomly changes records, or gives no tensor with a row a record")


def _refuse_order(what: str) -> NoReturn:
    fail(
        "Expected a collate_fn that gives each record the row of its place in the list, whatever the others are: "
        "a row's place says whose it is, and at which norm it is clipped (0 where nobody stands). Got one that "
        f"{what}. Do that in the dataset's __getitem__, or not at all."
    )


def _bytes(part: Tensor) -> np.ndarray[Any, Any]:
    return part.detach().cpu().reshape(len(part), -1).contiguous().view(torch.uint8).numpy()


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _warn(reason: str) -> None:
    warn(
        f"Whether records mix in collate_fn could not be checked: {reason}. If they do, nothing is proven.",
    )


def _refuse_lengths() -> None:
    fail(
        "Expected a collate_fn that gives all records rows of one shape, in every batch. Got rows whose shape depends "
        "on who else is in the batch (padded to the longest, say). Pad, or cut, every record to one public length."
    )
