"""Every rule gives what plain autograd gives for each example alone, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.per_example import OuterProducts
from pdpsgd.gradients.rules.convolution import Kernels
from pdpsgd.gradients.rules.registry import RULES

# PyTorch's own advice about padding="same" with even kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class LastOf(nn.Module):
    """Calls a module with the same input several times over (attention) or picks one of its outputs."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        first: Tensor = self.module(x, *(more or (x, x)), **self.options)[0]
        return first


class AroundFrozen(nn.Module):
    """Trains around a frozen recurrent layer."""

    def __init__(self, layer: nn.RNNBase, *, from_state: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 3), layer.requires_grad_(False), nn.Linear(8, 2)
        self.from_state = from_state

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        states = (found.new_ones(1, len(x), 8), found.mean(1)[None].repeat(1, 1, 3)[..., :8])
        outputs: Tensor = self.layer(found, states if self.from_state else None)[0]
        return self.last(outputs)


class Resized(nn.Module):
    """A transposed convolution that is told the size of its output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, _: Tensor, *, output_size: tuple[int, int]) -> tuple[Tensor]:
        return (self.module(x, output_size=output_size),)


class LoRA(nn.Module):
    """A frozen layer with trainable low-rank factors, held as raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return result


class Tied(nn.Module):
    """A language model whose last layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = (
            nn.Embedding(7, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 7, bias=False),
        )
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.inner(self.embedding(tokens))))
        return result


class Reused(nn.Module):
    """Applies the same layers again and again."""

    def __init__(self, layer: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Rewound(nn.Module):
    """Encodes a sequence, and decodes it from the state at its end, with one and the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(3, 4), nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x[:, 0])[None]
        outputs, states = self.cell(x, (start, torch.tanh(start)))
        again, (last, cell) = self.cell(x.flip(1), states)
        result: Tensor = outputs + again * last[0][:, None] + cell[0][:, None]
        return result


class Positions(nn.Module):
    """Adds an embedding of positions that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.mix = nn.Embedding(9, 4), nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.mix(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])[None]))
        return result


class Residual(nn.Module):
    """A block of a residual network, with ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
        )
        self.norm, self.relu = nn.GroupNorm(2, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.two(self.relu(self.norm(self.one(x))))
        result: Tensor = self.relu(inside + x)
        return result


class Unusual(nn.Module):
    """Own parameters of odd shapes, a child, and a list of parameters that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bend = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1, 3))
        self.inner, self.more = nn.Linear(3, 3), nn.ParameterList([nn.Parameter(torch.randn(3, 3))])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.sin(self.scale * self.inner(x)) * self.bend + x @ self.more[0]
        return result


class DataDependent(nn.Module):
    """Branches on the values, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a if x.sum() > 0 else x * self.b


class Weighted(nn.Module):
    """Sums looked-up rows with weights that another layer has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.weigh = nn.EmbeddingBag(6, 3, mode="sum"), nn.Linear(5, 5)

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:
        result: Tensor = self.bag(tokens, per_sample_weights=self.weigh(values))
        return result


class NHWC(nn.Module):
    """Flattens with view, which insists on the default memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(27, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.conv(x).view(x.shape[0], -1))
        return result


def frozen_weight(module: nn.Module) -> nn.Module:
    module.weight.requires_grad_(False)
    return module


def causal(time: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(time, dtype=torch.float64)


CASES: dict[str, tuple[Any, ...]] = {
    "linear": (nn.Linear(5, 3), images(4, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False), images(4, 5)),
    "linear over positions, norms by inner products": (nn.Linear(6, 5), images(4, 3, 6)),
    "linear over positions, materialized": (nn.Linear(2, 3), images(4, 90, 2)),
    "linear over a grid": (nn.Linear(3, 2), images(4, 3, 2, 3)),
    "linear, bias only": (frozen_weight(nn.Linear(5, 3)), images(4, 5)),
    "one example": (nn.Linear(5, 3), images(1, 5)),
    "conv1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), images(3, 3, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3), images(3, 3, 6, 7)),
    "conv2d, few positions": (nn.Conv2d(8, 8, 3), images(3, 8, 4, 4)),
    "conv2d, stride over kernel": (
        nn.Conv2d(2, 4, (4, 3), stride=(2, 3), padding=(1, 2)),
        images(3, 2, 9, 8),
    ),
    "conv2d, one channel": (nn.Conv2d(1, 4, 8, stride=2, padding=3), images(3, 1, 28, 28)),
    "conv2d same": (nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), images(3, 3, 6, 7)),
    "conv2d circular": (nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular"), images(3, 2, 6, 7)),
    "conv2d reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), images(3, 2, 6, 7)),
    "conv2d replicate": (nn.Conv2d(2, 3, 3, padding="same", padding_mode="replicate"), images(3, 2, 6, 7)),
    "conv2d groups": (nn.Conv2d(4, 6, 3, groups=2, stride=2), images(3, 4, 7, 8)),
    "conv2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), images(3, 4, 7, 8)),
    "conv2d pointwise": (nn.Conv2d(4, 3, 1, stride=2), images(3, 4, 7, 8)),
    "conv3d": (
        nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1, dilation=(1, 1, 2)),
        images(2, 2, 4, 5, 6),
    ),
    "conv3d groups": (nn.Conv3d(2, 4, 2, groups=2), images(2, 2, 3, 4, 3)),
    "residual block": (nn.Sequential(nn.Conv2d(3, 4, 1), Residual()), images(3, 3, 5, 5)),
    "view after conv": (NHWC(), images(3, 2, 5, 5)),
    "embedding": (nn.Embedding(6, 3), torch.randint(6, (4, 5))),
    "embedding, one lookup": (nn.Embedding(6, 3), torch.randint(6, (4,))),
    "embedding, padding": (nn.Embedding(6, 3, padding_idx=2), torch.randint(6, (4, 5))),
    "embedding over a grid": (nn.Embedding(6, 3), torch.randint(6, (4, 2, 3))),
    "embedding, every row twice": (nn.Embedding(3, 17), torch.arange(3).repeat(4, 2)),
    "bag, every row twice": (nn.EmbeddingBag(3, 17, mode="sum"), torch.arange(3).repeat(4, 2)),
    "bag, mean": (nn.EmbeddingBag(6, 3), torch.randint(6, (4, 5))),
    "bag, sum with padding": (nn.EmbeddingBag(6, 3, mode="sum", padding_idx=2), torch.randint(6, (4, 5))),
    "bag, mean with padding": (nn.EmbeddingBag(4, 3, padding_idx=1), torch.randint(4, (9, 3))),
    "bag, maximum": (nn.EmbeddingBag(6, 3, mode="max", padding_idx=0), torch.randint(6, (4, 5))),
    "bag, weighted": (Weighted(), torch.randint(6, (4, 5)), images(4, 5)),
    "layer norm": (nn.LayerNorm(5), images(4, 5)),
    "layer norm over positions": (nn.LayerNorm((3, 5)), images(4, 2, 3, 5)),
    "layer norm without bias": (nn.LayerNorm(5, bias=False), images(4, 3, 5)),
    "rms norm": (nn.RMSNorm(5), images(4, 3, 5)),
    "rms norm with eps": (nn.RMSNorm((2, 5), eps=0.1), images(4, 3, 2, 5)),
    "group norm": (nn.GroupNorm(2, 4), images(4, 4, 3, 3)),
    "group norm without space": (nn.GroupNorm(2, 4), images(4, 4)),
    "instance norm 1d": (nn.InstanceNorm1d(3, affine=True), images(4, 3, 5)),
    "instance norm 2d": (nn.InstanceNorm2d(3, affine=True), images(4, 3, 4, 4)),
    "instance norm 3d": (nn.InstanceNorm3d(3, affine=True), images(4, 3, 2, 2, 3)),
    "attention": (LastOf(nn.MultiheadAttention(6, 2, batch_first=True)), images(3, 4, 6)),
    "attention without weights": (
        LastOf(nn.MultiheadAttention(6, 2, batch_first=True), need_weights=False),
        images(3, 4, 6),
    ),
    "attention, causal": (
        LastOf(
            nn.MultiheadAttention(6, 2, batch_first=True),
            attn_mask=causal(4),
            is_causal=True,
            need_weights=False,
        ),
        images(3, 4, 6),
    ),
    "attention to something else": (
        LastOf(nn.MultiheadAttention(6, 2, batch_first=True)),
        images(3, 4, 6),
        images(3, 5, 6),
        images(3, 5, 6),
    ),
    "attention of other widths": (
        LastOf(
            nn.MultiheadAttention(
                6, 2, batch_first=True, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True
            )
        ),
        images(3, 4, 6),
        images(3, 5, 3),
        images(3, 5, 5),
    ),
    "transformer layer": (
        nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=0.0, batch_first=True),
        images(3, 4, 6),
    ),
    "transformer": (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        images(3, 4, 6),
    ),
    "tied embedding": (Tied(), torch.randint(7, (4, 5))),
    "reused linear": (Reused(nn.Linear(4, 4)), images(3, 4)),
    "reused linear over positions": (Reused(nn.Linear(4, 4)), images(3, 5, 4)),
    "reused convolution": (Reused(nn.Conv2d(2, 2, 3, padding=1)), images(3, 2, 4, 4)),
    "reused layer norm": (Reused(nn.LayerNorm(4)), images(3, 4)),
    "shared positions": (Positions(), torch.randint(9, (4, 6))),
    "low-rank adapter": (LoRA(), images(4, 3, 5)),
    "frozen below": (
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2)),
        images(3, 4),
    ),
    "frozen recurrent between": (
        AroundFrozen(nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)),
        images(3, 5, 3),
    ),
    "frozen recurrent between, from a state": (
        AroundFrozen(nn.LSTM(3, 8, batch_first=True), from_state=True),
        images(3, 5, 3),
    ),
    "frozen above": (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2).requires_grad_(False)),
        images(3, 4),
    ),
    "anything: prelu": (nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), images(3, 4)),
    "transposed convolution": (nn.ConvTranspose2d(2, 3, 3, stride=2), images(3, 2, 4, 4)),
    "transposed convolution, 1d": (
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        images(3, 4, 5),
    ),
    "transposed convolution, 3d": (
        nn.ConvTranspose3d(2, 3, 2, padding=1, dilation=2, bias=False),
        images(2, 2, 3, 4, 3),
    ),
    "transposed convolution, more outputs than the stride skips": (
        nn.ConvTranspose2d(2, 3, 2, stride=2, dilation=4, output_padding=3),
        images(2, 2, 3, 4),
    ),
    "transposed convolution to a size": (
        LastOf(Resized(nn.ConvTranspose2d(2, 3, 3, stride=2)), output_size=(10, 9)),
        images(3, 2, 4, 4),
        images(3, 2, 4, 4),
    ),
    "anything: own parameters": (Unusual(), images(3, 3)),
    "anything: reused": (Reused(Unusual()), images(3, 3)),
    "anything: bilinear": (nn.Bilinear(3, 4, 2), images(3, 3), images(3, 4)),
    "anything: weight normalised": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), images(3, 4)),
    "anything: branches on values": (DataDependent(), images(3, 3)),
    "recurrent": (nn.LSTM(3, 4, num_layers=2, batch_first=True), images(3, 5, 3)),
    "recurrent, one step": (nn.LSTM(3, 4, batch_first=True), images(3, 1, 3)),
    "recurrent, both ways": (
        nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        images(3, 5, 3),
    ),
    "recurrent, LSTM both ways": (
        nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        images(3, 5, 3),
    ),
    "recurrent, no bias": (nn.GRU(3, 4, bias=False, batch_first=True), images(3, 5, 3)),
    "recurrent cell": (nn.RNNCell(3, 4), images(3, 3)),
    "recurrent cell, relu, with a state": (nn.RNNCell(3, 4, nonlinearity="relu"), images(3, 3), images(3, 4)),
    "recurrent cell, LSTM": (nn.LSTMCell(3, 4), images(3, 3)),
    "recurrent cell, GRU, with a state": (nn.GRUCell(3, 4, bias=False), images(3, 3), images(3, 4)),
    "recurrent, long": (nn.LSTM(2, 2, bias=False, batch_first=True), images(3, 17, 2)),
    "recurrent, tanh": (nn.RNN(3, 4, num_layers=2, batch_first=True), images(3, 5, 3)),
    "recurrent, relu": (
        nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, bias=False, batch_first=True),
        images(3, 5, 3),
    ),
    "recurrent, reused and from a state": (Rewound(), images(3, 5, 3)),
    "anything: recurrent with projections": (
        nn.LSTM(3, 4, proj_size=2, batch_first=True),
        images(3, 5, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_gives_each_example_its_own_gradient(case: str, oracle: Any) -> None:
    module, *inputs = CASES[case]
    oracle.check(module.double(), *inputs)


def test_every_rule_has_a_case() -> None:
    used = {type(child) for module, *_ in CASES.values() for child in module.modules()}
    assert set(RULES) <= used


@settings(max_examples=60, deadline=None)
@given(
    dimensions=st.integers(1, 3),
    batch=st.integers(1, 4),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_convolutions_of_any_shape(
    oracle: Any, dimensions: int, batch: int, groups: int, channels: tuple[int, int], data: st.DataObject
) -> None:
    per_dimension = st.tuples(*[st.integers(1, 3)] * dimensions)
    kernel, stride, dilation = (data.draw(per_dimension) for _ in range(3))
    padding = data.draw(
        st.one_of(st.just("valid"), st.just("same"), st.tuples(*[st.integers(0, 2)] * dimensions)),
        label="padding",
    )
    mode = data.draw(st.sampled_from(["zeros", "circular", "replicate"]))
    stride = (1,) * dimensions if padding == "same" else stride
    size = [dilation[d] * (kernel[d] - 1) + data.draw(st.integers(1, 5)) for d in range(dimensions)]
    if mode == "circular" and isinstance(padding, tuple):
        size = [max(length, pad) for length, pad in zip(size, padding, strict=True)]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    module = kind(
        channels[0] * groups,
        channels[1] * groups,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        padding_mode=mode,
    )
    oracle.check(module.double(), images(batch, channels[0] * groups, *size))


@settings(max_examples=40, deadline=None)
@given(
    dimensions=st.integers(1, 3),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_transposed_convolutions_of_any_shape(
    oracle: Any, dimensions: int, groups: int, channels: tuple[int, int], data: st.DataObject
) -> None:
    per_dimension = st.tuples(*[st.integers(1, 3)] * dimensions)
    kernel, stride, dilation, size = (data.draw(per_dimension) for _ in range(4))
    padding, more = (data.draw(st.tuples(*[st.integers(0, 2)] * dimensions)) for _ in range(2))
    more = tuple(min(more[d], max(stride[d], dilation[d]) - 1) for d in range(dimensions))
    full = [(size[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + more[d] for d in range(dimensions)]
    padding = tuple(min(padding[d], full[d] // 2) for d in range(dimensions))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    module = kind(
        channels[0] * groups, channels[1] * groups, kernel, stride, padding, more, groups, dilation=dilation
    )
    oracle.check(module.double(), images(2, channels[0] * groups, *size))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 4),
    middle=st.lists(st.integers(1, 6), max_size=3),
    widths=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    bias=st.booleans(),
)
def test_linear_layers_of_any_shape(
    oracle: Any, batch: int, middle: list[int], widths: tuple[int, int], bias: bool
) -> None:
    oracle.check(nn.Linear(*widths, bias=bias).double(), images(batch, *middle, widths[0]))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_one_after_the_other_are_bags_of_their_examples(mode: str, last: bool) -> None:
    """With offsets, the second of them empty, against bags by themselves."""
    tokens, lengths = torch.randint(7, (9,)), [4, 0, 3, 2]
    module = nn.EmbeddingBag(7, 3, mode=mode, include_last_offset=last, padding_idx=5).double()
    offsets = torch.tensor([0, 4, 4, 7, 9] if last else [0, 4, 4, 7])
    clipped = ClippedGradients(module)
    module(tokens, offsets).square().sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")[module.weight]
    clipped.remove()
    alone = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=5).double()
    alone.load_state_dict(module.state_dict())
    for bag, gradient in zip(tokens.split(lengths), found, strict=True):
        alone.zero_grad()
        alone(bag[None]).square().sum().backward() if len(bag) else None
        expected = torch.zeros_like(gradient) if alone.weight.grad is None else alone.weight.grad
        assert torch.allclose(gradient, expected)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 4), data=st.data())
def test_embeddings_with_any_repetitions(oracle: Any, rows: int, width: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    padding = data.draw(st.one_of(st.none(), st.integers(0, rows - 1)))
    oracle.check(nn.Embedding(rows, width, padding_idx=padding).double(), torch.randint(rows, tuple(shape)))


def test_norms_do_not_depend_on_how_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = images(5, 4, 6), images(5, 4, 7)
    expected = torch.bmm(left.transpose(1, 2), right).flatten(1).norm(dim=1).square()
    weights = torch.rand(5, dtype=torch.float64)
    for cheaper in (True, False):
        monkeypatch.setattr(
            "pdpsgd.gradients.per_example.gram_is_cheaper", lambda *_, answer=cheaper, **__: answer
        )
        for room in (1 << 20, 50):  # all at once, one example at a time
            monkeypatch.setattr("pdpsgd.gradients.per_example.CACHE", room)
            monkeypatch.setattr("pdpsgd.gradients.workspace.ROOM", room)
            form, total = OuterProducts(left, right), torch.zeros(6, 7, dtype=torch.float64)
            assert torch.allclose(form.squared_norms(), expected)
            form.add_weighted_sum(weights, total)
            assert torch.allclose(total, torch.einsum("b,bto,bti->oi", weights, left, right))


def test_gradients_that_do_not_fit_are_taken_in_chunks(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("per_example.CACHE", "rules.convolution.CACHE", "workspace.ROOM"):
        monkeypatch.setattr(f"pdpsgd.gradients.{name}", 200)
    oracle.check(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2)).double(), images(5, 2, 9, 9))
    oracle.check(Tied().double(), torch.randint(7, (4, 5)))


def test_a_kernel_is_never_unfolded_whole() -> None:
    """The unfolded inputs grow with the kernel's width only, not with its height."""
    module = nn.Conv2d(3, 6, 5).double()
    clipped = ClippedGradients(module)
    module(images(2, 3, 32, 32)).sum().backward()
    gradients = dict(clipped._gradients("sum", 2))
    assert isinstance(gradients[module.weight], Kernels)


def test_functional_dropout_and_modules_between_do_not_matter(oracle: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.gelu(self.one(x))
            result: Tensor = self.two(hidden[:, ::2] * hidden[:, 1::2])
            return result

    oracle.check(Net().double(), images(4, 4))


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, which the general rule runs."""

    def forward(self, tokens):
        return 3 * super().forward(tokens)


@pytest.mark.parametrize("padding", [0, -1])
def test_the_general_rule_gives_padding_tokens_no_gradient(padding):
    table = Scaled(6, 4, padding_idx=padding)
    tokens = torch.tensor([[1, 0, 5], [2, 5, 5], [0, 0, 3]])
    instrumented = ClippedGradients(table)
    table(tokens).square().sum().backward()
    found = instrumented.per_example_gradients(loss_reduction="sum")[table.weight]
    instrumented.remove()
    for row, own in zip(tokens, found, strict=True):
        (expected,) = torch.autograd.grad(table(row[None]).square().sum(), table.weight)
        assert torch.allclose(own.reshape(expected.shape), expected, atol=1e-6)
        assert not expected[padding].any()
