"""Layers that compute their weight from parameters: the usual rules, and one backward pass of that computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.rules import effective_weight
from tests.gradients.test_groups import compare


class Standardized(nn.Conv2d):
    """A convolution whose kernels, and their bias, are standardized; asks for shapes."""

    def forward(self, input: Tensor) -> Tensor:
        assert input.dim() == 4
        assert input.shape[1] == input.size(1) == self.in_channels
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (self.weight.std((1, 2, 3), keepdim=True) + 1e-5)
        bias = None if self.bias is None else torch.tanh(self.bias)
        return self._conv_forward(input, weight, bias)


class Gated(nn.Linear):
    """Its bias is used as it is, and its weight twice."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * torch.sigmoid(self.weight), self.bias)


class Sorted(nn.Linear):
    """Computes its weight by something that is not done for many at once."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, Twice.apply(self.weight), self.bias)  # type: ignore[no-untyped-call]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if float(gradients[0].sum()) == 0.0:  # no number is known where many are done at once
            return torch.zeros_like(gradients[0])
        return 2 * gradients[0]


BY_WEIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "standardized": (lambda: Standardized(3, 4, 3, stride=2, padding=1, bias=False), (3, 7, 6)),
    "standardized with bias": (lambda: Standardized(4, 6, (2, 3), groups=2), (4, 5, 6)),
    "gated": (lambda: Gated(4, 3), (4,)),
    "gated over positions": (lambda: Gated(4, 3), (5, 4)),
    "one by one": (lambda: Sorted(4, 3), (4,)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2, dilation=2)), (3, 8)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (4,)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv3d(2, 3, 2)).eval(), (2, 3, 4, 3)),
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often gradients were taken through a weight."""
    found: list[int] = []
    original = effective_weight._Use.gradients

    def counted(*args: Any) -> Any:
        found.append(1)
        return original(*args)

    monkeypatch.setattr(effective_weight._Use, "gradients", counted)
    return found


@pytest.mark.parametrize("name", BY_WEIGHT)
def test_gradients_go_through_the_weight(name: str, oracle: Any, passes: list[int]) -> None:
    build, shape = BY_WEIGHT[name]
    oracle.check(build().double(), torch.randn(4, *shape, dtype=torch.float64))
    assert passes


@pytest.mark.parametrize("name", BY_WEIGHT)
def test_a_persons_records_are_added_up(name: str, oracle: Any) -> None:
    build, shape = BY_WEIGHT[name]
    compare(oracle, build(), torch.randn(7, *shape), [1, 4, 2], reduction="sum", tolerance=4e-5)


class Scaled(Gated):
    """Has a parameter besides."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, input: Tensor) -> Tensor:
        return self.gain * super().forward(input)


class OfInputs(nn.Linear):
    """Its weight depends on what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * input.detach().square().mean(), self.bias)


class Branching(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight if float(input.sum()) > 0 else -self.weight
        return F.linear(input, weight, self.bias)


class UsedTwice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) + F.linear(input, torch.tanh(self.weight), self.bias)


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input + 1, torch.tanh(self.weight), self.bias)


class OfInputsInAList(nn.Linear):
    """Its weight depends on what it is given, by a function that takes a list of tensors."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * torch.stack([input]).detach().square().mean(), self.bias)


class InPlace(nn.Linear):
    """Adds to the outputs of its linear map where they stand."""

    def forward(self, input: Tensor) -> Tensor:
        outputs = F.linear(input, torch.tanh(self.weight))
        outputs += self.bias
        return outputs


@pytest.mark.parametrize("kind", [Scaled, OfInputs, OfInputsInAList, Branching, UsedTwice, Shifted, InPlace])
def test_another_use_is_left_to_the_general_rule(
    kind: Callable[..., nn.Module], oracle: Any, passes: list[int]
) -> None:
    module = kind() if kind is Scaled else kind(4, 3)
    oracle.check(module.double(), torch.randn(5, 4, dtype=torch.float64))
    assert not passes


def test_a_try_that_fails_leaves_random_numbers_as_they_were() -> None:
    class Dropping(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.dropout(input, 0.5) @ self.weight.t()

    module, inputs = Dropping(40, 40), torch.randn(3, 40)
    clipped = ClippedGradients(module)
    outputs = []
    for _ in range(2):  # the second time nothing is tried
        torch.manual_seed(1)
        outputs.append(module(inputs).detach())
    clipped.remove()
    assert torch.equal(*outputs)


def test_a_weight_that_is_random_is_every_examples_own(passes: list[int]) -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, F.dropout(self.weight, 0.5), self.bias)

    clipped = ClippedGradients(module := Noisy(40, 40))
    outputs = module(torch.ones(2, 40))
    clipped.remove()
    assert not torch.equal(*outputs)
    assert not passes


def test_a_parametrization_is_computed_once_for_all_examples(passes: list[int]) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return weight * 2

    module = nn.Linear(3, 2)
    nn.utils.parametrize.register_parametrization(module, "weight", counting := Counting())
    clipped = ClippedGradients(module)
    module(torch.randn(2, 3))  # the first pass also finds out what is batched
    before = counting.calls
    module(torch.randn(5, 3)).sum().backward()
    assert counting.calls == before + 1
    clipped.clipped_sum(torch.ones(5), loss_reduction="sum")
    clipped.remove()
    assert passes


class LowRank(nn.Linear):
    """A weight plus a product of two parameters: each example's gradient goes back through matrix products."""

    def __init__(self) -> None:
        super().__init__(65, 33)
        self.left, self.right = (nn.Parameter(torch.randn(shape)) for shape in ((33, 3), (3, 65)))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight + self.left @ self.right, self.bias)


def test_an_example_is_passed_back_alike_wherever_in_its_lane_it_stands() -> None:
    """Also where not all examples are passed back at once."""
    clipped, row = ClippedGradients(model := LowRank()), torch.randn(1, 65)
    found = []
    for rows in (16, 124, 248):
        model(row.repeat(rows, 1)).square().sum().backward()
        parts = clipped.per_example_gradients(loss_reduction="sum").values()
        found.append(torch.cat([part.flatten(1) for part in parts], 1).view(rows // 4, 4, -1))
        clipped.forget()
    clipped.remove()
    first = found[0][0]
    assert all(torch.equal(lanes, first) for part in found for lanes in part)


@pytest.mark.parametrize("numbers", [1, 100, 2145, 1 << 18, 1 << 30])
def test_as_many_are_passed_back_at_once_as_a_power_of_two(numbers: int) -> None:
    many = effective_weight.examples_at_once(numbers)
    assert many & (many - 1) == 0
    assert many == 1 or many * numbers <= effective_weight.AT_ONCE < 2 * many * numbers
