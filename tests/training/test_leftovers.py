"""The model that `fit` gives back keeps nothing of a batch beside its parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn


class Remembers(nn.Module):
    """A network that keeps what it saw, in every way that is easily written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.scale = torch.ones(5)
        self.seen: list[torch.Tensor] = []
        self.largest = 0.0
        self.notes = {"name": "mine"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = inputs
        self.seen.append(inputs.mean())
        self.scale = self.scale + inputs.detach().abs().amax(0)
        self.largest = max(self.largest, float(inputs.detach().abs().max()))
        self.notes["count"] = len(inputs)
        self.layer.kept = inputs
        return self.layer(inputs)


def test_what_a_model_kept_of_batches_is_gone(problem):
    model = Remembers()
    result = problem.fit(model=model, test_data=problem.test)
    assert result.model is model
    assert not hasattr(model, "last")
    assert not hasattr(model.layer, "kept")
    assert (model.seen, model.largest, model.notes) == ([], 0.0, {"name": "mine"})
    assert torch.equal(model.scale, torch.ones(5))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_of_earlier_rounds_keep_nothing_either(problem):
    result = problem.fit(
        model=Remembers(), plan=problem.plan(steps=(2, 2), fresh=True), test_data=problem.test
    )
    assert len(result.models) == 2
    assert not any(hasattr(model, "last") or model.seen for _, model in result.models)


def test_an_ordinary_model_is_given_back_as_it_is(problem):
    model = problem.model()
    model.names, model.width, model.order = ["a", "b"], 8, [model[0], model[3]]
    result = problem.fit(model=model, seed=None)
    assert (model.names, model.width, model.order) == (["a", "b"], 8, [model[0], model[3]])
    assert result.verdict.reasons == ()


def test_an_attribute_that_cannot_be_seen_through_is_said(problem):
    model = problem.model()
    model.pairs = [(model[0], torch.zeros(3))]
    result = problem.fit(model=model, seed=None)
    assert [reason.code for reason in result.verdict.reasons] == ["unseen-code"]
    assert "attribute pairs of the model" in result.release_note
