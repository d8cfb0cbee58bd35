"""Linear layers and convolutions that compute their weight from parameters: standardized, normalized, parametrized.

The weight that they use in the end is the same for all examples. Its per-example gradients are those of the usual
rules, and what each says about the parameters is linear in it: one backward pass of the computation of the weight, for
all examples at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from pdpsgd.gradients._torch import is_eager, pytree, version_of
from pdpsgd.gradients.compiled_kernels import in_best_form
from pdpsgd.gradients.geometry import Geometry, channels_last
from pdpsgd.gradients.per_example import (
    Gradient,
    Materialized,
    OuterProducts,
    PerExample,
    accurate,
    detached,
    positions,
    shift_gradient,
)
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.convolution import bias_gradient, kernel_gradient

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
# Numbers that are passed back at once: several times as many are on the way, and all of them fit into the cache.
AT_ONCE = 1 << 18
# What may be asked of an input: nothing that depends on its numbers.
_HARMLESS = (
    Tensor.dim,
    Tensor.size,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
)


class EffectiveWeight:
    """The rule of such a layer, as long as its forward gives its input to one operation and returns what that gives."""

    def __init__(self, site: Site, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._site, self._module, self._forward = site, module, forward
        self._possible = isinstance(module, LAYERS)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the layer's outputs; or None where it is no such layer, and nothing was recorded."""
        if not (
            self._possible and len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and is_eager()
        ):
            return None
        inputs = self._site.batched(args[0])
        if not len(inputs):
            return None
        if self._site.recorder.channels_last and isinstance(self._module, nn.Conv2d) and inputs.dim() == 4:
            inputs = channels_last(inputs)
        leaves = {
            parameter: parameter.detach().requires_grad_()
            for parameter in self._module.parameters()
            if parameter.requires_grad
        }
        names = {f"module.{name}": leaves[p] for name, p in self._module.named_parameters() if p in leaves}
        state, recorder, used = torch.get_rng_state(), self._site.recorder, _Use(inputs)
        recorder.paused = True
        try:
            with used:
                found = functional_call(_Forward(self._forward, self._module), names, (inputs,))
        except _OtherUse:
            found = None
        finally:
            recorder.paused = False
        if not isinstance(found, Tensor) or not used.gave(found) or _is_random(state):
            torch.set_rng_state(state)
            self._possible = False
            return None
        self._site.check_input(args, kwargs)
        return self._site.record(found, inputs, lambda gradient: used.gradients(gradient, leaves, self._site))


def _is_random(state: Tensor) -> bool:
    """Tell whether random numbers were used since: the general rule gives every example its own."""
    return not torch.equal(state, torch.get_rng_state())


class _OtherUse(Exception):
    """The input is used otherwise than by one linear map or convolution."""


class _Forward(nn.Module):
    """Lets functional_call reach a module's forward without running its hooks a second time."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        self.module = module

    def forward(self, inputs: Tensor) -> Any:
        return self._forward(inputs)


class _Use(TorchFunctionMode):
    """Takes the one operation that an input is given to out of autograd's sight, as far as its weight goes."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._geometry: Geometry | None = None
        self._version = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not any(leaf is self.inputs for leaf in pytree.tree_leaves((args, options))):
            return func(*args, **options)
        if func in _HARMLESS:
            return func(*args, **options)
        known = func is F.linear or func in CONVOLUTIONS
        if not known or self.outputs is not None or args[:1] == () or args[0] is not self.inputs:
            raise _OtherUse
        self._take(func, args, options)
        return self.outputs

    def _take(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = {**dict(zip(names, args, strict=False)), **options}
        self.weight, self.bias = given["weight"], given.get("bias")
        if func is not F.linear:
            self._geometry = geometry_of_call(tuple(self.weight.shape), given)
            if self._geometry is None:
                raise _OtherUse
        if self.inputs.dim() != (self.weight.dim() if func is not F.linear else max(2, self.inputs.dim())):
            raise _OtherUse  # one example, without a batch
        given["weight"], given["bias"] = detached(self.weight), detached(self.bias)
        self.outputs = func(**given)
        self._version = version_of(self.outputs)

    def gave(self, found: Tensor) -> bool:
        """Tell whether these are the outputs of the operation, as it left them."""
        return found is self.outputs and version_of(found) == self._version

    def gradients(self, output_gradient: Tensor, leaves: dict[nn.Parameter, Tensor], site: Site) -> Gradient:
        """Yield the gradients of parameters: what those of weight and bias say of them."""
        gradient, inputs = accurate(output_gradient), accurate(self.inputs)
        assert self.weight is not None
        of_weight: PerExample
        if self._geometry is None:
            workspace = site.recorder.workspace
            of_weight = in_best_form(
                OuterProducts(positions(gradient), positions(inputs), workspace=workspace)
            )
            of_bias = shift_gradient(gradient)
        else:
            of_weight = kernel_gradient(self._geometry, inputs, gradient, site.recorder.workspace)
            of_bias = Materialized(bias_gradient(gradient), of_weight.shape[:1])
        for value, of_value in ((self.weight, of_weight), (self.bias, of_bias)):
            if value is not None and value.requires_grad:
                yield from pulled_back(value, of_value, leaves)


def geometry_of_call(shape: tuple[int, ...], given: dict[str, Any]) -> Geometry | None:
    """Return the geometry of a convolution with these arguments; None where its padding is given by name."""
    dimensions = len(shape) - 2
    sizes = [given.get(name, usual) for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))]
    if any(isinstance(size, str) for size in sizes):
        return None
    stride, padding, dilation = (
        (size,) * dimensions if isinstance(size, int) else tuple(size) for size in sizes
    )
    amounts = tuple(size for size in reversed(padding) for _ in range(2))
    return Geometry(shape, stride, dilation, given.get("groups", 1), amounts)


def pulled_back(value: Tensor, gradient: PerExample, leaves: Mapping[Any, Tensor]) -> Gradient:
    """Yield the per-example gradients of the parameters that a value was computed from."""
    for parameter, leaf in leaves.items():
        if value is leaf:
            yield parameter, gradient
            return
    size, many = gradient.batch_size, examples_at_once(gradient.shape.numel())
    parts = [
        _backward(value, list(leaves.values()), gradient.materialize(first, min(first + many, size)))
        for first in range(0, size, many)
    ]
    for parameter, rows in zip(leaves, zip(*parts, strict=True), strict=True):
        if rows[0] is not None:
            yield parameter, Materialized(torch.cat(rows), parameter.shape)


def examples_at_once(numbers: int) -> int:
    """Return how many examples' gradients of so many numbers are passed back at once: a power of two.

    So is what batches are filled up to a multiple of, and how many lanes there are. Then an example's place among those
    that are passed back together is in its lane, and they are as many as in some batch that the model was tried with.
    """
    return 1 << (max(1, AT_ONCE // max(1, numbers)).bit_length() - 1)


def _backward(value: Tensor, leaves: list[Tensor], rows: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves for each row, a gradient of the value."""
    rows = rows.to(value.dtype)
    with torch.enable_grad(), warnings.catch_warnings(), suppress(RuntimeError):
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return torch.autograd.grad(
            value, leaves, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    return _one_by_one(value, leaves, rows)  # something that has no rule for many at once


def _one_by_one(value: Tensor, leaves: list[Tensor], rows: Tensor) -> tuple[Tensor | None, ...]:
    def each() -> Iterator[tuple[Tensor | None, ...]]:
        for row in rows:
            yield torch.autograd.grad(value, leaves, row, retain_graph=True, allow_unused=True)

    columns = zip(*each(), strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)
