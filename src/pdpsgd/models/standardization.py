"""Images of like brightness and contrast, each by its own mean and standard deviation, or those around each pixel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_CONTRAST = 0.1
"""Images with less are not stretched to a standard deviation of 1: what is in them may be noise alone."""


def standardized_images(images: Tensor) -> Tensor:
    """Each image less its mean, divided by its standard deviation.

    Guarantee: each result is a fixed function of that image alone, so training on it gives every person the
    same promise as training on the image.

    >>> import torch
    >>> standardized_images(torch.tensor([[[[1.0, 3.0]]], [[[0.2, 0.2]]]])).flatten().tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    sides = tuple(range(1, images.dim()))
    centred = images - images.mean(sides, keepdim=True)
    deviation = torch.linalg.vector_norm(centred, dim=sides, keepdim=True) / math.sqrt(
        images.shape[1:].numel()
    )
    return centred.div_(deviation.clamp_(min=LEAST_CONTRAST))


def locally_standardized_images(images: Tensor, *, width: int = 9) -> Tensor:
    """Each pixel less the mean of its channel around it, divided by the standard deviation around it.

    Where there is less contrast than in the image on average, it is divided by that instead: nothing is there.

    Guarantee: as for `standardized_images`.

    >>> import torch
    >>> locally_standardized_images(torch.zeros(1, 3, 32, 32)).abs().max().item()
    0.0
    """
    centred = images - _means_around(images, width)
    around = _means_around(centred.square().mean(1, keepdim=True), width).sqrt()
    usual = around.mean((1, 2, 3), keepdim=True).clamp(min=LEAST_CONTRAST)
    return centred / torch.maximum(around, usual)


PIXELS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": lambda images: images,
    "standardised-pixels": standardized_images,
    "locally-standardised-pixels": locally_standardized_images,
}
"""Inputs of the size of the images, by name."""


def _means_around(images: Tensor, width: int) -> Tensor:
    return F.avg_pool2d(images, width, stride=1, padding=width // 2, count_include_pad=False)
