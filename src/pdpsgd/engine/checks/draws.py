"""Refuses models whose random draws all rows of a physical batch share, where steps are cut into physical batches.

How many such draws a step has depends on how many people were sampled, and that shows in the sum. A draw is shared if
it has as many numbers for twice as many rows (stochastic depth in batch mode, a mask over weights), and it matters if
other numbers in its place change what the model gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdpsgd.engine._torch import TorchDispatchMode
from pdpsgd.engine.batches import RandomStates, has_rows, map_tensors, seeded, tensors
from pdpsgd.errors import fail

CHECKED_SEEDS = 16
ROWS = 3


def check_draws(run: Callable[[Any], Any], inputs: Any, size: int) -> None:
    """Refuse a model that draws random numbers which all rows share, and uses them.

    Args:
        run: The model in training mode, on inputs like those given.
        inputs: What the model is called with: `size` rows.
        size: The number of rows.

    Guarantee: none by itself. A draw that matters in fewer than one of some 16 passes can stay unseen, as can one whose
    number of passes or of draws depends on the rows.
    """
    few, twice = (_repeated(inputs, size, rows) for rows in (ROWS, 2 * ROWS))
    for seed in range(CHECKED_SEEDS):
        with seeded(seed):
            begin = RandomStates.now()
            usual, more = _Draws(), _Draws()
            before = _outputs(run, few, usual)
            after_few = RandomStates.now()
            if after_few.same_as(begin):
                return
            begin.restore()
            _outputs(run, twice, more)
            shared = usual.shared_with(more)
            outside = _drawn_outside_torch(begin, after_few, RandomStates.now())
            if not shared and not outside:
                return
            begin.restore()
            if outside:
                random.seed(seed + 1)
                np.random.seed(seed + 1)  # noqa: NPY002
            after = _outputs(run, few, _Draws(replaced=shared, seed=seed))
        if not _same(before, after):
            fail(
                "Expected the model to draw its random numbers for each example, where a step may be cut into physical "
                "batches (max_physical_batch_size). Got a draw that all examples of a batch share (stochastic depth in "
                "batch mode, a random mask over weights): draw per row (mode='row'), or set max_physical_batch_size "
                "to all people's records at least, so that no step is cut."
            )


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers of each random draw of torch; gives other ones in place of those `replaced`."""

    def __init__(self, *, replaced: frozenset[int] = frozenset(), seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[int] = []
        self._replaced = replaced
        self._seed = seed

    def shared_with(self, twice: _Draws) -> frozenset[int]:
        """The draws that have as many numbers for twice as many rows; none if they cannot be matched."""
        if len(self.counts) != len(twice.counts):
            return frozenset()
        pairs = enumerate(zip(self.counts, twice.counts, strict=True))
        return frozenset(place for place, (one, other) in pairs if one == other)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        place = len(self.counts)
        with _from_elsewhere(self._seed + place, wanted=place in self._replaced):
            drawn = function(*args, **kwargs)
        self.counts.append(sum(leaf.numel() for leaf in tensors(drawn)))
        return drawn


@contextmanager
def _from_elsewhere(seed: int, *, wanted: bool) -> Iterator[None]:
    """Draw from another seed, and go on as if it had been drawn from the usual one."""
    if not wanted:
        yield
        return
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(2**32 + seed)
        yield


def _outputs(run: Callable[[Any], Any], inputs: Any, draws: _Draws) -> list[Tensor]:
    with draws, torch.no_grad():
        return [leaf.clone() for leaf in tensors(run(map_tensors(torch.clone, inputs)))]


def _repeated(inputs: Any, size: int, rows: int) -> Any:
    """Return a batch of some rows, from the first on and around again."""

    def change(leaf: Tensor) -> Tensor:
        return leaf.detach()[torch.arange(rows, device=leaf.device) % size] if has_rows(leaf, size) else leaf

    return map_tensors(change, inputs)


def _drawn_outside_torch(begin: RandomStates, few: RandomStates, twice: RandomStates) -> bool:
    """Whether Python or NumPy drew numbers, and as many for twice as many rows."""
    of_torch = begin.of_torch
    apart = [RandomStates(of_torch, states.of_numpy, states.of_python) for states in (begin, few, twice)]
    return not apart[0].same_as(apart[1]) and apart[1].same_as(apart[2])


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(before, after, strict=True)
    )
