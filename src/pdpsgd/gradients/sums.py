"""Squared norms and weighted sums over the examples of a batch, with bounds on their rounding.

Guarantee: a squared norm is right to a part in 2^20. A weighted sum over n examples, each of norm at most C times its
weight, is added in float32 over blocks of b = 64 examples at most, and in float64 over these. A block, in any order,
is off by at most b (b + 2) 2^-24 C, and the sum of the blocks by 2^-53 (n^2 / b) C. So if one example of a batch is
changed and nothing else, the sum moves by that example and by 2 b (b + 2) 2^-24 C = 0.0005 C, besides 2^-52 (n^2 / b)
C, which is 3e-4 C at ten million people.

With weights in float64 all of this is done in float64, and it does not matter where in a batch an example stands: for
people with many records, whose number decides that, the sum moves by that person and by 2^-52 n^2 C, n people in a
batch. (Compiled code adds their rows in float32 over units of as many people each: see `layers`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.gradients.native import dispatch as native

# Examples that are added in float32.
BLOCK = 64
# Numbers (not bytes) that are worked on at a time: what fits into a processor's cache.
CACHE = 1 << 19
# Numbers for which a call of compiled code does not pay.
SMALL = 1 << 16
# Matrices of so few rows are added up row by row.
NARROW = 4
# A factor counts as at least this large: times a weight, smaller numbers are not rounded well any more.
SMALLEST_FACTOR = 1e-20


def row_squared_norms(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of squares of each row (all but the first dimension), added in float64."""
    rows = rows.reshape(rows.shape[0], -1)
    dtype = dtype or rows.dtype
    if native.has_sums(rows):
        return native.row_squares(rows, dtype)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square_().to(dtype)


def outer_squared_norms(left: Tensor, right: Tensor) -> Tensor:
    """Return the squared norm of each two rows' outer product."""
    # In float64: a tiny factor must not vanish while the other one is huge.
    if native.has_sums(left) and native.has_sums(right):
        return native.outer_squares(left, right, SMALLEST_FACTOR**2)
    squares = row_squared_norms(left, torch.float64).clamp_(min=SMALLEST_FACTOR**2)
    return squares.mul_(row_squared_norms(right, torch.float64)).to(left.dtype)


def group_squared_norms(
    left: Tensor, right: Tensor, starts: Tensor, by_size: Iterable[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the squared norm of the sum over each group of rows of outer products of left and right.

    The sum over pairs of a group's rows of (left left')(right right'), in float64, plus a bound on its rounding: rows
    may cancel. An inner product of k numbers is off by at most k 2^-53 times the norms of its factors, so the whole by
    the sum of these, times the squared sum of the norms of all products. With this added it is never too small.

    Args:
        left: (rows, out).
        right: (rows, in).
        starts: Group i has rows starts[i] to starts[i + 1].
        by_size: For each size that there is, its groups and their rows (groups, size).
    """
    if native.has_sums(left) and native.has_sums(right):
        return native.group_squares(left, right, starts)
    squares = torch.empty(len(starts) - 1, dtype=torch.float64, device=left.device)
    for groups, rows in by_size:
        # As many rows, the last of them zero, that each matrix of inner products begins where 64 bytes do.
        more = (0, 0, 0, -rows.shape[1] % 4)
        both = (F.pad(part[rows].to(torch.float64), more) for part in (left, right))
        grams = [some @ some.transpose(1, 2) for some in both]
        gram = (grams[0] * grams[1]).sum((1, 2))
        terms = torch.sqrt(grams[0].diagonal(dim1=1, dim2=2) * grams[1].diagonal(dim1=1, dim2=2)).sum(1)
        added = left.shape[1] + right.shape[1] + rows.shape[1] ** 2 + 8
        squares[groups] = gram.clamp(min=0) + added * 2.0**-52 * terms.square()
    return squares.to(left.dtype)


def segment_sums(rows: Tensor, starts: Tensor, owner: Tensor) -> Tensor:
    """Return the sums of (rows, numbers) over rows starts[i] to starts[i + 1]; `owner` is the i of each row."""
    if native.has_sums(rows):
        return native.segment_sums(rows, starts)
    return rows.new_zeros(len(starts) - 1, rows.shape[1]).index_add_(0, owner, rows)


def position_sums(values: Tensor) -> Tensor:
    """Return (examples, positions, width) summed over positions."""
    if 0 < values.shape[1] <= native.MOST_POSITIONS and native.has_sums(values):
        return native.position_sums(values)
    return values.sum(1)


def add_weighted_rows(weights: Tensor, rows: Tensor, total: Tensor) -> None:
    """Add the sum over (examples, numbers) of weight times row to `total`, which is float64."""
    flat = total.view(-1)
    exact = weights.dtype == torch.float64
    if rows.dtype == torch.float64 or (not exact and len(rows) <= BLOCK and rows.numel() < SMALL):
        flat += torch.mv(rows.t(), weights)
    elif native.has_weighted_sums(rows, flat):
        native.add_weighted_rows(weights, rows, flat)  # in float64 throughout
    elif exact:
        at_once = max(1, CACHE // max(1, rows.shape[1]))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once].to(torch.float64)
            flat += torch.mv(some.t(), weights[first : first + at_once])
    else:
        for first in range(0, len(rows), BLOCK):
            flat += weights[first : first + BLOCK] @ rows[first : first + BLOCK]


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over (examples, numbers) of weight times row: in float64, or in float32 if it is one block."""
    if weights.dtype == rows.dtype and (len(rows) <= BLOCK or rows.dtype == torch.float64):
        return torch.mv(rows.t(), weights)
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    add_weighted_rows(weights, rows, total)
    return total


def add_products(weights: Tensor, left: Tensor, right: Tensor, total: Tensor) -> None:
    """Add the sum over the examples of weight times outer product of left and right to `total`, which is float64."""
    left = left * weights[:, None]
    if left.dtype == torch.float64 or (len(left) <= BLOCK and total.numel() < SMALL):
        total += left.t() @ right
        return
    at_once = BLOCK * max(1, CACHE // max(1, total.numel()))  # small matrices: many blocks in one call
    for first in range(0, len(left), at_once):
        lefts, rights = left[first : first + at_once], right[first : first + at_once]
        whole = len(lefts) // BLOCK * BLOCK
        if whole:
            _add(torch.bmm(_in_blocks(lefts[:whole]).transpose(1, 2), _in_blocks(rights[:whole])), total)
        if whole < len(lefts):
            _add((lefts[whole:].t() @ rights[whole:])[None], total)


def add_exact_products(
    weights: Tensor, left: Tensor, right: Tensor, total: Tensor, take: Callable[..., Tensor]
) -> None:
    """Add the sum over the rows of weight times outer product of left and right to `total`, in float64 throughout.

    Args:
        weights: (rows,), float64.
        left: (rows, out).
        right: (rows, in).
        total: (out, in), float64.
        take: Gives memory to work in: `take(name, shape, like)`.
    """
    at_once = max(1, CACHE // max(1, *total.shape))
    for first in range(0, len(left), at_once):
        some = slice(first, first + at_once)
        rights = right[some]
        lefts = take("exact left", tuple(left[some].shape), total).copy_(left[some]).mul_(weights[some, None])
        if len(total) <= NARROW and native.has_weighted_sums(rights, total):
            for row, by in zip(total, lefts.t(), strict=True):
                native.add_weighted_rows(by, rights, row)
        elif right.dtype == torch.float64:
            total.addmm_(lefts.t(), rights)
        else:
            total.addmm_(lefts.t(), take("exact right", tuple(rights.shape), total).copy_(rights))


def _in_blocks(rows: Tensor) -> Tensor:
    return rows.reshape(-1, BLOCK, rows.shape[1])


def _add(blocks: Tensor, total: Tensor) -> None:
    """Add the sums of blocks (blocks, ...) to `total`, in float64."""
    rows = blocks.flatten(1)
    if native.has_weighted_sums(rows, total):
        native.add_weighted_rows(torch.ones(len(rows), dtype=torch.float64, device=rows.device), rows, total)
    else:
        total += blocks[0] if len(blocks) == 1 else blocks.sum(0, dtype=torch.float64)
