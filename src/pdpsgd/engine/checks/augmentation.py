"""Refuses an augmentation in which examples mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdpsgd.engine.batches import exchanged, has_rows, map_tensors, named_tensors, same_but_for, seeded
from pdpsgd.errors import fail

CHECKED_EXAMPLES = 4
CHECKED_SEEDS = 16


def check_augment(augment: Callable[[Any], Any], inputs: Any, size: int) -> None:
    """Refuse an augmentation in which the examples of a batch of `size` mix (mixup, say).

    Each of a few examples is replaced by another in turn, under several seeds: the others must come out as before.

    Guarantee: none by itself. What mixes examples in one of many batches only can stay unseen.
    """
    few = min(size, CHECKED_EXAMPLES)
    given = map_tensors(lambda part: part[:few] if has_rows(part, size) else part, inputs)
    for seed in range(CHECKED_SEEDS if few > 1 else 0):
        with seeded(seed):
            before = named_tensors(augment(map_tensors(torch.clone, given)))
        rows = {name for name, part in before.items() if has_rows(part, few)}
        if not rows:
            shapes = [tuple(part.shape) for part in before.values()]
            fail(f"Expected augment to keep the {few} examples of a batch. Got tensors of shape {shapes}.")
        for row in range(few):
            with seeded(seed):
                after = named_tensors(augment(exchanged(given, few, [row], (row + 1) % few)))
            for name, part in before.items():
                changed = name not in after or (
                    not same_but_for([row], part, after[name], few)
                    if name in rows
                    else not torch.equal(part, after[name])
                )
                if changed:
                    fail(
                        "Expected augment to treat examples one by one, with random numbers of torch, NumPy or Python "
                        "that can be seeded. Got one in which replacing an example changes the results of others."
                    )
