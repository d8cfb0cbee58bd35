"""Changes to images that leave their meaning, one example at a time; and the check that an augmentation is such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.errors import fail
from pdpsgd.engine.batches import exchanged, has_rows, map_tensors, named_tensors, same_but_for, seeded

CHECKED_EXAMPLES = 4
CHECKED_SEEDS = 16


@dataclass(frozen=True)
class Shifts:
    """Moves each image by up to `most` pixels in both directions, at random; what comes in repeats the border.

    >>> Shifts(1)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 1, 8, 8])
    """

    most: int = 2

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images (examples, channels, height, width), each moved on its own."""
        if images.dim() != 4:
            fail(
                "Expected images (examples, channels, height, width), to move them. Got inputs of shape "
                f"{tuple(images.shape)}."
            )
        examples, _, height, width = images.shape
        padded = F.pad(images, [self.most] * 4, mode="replicate").permute(0, 2, 3, 1)
        top, left = torch.randint(2 * self.most + 1, (2, examples, 1, 1), device=images.device)
        rows = top + torch.arange(height, device=images.device)[:, None]
        columns = left + torch.arange(width, device=images.device)
        example = torch.arange(examples, device=images.device)[:, None, None]
        return padded[example, rows, columns].permute(0, 3, 1, 2)


def check_augment(augment: Callable[[Any], Any], inputs: Any, size: int) -> None:
    """Refuse an augmentation in which the examples of a batch of `size` mix (mixup, say).

    Each of a few examples is exchanged for another in turn, under several seeds: what becomes of the others must stay.

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
                        "that can be seeded. Got one in which exchanging an example changes what becomes of others."
                    )
