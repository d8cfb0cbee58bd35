"""The compiled code gives what PyTorch's own operations give, and is used only where it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients._torch import TRANSPOSED
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.geometry import geometry_of
from pdpsgd.gradients.groups import Groups, over_people
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import PerExample
from pdpsgd.gradients.rules.convolution import CompiledKernels, Kernels, kernel_gradient
from pdpsgd.gradients.rules.recurrent import Lstm
from pdpsgd.gradients.workspace import Workspace
from pdpsgd.models.networks import mnist_cnn, svhn_cnn
from tests.gradients.conftest import Oracle

with_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or PDPSGD_NATIVE=0")
sizes = st.integers(1, 5)


@with_compiler
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 70), st.integers(1, 50)),
    power=st.integers(-40, 30),
)
def test_sums_are_those_of_float64(seed: int, shape: tuple[int, int, int], power: int) -> None:
    torch.manual_seed(seed)
    values = torch.randn(shape) * 10.0**power
    wanted = values.double().flatten(1).square().sum(1)
    assert torch.allclose(native.row_squares(values.flatten(1)), wanted, rtol=1e-12, atol=0)
    scale = float(values.abs().max()) if values.numel() else 1.0
    found = native.position_sums(values).double()
    assert torch.allclose(found, values.double().sum(1), rtol=0, atol=1e-5 * scale * shape[1])


@with_compiler
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 9),
    widths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    powers=st.tuples(st.integers(-44, 18), st.integers(-18, 18)),
)
def test_squares_of_outer_products_are_those_of_float64(
    seed: int, rows: int, widths: tuple[int, int], powers: tuple[int, int]
) -> None:
    torch.manual_seed(seed)
    left, right = (
        torch.randn(rows, width) * 10.0**power for width, power in zip(widths, powers, strict=True)
    )
    wanted = left.double().square().sum(1).clamp(min=1e-40) * right.double().square().sum(1)
    assert torch.allclose(native.outer_squares(left, right, 1e-40), wanted.float(), rtol=1e-6, atol=0)
    left[:1], right[1:2] = float("nan"), float("inf")
    assert not native.outer_squares(left, right, 1e-40)[:2].isfinite().any()


def near(found: Tensor, exact: Tensor) -> bool:
    difference = (found.detach().double() - exact.detach()).abs().max()
    return bool(difference <= 1e-5 * (1 + exact.detach().abs().max()))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, Tensor]:
    """A convolution of any kind, and images for it."""
    kernel, stride, wanted = (
        draw(st.tuples(each, each)) for each in (sizes, st.integers(1, 3), st.integers(0, 2))
    )
    dilation, height, width = draw(st.integers(1, 2)), draw(st.integers(5, 12)), draw(st.integers(5, 12))
    assume(dilation * (kernel[0] - 1) < height)
    padding = min(wanted[0], dilation * (kernel[0] - 1)), min(wanted[1], kernel[1] - 1)
    channels = draw(st.sampled_from([1, 2, 3, 7, 16, 20]))
    out = draw(st.sampled_from([1, 3, 6, 8, 9, 16, 19, 32, 33, 64]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    module = nn.Conv2d(
        channels, out, kernel, stride, padding, dilation=(dilation, 1), bias=draw(st.booleans())
    )
    return module, torch.randn(draw(st.integers(1, 5)), channels, height, width)


@with_compiler
@given(case=convolutions())
def test_a_convolution_and_what_it_passes_back_are_pytorchs(case: tuple[nn.Conv2d, Tensor]) -> None:
    module, inputs = case
    inputs.requires_grad_()
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    exact = inputs.detach().double().requires_grad_()
    found, wanted = native.convolve(module, inputs, weight, bias), module.double()(exact)
    assert near(found, wanted)
    gradient = torch.randn_like(found)
    (back,) = torch.autograd.grad(found, inputs, gradient)
    (wanted_back,) = torch.autograd.grad(wanted, exact, gradient.double())
    assert near(back, wanted_back)
    # What one example holds is nothing to the others.
    alone = native.convolve(module.float(), inputs[-1:].detach(), weight, bias)
    with torch.no_grad():
        inputs[:-1] = float("nan")
    assert torch.equal(native.convolve(module, inputs.detach(), weight, bias)[-1:], alone)


@with_compiler
@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        ({}, True),
        ({"padding": (-1, 0)}, False),  # PyTorch refuses what it can, and does the rest
        ({"stride": (0, 1)}, False),
        ({"stride": [2, 2]}, False),
        ({"stride": 2}, False),
        ({"padding": "same"}, False),
        ({"in_channels": 3}, False),
        ({"groups": 2}, False),
        ({"padding": (3, 3)}, False),
        ({"_conv_forward": lambda inputs, weight, bias: inputs}, False),
        ({"bias": nn.Parameter(torch.zeros(1))}, False),
        ({"bias": nn.Parameter(torch.zeros(16, 1, 1))}, False),
        ({"bias": nn.Parameter(torch.zeros(16, device="meta"))}, False),
        ({"weight": nn.Parameter(torch.zeros(16, 4, 3, 3, device="meta"))}, False),
        ({"bias": nn.Parameter(torch.zeros(16, dtype=torch.float64))}, False),
        ({"weight": nn.Parameter(torch.zeros(16, 4, 2, 2))}, False),
    ],
)
def test_a_convolution_that_is_not_what_it_seems_is_left_to_pytorch(
    change: dict[str, Any], compiled: bool
) -> None:
    module, images = nn.Conv2d(4, 16, 3), torch.randn(2, 4, 8, 8)
    for name, value in change.items():
        setattr(module, name, value)
    assert native.has_convolution(module, images) is compiled
    assert not native.has_convolution(module, images[:0])
    assert not native.has_convolution(module, images[:, :, :2])
    assert not native.has_convolution(module, images.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not native.has_convolution(module, images)


@with_compiler
@given(case=convolutions())
def test_kernel_gradients_are_those_of_the_matrix_products(case: tuple[nn.Conv2d, Tensor]) -> None:
    module, inputs = case
    examples = len(inputs)
    gradient = torch.randn_like(module(inputs))
    geometry = geometry_of(module)
    assert native.has_kernel_gradients(geometry, inputs, gradient)
    compiled = CompiledKernels(geometry, inputs, gradient, Workspace())
    exact = Kernels(geometry, inputs.double(), gradient.double(), Workspace())
    # Terms may cancel; rounding is in proportion to them.
    scale = float((inputs.flatten(1).norm(dim=1) * gradient.flatten(1).norm(dim=1)).max())
    norms = compiled.squared_norms()
    assert torch.allclose(norms.double().sqrt(), exact.squared_norms().sqrt(), rtol=1e-5, atol=1e-6 * scale)
    weights, total = torch.rand(examples), torch.zeros(module.weight.shape)
    compiled.add_weighted_sum(weights, total)
    wanted = torch.tensordot(weights.double(), exact.materialize(0, examples), 1)
    assert torch.allclose(total.double(), wanted, rtol=0, atol=1e-5 * scale)
    # The numbers that are summed are those that the norms were taken of.
    written = compiled.materialize(0, examples)
    assert torch.allclose(written.flatten(1).square().sum(1), norms, rtol=1e-5)


@with_compiler
def test_what_does_not_fit_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Conv2d(3, 5, 3)
    inputs = torch.randn(6, 3, 8, 8)
    gradient = torch.randn_like(module(inputs))
    whole, parts = (CompiledKernels(geometry_of(module), inputs, gradient, Workspace()) for _ in range(2))
    totals = torch.zeros(2, *module.weight.shape)
    norms = whole.squared_norms()
    whole.add_weighted_sum(torch.ones(6), totals[0])
    monkeypatch.setattr("pdpsgd.gradients.workspace.ROOM", 0)
    monkeypatch.setattr("pdpsgd.gradients.per_example.CACHE", 2 * module.weight.numel())
    assert torch.equal(parts.squared_norms(), norms)
    parts.add_weighted_sum(torch.ones(6), totals[1])
    assert torch.allclose(totals[0], totals[1], atol=1e-4)


@with_compiler
@given(
    seed=st.integers(0, 1000),
    channels=st.sampled_from([1, 3, 6, 8, 16, 17, 32]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padded=st.booleans(),
    rectify=st.booleans(),
    special=st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]),
    image=st.tuples(st.integers(4, 9), st.integers(4, 9)),
)
def test_max_pooling_is_pytorchs_to_the_bit(
    seed: int,
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padded: bool,
    rectify: bool,
    special: float,
    image: tuple[int, int],
) -> None:
    torch.manual_seed(seed)
    padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
    module = nn.MaxPool2d(kernel, stride, padding)
    values = torch.randn(3, channels, *image).round(decimals=0)  # many numbers are equal
    values[torch.rand_like(values) < 0.1] = special
    inputs = values.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert native.has_max_pool(module, inputs)
    wanted = F.relu(module(inputs)) if rectify else module(inputs)
    found = native.max_pool(module, inputs, rectify=rectify)
    assert torch.equal(found.nan_to_num(nan=7e7), wanted.nan_to_num(nan=7e7))
    gradient = torch.randint(-9, 9, wanted.shape).float()  # whole numbers: their sums are exact in any order
    (one,), (other,) = (torch.autograd.grad(outputs, inputs, gradient) for outputs in (wanted, found))
    assert torch.equal(one, other)


@with_compiler
@pytest.mark.parametrize("build", [mnist_cnn, svhn_cnn])
def test_the_papers_networks_use_it_and_agree(
    build: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = set()

    def note(name: str) -> None:
        inner = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *args: (calls.add(name), inner(*args))[1])

    note("kernel_gradients")
    note("convolve")
    torch.manual_seed(0)
    shape = (3, 1, 28, 28) if build is mnist_cnn else (3, 3, 32, 32)
    oracle.check(build(), torch.randn(shape), tolerance=1e-5)
    assert calls == {"kernel_gradients", "convolve"}


@with_compiler
def test_two_layers_with_one_left_factor_have_the_norms_of_layers_with_two() -> None:
    """The gates of a recurrent layer meet what it was given, and the states before: sizes differ, positions do not."""
    left, rights = torch.randn(5, 7, 70), (torch.randn(5, 7, 60), torch.randn(5, 7, 90))
    other = torch.randn(5, 4, 21)  # other positions and widths, in the same memory as nothing else
    found = []
    for lefts in ((left, left), (left, left.clone())):
        factors = [*zip(lefts, rights, strict=True), (other, rights[0][:, :4].contiguous())]
        totals = [torch.zeros(one.shape[2], two.shape[2], dtype=torch.float64) for one, two in factors]
        parts = [(one, two, total) for (one, two), total in zip(factors, totals, strict=True)]
        together = native.layers(parts, (), 5)
        squares = together.squares(1e-40)
        together.add(torch.ones(5))
        found.append((squares, *totals))
    expected = sum(
        torch.bmm(one.double().transpose(1, 2), two.double()).square().sum((1, 2)) for one, two in factors
    )
    assert torch.allclose(found[0][0], expected, rtol=1e-3)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@with_compiler
def test_an_infinite_gradient_counts_as_zero() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    clipped = ClippedGradients(module)
    inputs = torch.randn(4, 1, 8, 8)
    inputs[1] = float("nan")
    inputs[2] = 1e38
    module(inputs).sum().backward()
    assert clipped.clipped_sum(torch.ones(4), loss_reduction="sum") >= 1
    total = torch.cat([part.flatten() for part in clipped.flat_sums])
    assert total.isfinite().all()
    assert total.norm() <= 3
    clipped.remove()


def changed(name: str) -> Any:
    """A context in which PyTorch's operations are not just run."""
    if name == "fake":
        return FakeTensorMode(allow_non_fake_inputs=True)
    if name == "forward":
        return forward_ad.dual_level()
    if name == "flops":
        return FlopCounterMode(display=False)
    return torch.overrides.BaseTorchFunctionMode()


@with_compiler
@pytest.mark.parametrize("name", ["fake", "forward", "flops", "functions"])
def test_operations_that_are_traced_or_changed_are_pytorchs(name: str) -> None:
    images = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    module, pooling = nn.Conv2d(4, 16, 3), nn.MaxPool2d(2)
    assert native.has_convolution(module, images)
    assert native.has_max_pool(pooling, images)
    with changed(name):
        assert not native.has_convolution(module, images)
        assert not native.has_max_pool(pooling, images)


def test_transforms_of_a_watched_model_are_pytorchs() -> None:
    model, images = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(4, 3, 8, 8)
    wanted = torch.func.grad(lambda x: model(x).square().sum())(images)
    clipped = ClippedGradients(model)
    model(images).sum().backward()  # a pass as any other
    clipped.forget()
    found = torch.func.grad(lambda x: model(x).square().sum())(images)
    clipped.remove()
    assert torch.allclose(found, wanted, atol=1e-4)


@with_compiler
def test_saved_tensors_may_come_back_in_another_layout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.Flatten(),
    )
    images = torch.randn(4, 3, 8, 8)
    model(images).square().sum().backward()
    clipped = ClippedGradients(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.contiguous(), lambda tensor: tensor):
        loss = model(images).square().sum()
    loss.backward()
    clipped.clipped_sum(torch.full((4,), 1e9), loss_reduction="sum")
    for parameter, total in clipped.sums.items():
        assert parameter.grad is not None
        assert torch.allclose(total, parameter.grad.double(), rtol=1e-2, atol=1e-3)
    clipped.remove()


@st.composite
def kernels(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A convolution of lines, images or volumes, transposed or not, with groups, and what it is given."""
    dimensions, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 5]))
    transposed = draw(st.booleans())
    per_dimension = st.tuples(*[st.integers(1, 3)] * dimensions)
    kernel, stride, dilation = (draw(per_dimension) for _ in range(3))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(dimensions))
    size = [
        dilation[d] * (kernel[d] - 1) + 2 * padding[d] + draw(st.integers(1, 4)) for d in range(dimensions)
    ]
    channels, out = (draw(st.sampled_from([1, 2, 3, 7, 16, 20])) * groups for _ in range(2))
    torch.manual_seed(draw(st.integers(0, 1000)))
    kinds = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )
    module = kinds[dimensions - 1](channels, out, kernel, stride, padding, dilation=dilation, groups=groups)
    inputs = torch.randn(draw(st.integers(1, 4)), channels, *size)
    return module, in_either_layout(inputs, draw(st.booleans()))


def in_either_layout(values: Tensor, channels_last: bool) -> Tensor:
    return values.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else values


@with_compiler
@settings(max_examples=200, deadline=None)
@given(case=kernels(), channels_last=st.booleans(), people=st.booleans())
def test_kernels_of_any_dimensions_groups_and_layout(
    case: tuple[nn.Module, Tensor], channels_last: bool, people: bool
) -> None:
    module, inputs = case
    examples, geometry = len(inputs), geometry_of(module)
    gradient = in_either_layout(torch.randn_like(module(inputs)), channels_last)
    given, shares = (gradient, inputs) if isinstance(module, TRANSPOSED) else (inputs, gradient)
    assert native.has_kernel_gradients(geometry, given, shares)
    compiled: PerExample = CompiledKernels(geometry, given, shares, Workspace())
    wanted = Kernels(geometry, given.double(), shares.double(), Workspace()).materialize(0, examples)
    alone = compiled.materialize(examples - 1, examples)
    last = CompiledKernels(geometry, given[-1:], shares[-1:], Workspace())
    assert torch.equal(last.materialize(0, 1), alone)  # what one example holds is nothing to the others
    if people and examples > 1:
        starts = torch.tensor([0, 1, examples])
        compiled = over_people(compiled, Groups(starts, inputs.device))
        wanted = torch.stack([wanted[0], wanted[1:].sum(0)])
    norms = compiled.squared_norms()
    written = compiled.materialize(0, len(wanted))
    assert near(written, wanted)
    assert torch.allclose(written.flatten(1).square().sum(1), norms, rtol=1e-5)
    weights, total = torch.rand(len(wanted)), torch.zeros(module.weight.shape)
    compiled.add_weighted_sum(weights, total)
    assert torch.allclose(total, torch.tensordot(weights, written, 1), atol=1e-3)


@with_compiler
@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.Conv2d(4, 6, (2, 4), padding="same"),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_other_paddings_are_padded_before(module: nn.Conv2d) -> None:
    images = torch.randn(2, 4, 7, 7)
    gradient = torch.randn_like(module(images))
    compiled = kernel_gradient(geometry_of(module), images, gradient, Workspace())
    assert isinstance(compiled, CompiledKernels)
    exact = kernel_gradient(geometry_of(module), images.double(), gradient.double(), Workspace())
    assert near(compiled.materialize(0, 2), exact.materialize(0, 2))


def test_other_numbers_are_left_to_the_matrix_products() -> None:
    module, images = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 7, 7)
    gradient, geometry = module(images).detach(), geometry_of(module)
    assert not native.has_kernel_gradients(geometry, images.double(), gradient.double())
    assert not native.has_kernel_gradients(geometry, images[:1], gradient)
    assert not native.has_kernel_gradients(geometry, images[:, :, 1:], gradient)
    assert not native.has_kernel_gradients(geometry, images[:, :3], gradient)
    assert not native.has_kernel_gradients(replace(geometry, amounts=(0, -1, 0, 0)), images, gradient)
    assert not native.has_kernel_gradients(
        replace(geometry, amounts=(1, 1, 1, 1), mode="reflect"), images, gradient
    )


@with_compiler
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 4),
    width=st.integers(1, 20),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    channels_last=st.booleans(),
    shift=st.sampled_from([0.0, 100.0]),
)
def test_gradients_of_scales_and_shifts_are_those_of_float64(
    seed: int, groups: int, width: int, size: tuple[int, int], channels_last: bool, shift: float
) -> None:
    torch.manual_seed(seed)
    inputs = in_either_layout(torch.randn(3, groups * width, *size) + shift, channels_last)
    gradient = torch.randn(3, groups * width, *size)
    exact, shares = inputs.double(), gradient.double()
    scales, shifts = native.group_scales(inputs, gradient, groups, 0.01)
    normalized = F.group_norm(exact, groups, eps=0.01)
    tolerance = 1e-5 * (1 + shift)
    assert torch.allclose(scales.double(), (shares * normalized).sum((2, 3)), atol=10 * tolerance)
    assert torch.allclose(shifts.double(), shares.sum((2, 3)), atol=1e-5)
    rows, of_rows = inputs.flatten(2), gradient.flatten(2)
    scales, none = native.last_scales(rows, of_rows, centered=True, eps=0.01, shifts=False)
    normalized = F.layer_norm(rows.double(), rows.shape[2:], eps=0.01)
    assert none is None
    assert torch.allclose(scales.double(), (of_rows.double() * normalized).sum(1), atol=10 * tolerance)


@with_compiler
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40)),
    scale=st.sampled_from([1e-6, 1.0, 30.0]),
)
def test_an_lstm_layer_is_the_one_of_float64(seed: int, sizes: tuple[int, int, int], scale: float) -> None:
    times, rows, width = sizes
    torch.manual_seed(seed)
    inputs, weights = torch.randn(times, rows, 3) * scale, [torch.randn(4 * width, n) for n in (3, width)]
    first, last = ([torch.randn(rows, width) for _ in range(2)] for _ in range(2))
    shares, cell = torch.randn(times, rows, width), Lstm()
    assert native.has_lstm(torch.empty(times, rows, 4 * width), weights[1], *first)

    def run(dtype: torch.dtype, some: slice = slice(None)) -> list[Tensor]:
        given = [part.to(dtype) for part in weights]
        kept = cell.run(inputs[:, some].to(dtype), given, [state[some].to(dtype) for state in first])
        ends = [gradient[some].to(dtype) for gradient in last]
        gates, begins = cell.gate_gradients(kept, given[1], shares[:, some].to(dtype), ends)
        return [*kept[:2], gates, *(begin[None] for begin in begins)]

    found = run(torch.float32)
    assert all(near(one, other) for one, other in zip(found, run(torch.float64), strict=True))
    # What one example holds is nothing to the others.
    inputs[:, 1:] = float("nan")
    again = run(torch.float32)
    assert all(torch.equal(one[:, :1], other[:, :1]) for one, other in zip(found, again, strict=True))


@with_compiler
def test_normalizations_of_many_positions_or_other_numbers_are_left_to_pytorch() -> None:
    images = torch.randn(2, 4, 80, 80)
    assert not native.has_scales(images, images, 6400)
    assert not native.has_scales(images.double(), images.double(), 4)
    assert not native.has_scales(images, images[:1], 4)
    clipped = ClippedGradients(module := nn.GroupNorm(2, 4))
    module(images).sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")[module.bias]
    assert torch.allclose(found, torch.tensor(6400.0))
    clipped.remove()


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(16),
        nn.AvgPool2d(2),
    ],
)
def test_other_poolings_are_left_to_pytorch(module: nn.Module) -> None:
    images = torch.randn(2, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    assert not native.has_max_pool(module, images)
    assert not native.has_max_pool(nn.MaxPool2d(2), images.contiguous())


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (nn.MaxPool2d(2), 1),  # PyTorch refuses these three
        (nn.MaxPool2d(2, padding=2), 8),
        (nn.MaxPool2d(2, padding=-1), 8),
        (nn.MaxPool2d((2,)), 8),
        (nn.MaxPool2d(2, stride=[]), 8),
        (nn.MaxPool2d(2, stride=1, padding=1), 1),
    ],
)
def test_unusual_poolings_do_what_pytorch_does(module: nn.Module, size: int) -> None:
    images = torch.randn(2, 4, size, size).contiguous(memory_format=torch.channels_last)
    assert not native.has_max_pool(module, images)


@with_compiler
def test_many_positions_are_added_up_by_pytorch() -> None:
    module = nn.Conv2d(1, 2, 3, padding=1)
    images = torch.full((1, 1, 300, 300), 0.1)
    assert not native.has_kernel_gradients(geometry_of(module), images, module(images))
    clipped = ClippedGradients(module)
    module(images).sum().backward()
    written = clipped.per_example_gradients(loss_reduction="sum")
    assert torch.allclose(written[module.bias], torch.tensor(300.0**2), rtol=1e-5)
    assert torch.allclose(written[module.weight][0, :, 0, 1, 1], torch.tensor(0.1 * 300**2), rtol=1e-5)
    clipped.remove()


def test_a_kernel_without_numbers_is_left_to_pytorch() -> None:
    module = nn.Conv2d(1, 1, 1)
    module.weight = nn.Parameter(torch.empty(1, 0, 1, 1))
    assert not native.has_kernel_gradients(
        geometry_of(module), torch.empty(2, 0, 4, 4), torch.empty(2, 1, 4, 4)
    )


@pytest.mark.parametrize(
    "change", [{"padding": (0, 0)}, {"stride": (2, 2)}, {"dilation": (2, 2), "padding": (2, 2)}]
)
def test_a_convolution_that_changes_between_use_and_step_is_refused(change: dict[str, Any]) -> None:
    module = nn.Conv2d(1, 2, 3, padding=1)
    clipped = ClippedGradients(module)
    module(torch.randn(2, 1, 8, 8)).sum().backward()
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(PdpsgdError, match="were changed between its use"):
        clipped.clipped_sum(torch.ones(2))
    clipped.remove()


# Few positions, added up or multiplied; and many, whose products are kept.
POSITIONS = [
    (1, 7, 3),
    (5, 7, 3),
    (40, 9, 70),
    (48, 3, 64),
    (4, 80, 90),
    (2, 300, 270),
    (60, 20, 3),
    (60, 3, 20),
]


@with_compiler
@pytest.mark.parametrize("sizes", POSITIONS)
def test_linear_layers_over_positions(sizes: tuple[int, int, int], oracle: Oracle) -> None:
    positions, columns, rows = sizes
    module = nn.Sequential(nn.Linear(columns, rows), nn.Tanh(), nn.Linear(rows, 2))
    oracle.check(module, torch.randn(7, positions, columns), tolerance=5e-4)


@with_compiler
@pytest.mark.parametrize("sizes", POSITIONS)
def test_positions_come_out_the_same_in_one_call_and_step_by_step(sizes: tuple[int, int, int]) -> None:
    """To the bit: which of both it is may depend on one example, whose gradient is not finite."""
    positions, columns, rows = sizes
    module = nn.Sequential(nn.Linear(columns, rows), nn.Tanh(), nn.Linear(rows, 2))
    inputs, clipped, sums = torch.randn(70, 1, positions, columns), ClippedGradients(module), []
    for note in (None, lambda _: None):
        clipped.zero_sums()
        module(inputs).square().sum().backward()
        norms = torch.linspace(0.1, 30.0, 70)
        clipped.clipped_sum(norms, largest_clip_norm=30.0, loss_reduction="sum", note=note)
        sums.append(clipped.flat_sums[0].clone())
    assert torch.equal(*sums)
    assert bool(sums[0].any())
    clipped.remove()


@with_compiler
def test_gradients_of_outputs_that_do_not_lie_in_a_row_are_copied(oracle: Oracle) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Linear(6, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.each(inputs.transpose(1, 2)).mean(1)
            return found

    oracle.check(Mean(), torch.randn(7, 6, 9), tolerance=1e-4)
