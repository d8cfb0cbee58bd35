"""Chooses the rows of a batch that a check tries: few, and as different as the batch has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pdpsgd.engine.batches import has_rows, map_tensors, named_tensors, tensors

# An integer tensor with more values than this is no list of classes.
MOST_CLASSES = 1000
MOST_FLAGS = 4
MOST_NEWS = 32
FEW_ROWS = 4096  # up to here a Python set is faster than `torch.unique`


def pick(tree: Any, rows: list[int] | Tensor, size: int) -> Any:
    """Return these examples of a batch of `size`; what has no batch dimension stays whole."""
    return map_tensors(lambda leaf: leaf[rows] if has_rows(leaf, size) else leaf, tree)


def differing_rows(tree: Any, size: int, *, most: int) -> list[int]:
    """Return up to `most` rows: one of each class, the largest and the smallest, and others spread over the batch.

    >>> differing_rows((torch.tensor([1.0, 9.0, 2.0, 3.0]), torch.tensor([0, 0, 0, 1])), 4, most=3)
    [0, 1, 3]
    """
    found: dict[int, None] = {}
    leaves = [leaf.detach() for leaf in tensors(tree) if has_rows(leaf, size)]
    candidates = [_extremes(leaf) for leaf in leaves if leaf.is_floating_point()]
    candidates += [_one_of_each(leaf, most) for leaf in leaves if not leaf.is_floating_point()]
    for place in range(most):  # in turn, so that no tensor takes all the places
        found |= {rows[place]: None for rows in candidates if place < len(rows)}
    spread = torch.linspace(0, size - 1, min(most, size), device="cpu").round().long().tolist()
    return sorted(list(dict.fromkeys([*found, *spread]))[:most])


def sorted_rows(tree: Any, size: int) -> Tensor:
    """Return all rows ordered by class, else by size, so that the two halves of the batch differ.

    >>> sorted_rows((torch.zeros(4), torch.tensor([1, 0, 1, 0])), 4).tolist()
    [1, 3, 0, 2]
    """
    leaves = [leaf.detach() for leaf in tensors(tree) if has_rows(leaf, size)]
    by_class = [leaf for leaf in leaves if not leaf.is_floating_point()]
    chosen = (by_class or leaves)[-1:]  # targets come last
    keys = [_size_of_rows(leaf) for leaf in chosen] or [torch.zeros(size, device="cpu")]
    return keys[0].argsort(stable=True).cpu()


def _extremes(leaf: Tensor) -> list[int]:
    sizes = _size_of_rows(leaf)
    return [int(sizes.argmax()), int(sizes.argmin())]


def _one_of_each(leaf: Tensor, most: int) -> list[int]:
    """Return the first row of each value, rare values first; the rows with the least and largest sums otherwise."""
    if leaf.dim() > 1 and leaf.numel() != leaf.shape[0]:
        return _extremes(leaf)
    values, place, counts = torch.unique(leaf.reshape(-1), return_inverse=True, return_counts=True)
    if len(values) > MOST_CLASSES:
        return _extremes(leaf)
    first = torch.full_like(values, leaf.shape[0], dtype=torch.long)
    first = first.scatter_reduce(0, place, torch.arange(len(place), device=leaf.device), "amin")
    rows: list[int] = first[counts.argsort(stable=True)][:most].tolist()
    return rows


def _size_of_rows(leaf: Tensor) -> Tensor:
    numbers = leaf.reshape(leaf.shape[0], -1).double().nan_to_num()
    return numbers.abs().sum(1) if leaf.is_floating_point() else numbers.sum(1)


class SeenValues:
    """Classes and the like that batches have had: a check on batches without a class tells nothing about it."""

    def __init__(self) -> None:
        self._seen: dict[str, set[float]] = {}
        self._news = 0

    def has_news(self, batch: Any, size: int) -> bool:
        """Whether a batch has a class, a flag or a padding value that none before it had.

        Of tensors with one value per example, all values count, as long as there are few; of others, negative integers.
        Said at most `MOST_NEWS` times.

        >>> seen = SeenValues()
        >>> [seen.has_news(torch.tensor(values), 2) for values in ([0, 1], [1, 1], [1, 2])]
        [True, False, True]
        """
        news = False
        for name, leaf in _named(batch) if self._news < MOST_NEWS else ():
            if has_rows(leaf, size) and size:
                found = _classes_of(leaf.detach())
                known = self._seen.setdefault(name, set())
                if len(known) <= MOST_CLASSES and not found <= known:
                    news = True
                    known |= found
        self._news += news
        return news


def _named(batch: Any) -> Iterable[tuple[str, Tensor]]:
    """Return what `named_tensors` has; of what most batches are, in less time."""
    if type(batch) is list and all(type(part) is Tensor for part in batch):
        return [(f".{place}", part) for place, part in enumerate(batch)]
    return named_tensors(batch).items()


def _classes_of(leaf: Tensor) -> set[float]:
    """Return the values of a tensor that may be classes."""
    if leaf.numel() == leaf.shape[0]:
        flat = leaf if leaf.dim() == 1 else leaf.reshape(-1)
        values = set((flat if leaf.numel() <= FEW_ROWS else torch.unique(flat)).tolist())
        return values if not leaf.is_floating_point() or len(values) <= MOST_FLAGS else set()
    if leaf.is_floating_point() or leaf.dtype == torch.bool:
        return set()
    least = int(leaf.min()) if leaf.numel() else 0
    return {float(least)} if least < 0 else set()
