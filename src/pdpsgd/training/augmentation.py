"""Changes to images that leave their meaning, one example at a time; and the check that an augmentation is such."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.errors import fail


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
