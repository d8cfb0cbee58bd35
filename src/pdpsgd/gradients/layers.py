"""The gradients of all parameters together: compiled code takes those of most layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdpsgd.gradients.groups import Groups, over_people
from pdpsgd.gradients.lookups import Passed, TableGradients
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.native.dispatch import AtOnce
from pdpsgd.gradients.per_example import Blocks, Materialized, OuterProducts, PartOfRows, PerExample
from pdpsgd.gradients.sums import SMALLEST_FACTOR
from pdpsgd.gradients.weights import ROUNDED, Weighed, figures_of


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
        gradients: Sequence[tuple[Tensor, PerExample]],
        totals: Mapping[int, Tensor],
        examples: int,
        groups: Groups | None = None,
        at_once: AtOnce | None = None,
    ) -> None:
        """Each parameter comes once; `totals` are by the identity of parameters.

        With `at_once`, which has further ones, there is `add_clipped` and nothing else.
        """
        self._gradients, self._totals, self._groups = gradients, totals, groups
        self._examples = examples  # or people, if there are groups
        self._at_once = at_once  # what its addresses point to has to be there
        self._others: list[tuple[PerExample, Tensor]] = []
        self._arranged: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = []
        parts: list[tuple[Tensor, Tensor | None, Tensor]] = []
        blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        tables: list[tuple[Passed, Tensor]] = []
        for parameter, whole in gradients:
            gradient: Any = whole
            total = totals[id(parameter)]
            if whole.shape != total.shape:  # compiled code would write to what follows in memory
                raise RuntimeError(f"a gradient of shape {tuple(whole.shape)}, not {tuple(total.shape)}")
            # By the very type: to ask an abstract class takes longer than all else here.
            if type(gradient) is PartOfRows:
                gradient, total = gradient.part, total[gradient.rows]
            kind = type(gradient)
            if kind is Materialized and native.has_layer(total, gradient.values):
                parts.append((gradient.values, None, total))
            elif kind is OuterProducts and self._is_together(gradient, total):
                if gradient.arrange is not None:
                    matrix = total.new_zeros(gradient.matrix)
                    self._arranged.append((gradient.arrange, matrix, total))
                    total = matrix
                parts.append((*gradient.factors, total))
            elif kind is Blocks and groups is None and native.has_layer(total, *gradient.factors):
                if gradient.arrange is None:
                    total = total.view(gradient.stacked)
                else:
                    stacked = total.new_zeros(gradient.stacked)
                    self._arranged.append((gradient.arrange, stacked, total))
                    total = stacked
                blocks.append((*gradient.factors, total))
            elif kind is TableGradients and groups is None and native.has_table(total, *gradient.passed):
                tables.append((gradient.passed, total))
            else:
                self._others.append((gradient if groups is None else over_people(gradient, groups), total))
        starts, whose = (None, None) if groups is None else (groups.starts, groups.whose)
        there_are = parts or blocks or tables or (at_once is not None and at_once.fields)
        self._together = (
            native.layers(parts, tables, examples, starts, whose, at_once, blocks) if there_are else None
        )

    def _is_together(self, gradient: OuterProducts, total: Tensor) -> bool:
        at_once = gradient.positions == 1 or (gradient.by_gram and self._groups is None)
        return at_once and native.has_layer(total, *gradient.factors)

    @property
    def are_compiled(self) -> bool:
        """Whether there is a layer that compiled code takes with others at once."""
        return self._together is not None

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each example's, or person's, gradients, in float64."""
        total = self.squares_of_others()
        if self._together is not None:
            found = self._together.squares(SMALLEST_FACTOR**2)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def add_weighted_sums(self, found: Weighed) -> None:
        """Add the sums over the examples of weight times gradient; after `squared_norms`."""
        self._add_others(found.scaled, found.narrow)
        if self._together is not None:
            self._together.add(found.narrow, found.scaled)
        self._add_arranged()

    def squares_of_others(self) -> Tensor | None:
        """Return the squared norms of what compiled code does not take at once; None if there is nothing else."""
        if not self._others:
            return None
        squares = [gradient.squared_norms() for gradient, _ in self._others]
        return torch.stack(squares).sum(0, dtype=torch.float64)

    def add_clipped(
        self, clip_norms: Tensor, largest_clip_norm: float, scale: float, others: Tensor | None
    ) -> bool:
        """Do all that clips at once, where compiled code can: norms, weights and weighted sums.

        `others` are `squares_of_others()`. Tells whether it was done. If not, nothing was added, and it has to be done
        step by step: somebody's norm is not finite, say. Done so, sums are the same to the bit.
        """
        if self._together is None or not native.has_clip_norms(clip_norms):
            return False
        if others is not None and not native.has_squares(others):
            return False
        weights = self._together.add_clipped(
            clip_norms,
            figures_of(scale, largest_clip_norm),
            smallest=SMALLEST_FACTOR**2,
            largest=largest_clip_norm * ROUNDED,
            others=others,
        )
        if weights is None:
            return False
        self._add_others(*weights)
        self._add_arranged()
        return True

    def _add_others(self, scaled: Tensor, narrow: Tensor) -> None:
        for gradient, total in self._others:
            exact = self._groups is not None or gradient.dtype == torch.float64
            gradient.add_weighted_sum(scaled if exact else narrow, total)

    def _add_arranged(self) -> None:
        for arrange, matrix, total in self._arranged:
            total += arrange(matrix[None])[0]

    def zeroed(self, examples: Tensor) -> Layers:
        """Return the same with the gradients of these examples, or people, (a boolean mask) zero."""
        rows = examples if self._groups is None else examples[self._groups.owner]
        zeroed = [(parameter, gradient.zeroed(rows)) for parameter, gradient in self._gradients]
        layers = Layers(zeroed, self._totals, self._examples, self._groups)
        layers.squared_norms()
        return layers
