"""Gradients of kernels, and sums of products over positions, materialized by compiled code.

A person's rows are added up as they are computed, one after the other; how a number is rounded depends on these rows
alone, not on where they or the results lie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdpsgd.gradients.geometry import Geometry
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.native.calls import in_kernel_order, runs_along_columns
from pdpsgd.gradients.per_example import Kept, OuterProducts, PerExample, zero_rows
from pdpsgd.gradients.sums import weighted_sum
from pdpsgd.gradients.workspace import Workspace


class CompiledKernels(PerExample):
    """Gradients of a kernel, materialized by compiled code, in an order of its own."""

    def __init__(
        self,
        geometry: Geometry,
        inputs: Tensor,
        output_gradient: Tensor,
        workspace: Workspace,
        *,
        starts: Tensor | None = None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        """With `starts`, the gradients of rows starts[i] to starts[i + 1] are added up as they are computed.

        `arrange` turns (examples, outputs, channels) into (examples, *shape), for a kernel that is a matrix.
        """
        self.shape, self.dtype = shape or torch.Size(geometry.shape), inputs.dtype
        self.batch_size = inputs.shape[0] if starts is None else len(starts) - 1
        self._geometry, self._inputs, self._output_gradient = geometry, inputs, output_gradient
        self._starts, self._arrange = starts, arrange
        self._by_columns = runs_along_columns(geometry, output_gradient)
        self._workspace = workspace
        self._kept: Tensor | None = None

    @property
    def may_settle(self) -> bool:
        """It is, if there is room."""
        return True

    def squared_norms(self) -> Tensor:
        """Of the gradients, which are kept if there is room."""
        return self._materialized()

    def _materialized(self, let_go: int = 0) -> Tensor:
        self._kept = self._workspace.keep((self.batch_size, self.shape.numel()), self._inputs, let_go)
        chunks = self.in_chunks() if self._kept is None else [(0, self.batch_size)]
        return torch.cat([self._compute(*chunk)[1] for chunk in chunks])

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Sum the same numbers."""
        chunks = self.in_chunks() if self._kept is None else [(0, self.batch_size)]
        for first, last in chunks:
            values = self._compute(first, last)[0] if self._kept is None else self._kept
            total += self._arranged(weighted_sum(weights[first:last], values)[None])[0]

    def materialize(self, first: int, last: int) -> Tensor:
        """Bring them into the parameter's order."""
        # A copy: the memory is used again.
        return self._arranged(self._compute(first, last)[0].clone())

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite inputs and gradients, in copies."""
        rows = examples
        if self._starts is not None:
            rows = examples.repeat_interleave((self._starts[1:] - self._starts[:-1]).to(examples.device))
        return self._like(zero_rows(self._inputs, rows), zero_rows(self._output_gradient, rows), self._starts)

    def settled(self) -> PerExample | None:
        """Materialize, if there is room."""
        let_go = self._inputs.numel() + self._output_gradient.numel()
        if not self._workspace.has_room((self.batch_size, self.shape.numel()), let_go):
            return None
        squares = self._materialized(let_go)
        assert self._kept is not None
        arranged = _arranging(self._geometry, self._by_columns, self._arrange)
        return Kept(self._kept, squares, self.shape, arranged)

    def over(self, starts: Tensor) -> CompiledKernels:
        """Return the sums over rows starts[i] to starts[i + 1], none of which has been added up."""
        assert self._starts is None
        return self._like(self._inputs, self._output_gradient, starts)

    def _like(self, inputs: Tensor, output_gradient: Tensor, starts: Tensor | None) -> CompiledKernels:
        return CompiledKernels(
            self._geometry,
            inputs,
            output_gradient,
            self._workspace,
            starts=starts,
            arrange=self._arrange,
            shape=self.shape,
        )

    def _compute(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the gradients of some examples, and their squared norms."""
        size = (last - first, self.shape.numel())
        values = (
            self._workspace.take("rows", size, self._inputs) if self._kept is None else self._kept[first:last]
        )
        squares = self._inputs.new_empty(last - first)
        rows, starts = slice(first, last), None
        if self._starts is not None:
            starts = self._starts[first : last + 1]
            rows = slice(int(starts[0]), int(starts[-1]))
            starts = starts - rows.start
        native.kernel_gradients(
            self._geometry,
            self._inputs[rows],
            self._output_gradient[rows],
            self._by_columns,
            values,
            squares,
            starts,
        )
        return values, squares

    def _arranged(self, values: Tensor) -> Tensor:
        return _arranging(self._geometry, self._by_columns, self._arrange)(values)


def _arranging(
    geometry: Geometry, by_columns: bool, arrange: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """Return what brings results into the parameter's order."""
    if arrange is None:
        return lambda rows: in_kernel_order(geometry, rows, by_columns)
    return lambda rows: arrange(in_kernel_order(geometry, rows, by_columns).squeeze(3))


def compiled_products(products: OuterProducts, starts: Tensor | None = None) -> CompiledKernels | None:
    """Return sums of products over positions as gradients of a kernel of one place; None without compiled code."""
    left, right = products.left, products.right
    if not native.has_products(left, right):
        return None
    shape = products.shape
    out, width = products.matrix
    return CompiledKernels(
        Geometry((out, width, 1), (1,), (1,), 1, (0, 0)),
        right.transpose(1, 2),
        left.transpose(1, 2),
        products.workspace,
        starts=starts,
        arrange=products.arrange or (lambda rows: rows.reshape(-1, *shape)),
        shape=shape,
    )


def in_best_form(products: OuterProducts) -> PerExample:
    """Return products over several positions in a form in which it does not matter where they stand in a batch."""
    if products.positions == 1 or products.by_gram:
        return products
    return compiled_products(products) or products
