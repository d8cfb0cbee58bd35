"""Views (augmentation multiplicity): the gradients of an example's views are averaged before it is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from pdpsgd.gradients.per_example import Materialized, OuterProducts, PerExample, as_rows
from pdpsgd.gradients.sums import add_weighted_rows, row_squared_norms


def over_views(gradient: PerExample, views: int) -> PerExample:
    """Return the sum over each `views` consecutive rows: the gradient of the example whose views they are."""
    if isinstance(gradient, OuterProducts) and not gradient.may_settle:
        # Positions of different views are positions of one example.
        left = gradient.left.reshape(-1, views * gradient.positions, gradient.left.shape[2])
        right = gradient.right.reshape(-1, views * gradient.positions, gradient.right.shape[2])
        return OuterProducts(left, right, gradient.shape, gradient.workspace, gradient.arrange)
    if isinstance(gradient, Materialized):
        rows = gradient.materialize(0, gradient.batch_size)
        return Materialized(rows.reshape(-1, views, *gradient.shape).sum(1), gradient.shape)
    return OverViews(gradient, views)


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
