"""Shifted images are the image's own pixels, moved; every example is moved on its own."""

from __future__ import annotations

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


def test_tables_cannot_be_moved() -> None:
    with pytest.raises(PdpsgdError, match=r"Got inputs of shape \(4, 7\)"):
        Shifts(2)(torch.zeros(4, 7))
    with pytest.raises(PdpsgdError, match="Got augment='mixup'"):
        augment_of("mixup")
