"""Images of like brightness and contrast, each by its own mean and standard deviation."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pdpsgd.datasets import Dataset

LEAST_CONTRAST = 0.1
"""Images with less are not stretched to a standard deviation of 1: what is in them may be noise alone."""


def standardised_images(images: Tensor) -> Tensor:
    """Each image less its mean, divided by its standard deviation.

    Guarantee: each result is a fixed function of that image alone, so training on it gives every person the
    same promise as training on the image.

    >>> import torch
    >>> standardised_images(torch.tensor([[[[1.0, 3.0]]], [[[0.2, 0.2]]]])).flatten().tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    sides = tuple(range(1, images.dim()))
    centred = images - images.mean(sides, keepdim=True)
    return centred / centred.square().mean(sides, keepdim=True).sqrt().clamp(min=LEAST_CONTRAST)


def standardised(dataset: Dataset) -> Dataset:
    """The data set with standardised images."""
    return replace(
        dataset,
        train_inputs=standardised_images(dataset.train_inputs),
        test_inputs=standardised_images(dataset.test_inputs),
    )
