"""The gradients of all parameters together: compiled code takes those of most layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pdpsgd.gradients.groups import Groups, over_people
from pdpsgd.gradients.lookups import Passed, TableGradients
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import Materialized, OuterProducts, PartOfRows, PerExample
from pdpsgd.gradients.sums import SMALLEST_FACTOR
from pdpsgd.gradients.weights import Weighed


class Layers:
    """Norms over all parameters, then one weighted sum for each of them.

    Guarantee: that of `sums`. Where an example has several positions, the norms of its products may add up to much more
    than the norm of their sum. Compiled code adds the rows of a unit of k examples (as many as have 64 rows, or one) in
    float32, 64 at a time, if for each of them they add up to at most 60 / k times that norm; if not, in float64. Either
    way a unit is off by at most 4000 * 2^-24 C, and which way it takes depends on the examples in it alone.

    With `groups` the same for people with many rows: a unit is 32 people, whatever rows they have, so where others'
    units begin and end does not depend on how many rows anybody has. Its blocks are the shorter, the more its people's
    rows cancel. What is not of that form is added in float64.
    """

    def __init__(
        self,
        gradients: Mapping[nn.Parameter, PerExample],
        sums: Mapping[nn.Parameter, Tensor],
        groups: Groups | None = None,
    ) -> None:
        self._gradients, self._sums, self._groups = gradients, sums, groups
        self._others: list[tuple[PerExample, Tensor]] = []
        self._arranged: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = []
        parts: list[tuple[Tensor, Tensor | None, Tensor]] = []
        tables: list[tuple[Passed, Tensor]] = []
        for parameter, whole in gradients.items():
            gradient, total = whole, sums[parameter]
            if isinstance(whole, PartOfRows):
                gradient, total = whole.part, total[whole.rows]
            if isinstance(gradient, Materialized) and native.has_layer(total, gradient.values):
                parts.append((gradient.values, None, total))
            elif isinstance(gradient, OuterProducts) and self._is_together(gradient, total):
                if gradient.arrange is not None:
                    matrix = total.new_zeros(gradient.matrix)
                    self._arranged.append((gradient.arrange, matrix, total))
                    total = matrix
                parts.append((*gradient.factors, total))
            elif (
                isinstance(gradient, TableGradients)
                and groups is None
                and native.has_table(total, *gradient.passed)
            ):
                tables.append((gradient.passed, total))
            else:
                self._others.append((gradient if groups is None else over_people(gradient, groups), total))
        size = next((gradient.batch_size for gradient in gradients.values()), 0)
        if groups is not None:
            size = groups.people
        rows = (None, None) if groups is None else (groups.starts, groups.whose)
        self._together = native.layers(parts, tables, size, *rows) if parts or tables else None

    def _is_together(self, gradient: OuterProducts, total: Tensor) -> bool:
        at_once = gradient.positions == 1 or (gradient.by_gram and self._groups is None)
        return at_once and native.has_layer(total, *gradient.factors)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each example's, or person's, gradients, in float64."""
        squares = [gradient.squared_norms() for gradient, _ in self._others]
        total = torch.stack(squares).sum(0, dtype=torch.float64) if squares else None
        if self._together is not None:
            found = self._together.squares(SMALLEST_FACTOR**2)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def add_weighted_sums(self, found: Weighed) -> None:
        """Add the sums over the examples of weight times gradient; after `squared_norms`."""
        for gradient, total in self._others:
            exact = self._groups is not None or gradient.dtype == torch.float64
            gradient.add_weighted_sum(found.scaled if exact else found.narrow, total)
        if self._together is not None:
            self._together.add(found.narrow, found.scaled)
        for arrange, matrix, total in self._arranged:
            total += arrange(matrix[None])[0]

    def zeroed(self, examples: Tensor) -> Layers:
        """Return the same with the gradients of these examples, or people, (a boolean mask) zero."""
        rows = examples if self._groups is None else examples[self._groups.owner]
        zeroed = {parameter: gradient.zeroed(rows) for parameter, gradient in self._gradients.items()}
        layers = Layers(zeroed, self._sums, self._groups)
        layers.squared_norms()
        return layers
