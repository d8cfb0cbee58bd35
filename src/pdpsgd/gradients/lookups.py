"""Gradients of tables of which each example looks up some rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import PerExample, accurate, zero_rows
from pdpsgd.gradients.sums import row_squared_norms


class Lookups(PerExample):
    """Gradients of a table of which each example used some rows: (uses, width), each with its example and its row."""

    def __init__(
        self, examples: Tensor, rows: Tensor, values: Tensor, shape: torch.Size, batch_size: int
    ) -> None:
        """No two uses have the same example and the same row."""
        self.shape, self.batch_size = shape, batch_size
        self._owner, self._row, self._values = examples, rows, accurate(values)
        self.dtype = self._values.dtype

    def squared_norms(self) -> Tensor:
        """Of the rows used, each counted once."""
        squares = row_squared_norms(self._values)
        return squares.new_zeros(self.batch_size).index_add_(0, self._owner, squares)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add to the rows used."""
        if native.has_weighted_sums(self._values, total):
            native.add_uses(self._owner, self._row, weights, self._values, total)
            return
        total.index_add_(0, self._row, self._values.to(total.dtype) * weights[self._owner, None])

    def materialize(self, first: int, last: int) -> Tensor:
        """Fill a table per example."""
        chosen = (self._owner >= first) & (self._owner < last)
        tables = self._values.new_zeros(last - first, *self.shape)
        tables[self._owner[chosen] - first, self._row[chosen]] = self._values[chosen]
        return tables

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite, in place: these numbers are our own."""
        self._values[examples[self._owner]] = 0
        return self

    def settled(self) -> PerExample:
        """Nothing else is needed."""
        return self

    def owned_by(self, owners: Tensor, count: int) -> Lookups:
        """Return the same for `count` owners of examples: what one looked up several times is added up."""
        table = self.shape[0]
        keys, use_of = torch.unique(owners[self._owner] * table + self._row, return_inverse=True)
        values = self._values.new_zeros(len(keys), self._values.shape[1]).index_add_(0, use_of, self._values)
        return Lookups(keys // table, keys % table, values, self.shape, count)


class Passed(NamedTuple):
    """What lookups (examples, number) of rows of a table pass back to it.

    Attributes:
        rows: Of the table; int64.
        gradient: Of each lookup (examples, number, width); or, with shares, of each example (examples, width).
        shares: What each lookup has in its example, if that is a sum over lookups.
        padding: The row that gets nothing, if there is one.
    """

    rows: Tensor
    gradient: Tensor
    shares: Tensor | None
    padding: int | None


class TableGradients(PerExample):
    """Gradients of a table, as they are passed back to it: an example may look a row up several times."""

    def __init__(self, passed: Passed, shape: torch.Size) -> None:
        self.passed, self.shape = passed, shape
        self.batch_size, self.dtype = passed.rows.shape[0], passed.gradient.dtype
        self._lookups: Lookups | None = None

    @property
    def lookups(self) -> Lookups:
        """The same with the rows that each example uses, each of them once."""
        if self._lookups is None:
            rows, gradient, shares, padding = self.passed
            examples, used, use_of = distinct_uses(rows, self.shape[0])
            if shares is None:
                per_lookup = gradient.reshape(rows.numel(), -1)
                values = per_lookup.new_zeros(len(used), self.shape[1]).index_add_(0, use_of, per_lookup)
            else:
                factors = shares.new_zeros(len(used)).index_add_(0, use_of, shares.flatten())
                values = factors[:, None] * gradient[examples]
            if padding is not None:
                values[used == padding] = 0
            self._lookups = Lookups(examples, used, values, self.shape, self.batch_size)
        return self._lookups

    def squared_norms(self) -> Tensor:
        """Of the rows used, each counted once."""
        return self.lookups.squared_norms()

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add to the rows used."""
        self.lookups.add_weighted_sum(weights, total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Fill a table per example."""
        return self.lookups.materialize(first, last)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite what is passed back, in copies."""
        rows, gradient, shares, padding = self.passed
        shares = None if shares is None else zero_rows(shares, examples)
        return TableGradients(Passed(rows, zero_rows(gradient, examples), shares, padding), self.shape)


def distinct_uses(rows: Tensor, table: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return examples and rows of distinct uses of a table by (examples, length), and which use each lookup is of."""
    if native.has_lookups(rows):
        return native.distinct_uses(rows)
    owner = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
    return distinct_uses_of(owner.flatten(), rows.flatten(), table)


def distinct_uses_of(examples: Tensor, rows: Tensor, table: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same of lookups with their examples."""
    keys, use_of = torch.unique(examples * table + rows, return_inverse=True)
    return keys // table, keys % table, use_of
