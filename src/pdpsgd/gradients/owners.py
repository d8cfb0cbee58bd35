"""Whose the rows of a batch are: several may be one example's views, or one person's records.

Where that is known before the backward pass, gradients are added up over an example or a person as they are taken, and
those of single rows never are. So it changes no bit whether something is taken during the backward pass or at the step,
which depends on how many rows there are.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from pdpsgd.errors import fail
from pdpsgd.gradients.groups import Groups, over_people
from pdpsgd.gradients.per_example import Materialized, OuterProducts, PerExample
from pdpsgd.gradients.views import over_views


class Owners:
    """Examples with as many views each, or people with many records (and views of them)."""

    def __init__(
        self,
        *,
        views: int,
        starts: Tensor | None,
        whose: Tensor | None,
        device: torch.device,
        early: bool = False,
    ) -> None:
        """`starts` and `whose` are those of `clipped_sum`; with `early`, this is known before the backward pass."""
        self.views, self.early = views, early
        self._given = starts, whose
        self.groups: Groups | None = None
        if starts is not None:
            self.groups = Groups(starts * views if views > 1 else starts, device, whose, early=early)

    def are(self, *, views: int, starts: Tensor | None, whose: Tensor | None) -> bool:
        """Tell whether these are the same."""
        pairs = zip(self._given, (starts, whose), strict=True)
        return views == self.views and all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
        )

    def have(self, rows: int) -> bool:
        """Tell whether there are so many rows."""
        return rows % self.views == 0 if self.groups is None else rows == int(self.groups.starts[-1])

    def over(self, gradient: PerExample) -> PerExample:
        """Return the sums over each owner's rows."""
        if self.groups is not None:
            return over_people(gradient, self.groups)
        return over_views(gradient, self.views, early=self.early) if self.views > 1 else gradient

    def settled(self, gradient: PerExample) -> PerExample | None:
        """Return what `PerExample.settled` does, with each owner's rows added up."""
        if not self.have(gradient.batch_size):
            return None  # the step says it
        # Of these, people's rows are added up by `Layers`.
        by_row = isinstance(gradient, Materialized) or (
            isinstance(gradient, OuterProducts) and gradient.positions == 1
        )
        if self.groups is not None and by_row:
            return gradient.settled()
        whole = self.over(gradient).settled()
        return None if whole is None else Joined(whole, gradient, self)


class Joined(PerExample):
    """Gradients of a batch's rows that were added up over their owners; those of single rows were never taken."""

    def __init__(self, whole: PerExample, rows: PerExample, owners: Owners) -> None:
        self.whole, self.owners = whole, owners
        self.shape, self.batch_size, self.dtype = rows.shape, rows.batch_size, rows.dtype

    def squared_norms(self) -> Tensor:
        """There are none of single rows."""
        self._refuse()

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """There is none of single rows."""
        self._refuse()

    def materialize(self, first: int, last: int) -> Tensor:
        """There are none of single rows."""
        self._refuse()

    def zeroed(self, examples: Tensor) -> PerExample:
        """Where an owner's rows are: all of them, or none."""
        groups, views = self.owners.groups, self.owners.views
        firsts = slice(None, None, views) if groups is None else groups.starts[:-1].to(examples.device)
        return Joined(self.whole.zeroed(examples[firsts]), self, self.owners)

    def settled(self) -> PerExample:
        """It is."""
        return self

    def _refuse(self) -> NoReturn:
        fail(
            "Expected the rows of the batch to belong to whom they were said to before the backward pass. Got "
            "others, or was asked for the gradients of single rows, which were never taken."
        )


@over_people.register
def _(gradient: Joined, groups: Groups) -> PerExample:
    return gradient.whole if gradient.owners.groups is groups else gradient


@over_views.register
def _(gradient: Joined, views: int, *, early: bool = False) -> PerExample:
    same = early and gradient.owners.groups is None and gradient.owners.views == views
    return gradient.whole if same else gradient
