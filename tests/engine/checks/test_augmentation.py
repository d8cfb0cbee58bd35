"""An augmentation in which examples mix is refused, whatever holds the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pdpsgd.engine.checks.augmentation import check_augment
from pdpsgd.errors import PdpsgdError
from pdpsgd.training.augmentation import Shifts


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


def test_a_draw_that_all_examples_share_is_refused_where_a_step_is_cut() -> None:
    def flip_all_or_none(x: torch.Tensor) -> torch.Tensor:
        return -x if torch.rand(()) < 0.5 else x

    def flip_each(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(len(x), 1) < 0.5, -x, x)

    inputs = torch.randn(6, 3)
    with pytest.raises(PdpsgdError, match="Got one that draws once for all examples"):
        check_augment(flip_all_or_none, inputs, 6, is_cut=True)
    check_augment(flip_all_or_none, inputs, 6)
    check_augment(flip_each, inputs, 6, is_cut=True)
    check_augment(lambda x: 2 * x, inputs, 6, is_cut=True)
