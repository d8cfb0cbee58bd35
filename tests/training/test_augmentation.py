"""Shifted images are the image's own pixels, moved; every example is moved on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdpsgd.engine.checks.augmentation import check_augment
from pdpsgd.errors import PdpsgdError
from pdpsgd.training.augmentation import Shifts
from pdpsgd.training.components import augment_of


@given(seed=st.integers(0, 1000), most=st.integers(0, 3), channels=st.integers(1, 3))
def test_each_image_is_moved_by_up_to_so_many_pixels(seed: int, most: int, channels: int) -> None:
    torch.manual_seed(seed)
    images = torch.randn(6, channels, 8, 9)
    moved = Shifts(most)(images)
    rows, columns = torch.arange(8), torch.arange(9)
    for before, after in zip(images, moved, strict=True):
        candidates = [
            before[:, (rows + down).clamp(0, 7)][:, :, (columns + right).clamp(0, 8)]
            for down in range(-most, most + 1)
            for right in range(-most, most + 1)
        ]
        assert any(torch.equal(after, candidate) for candidate in candidates)


def test_all_shifts_occur_equally_often() -> None:
    torch.manual_seed(0)
    places = torch.arange(25.0).view(1, 1, 5, 5).expand(25_000, 1, 5, 5)
    middle = Shifts(2)(places)[:, 0, 2, 2].long()
    counts = torch.bincount(middle, minlength=25)
    # Each is binomial with mean 1,000: six deviations of one of 25 are a false alarm in 2e-8 of such tests.
    assert ((counts - 1000).abs() < 6 * (1000 * 24 / 25) ** 0.5).all()


def test_examples_do_not_mix() -> None:
    check_augment(Shifts(2), torch.randn(4, 3, 8, 8), 4)


def mixup(inputs: torch.Tensor) -> torch.Tensor:
    share = np.random.beta(0.4, 0.4)  # noqa: NPY002
    return share * inputs + (1 - share) * inputs[torch.randperm(len(inputs))]


def pasted(inputs: torch.Tensor) -> torch.Tensor:
    """Cutmix, one time in two."""
    if torch.rand(()) < 0.5:
        inputs[:, :, :4] = inputs[torch.randperm(len(inputs)), :, :4]
    return inputs


@pytest.mark.parametrize("augment", [mixup, pasted])
@pytest.mark.parametrize("size", [2, 3, 60])
def test_textbook_mixing_is_refused(augment: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    inputs = torch.randn(size, 1, 8, 8)
    before = inputs.clone()
    with pytest.raises(PdpsgdError, match="treat examples one by one"):
        check_augment(augment, inputs, size)
    assert torch.equal(inputs, before)


def test_inputs_in_containers_are_looked_at_too() -> None:
    scale = torch.ones(7)  # the same for all examples, and the first tensor in there
    inputs = {"scale": scale, "images": torch.randn(5, 1, 8, 8)}

    def within(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
        return lambda batch: {**batch, "images": change(batch["images"])}

    check_augment(within(Shifts(1)), inputs, 5)
    with pytest.raises(PdpsgdError, match="treat examples one by one"):
        check_augment(within(mixup), inputs, 5)
    with pytest.raises(PdpsgdError, match="Expected augment to keep the 4 examples"):
        check_augment(lambda batch: batch["images"][1:], inputs, 5)


def test_tables_cannot_be_moved() -> None:
    with pytest.raises(PdpsgdError, match=r"Got inputs of shape \(4, 7\)"):
        Shifts(2)(torch.zeros(4, 7))
    with pytest.raises(PdpsgdError, match="Got augment='mixup'"):
        augment_of("mixup")
