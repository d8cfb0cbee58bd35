"""Random draws that all examples of a batch share are refused where steps are cut into physical batches."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdpsgd.engine.checks.probe import check_examples_do_not_mix
from pdpsgd.errors import PdpsgdError


class Drawing(nn.Module):
    """A small network that draws something between its layers, beside ordinary dropout."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x).tanh())
        return self.last(self.draw(hidden) if self.training else hidden)


def weights_dropped(hidden: Tensor) -> Tensor:
    return hidden @ nn.functional.dropout(torch.eye(8), 0.3)


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "stochastic depth in batch mode": lambda h: h * torch.empty(1, 1).bernoulli_(0.8),
    "one mask": lambda h: h * (torch.rand(8) < 0.7),
    "weights dropped": weights_dropped,
    "layer drop by Python": lambda h: h if random.random() < 0.7 else h.sin(),
    "layer drop by NumPy": lambda h: h if np.random.rand() < 0.7 else h.sin(),  # noqa: NPY002
    "layer drop by torch": lambda h: h if torch.rand([]) < 0.7 else h.sin(),
}


def never_used(hidden: Tensor) -> Tensor:
    """As Transformers do where `layerdrop` is 0."""
    return hidden.sin() if torch.rand([]) < 0.0 else hidden


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "stochastic depth in row mode": lambda h: h * torch.empty(len(h), 1).bernoulli_(0.8),
    "noise": lambda h: h + torch.randn_like(h),
    "channels": lambda h: nn.functional.dropout1d(h[:, :, None], 0.4)[:, :, 0],
    "one by one": lambda h: torch.stack([row * torch.rand([]) for row in h]),
    "a draw that decides nothing": never_used,
}


def check(draw: Callable[[Tensor], Tensor], *, is_cut: bool) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(9, 5), torch.arange(9) % 3
    check_examples_do_not_mix(Drawing(draw), nn.functional.cross_entropy, inputs, targets, is_cut=is_cut)


@pytest.mark.parametrize("how", SHARED)
def test_a_draw_that_all_examples_share_is_refused_where_steps_are_cut(how: str) -> None:
    with pytest.raises(PdpsgdError, match="Got a draw that all examples of a batch share"):
        check(SHARED[how], is_cut=True)
    check(SHARED[how], is_cut=False)


@pytest.mark.parametrize("how", OWN)
def test_draws_for_each_example_pass(how: str) -> None:
    check(OWN[how], is_cut=True)


@pytest.mark.parametrize("criterion", [None, nn.functional.cross_entropy], ids=["own loop", "criterion"])
def test_a_run_refuses_it_only_if_a_step_may_be_cut(private, criterion) -> None:
    def run(draw: str, **options: int) -> None:
        model = Drawing({**SHARED, **OWN}[draw])
        private(module=model, criterion=criterion, **options).train()

    shared = "stochastic depth in batch mode"
    with pytest.raises(PdpsgdError, match="max_physical_batch_size"):
        run(shared, max_physical_batch_size=7)
    run(shared)
    run(shared, max_physical_batch_size=40)  # everybody
    run("stochastic depth in row mode", max_physical_batch_size=7)
