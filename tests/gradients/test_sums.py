"""Sums over many people: rounding is within its bound, and one person moves the sum by a clipping norm at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.sums import BLOCK, add_products, add_weighted_rows, row_squared_norms


@pytest.fixture(params=["compiled", "torch"])
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)


def error_bound(count: int) -> float:
    """Of a sum of vectors of norm 1, in clipping norms: every block is off by b (b + 2) 2^-24, see `sums`."""
    blocks = -(-count // BLOCK)
    return blocks * BLOCK * (BLOCK + 2) * 2.0**-24 + 2.0**-53 * count * blocks


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("kind", ["alike", "any", "large and small"])
def test_weighted_sums_are_off_by_no_more_than_their_bound(kind: str, count: int, dtype: torch.dtype) -> None:
    rows = torch.randn(1 if kind == "alike" else count, 7).expand(count, 7).to(dtype).contiguous()
    if kind == "large and small":
        rows = rows * 10.0 ** torch.linspace(-9, 9, count, dtype=dtype)[:, None]
    weights = (1 / rows.double().norm(dim=1)).to(dtype)
    total = torch.full((7,), 3.0, dtype=torch.float64)
    add_weighted_rows(weights, rows, total)
    assert float((total - 3 - weights.double() @ rows.double()).norm()) <= error_bound(count)


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (900, 700)])
@pytest.mark.parametrize("count", [1, 64, 130, 333])
def test_sums_of_products_are_off_by_no_more_than_their_bound(count: int, shape: tuple[int, int]) -> None:
    left = torch.rand(count, shape[0]) + 0.5
    right = torch.rand(count, shape[1]).add(0.5).t().contiguous().t()  # in another layout
    weights = 1 / (left.norm(dim=1) * right.norm(dim=1))
    total = torch.ones(shape, dtype=torch.float64)
    add_products(weights, left, right, total)
    exact = (left.double() * weights[:, None]).t() @ right.double()
    assert float((total - 1 - exact).norm()) <= error_bound(count)


@pytest.mark.usefixtures("_code")
def test_squared_norms_are_added_in_float64() -> None:
    rows = torch.full((2, 1 << 20), 1.1)
    exact = rows.double().square().sum(1)
    assert torch.allclose(row_squared_norms(rows).double(), exact, rtol=2.0**-22)


@settings(max_examples=40, deadline=None)
@given(
    positions=st.integers(2, 9),
    width=st.sampled_from([1, 5, 300]),
    cancelling=st.floats(0, 1),
    zeros=st.booleans(),
    seed=st.integers(0, 99),
)
@example(positions=2, width=1, cancelling=1.175494351e-38, zeros=True, seed=0)
def test_norms_by_inner_products_are_never_too_small(
    positions: int, width: int, cancelling: float, zeros: bool, seed: int
) -> None:
    """The Gram form, against the products themselves in float64, also where they nearly cancel."""
    torch.manual_seed(seed)
    module, inputs = nn.Linear(width, 40), torch.randn(3, positions, width)
    inputs[:, 1] = inputs[:, 0] * (1 + 1e-6 * torch.randn(3, width))
    signs = torch.ones(positions)
    signs[1] = -cancelling
    if zeros:
        signs[0] = 0
    direction = torch.randn(40)
    clipped = ClippedGradients(module)
    (module(inputs) * direction * signs[:, None]).sum().backward()
    norms = clipped.per_example_norms(loss_reduction="sum")
    gradients = (direction[:, None].double() * (inputs.double() * signs[:, None]).sum(1)[:, None], direction)
    squares = gradients[0].flatten(1).square().sum(1) + (signs.sum() * gradients[1]).double().square().sum()
    clipped.remove()
    # Numbers below float32's smallest normal one may be taken for 0, in the gradients that are added as well.
    assert bool((norms >= squares.sqrt() * (1 - 2**-20) - 1e-30).all())
    terms = float(inputs.norm(dim=2).sum(1).max() * direction.norm())
    assert bool((norms <= squares.sqrt() + 0.02 * terms).all())


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 5), (8,)),
    "positions": (lambda: nn.Linear(8, 5), (3, 8)),
    "many positions": (lambda: nn.Linear(3, 2), (20, 3)),
    "convolution": (lambda: nn.Conv2d(1, 2, 3), (1, 5, 5)),
}


def like_minded_sum(module: nn.Module, inputs: Tensor, clip_norms: Tensor) -> Tensor:
    clipped = ClippedGradients(module)
    for records, norms in zip(inputs.split(2048), clip_norms.split(2048), strict=True):
        module(records).sum().backward()
        clipped.clipped_sum(norms, largest_clip_norm=1.0, loss_reduction="sum")
    clipped.remove()
    return torch.cat([part.flatten() for part in clipped.flat_sums])


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("name", LAYERS)
def test_among_many_like_minded_people_one_moves_the_sum_by_a_clipping_norm_at_most(name: str) -> None:
    """A small version of bench/sensitivity.py; the row is kept, at weight 0."""
    build, shape = LAYERS[name]
    module, people = build(), 20_000
    inputs = 3 + 1e-3 * torch.randn(people, *shape)
    clip_norms = torch.ones(people)
    whole = like_minded_sum(module, inputs, clip_norms)
    assert float(whole.norm()) > 0.99 * people
    for person in (0, people // 2, people - 1):
        without = clip_norms.clone()
        without[person] = 0
        distance = float((whole - like_minded_sum(module, inputs, without)).norm())
        assert 0.99 < distance <= 1.0


@settings(max_examples=30, deadline=None)
@given(
    examples=st.integers(1, 9),
    positions=st.sampled_from([2, 3, 20, 64, 65, 130]),
    widths=st.tuples(st.integers(1, 50), st.integers(1, 70)),
    cancelling=st.floats(0, 1),
    scale=st.integers(-18, 18),
    seed=st.integers(0, 99),
)
@pytest.mark.skipif(native.library() is None, reason="no C compiler here, or PDPSGD_NATIVE=0")
def test_sums_over_positions_are_off_by_no_more_than_their_bound(
    examples: int, positions: int, widths: tuple[int, int], cancelling: float, scale: int, seed: int
) -> None:
    """Also where products nearly cancel, so that they are much larger than their sum."""
    torch.manual_seed(seed)
    left, right = (torch.randn(examples, positions, width) for width in widths)
    left[:, 1] = -left[:, 0] * cancelling
    right[:, 1] = right[:, 0] * (1 + 1e-6 * torch.randn(examples, widths[1]))
    left[:, :2] *= 10.0 ** torch.randint(0, 9, (examples, 1, 1))
    left, right = left * 10.0**scale, right * 10.0**-scale
    total = torch.zeros(widths, dtype=torch.float64)
    layers = native.layers([(left, right, total)], [], examples)
    norms = layers.squares(0.0).sqrt()
    products = left.double().transpose(1, 2) @ right.double()
    assert bool((norms >= (1 - 2.0**-20) * products.flatten(1).norm(dim=1)).all())
    weights = (1 / norms).float()
    layers.add(weights)
    units = -(-examples // max(1, BLOCK // positions))
    exact = torch.einsum("n,nij->ij", weights.double(), products)
    assert float((total - exact).norm()) <= units * BLOCK * (BLOCK + 2) * 2.0**-24
