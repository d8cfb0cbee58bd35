"""People with many rows: the gradients of a person's rows are added up before any norm is taken.

A person's rows are like the positions of one example: the squared norm of their sum is a sum over pairs of *own* rows.
How many rows somebody has depends on their records, so rows of others may stand elsewhere without them: whatever is
added over people is added in float64 (see `sums`), but by compiled code, which cuts batches between people (`layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, singledispatch

import torch
from torch import Tensor

from pdpsgd.gradients.compiled_kernels import CompiledKernels, compiled_products
from pdpsgd.gradients.lookups import Lookups, TableGradients
from pdpsgd.gradients.per_example import (
    LANES,
    Materialized,
    OuterProducts,
    PartOfRows,
    PerExample,
    Sum,
    as_rows,
    gram_is_cheaper,
    zero_rows,
)
from pdpsgd.gradients.sums import (
    CACHE,
    add_exact_products,
    add_weighted_rows,
    group_squared_norms,
    row_squared_norms,
    segment_sums,
)
from pdpsgd.gradients.workspace import Workspace

# A person's positions for which inner products pay: then the weighted sum over positions has to be one in float64.
FEW = 8


class Groups:
    """Whose rows are which: person i has rows starts[i] to starts[i + 1], side by side, at least one.

    Some of them may be nobody: placeholders that stand where rows of others begin, or at the end.
    """

    def __init__(
        self, starts: Tensor, device: torch.device, whose: Tensor | None = None, *, early: bool = False
    ) -> None:
        """`whose` are places on the list, below 0 for nobody; on the processor, as `starts` are.

        With `early`, no gradients of single rows were taken during the backward pass. Without, those of some batches
        may have been, by the number of rows; so they are added up one by one, and come out the same either way.
        """
        self.early = early
        self.starts = starts
        self.device = device
        self.people = starts.shape[0] - 1
        self.whose = torch.zeros_like(starts[1:]) if whose is None else whose
        assert self.whose.shape[0] == self.people  # compiled code reads them side by side
        self._by_size: list[tuple[Tensor, Tensor]] = []

    @cached_property
    def sizes(self) -> Tensor:
        """How many rows each person has."""
        return (self.starts[1:] - self.starts[:-1]).to(self.device)

    @cached_property
    def owner(self) -> Tensor:
        """The person of each row."""
        return torch.repeat_interleave(self.sizes)

    def by_size(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield people who have as many rows: who they are, in ascending order, and their rows (people, number)."""
        if not self._by_size:
            begins = self.starts[:-1].to(self.device)
            for size in torch.unique(self.sizes).tolist():
                people = (self.sizes == size).nonzero()[:, 0]
                rows = begins[people, None] + torch.arange(size, device=self.device)
                self._by_size.append((people, rows))
        yield from self._by_size


@singledispatch
def over_people(gradient: PerExample, groups: Groups) -> PerExample:
    """Return the sums over each person's rows, in a form that suits that of the rows."""
    return OverPeople(gradient, groups)


@over_people.register
def _(gradient: OuterProducts, groups: Groups) -> PerExample:
    if gradient.positions == 1:
        return RowProducts(gradient, groups)
    if gradient.may_settle and not groups.early:
        return OverPeople(gradient, groups)
    if not gradient.by_gram:
        return _materialized(gradient, groups)
    return _by_cost(gradient, groups)


@over_people.register
def _(gradient: CompiledKernels, groups: Groups) -> PerExample:
    return gradient.over(groups.starts) if groups.early else OverPeople(gradient, groups)


@over_people.register
def _(gradient: Materialized, groups: Groups) -> PerExample:
    return Materialized(segment_sums(as_rows(gradient.values), groups.starts, groups.owner), gradient.shape)


@over_people.register
def _(gradient: Lookups, groups: Groups) -> PerExample:
    return gradient.owned_by(groups.owner, groups.people)


@over_people.register
def _(gradient: TableGradients, groups: Groups) -> PerExample:
    return gradient.lookups.owned_by(groups.owner, groups.people)


@over_people.register
def _(gradient: Sum, groups: Groups) -> PerExample:
    return Sum([over_people(part, groups) for part in gradient.parts])


@over_people.register
def _(gradient: PartOfRows, groups: Groups) -> PerExample:
    return PartOfRows(over_people(gradient.part, groups), gradient.shape, gradient.rows)


def _by_cost(gradient: OuterProducts, groups: Groups) -> PerExample:
    """Return sums over people's positions: by inner products for people with few records, else materialized.

    Guarantee: which of them somebody's is depends on their own number of records alone, and so do its bits.
    """
    few = groups.sizes <= _most_by_gram(gradient.positions, *gradient.matrix)
    parts: list[tuple[Tensor, PerExample]] = []
    for chosen, form in ((few, _by_gram), (~few, _materialized)):
        if chosen.any():
            parts.append((chosen.nonzero()[:, 0], form(*_of_some(gradient, groups, chosen))))
    return parts[0][1] if len(parts) == 1 else BySize(parts)


@cache
def _most_by_gram(positions: int, rows: int, columns: int) -> int:
    """Return how many records somebody may have for inner products of all their positions to be cheaper."""
    most = 0
    while (most + 1) * positions <= FEW and gram_is_cheaper((most + 1) * positions, rows, columns):
        most += 1
    return most


def _of_some(gradient: OuterProducts, groups: Groups, chosen: Tensor) -> tuple[OuterProducts, Groups]:
    """Return the rows of some people, and whose they are."""
    if chosen.all():
        return gradient, groups
    rows = chosen[groups.owner]
    ends = groups.sizes[chosen].cumsum(0).cpu()
    starts = torch.cat([ends.new_zeros(1), ends])
    return gradient.of(gradient.left[rows], gradient.right[rows]), Groups(starts, groups.device, early=True)


def _by_gram(products: OuterProducts, groups: Groups) -> PerExample:
    """Return sums over positions as sums over so many rows more."""
    left, right = (factor.flatten(0, 1) for factor in (products.left, products.right))
    rows = Groups(groups.starts * products.positions, groups.device, early=True)
    return RowProducts(products.of(left, right), rows)


def _materialized(products: OuterProducts, groups: Groups) -> PerExample:
    """Return sums over positions that are materialized: by compiled code, or one call for each number of rows."""
    compiled = compiled_products(products, groups.starts)
    if compiled is not None:
        return compiled
    parts: list[tuple[Tensor, PerExample]] = []
    for people, rows in groups.by_size():
        # Positions of different rows are positions of one person.
        left, right = (
            factor[rows].reshape(len(people), -1, factor.shape[2])
            for factor in (products.left, products.right)
        )
        parts.append((people, products.of(left, right)))
    return parts[0][1] if len(parts) == 1 else BySize(parts)


class RowProducts(PerExample):
    """Sums over a person's rows of outer products left (x) right: (rows, out), (rows, in)."""

    def __init__(self, products: OuterProducts, groups: Groups) -> None:
        """`products` have one position."""
        self.shape, self.dtype, self.batch_size = products.shape, products.dtype, groups.people
        self._products, self._groups = products, groups
        self._left, self._right = products.left[:, 0], products.right[:, 0]

    def squared_norms(self) -> Tensor:
        """Take them of inner products among own rows, in float64."""
        groups = self._groups
        return group_squared_norms(self._left, self._right, groups.starts, groups.by_size())

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add one matrix product over all rows, in float64: rows of one person may cancel."""
        arrange, matrix = self._products.arrange, self._products.matrix
        products = total.view(matrix) if arrange is None else total.new_zeros(matrix)
        of_rows = weights.to(torch.float64).index_select(0, self._groups.owner)
        add_exact_products(of_rows, self._left, self._right, products, self._products.workspace.take)
        if arrange is not None:
            total += arrange(products[None])[0]

    def materialize(self, first: int, last: int) -> Tensor:
        """Write out the products of rows, and sum them."""
        return _materialize_sums(self._products, self._groups, first, last)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite both factors of all rows, in copies."""
        rows, old = examples[self._groups.owner], self._products
        left, right = zero_rows(old.left, rows), zero_rows(old.right, rows)
        return RowProducts(OuterProducts(left, right, old.shape, old.workspace, old.arrange), self._groups)


class BySize(PerExample):
    """Gradients of people in several parts, by how many rows they have."""

    def __init__(self, parts: Sequence[tuple[Tensor, PerExample]]) -> None:
        """With each part goes who is in it, in ascending order."""
        self.parts = parts
        self.shape, self.dtype = parts[0][1].shape, parts[0][1].dtype
        self.batch_size = sum(len(people) for people, _ in parts)

    def squared_norms(self) -> Tensor:
        """Of each part, put together."""
        norms = [(people, part.squared_norms()) for people, part in self.parts]
        found = norms[0][1].new_empty(self.batch_size)
        for people, some in norms:
            found[people] = some
        return found

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add each part."""
        for people, part in self.parts:
            part.add_weighted_sum(weights[people], total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Put the parts together."""
        found = None
        for people, part in self.parts:
            begin, end = torch.searchsorted(people, people.new_tensor([first, last])).tolist()
            some = part.materialize(begin, end)
            found = some.new_empty(last - first, *self.shape) if found is None else found
            found[people[begin:end] - first] = some
        assert found is not None
        return found

    def settled(self) -> PerExample | None:
        """Settle every part, if all of them can be."""
        if not all(part.may_settle for _, part in self.parts):
            return None
        settled = [(people, part.settled()) for people, part in self.parts]
        if any(part is None for _, part in settled):
            return None
        return BySize([(people, part) for people, part in settled if part is not None])

    def zeroed(self, examples: Tensor) -> PerExample:
        """In every part."""
        return BySize([(people, part.zeroed(examples[people])) for people, part in self.parts])


class OverPeople(PerExample):
    """The sums over people's rows of gradients in any form, materialized a few people at a time.

    They are kept from the norms to the weighted sum if there is a workspace with room.
    """

    def __init__(self, part: PerExample, groups: Groups, workspace: Workspace | None = None) -> None:
        self.part, self.groups, self.workspace = part, groups, workspace
        self.shape, self.batch_size, self.dtype = part.shape, groups.people, part.dtype
        self._kept: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """Of the sums."""
        if self.workspace is not None:
            like = torch.empty(0, dtype=self.dtype, device=self.groups.device)
            self._kept = self.workspace.keep((self.batch_size, *self.shape), like)
        norms = []
        for first, last in self.in_chunks():
            values = self.materialize(first, last)
            if self._kept is not None:
                self._kept[first:last] = values
            norms.append(row_squared_norms(values))
        return torch.cat(norms)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the same numbers that the norms were taken of."""
        if self._kept is not None:
            add_weighted_rows(weights, as_rows(self._kept), total)
            return
        for first, last in self.in_chunks():
            add_weighted_rows(weights[first:last], as_rows(self.materialize(first, last)), total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Sum over rows."""
        return _materialize_sums(self.part, self.groups, first, last)

    def zeroed(self, examples: Tensor) -> PerExample:
        """In every row."""
        return OverPeople(self.part.zeroed(examples[self.groups.owner]), self.groups, self.workspace)

    def in_chunks(self) -> Iterator[tuple[int, int]]:
        """Return ranges of people whose rows may be materialized at once."""
        most, first = max(1, CACHE // max(1, self.shape.numel())), 0
        starts = self.groups.starts
        while first < self.batch_size:
            end = int(torch.searchsorted(starts, int(starts[first]) + most, right=True)) - 1
            last = min(max(first + 1, end), self.batch_size)
            yield first, last
            first = last


def _materialize_sums(part: PerExample, groups: Groups, first: int, last: int) -> Tensor:
    begin, end = int(groups.starts[first]), int(groups.starts[last])
    # Rows are rounded by their place modulo the number of lanes, among as many rows.
    before, after = begin % LANES, min(-end % LANES, part.batch_size - end)
    rows = as_rows(part.materialize(begin - before, end + after))[before : before + end - begin]
    starts, owner = groups.starts[first : last + 1] - begin, groups.owner[begin:end] - first
    return segment_sums(rows, starts, owner).view(-1, *part.shape)
