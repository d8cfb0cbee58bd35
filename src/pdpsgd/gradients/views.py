"""Views (augmentation multiplicity): the gradients of an example's views are averaged before it is clipped."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from pdpsgd.gradients.compiled_kernels import CompiledKernels, in_best_form
from pdpsgd.gradients.per_example import (
    Blocks,
    Materialized,
    OuterProducts,
    PartOfRows,
    PerExample,
    Sum,
    as_rows,
)
from pdpsgd.gradients.sums import add_weighted_rows, row_squared_norms


@singledispatch
def over_views(gradient: PerExample, views: int, *, early: bool = False) -> PerExample:
    """Return the sum over each `views` consecutive rows: the gradient of the example whose views they are.

    With `early`, no gradients of single rows were taken during the backward pass. Without, those of some batches may
    have been, by the number of rows; so they are added up one by one, and come out the same either way, to the bit.
    """
    return OverViews(gradient, views)


@over_views.register
def _(gradient: OuterProducts, views: int, *, early: bool = False) -> PerExample:
    if gradient.may_settle and not early:
        return OverViews(gradient, views)
    # Positions of different views are positions of one example.
    left, right = (
        factor.reshape(-1, views * gradient.positions, factor.shape[2])
        for factor in (gradient.left, gradient.right)
    )
    return in_best_form(gradient.of(left, right))


@over_views.register
def _(gradient: CompiledKernels, views: int, *, early: bool = False) -> PerExample:
    if not early:
        return OverViews(gradient, views)
    return gradient.over(torch.arange(0, gradient.batch_size + 1, views, device="cpu"))


@over_views.register
def _(gradient: Materialized, views: int, *, early: bool = False) -> PerExample:
    rows = gradient.materialize(0, gradient.batch_size)
    return Materialized(rows.reshape(-1, views, *gradient.shape).sum(1), gradient.shape)


@over_views.register
def _(gradient: Sum, views: int, *, early: bool = False) -> PerExample:
    return Sum([over_views(part, views, early=early) for part in gradient.parts])


@over_views.register
def _(gradient: Blocks, views: int, *, early: bool = False) -> PerExample:
    # Positions of different views are positions of one example.
    blocks, rows = gradient.factors[0].shape[:2]
    left, right = (factor.reshape(blocks, rows // views, -1, factor.shape[-1]) for factor in gradient.factors)
    return Blocks(left, right, gradient.shape, gradient.workspace, gradient.arrange)


@over_views.register
def _(gradient: PartOfRows, views: int, *, early: bool = False) -> PerExample:
    return PartOfRows(over_views(gradient.part, views, early=early), gradient.shape, gradient.rows)


class OverViews(PerExample):
    """The sum over views of gradients in any form, materialized a few examples at a time."""

    def __init__(self, part: PerExample, views: int) -> None:
        self.part, self.views = part, views
        self.shape, self.batch_size, self.dtype = part.shape, part.batch_size // views, part.dtype

    def squared_norms(self) -> Tensor:
        """Of the sums."""
        return torch.cat([row_squared_norms(self.materialize(*chunk)) for chunk in self.in_chunks()])

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the same numbers, in the same chunks, that the norms were taken of."""
        for first, last in self.in_chunks():
            add_weighted_rows(weights[first:last], as_rows(self.materialize(first, last)), total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Sum over the views."""
        rows = self.part.materialize(first * self.views, last * self.views)
        return rows.reshape(last - first, self.views, *self.shape).sum(1)

    def zeroed(self, examples: Tensor) -> PerExample:
        """In every view."""
        return OverViews(self.part.zeroed(examples.repeat_interleave(self.views)), self.views)
