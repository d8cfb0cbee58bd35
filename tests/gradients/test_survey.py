"""What all examples share is never taken for a batch, at no batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients

TIME, NODES, WIDTH = 6, 5, 4


class Graph(nn.Module):
    """Propagates along a matrix that everybody shares, by parameters of its own: the general rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return torch.tanh(adjacency @ nodes @ self.weight)


class GraphModel(nn.Module):
    """Keeps the matrix (or is given it) and hands it to a layer."""

    def __init__(self, *, given: bool) -> None:
        super().__init__()
        self.layer, self.out = Graph(), nn.Linear(WIDTH, 2)
        self.given = given
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("adjacency", torch.rand(NODES, NODES, generator=generator))

    def forward(self, nodes: Tensor, adjacency: Tensor | None = None) -> Tensor:
        return self.out(self.layer(nodes, self.adjacency if adjacency is None else adjacency)).flatten(1)


class Biased(nn.Module):
    """Attention by raw parameters, with a mask (time, time) as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MaskedAttention()

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(TIME, TIME).tril()
        return self.inner(tokens, mask=mask).flatten(1)


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, tokens: Tensor, *, mask: Tensor) -> Tensor:
        scores = (tokens @ self.queries) @ (tokens @ self.keys).transpose(1, 2)
        return scores.masked_fill(mask == 0, -1e4).softmax(-1) @ tokens


def losses(outputs: Tensor) -> Tensor:
    return (outputs * torch.linspace(-1, 2, outputs.shape[1])).sum(1) + outputs.square().sum(1)


def gradients_one_by_one(model: nn.Module, inputs: Tensor, *shared: Tensor) -> Tensor:
    rows = []
    for row in inputs:
        model.zero_grad()
        losses(model(row[None], *shared)).sum().backward()
        rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    model.zero_grad()
    return torch.stack(rows)


def per_example(model: nn.Module, inputs: Tensor, *shared: Tensor) -> Tensor:
    clipped = ClippedGradients(model)
    losses(model(inputs, *shared)).sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")
    clipped.remove()
    return torch.cat([found[parameter].flatten(1) for parameter in model.parameters()], 1)


SHARED: dict[str, Any] = {
    "matrix of the model": (lambda: GraphModel(given=False), (NODES, WIDTH), ()),
    "matrix that is given": (lambda: GraphModel(given=True), (NODES, WIDTH), (torch.rand(NODES, NODES),)),
    "mask": (Biased, (TIME, WIDTH), ()),
}


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_tensor_is_shared_at_every_batch_size(name: str, batch: int) -> None:
    build, shape, shared = SHARED[name]
    model, inputs = build(), torch.randn(batch, *shape)
    expected = gradients_one_by_one(model, inputs, *shared)
    assert torch.allclose(per_example(model, inputs, *shared), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHARED)
def test_one_example_moves_the_sum_by_its_clipping_norm_at_most(name: str) -> None:
    build, shape, shared = SHARED[name]
    model = build()
    inputs = torch.randn(shape[0], *shape)
    sums = []
    for last in (1.0, 100.0):
        clipped = ClippedGradients(model)
        changed = inputs.clone()
        changed[-1] *= last
        losses(model(changed, *shared)).sum().backward()
        clipped.clipped_sum(torch.full((len(inputs),), 0.5), loss_reduction="sum")
        sums.append(torch.cat([total.flatten() for total in clipped.sums.values()]).clone())
        clipped.remove()
    assert float((sums[0] - sums[1]).norm()) <= 2 * 0.5


def test_what_was_settled_holds_for_later_batches_of_any_size() -> None:
    model = GraphModel(given=False)
    clipped = ClippedGradients(model)
    for batch in (7, NODES, 1, NODES, 2):
        inputs = torch.randn(batch, NODES, WIDTH)
        losses(model(inputs)).sum().backward()
        found = clipped.per_example_gradients(loss_reduction="sum")
        clipped.forget()
        with clipped.uninstrumented():
            expected = gradients_one_by_one(model, inputs)
        clipped.forget()
        rows = torch.cat([found[parameter].flatten(1) for parameter in model.parameters()], 1)
        assert torch.allclose(rows, expected, rtol=1e-4, atol=1e-5)


class Positions(nn.Module):
    """Adds a table of positions that is looked up once for all; or once per example."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.positions, self.out = nn.Embedding(TIME, WIDTH), nn.Linear(WIDTH, 1)
        self.each = each

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(TIME)
        found = self.positions(places[None] if self.each else places)
        return self.out(tokens + found).flatten(1)


@pytest.mark.parametrize("batch", [3, TIME])
def test_a_layer_on_what_all_examples_share_is_refused_at_every_batch_size(batch: int) -> None:
    """Where the batch has as many examples as there are positions, each position would pass for an example."""
    model, inputs = Positions(each=False), torch.randn(batch, TIME, WIDTH)
    with pytest.raises(PdpsgdError, match=r"positions.*positions\[None\]"):
        per_example(model, inputs)
    model = Positions(each=True)
    assert torch.allclose(per_example(model, inputs), gradients_one_by_one(model, inputs), atol=1e-5)


class Counting(nn.Module):
    """Counts its passes, keeps its inputs, drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("last", None)
        self.calls, self.sizes = 0, []

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.calls += 1
        self.sizes.append(len(inputs))
        self.last = inputs.detach().clone()
        return nn.functional.dropout(self.inner(inputs), 0.5, self.training)


def test_finding_out_leaves_no_trace() -> None:
    outputs, seen = [], []
    for instrumented in (False, True):
        torch.manual_seed(5)
        model = Counting()
        model.inner.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
        clipped = ClippedGradients(model) if instrumented else None
        outputs.append(model(torch.ones(4, 3)))
        if clipped is not None:
            clipped.remove()
        assert (int(model.passes), model.calls, model.sizes, len(model.last)) == (1, 1, [4], 4)
    assert torch.equal(*outputs)
    assert seen == [4, 4]


class OnlyWhole(nn.Module):
    """Refuses other batches than those of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.view(8, 3))


def test_a_model_of_one_batch_size_is_used_as_it_is() -> None:
    model, inputs = OnlyWhole(), torch.randn(8, 3)
    clipped = ClippedGradients(model)
    losses(model(inputs)).sum().backward()
    assert clipped.clipped_sum(torch.ones(8), loss_reduction="sum") == 0
    clipped.remove()
