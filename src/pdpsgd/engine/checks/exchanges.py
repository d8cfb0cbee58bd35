"""Changes of a batch with which a recording is replayed: examples replaced by others, enlarged, or taken alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pdpsgd.engine.batches import exchanged, has_rows, same_but_for
from pdpsgd.engine.checks.replay import Change

HALVES = 8
ALL_BUT_ONE = 4


def tries(size: int) -> Iterator[tuple[list[int], Change]]:
    """Yield which examples are replaced, and the change that does it."""
    for row in spread(size, ALL_BUT_ONE):
        yield _replacing([*range(row), *range(row + 1, size)], row, size)
    halves = torch.Generator().manual_seed(0)
    for _ in range(HALVES):
        order = torch.randperm(size, generator=halves, device="cpu")
        yield _replacing(order[: max(1, size // 2)].sort().values.tolist(), int(order[-1]), size)


def extremes(size: int) -> Iterator[tuple[list[int], Change]]:
    """Yield changes that make one example very large: then also what mixes weakly shows in the others."""
    for row in spread(size, 2):
        for factor in (1e4, -1e8):
            yield [row], partial(_enlarged, row, factor, size)


def _enlarged(row: int, factor: float, size: int, leaf: Tensor) -> Tensor:
    changed = leaf.detach().clone()
    if has_rows(leaf, size) and leaf.is_floating_point():
        changed[row] = changed[row] * factor + factor
    return changed


def _replacing(rows: list[int], by: int, size: int) -> tuple[list[int], Change]:
    return rows, lambda leaf: exchanged(leaf, size, rows, by)


def converted(dtype: torch.dtype | None, leaf: Tensor) -> Tensor:
    """Return numbers in another precision."""
    return leaf if dtype is None or not leaf.is_floating_point() else leaf.to(dtype)


def only(*rows: int) -> Change:
    """Return the change that leaves these examples only."""
    return lambda leaf: leaf[list(rows)]


def spread(size: int, most: int) -> list[int]:
    """Return up to `most` places, spread over the batch."""
    return sorted({round(place) for place in torch.linspace(0, size - 1, most, device="cpu").tolist()})


def are_same(
    replaced: list[int], before: Sequence[Tensor], after: Sequence[Tensor], rows: list[Tensor], size: int
) -> bool:
    """Tell whether tensors with rows are alike but for those that were replaced, and others altogether."""
    by_row = set(map(id, rows))
    return all(
        same_but_for(replaced, one, other, size)
        if id(one) in by_row
        else one.shape == other.shape and torch.equal(one.detach(), other.detach())
        for one, other in zip(before, after, strict=True)
    )
