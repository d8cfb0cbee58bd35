"""Refuses an augmentation in which examples mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdpsgd.engine.batches import exchanged, has_rows, map_tensors, named_tensors, same_but_for, seeded
from pdpsgd.errors import fail

CHECKED_EXAMPLES = 4
CHECKED_SEEDS = 16


def check_augment(augment: Callable[[Any], Any], inputs: Any, size: int, *, is_cut: bool = False) -> None:
    """Refuse an augmentation in which the examples of a batch of `size` mix (mixup, say).

    Each of a few examples is replaced by another in turn, under several seeds: the others must come out as before.
    Where a step may be cut into physical batches, neither may all examples share a random draw: how many draws there
    are, which shows in the sum, depends on how many people were sampled.

    Guarantee: none by itself. What mixes examples in one of many batches only can stay unseen.
    """
    few = min(size, CHECKED_EXAMPLES)
    given = map_tensors(lambda part: part[:few] if has_rows(part, size) else part, inputs)
    if is_cut and few > 1 and _shares_draws(augment, given, few):
        fail(
            "Expected augment to draw its random numbers for each example, where a step is cut into physical batches "
            "(max_physical_batch_size). Got one that draws once for all examples: draw one number per row "
            "(torch.rand(len(x)))."
        )
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


def _shares_draws(augment: Callable[[Any], Any], given: Any, few: int) -> bool:
    """Tell whether the same example, several times, comes out alike each time, and otherwise with another seed."""
    alike = map_tensors(
        lambda part: part[:1].repeat(few, *[1] * (part.dim() - 1)) if has_rows(part, few) else part, given
    )
    first = None
    differs = False
    for seed in range(CHECKED_SEEDS):
        with seeded(seed):
            made = named_tensors(augment(map_tensors(torch.clone, alike)))
        rows = {name: part for name, part in made.items() if has_rows(part, few)}
        if any(not torch.equal(part, part[:1].expand_as(part)) for part in rows.values()):
            return False
        now = {name: part[:1] for name, part in rows.items()}
        first = first or now
        differs |= any(name not in now or not torch.equal(part, now[name]) for name, part in first.items())
    return differs
