"""What writes to the model after a step is named in the verdict: it is assumed not to look at the data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdpsgd.engine import PrivacyEngine


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("kept", torch.zeros(5))
        self.register_buffer("none", None)

    def forward(self, inputs):
        return self.layers(inputs)


@torch.no_grad()
def to_a_buffer(module, inputs):
    module.kept.copy_(inputs.mean(0))


@torch.no_grad()
def to_a_weight(module, inputs):
    module.layers[0].bias.add_(inputs.mean())


def past_torch(module, inputs):
    module.layers[0].bias.data = module.layers[0].bias.data + inputs.mean()


def in_another_buffer(module, inputs):
    module.kept = inputs.mean(0)


WRITES = {
    to_a_buffer: "kept",
    to_a_weight: "layers.0.bias",
    past_torch: "layers.0.bias",
    in_another_buffer: "kept",
}


def assumed(run):
    return [each for each in run.engine.verdict().assumed if "after optimizer.step()" in each]


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at", [1, -1])
def test_what_writes_after_a_step_is_named_in_the_verdict(private, write, at, limit):
    """A copy of a batch in a buffer, or in a weight, was released, and the verdict held without a word."""
    run = private(module=WithBuffer(), max_physical_batch_size=limit)
    for batches, (inputs, targets) in enumerate(run.loader, 1):
        run.step(inputs, targets)
        is_last = not run.engine.steps_left and run.optimizer.took_step
        if len(inputs) and (batches == at or (at < 0 and is_last)):
            write(run.module, inputs)
    if at > 0 or write is not past_torch:
        (said,) = assumed(run)
        assert f"what writes to {WRITES[write]} after" in said
        assert [reason.code for reason in run.engine.verdict().reasons] == ["seeded"]  # nothing else


def test_a_loop_that_only_steps_is_said_nothing_of(private, helpers):
    run = private(module=WithBuffer())
    ema = {}
    for inputs, targets in run.loader:
        run.step(inputs, targets)
        run.module.eval()
        run.module(inputs)
        run.module.train()
        ema = {
            name: 0.9 * ema.get(name, value) + 0.1 * value for name, value in run.module.state_dict().items()
        }
    assert not assumed(run)
    fresh = private(
        plan=helpers.plan(steps=(2, 2), fresh=True),
        on_fresh_model=lambda number: nn.init.zeros_(fresh.module[0].bias),
    )
    fresh.train()
    assert not assumed(fresh)


def test_weights_that_are_kept_in_bounds_are_named_too(private):
    run = private(engine=PrivacyEngine(watch_loop=True))
    for inputs, targets in run.loader:
        run.step(inputs, targets)
        with torch.no_grad():
            for parameter in run.module.parameters():
                parameter.clamp_(-1.0, 1.0)
    (said,) = assumed(run)
    assert "0.weight, 0.bias, 2.weight and 1 more after" in said


def test_what_was_assumed_before_an_interruption_stays(private, tmp_path):
    run = private(module=WithBuffer())
    inputs, targets = next(iter(run.loader))
    run.step(inputs, targets)
    to_a_buffer(run.module, inputs)
    run.engine.save(tmp_path / "run.safetensors")
    again = private(module=WithBuffer())
    again.engine.resume(tmp_path / "run.safetensors")
    again.train()
    assert "what writes to kept after" in " ".join(assumed(again))
