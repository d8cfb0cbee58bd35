"""What spectral normalization keeps shows neither how many batches a step had, nor that one was left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations


def normed() -> nn.Module:
    torch.manual_seed(0)
    layers = map(parametrizations.spectral_norm, (nn.Linear(5, 6), nn.Linear(6, 3)))
    return nn.Sequential(next(layers), nn.Tanh(), next(layers))


def buffers_after(run: Any, *, leaves_out_empty: bool = False) -> list[torch.Tensor]:
    for inputs, targets in run.loader:
        if not (leaves_out_empty and not len(inputs)):
            run.step(inputs, targets)
    assert run.engine.steps_left == 0
    return [buffer.clone() for buffer in run.module.buffers()]


def assert_alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """Weights may differ by rounding, and so may what follows from them; an iteration more moves numbers by 1e-3."""
    for before, after in zip(one, other, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=2e-5)


@pytest.mark.parametrize("limit", [4, 16])
def test_buffers_do_not_show_into_how_many_batches_a_step_was_cut(private, helpers, limit):
    whole, cut = (
        buffers_after(private(module=normed(), plan=helpers.plan(rates=(0.7,)), **options))
        for options in ({}, {"max_physical_batch_size": limit})
    )
    assert_alike(whole, cut)


def test_buffers_do_not_show_that_nobody_was_sampled(private, helpers):
    plan = helpers.plan(rates=(0.02,), steps=12)
    left_out, stepped = (
        buffers_after(private(module=normed(), plan=plan), leaves_out_empty=each) for each in (True, False)
    )
    assert_alike(left_out, stepped)


def test_a_step_begun_anew_goes_on_from_where_it_stood(private):
    again = private(module=normed())
    inputs, _ = next(iter(again.loader))
    for _ in range(3):
        again.module(inputs)
    assert_alike(buffers_after(private(module=normed())), buffers_after(again))


def test_the_vectors_still_follow_the_weights(private, helpers):
    module = normed()
    before = [(layer, *map(torch.clone, layer.parametrizations.weight[0].buffers())) for layer in module[::2]]
    buffers_after(private(module=module))
    module.eval()
    for layer, u, v in before:
        weight = layer.parametrizations.weight.original.detach()
        largest = float(torch.linalg.matrix_norm(weight, 2))
        found = largest / float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
        assert float(u @ weight @ v) < found <= largest * 1.0001


@pytest.mark.parametrize("between", [False, True])
def test_a_run_that_was_saved_before_or_after_its_step_goes_on_as_if_nothing_had_been(
    private, tmp_path, between
):
    """Saved between a batch and its step, it iterated twice for that step, and was refused for other gradients."""
    file = tmp_path / "run.safetensors"
    saved = private(module=normed())
    for number, (inputs, targets) in enumerate(saved.loader):
        if between and number == 2:
            saved.engine.save(file)
        saved.step(inputs, targets)
        if not between and number == 1:
            saved.engine.save(file)
    resumed = private(module=normed())
    resumed.engine.resume(file)
    resumed.train()
    assert resumed.engine.steps_left == 0
    for one, other in zip(
        saved.module.state_dict().values(), resumed.module.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
