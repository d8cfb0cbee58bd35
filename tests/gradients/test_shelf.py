"""Networks from the shelf: what they do besides plain layers on rows gives the gradients of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients

WIDTH, TIME = 4, 6


def example_gradients(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return per-example gradients by plain autograd, one example at a time."""
    rows = []
    for row in inputs:
        loss = model(row[None]).square().sum()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, [p for _, p in named])
        rows.append(dict(zip((name for name, _ in named), found, strict=True)))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def assert_like_autograd(model: nn.Module, inputs: Tensor) -> None:
    expected = example_gradients(model, inputs)
    clipped = ClippedGradients(model)
    model(inputs).square().sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")
    clipped.remove()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[parameter], expected[name], rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Attention with a learned bias per distance, as T5 has: its table is looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.distances = nn.Linear(WIDTH, WIDTH), nn.Embedding(2 * TIME, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        places = torch.arange(TIME)
        bias = self.distances(places[:, None] - places + TIME).permute(2, 0, 1)
        projected = self.project(tokens)
        return nn.functional.scaled_dot_product_attention(projected, projected, tokens, attn_mask=bias), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.attention(tokens)[0]).mean(1)


class Windows(nn.Module):
    """Cuts each example into windows, which become rows: (examples * windows, ...), as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        windows = tokens.reshape(-1, TIME // 2, WIDTH)
        return tokens + torch.tanh(self.inner(windows)).reshape(tokens.shape)


class InWindows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Windows(), nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(tokens)).mean(1)


@pytest.mark.parametrize("make", [Block, InWindows])
@pytest.mark.parametrize("batch", [2, 5, TIME])
def test_layers_without_a_row_per_example_run_inside_the_module_around_them(
    make: Callable[[], nn.Module], batch: int
) -> None:
    torch.manual_seed(0)
    assert_like_autograd(make(), torch.randn(batch, TIME, WIDTH))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(inplace=True)])
def test_an_activation_may_follow_a_first_layer_on_sequences(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 3), activation, nn.Flatten(), nn.Linear(3 * TIME, 2))
    assert_like_autograd(model, torch.randn(5, TIME, WIDTH))


def pretrained() -> nn.Sequential:
    """Return a convolution, a batch norm with statistics of its own, and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    for _ in range(20):
        model(3 + 2 * torch.randn(32, 2, 6, 6))
    model[1].requires_grad_(False).eval()
    return model


def test_a_frozen_batch_norm_is_a_constant_also_after_train() -> None:
    model, inputs = pretrained(), torch.randn(5, 2, 6, 6)
    mean = model[1].running_mean.clone()
    assert_like_autograd(model, inputs)
    expected = model(inputs)
    clipped = ClippedGradients(model)
    model.train()
    torch.testing.assert_close(model(inputs), expected)
    assert torch.equal(model[1].running_mean, mean)
    clipped.remove()
    assert model[1].training  # as model.train() left it, and with its own forward
    assert "forward" not in model[1].__dict__


@pytest.mark.parametrize("change", [lambda norm: norm.train(), lambda norm: norm.requires_grad_(True)])
def test_a_batch_norm_that_trains_is_refused(change: Callable[[nn.Module], Any]) -> None:
    model = pretrained()
    change(model[1])
    with pytest.raises(PdpsgdError, match=r"1 \(BatchNorm2d\).*requires_grad_\(False\) and \.eval\(\)"):
        ClippedGradients(model)


def test_a_frozen_batch_norm_without_statistics_is_refused() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False).requires_grad_(False).eval()
    with pytest.raises(PdpsgdError, match="GroupNorm"):
        ClippedGradients(nn.Sequential(nn.Linear(3, 3), norm))


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_layers_have_the_gradients_of_autograd(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(WIDTH, 3)), nn.Tanh(), nn.Linear(3, 2)).eval()
    assert_like_autograd(model, torch.randn(5, WIDTH))
