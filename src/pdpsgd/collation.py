"""Refuses a `collate_fn` in which records mix, before anything is trained on what it gives.

Mixup in the collation, or padding to the longest record of the batch: then a record's row depends on who else was
drawn, and clipping that row does not bound what the others do to the sum.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pdpsgd.errors import fail
from pdpsgd.examples import has_rows, named_tensors, seeded
from pdpsgd.records import DatasetRecords, Records

CHECKED_RECORDS = 16
FEWER_RECORDS = 5

Collate = Callable[[list[Any]], Any]


def check_collation(records: Records, *, by_place: bool) -> None:
    """Refuse a collation in which records mix; where rows are clipped at norms of their own, also one that reorders.

    Some records, spread over the data, are put together; then again with each of them in turn exchanged for another,
    every time under another seed: the rows of the others must stay. From then on every batch must have rows of the
    same shape: a length that the longest record decides tells the others' rows who it is. With `by_place`, records in
    three orders must come out in these orders.

    Guarantee: none by itself. What mixes only for rare records can stay unseen.
    """
    if not isinstance(records, DatasetRecords) or records.collate is default_collate or len(records) < 2:
        return
    items, collate = records.some_items(CHECKED_RECORDS), records.collate
    rows = _names_of_rows(collate, items)
    if by_place:
        _check_order(collate, items, rows)
    if not rows:
        warnings.warn(
            "Whether records mix in collate_fn could not be checked: it gives no tensor with a row for each record. "
            "If they do, nothing is proven.",
            stacklevel=3,
        )
        return
    for row in range(len(items)):
        other = [*items[:row], items[row - 1], *items[row + 1 :]]
        before, after = _collated(collate, items, row), _collated(collate, other, row)
        for name in rows:
            if name not in after or before[name].shape != after[name].shape:
                _refuse_lengths()
        gone = _bytes_of_rows(before, rows) - _bytes_of_rows(after, rows)
        if gone.total() > 1:
            fail(
                "Expected a collate_fn that gives each record a row of its own, whatever the others are. Got one "
                "in which exchanging a record changes the rows of others: it mixes records, or normalises over "
                "them. Do to each record what has to be done in the dataset's __getitem__, with constants that are "
                "public."
            )
    records.shapes = RowShapes({name: before[name].shape[1:] for name in rows})


@dataclass(frozen=True)
class RowShapes:
    """The shapes of rows, by the name of their tensor."""

    of: dict[str, torch.Size]

    def check(self, batch: Any) -> None:
        """Refuse a batch with rows of another shape."""
        found = named_tensors(batch)
        if any(name not in found or found[name].shape[1:] != shape for name, shape in self.of.items()):
            _refuse_lengths()


def _names_of_rows(collate: Collate, items: Sequence[Any]) -> list[str]:
    """The tensors that have a row for each record, however many records there are."""
    all_of_them, fewer = _collated(collate, items, 0), _collated(collate, items[:FEWER_RECORDS], 0)
    return [
        name
        for name, part in all_of_them.items()
        if has_rows(part, len(items)) and name in fewer and has_rows(fewer[name], len(items[:FEWER_RECORDS]))
    ]


def _bytes_of_rows(parts: dict[str, Tensor], rows: Sequence[str]) -> Counter[bytes]:
    """How often each record's row is there, all tensors together: a collation may sort records."""
    flat = [parts[name].detach().cpu().reshape(len(parts[name]), -1).numpy() for name in rows]
    return Counter(b"".join(part[index].tobytes() for part in flat) for index in range(len(flat[0])))


def _check_order(collate: Collate, items: Sequence[Any], rows: Sequence[str]) -> None:
    """Rows put elsewhere by place alone move along with one exchange of order or another, not with both of these."""
    size, kept = len(items), bool(rows)
    before = _collated(collate, items, 0)
    for order in ([*range(1, size), 0], [1, 0, *range(2, size)]):
        after = _collated(collate, [items[place] for place in order], 0)
        kept &= all(name in after and _equal(before[name][order], after[name]) for name in rows)
    if not kept:
        fail(
            "Expected a collate_fn that gives each record the row of its place in the list, whatever the others are: "
            "the plan clips people of different levels at different norms, by their row. Got one that sorts, mixes or "
            "randomly changes records, or gives no tensor with a row a record. Do that in the dataset's __getitem__, "
            "or not at all."
        )


def _collated(collate: Collate, items: Sequence[Any], seed: int) -> dict[str, Tensor]:
    with seeded(seed):
        return named_tensors(collate(list(items)))


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _refuse_lengths() -> None:
    fail(
        "Expected a collate_fn that gives all records rows of one shape, in every batch. Got rows whose shape depends "
        "on who else is in the batch (padded to the longest, say). Pad, or cut, every record to one public length."
    )
