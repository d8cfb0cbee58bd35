"""The forms of per-example gradients, and what each of them can do without being materialized.

In every form: norms first, then one weighted sum over the examples. The norm is that of the very
numbers that are added, or one that is, if anything, too large; `sums` has the ways to add.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.sums import (
    CACHE,
    add_products,
    add_weighted_rows,
    outer_squared_norms,
    position_sums,
    row_squared_norms,
    weighted_sum,
)
from pdpsgd.gradients.workspace import Workspace

# A parameter, and its per-example gradients. (A module's weight is a Tensor to the type checker.)
Gradient = Iterator[tuple[Tensor, "PerExample"]]

# Libraries round a product by where it is written, modulo so many numbers (64 bytes).
APART = 16
# Rows stand where they are rounded alike modulo so many (see `engine.layout`): pieces begin at multiples of it.
LANES = 4
# Features whose products are added in float32; what they add up to is added in float64.
STRETCH = 256


class PerExample(ABC):
    """The per-example gradients of one parameter."""

    shape: torch.Size  # of the parameter
    batch_size: int
    dtype: torch.dtype  # float32 or float64

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return the squared Euclidean norm per example."""

    @abstractmethod
    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the sum over the examples of weight times gradient to `total`: float64, of the parameter's shape.

        The weights have the type of the gradients; or they are float64, and whatever is added over examples is, too.
        """

    @abstractmethod
    def materialize(self, first: int, last: int) -> Tensor:
        """Return the gradients of examples `first` to `last` as one tensor."""

    @abstractmethod
    def zeroed(self, examples: Tensor) -> PerExample:
        """Return the same with the gradients of these examples (a boolean mask) zero."""

    def settled(self) -> PerExample | None:
        """Return the same without what the layer was given and the gradient of its output; None if they are needed.

        What is returned may hold the norms; it takes no more memory than what it does without.
        """
        return None

    @property
    def may_settle(self) -> bool:
        """Whether it is materialized during the backward pass if there is room, which depends on the batch's size.

        So what is made of it has to be the same in both forms, to the bit: everybody's gradient would be rounded
        differently with one more row.
        """
        return False

    def within(self, shape: torch.Size, rows: slice) -> PerExample:
        """Return the same as the gradient of a larger parameter, of which only `rows` were used."""
        return self if rows == slice(None) else PartOfRows(self, shape, rows)

    def in_chunks(self) -> Iterator[tuple[int, int]]:
        """Return ranges of examples whose gradients may be materialized at once."""
        step = max(1, CACHE // max(1, self.shape.numel()))
        step -= step % LANES if step > LANES else 0
        return ((first, min(first + step, self.batch_size)) for first in range(0, self.batch_size, step))


class Materialized(PerExample):
    """Materialized gradients: (examples, *shape), or rows that can be viewed so."""

    def __init__(self, values: Tensor, shape: torch.Size) -> None:
        self.values = accurate(values)
        self.dtype = self.values.dtype
        self.shape = shape
        self.batch_size = values.shape[0]

    def squared_norms(self) -> Tensor:
        """Sum of squares."""
        return row_squared_norms(self.values)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the numbers the norms were taken of."""
        add_weighted_rows(weights, as_rows(self.values), total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Take a slice."""
        return self.values[first:last].reshape(last - first, *self.shape)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite, in a copy."""
        return Materialized(zero_rows(self.values, examples), self.shape)

    def settled(self) -> PerExample:
        """Nothing else is needed."""
        return self


class Kept(PerExample):
    """Gradients that were materialized, in an order of their own, and their norms taken, while it was possible."""

    def __init__(
        self, values: Tensor, squares: Tensor, shape: torch.Size, arrange: Callable[[Tensor], Tensor]
    ) -> None:
        """`arrange` turns (examples, numbers) into (examples, *shape)."""
        self.shape, self.batch_size, self.dtype = shape, values.shape[0], values.dtype
        self._values, self._squares, self._arrange = values, squares, arrange

    def squared_norms(self) -> Tensor:
        """Taken before."""
        return self._squares

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the numbers the norms were taken of."""
        total += self._arrange(weighted_sum(weights, self._values)[None])[0]

    def materialize(self, first: int, last: int) -> Tensor:
        """Bring them into the parameter's order."""
        # A copy: the memory is used again.
        return self._arrange(self._values[first:last].clone())

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite, in place: these numbers are our own."""
        self._values[examples] = 0
        return Kept(self._values, self._squares.masked_fill(examples, 0), self.shape, self._arrange)

    def settled(self) -> PerExample:
        """It is."""
        return self


class OuterProducts(PerExample):
    """Sums over positions of outer products left (x) right: (examples, positions, out), (examples, positions, in).

    Where there is one position for each example, it may be left out: (examples, out), (examples, in).
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        shape: torch.Size | None = None,
        workspace: Workspace | None = None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """`arrange` turns (examples, out, in) into (examples, *shape), where that is more than a view.

        With `apart`, products lie so far apart in memory that it does not matter which place in a batch they have.
        """
        self.factors = accurate(left), accurate(right)
        self.apart = apart
        self.dtype = self.factors[0].dtype
        self.batch_size, *between, rows = left.shape
        self.positions = between[0] if between else 1
        self.matrix = rows, right.shape[-1]
        self.shape = shape or torch.Size(self.matrix)
        self.workspace = workspace or Workspace()
        self.arrange = arrange
        # Of several positions, whether norms are taken without materializing the products.
        self.by_gram = self.positions > 1 and takes_factors(self.factors[0], self.positions, *self.matrix)
        self._kept: Tensor | None = None  # all of them, materialized, if there is room

    @property
    def left(self) -> Tensor:
        """The left factor: (examples, positions, out)."""
        return _with_positions(self.factors[0])

    @property
    def right(self) -> Tensor:
        """The right factor: (examples, positions, in)."""
        return _with_positions(self.factors[1])

    def of(self, left: Tensor, right: Tensor) -> OuterProducts:
        """Return products of these, one for several examples each, that are rounded alike in any place of a batch."""
        return OuterProducts(left, right, self.shape, self.workspace, self.arrange, apart=True)

    def squared_norms(self) -> Tensor:
        """Take them without materializing the products, where that is cheaper."""
        if self.positions == 1:
            return outer_squared_norms(self.left[:, 0], self.right[:, 0])
        if self.by_gram:
            return self._squared_norms_by_gram()
        return self._materialized()

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add one matrix product over all examples and positions, or the numbers the norms were taken of."""
        products = total.view(self.matrix) if self.arrange is None else total.new_zeros(self.matrix)
        if self.positions == 1:
            add_products(weights, self.left[:, 0], self.right[:, 0], products)
        elif self.by_gram:
            self._add_by_position(weights, products)
        else:
            whole = [] if self._kept is None else [(0, self.batch_size, self._kept)]
            for first, last, values in whole or self._chunks():
                add_weighted_rows(weights[first:last], as_rows(values), products)
        if self.arrange is not None:
            total += self.arrange(products[None])[0]

    def materialize(self, first: int, last: int) -> Tensor:
        """One small matrix product per example."""
        values = self._laid_out(self.left.new_empty(last - first, self._numbers))
        torch.bmm(self.left[first:last].transpose(1, 2), self.right[first:last], out=values)
        return self._in_shape(values)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite both factors, in copies."""
        left, right = zero_rows(self.left, examples), zero_rows(self.right, examples)
        return OuterProducts(left, right, self.shape, self.workspace, self.arrange, apart=self.apart)

    @property
    def may_settle(self) -> bool:
        """It is, where the norms materialize it in any case."""
        return self.positions > 1 and not self.by_gram

    def settled(self) -> PerExample | None:
        """Materialize, where the norms would do so in any case and there is room."""
        if not self.may_settle:
            return None
        let_go = self.left.numel() + self.right.numel()
        if not self.workspace.has_room((self.batch_size, self._numbers), let_go):
            return None
        squares = self._materialized(let_go)
        assert self._kept is not None
        return Kept(
            as_rows(self._kept), squares, self.shape, _arranging(self.matrix, self.shape, self.arrange)
        )

    def _materialized(self, let_go: int = 0) -> Tensor:
        """Return the squared norms of products, which are kept if there is room."""
        kept = self.workspace.keep((self.batch_size, self._numbers), self.left, let_go)
        self._kept = None if kept is None else self._laid_out(kept)
        return torch.cat([row_squared_norms(values) for *_, values in self._chunks()])

    @property
    def _numbers(self) -> int:
        """How many numbers the memory of a product has."""
        numbers = self.matrix[0] * self.matrix[1]
        return -(-numbers // APART) * APART if self.apart else numbers

    def _laid_out(self, memory: Tensor) -> Tensor:
        return memory[:, : self.matrix[0] * self.matrix[1]].view(-1, *self.matrix)

    def _in_shape(self, values: Tensor) -> Tensor:
        return values.view(-1, *self.shape) if self.arrange is None else self.arrange(values)

    def _chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        for first, last in self.in_chunks():
            if self._kept is None:
                values = self._laid_out(
                    self.workspace.take("products", (last - first, self._numbers), self.left)
                )
            else:
                values = self._kept[first:last]
            yield (
                first,
                last,
                torch.bmm(self.left[first:last].transpose(1, 2), self.right[first:last], out=values),
            )

    def _squared_norms_by_gram(self) -> Tensor:
        """Return the sum of (left left')(right right') over pairs of positions, plus a bound on its rounding.

        Positions may cancel: then the Gram form is off by rounding errors of the terms that cancelled, not of the
        small result. An entry of a Gram matrix, k products added in any order, is off by at most k u times the
        norms of its two factors, u half the machine epsilon; so the whole by the sum of these, times the squared
        sum of the norms of all terms. With this added the norm is never too small.
        """
        if self.apart and self.positions % LANES:
            # Then each matrix of inner products begins where 64 bytes do.
            more = (0, 0, 0, -self.positions % LANES)
            self.factors = F.pad(self.left, more), F.pad(self.right, more)
        # The size of a position's left factor goes to the right: squares of a tiny factor, or its product with a
        # weight, must not vanish while the other factor is huge. (Where all is zero nothing is divided: numbers of
        # the smallest size would make what follows crawl.)
        size = self.left.abs().amax(2, keepdim=True)
        size = torch.where(size > 0, size, 1)
        self.factors = self.left / size, self.right * size
        left, right = map(_gram, self.factors)
        gram: Tensor = torch.linalg.vecdot(left.flatten(1), right.flatten(1))
        terms = (left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)).sqrt().sum(1)
        added = sum(min(width, STRETCH) for width in self.matrix)
        rounding = (added + 8) * torch.finfo(self.left.dtype).eps  # twice what is needed
        return (gram.clamp(min=0) + rounding * terms.square()).to(self.left.dtype)

    def _add_by_position(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted products in float64: they may be much larger than what they add up to."""
        at_once = max(1, CACHE // max(1, self.positions * max(self.matrix)))
        for first in range(0, self.batch_size, at_once):
            some = slice(first, first + at_once)
            left = self.left[some].to(torch.float64) * weights[some, None, None]
            total.addmm_(left.flatten(0, 1).t(), self.right[some].to(torch.float64).flatten(0, 1))


def _arranging(
    matrix: tuple[int, int], shape: torch.Size, arrange: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """Return what brings rows, each a matrix, into a shape."""
    if arrange is None:
        return lambda rows: rows.view(-1, *shape)
    return lambda rows: arrange(rows.view(-1, *matrix))


class Blocks(PerExample):
    """The gradient of a parameter that is matrices side by side, each used by itself: of experts, or of heads.

    Sums of outer products left (x) right: (blocks, examples, positions, out), (blocks, examples, positions, in). Where
    there is one position for each example, it may be left out.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        shape: torch.Size,
        workspace: Workspace,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`arrange` turns (examples, blocks, out, in) into (examples, *shape), where that is more than a view."""
        self.factors, self.shape, self.arrange = (accurate(left), accurate(right)), shape, arrange
        self.stacked = torch.Size((left.shape[0], left.shape[-1], right.shape[-1]))
        self.batch_size, self.dtype = left.shape[1], self.factors[0].dtype
        self.workspace = workspace

    @property
    def suit(self) -> bool:
        """Whether their norms are taken without materializing the products."""
        positions = self.factors[0].shape[2] if self.factors[0].dim() == 4 else 1
        return positions == 1 or takes_factors(self.factors[0], positions, *self.stacked[1:])

    @functools.cached_property
    def parts(self) -> list[OuterProducts]:
        """The blocks, one by one."""
        pairs = zip(*self.factors, strict=True)
        return [OuterProducts(left, right, workspace=self.workspace) for left, right in pairs]

    def squared_norms(self) -> Tensor:
        """Of all blocks."""
        return torch.stack([part.squared_norms() for part in self.parts]).sum(0)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add to each block."""
        blocks = total.view(self.stacked) if self.arrange is None else total.new_zeros(self.stacked)
        for part, block in zip(self.parts, blocks, strict=True):
            part.add_weighted_sum(weights, block)
        if self.arrange is not None:
            total += self.arrange(blocks[None])[0]

    def materialize(self, first: int, last: int) -> Tensor:
        """Put the blocks side by side."""
        blocks = torch.stack([part.materialize(first, last) for part in self.parts], 1)
        return blocks.view(-1, *self.shape) if self.arrange is None else self.arrange(blocks)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite both factors, in copies."""
        left, right = (
            factor.masked_fill(examples.view(-1, *[1] * (factor.dim() - 2)), 0) for factor in self.factors
        )
        return Blocks(left, right, self.shape, self.workspace, self.arrange)


class Sum(PerExample):
    """Gradients of a parameter that was used several times: they add up before any norm is taken."""

    def __init__(self, parts: list[PerExample]) -> None:
        self.parts = parts
        self.shape, self.batch_size, self.dtype = parts[0].shape, parts[0].batch_size, parts[0].dtype

    def squared_norms(self) -> Tensor:
        """Materialize the sum, a chunk of examples at a time."""
        return torch.cat([row_squared_norms(self.materialize(*chunk)) for chunk in self.in_chunks()])

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add the same numbers, in the same chunks, that the norms were taken of."""
        for first, last in self.in_chunks():
            add_weighted_rows(weights[first:last], as_rows(self.materialize(first, last)), total)

    def materialize(self, first: int, last: int) -> Tensor:
        """Add up the parts."""
        total = self.parts[0].materialize(first, last)
        for part in self.parts[1:]:
            total = total + part.materialize(first, last)
        return total

    def zeroed(self, examples: Tensor) -> PerExample:
        """In every part."""
        return Sum([part.zeroed(examples) for part in self.parts])


class PartOfRows(PerExample):
    """The gradient of a parameter of which only some rows were used."""

    def __init__(self, part: PerExample, shape: torch.Size, rows: slice) -> None:
        self.part, self.shape, self.rows = part, shape, rows
        self.batch_size, self.dtype = part.batch_size, part.dtype

    def squared_norms(self) -> Tensor:
        """Of the part."""
        return self.part.squared_norms()

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add to the rows that were used."""
        self.part.add_weighted_sum(weights, total[self.rows])

    def materialize(self, first: int, last: int) -> Tensor:
        """Put the part where it belongs; all else is zero."""
        part = self.part.materialize(first, last)
        whole = part.new_zeros(last - first, *self.shape)
        whole[:, self.rows] = part
        return whole

    def zeroed(self, examples: Tensor) -> PerExample:
        """In the part."""
        return PartOfRows(self.part.zeroed(examples), self.shape, self.rows)

    def settled(self) -> PerExample | None:
        """If the part can do without."""
        part = self.part.settled()
        return None if part is None else PartOfRows(part, self.shape, self.rows)


def _with_positions(factor: Tensor) -> Tensor:
    return factor[:, None] if factor.dim() == 2 else factor


def _gram(factors: Tensor) -> Tensor:
    """Return the inner products of each example's positions, in float64 over stretches of features."""
    stretches = torch.split(factors, STRETCH, 2)
    products = (torch.bmm(part, part.transpose(1, 2)).to(torch.float64) for part in stretches)
    return functools.reduce(Tensor.add_, products)


def takes_factors(like: Tensor, positions: int, rows: int, columns: int) -> bool:
    """Whether norms of sums of products over so many positions are taken without keeping the sums."""
    cheaper = native.takes_products if native.has_numbers(like) else gram_is_cheaper
    return cheaper(positions, rows, columns)


def gram_is_cheaper(positions: int, rows: int, columns: int) -> bool:
    """Whether norms by inner products of positions cost less than materializing (rows, columns) per example."""
    # To write, read and add a number is worth some operations.
    return positions**2 * (rows + columns) <= 16 * rows * columns


def summed(parts: list[PerExample]) -> PerExample:
    """Return the sum of the uses of one parameter, joined where their forms allow it."""
    if len(parts) == 1:
        return parts[0]
    products = [part for part in parts if isinstance(part, OuterProducts) and not part.may_settle]
    if len(products) == len(parts):
        return OuterProducts(
            torch.cat([part.left for part in products], 1),
            torch.cat([part.right for part in products], 1),
            products[0].shape,
            products[0].workspace,
            products[0].arrange,
        )
    return Sum(parts)


def accurate(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or better, its signs in its numbers.

    A row that is set to zero would take with it a sign that is noted beside them, and all rows then be added otherwise.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def detached(parameter: Any) -> Any:
    """Return the parameter's value, out of autograd's sight; None stays None."""
    return None if parameter is None else parameter.detach()


def positions(tensor: Tensor) -> Tensor:
    """Return (examples, ..., features) as (examples, positions, features); a matrix stays as it is."""
    return tensor if tensor.dim() in (2, 3) else tensor.flatten(1, -2)


def shift_gradient(output_gradient: Tensor) -> Materialized:
    """Return the gradient of something that was added to the last dimension."""
    gradient = accurate(output_gradient)
    return Materialized(
        gradient if gradient.dim() == 2 else position_sums(gradient.flatten(1, -2)), gradient.shape[-1:]
    )


def as_rows(tensor: Tensor) -> Tensor:
    """Return (examples, ...) as a matrix with a row per example."""
    return tensor.reshape(tensor.shape[0], -1)


def zero_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the tensor with these rows zero, whatever was in them."""
    return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
