"""Doing the same with less work gives the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.rules.convolution import channels_last


def network(activation: type[nn.Module], *, stride: int = 2, kernel: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        activation(),
        nn.MaxPool2d(kernel, stride=stride),
        nn.Sequential(nn.Conv2d(5, 4, 2), activation()),
        nn.Flatten(),
        nn.LazyLinear(3),
        activation(),
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU])
def test_a_sequence_gives_what_its_modules_give(
    oracle: Any, activation: type[nn.Module], stride: int
) -> None:
    inputs = torch.randn(3, 2, 9, 9, dtype=torch.float64)
    module = network(activation, stride=stride).double()
    module(inputs)
    expected = module(inputs)
    clipped = ClippedGradients(module)
    assert torch.allclose(module(inputs), expected, rtol=1e-13)
    clipped.remove()
    oracle.check(module, inputs)


def test_a_module_that_somebody_looks_at_keeps_its_place() -> None:
    sizes = []
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 1))
    module[2].register_forward_pre_hook(lambda _, args: sizes.append(float(args[0].detach().min())))
    clipped = ClippedGradients(module)
    module(torch.randn(2, 1, 8, 8))
    assert sizes[0] == 0  # somebody looks: nothing is exchanged
    clipped.remove()


def test_a_hook_sees_what_it_would_have_seen() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    seen: list[Tensor] = []
    module[0].register_forward_hook(lambda _module, _args, output: seen.append(output))
    clipped = ClippedGradients(module)
    inputs = torch.randn(5, 3)
    module(inputs)
    assert torch.equal(seen[0], copy.deepcopy(module)[0](inputs))
    assert float(seen[0].detach().min()) < 0
    clipped.remove()


def test_images_are_laid_out_channels_last_inside_and_parameters_are_not() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    layouts = []
    module[2].register_forward_pre_hook(
        lambda _, args: layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    clipped = ClippedGradients(module)
    module(torch.randn(2, 1, 8, 8))
    assert layouts == [True]
    assert all(parameter.is_contiguous() for parameter in module.parameters())
    clipped.remove()


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_says_so_also_for_one_channel(channels: int) -> None:
    images = torch.randn(2, channels, 4, 5)
    assert torch.equal(channels_last(images), images)
    assert channels_last(images).stride() == (20 * channels, 1, 5 * channels, channels)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "after", [[], [nn.Dropout(0.5, inplace=True)], [nn.Hardtanh(-0.3, 0.3, inplace=True)]]
)
def test_what_comes_after_a_pooling_may_overwrite_it(
    activation: type[nn.Module], dtype: torch.dtype, after: list[nn.Module]
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), activation(), nn.MaxPool2d(2), *after).to(dtype)
    images = torch.randn(2, 1, 8, 8, dtype=dtype)
    clipped = ClippedGradients(model)
    torch.manual_seed(1)
    model(images).mul_(2).sum().backward()
    clipped.clipped_sum(torch.full((2,), 1e9), loss_reduction="sum")
    sums = [total.clone() for total in clipped.sums.values()]
    clipped.remove()
    torch.manual_seed(1)
    # Dropout fills its mask in the order of memory, so the plain model is given the layout that is used inside.
    plain = model.to(memory_format=torch.channels_last)
    plain(channels_last(images)).mul_(2).sum().backward()
    for total, parameter in zip(sums, plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(total, parameter.grad.double(), rtol=1e-4, atol=1e-5)


def test_an_activation_in_place_changes_what_it_is_given() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 3, 3)
            self.pooled = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))

        def forward(self, images: Tensor) -> Tensor:
            x = self.first(images)
            return self.pooled(x).sum((1, 2, 3)) + x.sum((1, 2, 3))

    model, images = Model(), torch.randn(2, 1, 8, 8)
    expected = model(images)
    clipped = ClippedGradients(model)
    assert torch.allclose(model(images), expected, rtol=1e-5)
    clipped.remove()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_forward_of_the_users_own_is_used(index: int) -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2))
    images = torch.randn(2, 1, 8, 8)
    own = module[index].forward
    module[index].forward = lambda x: own(x) + 3
    expected = module(images)
    clipped = ClippedGradients(module)
    assert torch.allclose(module(images), expected, rtol=1e-4)
    clipped.remove()
    assert torch.allclose(module(images), expected)


def test_hooks_on_all_modules_see_all_modules() -> None:
    seen = []
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    clipped = ClippedGradients(module)
    hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(type(part)))
    try:
        module(torch.randn(2, 1, 8, 8))
    finally:
        hook.remove()
    assert {nn.Conv2d, nn.ReLU, nn.MaxPool2d} <= set(seen)
    clipped.remove()


class Overwriting(nn.Module):
    """Overwrites what a layer gives, all of it or a part."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)
        self.whole = whole

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(inputs)))
        if self.whole:
            hidden += 1
            return hidden.relu_()
        hidden[:, 0] *= 2
        return hidden


ON_SEQUENCES = {
    "sequence": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 5), nn.ReLU(inplace=True)),
    "without bias": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Tanh()),
    "whole": lambda: Overwriting(whole=True),
    "part": lambda: Overwriting(whole=False),
}


@pytest.mark.parametrize("name", ON_SEQUENCES)
def test_what_overwrites_a_layers_outputs_leaves_its_gradient(name: str, oracle: Any) -> None:
    """On sequences, a linear layer's outputs are a view, and what overwrites a view takes its hooks away."""
    oracle.check(ON_SEQUENCES[name]().double(), torch.randn(4, 6, 3, dtype=torch.float64))
