"""What a model keeps of a batch in buffers or frozen parameters is never noised: it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pdpsgd.errors import PdpsgdError


class Keeper(nn.Module):
    """Changes a buffer or a frozen parameter in its training forward, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, inputs):
        with torch.no_grad():
            largest = inputs.amax(0) if self.training and len(inputs) else self.seen
            if not self.training or self.way == "nothing":
                pass
            elif self.way == "in place":
                self.seen.copy_(largest)
            elif self.way == "by another tensor":
                self.seen = largest
            elif self.way == "through data":
                self.seen.data.copy_(largest)
            elif self.way == "a new buffer":
                self.register_buffer("more", largest)
            elif self.way == "a frozen parameter":
                self.frozen.copy_(largest)
        return self.linear(inputs)


NAMES = {
    "in place": "seen",
    "by another tensor": "seen",
    "through data": "seen",
    "a new buffer": "more",
    "a frozen parameter": "frozen",
}


@pytest.mark.parametrize("criterion", [None, nn.functional.cross_entropy], ids=["watched", "criterion"])
@pytest.mark.parametrize("way", NAMES)
def test_a_model_that_keeps_something_of_a_batch_is_refused_by_name(private, way, criterion):
    run = private(module=nn.Sequential(Keeper(way)), criterion=criterion)
    with pytest.raises(PdpsgdError, match=rf"Got a change of 0\.{NAMES[way]}: .*without noise"):
        run.train()
    assert run.engine.steps_taken == 0
    run.engine.close()


@pytest.mark.parametrize("criterion", [None, nn.functional.cross_entropy], ids=["watched", "criterion"])
@pytest.mark.parametrize("way", ["in place", "by another tensor"])
def test_evaluation_mode_of_the_module_that_keeps_something_is_the_remedy(private, way, criterion):
    keeper = Keeper(way)
    run = private(module=nn.Sequential(keeper), criterion=criterion)
    keeper.eval()
    keeper.linear.train()
    run.train()
    assert run.engine.steps_left == 0
    assert torch.equal(keeper.seen, torch.zeros(5))


def test_buffers_that_stay_and_spectral_normalisation_are_allowed(private):
    module = nn.Sequential(Keeper("nothing"), parametrizations.spectral_norm(nn.Linear(3, 3)))
    module[0].seen.fill_(float("nan"))
    run = private(module=module)
    run.train()
    assert run.engine.steps_left == 0


def test_buffers_may_change_after_the_step(private):
    run = private(module=Keeper("nothing"))
    for inputs, targets in run.loader:
        run.step(inputs, targets)
        run.module.seen.add_(1)
    assert run.engine.steps_left == 0


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_rescale_the_rows_they_meet_are_refused(private, kind, trainable):
    embedding = kind(20, 5, max_norm=0.5)
    embedding.weight.requires_grad_(trainable)
    with pytest.raises(PdpsgdError, match="max_norm=None"):
        private(module=nn.Sequential(embedding, nn.Linear(5, 3)))


@pytest.mark.parametrize("place", ["before the model", "after it"])
def test_parameters_written_between_a_batch_and_its_step_are_refused(private, place):
    run = private()

    def train():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            if place == "before the model":
                with torch.no_grad():
                    run.module[0].bias.add_(inputs.mean())
            loss = nn.functional.cross_entropy(run.module(inputs), targets)
            loss.backward()
            if place == "after it":
                with torch.no_grad():
                    run.module[0].bias.add_(inputs.mean())
            run.optimizer.step()

    with pytest.raises(PdpsgdError, match=r"Got a change of 0\.bias between a batch and its step"):
        train()
    assert run.engine.steps_taken == 0
    run.engine.close()


def test_parameters_may_be_projected_after_the_step(private):
    run = private()
    for inputs, targets in run.loader:
        run.step(inputs, targets)
        with torch.no_grad():
            run.module[0].weight.clamp_(-1, 1)
    assert run.engine.steps_left == 0
