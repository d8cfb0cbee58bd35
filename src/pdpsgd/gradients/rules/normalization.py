"""Normalizations over an example's own features, with a scale and a shift per feature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients._torch import check_instance_norm_input
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import Gradient, Materialized, PerExample, accurate, detached
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.registry import rule_for


@rule_for(nn.LayerNorm)
def layer_norm(site: Site, module: nn.LayerNorm, input: Tensor) -> Tensor:
    """Rule of nn.LayerNorm."""
    inputs, shape = site.batched(input), module.normalized_shape
    outputs = F.layer_norm(inputs, shape, detached(module.weight), detached(module.bias), module.eps)

    def gradients(output_gradient: Tensor) -> Gradient:
        def normalized() -> Tensor:
            return F.layer_norm(accurate(inputs), shape, None, None, module.eps)

        found = _compiled_last(module, inputs, output_gradient, len(shape), centered=True, eps=module.eps)
        yield from found or _affine(module, output_gradient, normalized, features_last=len(shape))

    return site.record(outputs, inputs, gradients)


@rule_for(nn.RMSNorm)
def rms_norm(site: Site, module: nn.RMSNorm, input: Tensor) -> Tensor:
    """Rule of nn.RMSNorm."""
    inputs, shape = site.batched(input), module.normalized_shape
    outputs = F.rms_norm(inputs, shape, detached(module.weight), module.eps)

    # Without eps the layer uses the machine epsilon of its input's type.
    eps = torch.finfo(inputs.dtype).eps if module.eps is None else module.eps

    def gradients(output_gradient: Tensor) -> Gradient:
        def normalized() -> Tensor:
            return F.rms_norm(accurate(inputs), shape, None, eps)

        yield from scale_gradient(module, inputs, output_gradient, normalized, eps=eps, features=len(shape))

    return site.record(outputs, inputs, gradients)


@rule_for(nn.GroupNorm)
def group_norm(site: Site, module: nn.GroupNorm, input: Tensor) -> Tensor:
    """Rule of nn.GroupNorm."""
    inputs, groups = site.batched(input), module.num_groups
    outputs = F.group_norm(inputs, groups, detached(module.weight), detached(module.bias), module.eps)

    def gradients(output_gradient: Tensor) -> Gradient:
        found = _compiled_groups(module, inputs, output_gradient, groups, module.eps)
        yield from found or _affine(
            module, output_gradient, lambda: F.group_norm(accurate(inputs), groups, None, None, module.eps)
        )

    return site.record(outputs, inputs, gradients)


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(site: Site, module: nn.InstanceNorm2d, input: Tensor) -> Tensor:
    """Rule of nn.InstanceNorm1d, 2d and 3d without running statistics (those were refused beforehand)."""
    dimensions = check_instance_norm_input(module, input)
    inputs = site.batched(input)
    site.require_dimensions(inputs, dimensions)
    outputs = F.instance_norm(
        inputs, None, None, detached(module.weight), detached(module.bias), True, 0.0, module.eps
    )

    def gradients(output_gradient: Tensor) -> Gradient:
        found = _compiled_groups(module, inputs, output_gradient, module.num_features, module.eps)
        yield from found or _affine(
            module, output_gradient, lambda: F.instance_norm(accurate(inputs), eps=module.eps)
        )

    return site.record(outputs, inputs, gradients)


def scale_gradient(
    module: nn.Module,
    inputs: Tensor,
    output_gradient: Tensor,
    normalized: Callable[[], Tensor],
    *,
    eps: float,
    features: int = 1,
) -> Gradient:
    """Yield the gradient of a scale of inputs that are normalized by their root mean square over the last dimensions.

    `normalized` gives them, where compiled code cannot.
    """
    found = _compiled_last(module, inputs, output_gradient, features, centered=False, eps=eps)
    yield from found or _affine(module, output_gradient, normalized, features_last=features)


def _compiled_last(
    module: nn.Module, inputs: Tensor, output_gradient: Tensor, features: int, *, centered: bool, eps: float
) -> list[tuple[Tensor, PerExample]] | None:
    """Return the gradients of what is normalized over the last dimensions, if compiled code can take them."""
    given, gradient = accurate(inputs), accurate(output_gradient)
    width = math.prod(given.shape[given.dim() - features :])
    positions = math.prod(given.shape[1 : given.dim() - features])
    if given.dim() <= features or not native.has_scales(given, gradient, positions):
        return None
    shape = len(given), positions, width
    bias = getattr(module, "bias", None)
    found = native.last_scales(
        given.reshape(shape), gradient.reshape(shape), centered=centered, eps=eps, shifts=_trains(bias)
    )
    return _of_parameters(module, *found)


def _compiled_groups(
    module: nn.Module, inputs: Tensor, output_gradient: Tensor, groups: int, eps: float
) -> list[tuple[Tensor, PerExample]] | None:
    """Return the gradients of what is normalized over groups of channels, if compiled code can take them."""
    given, gradient = accurate(inputs), accurate(output_gradient)
    if given.dim() < 2 or not native.has_scales(given, gradient, math.prod(given.shape[2:])):
        return None
    return _of_parameters(module, *native.group_scales(given, gradient, groups, eps))


def _of_parameters(
    module: nn.Module, scales: Tensor, shifts: Tensor | None
) -> list[tuple[Tensor, PerExample]]:
    both = (getattr(module, "weight", None), scales), (getattr(module, "bias", None), shifts)
    return [
        (parameter, Materialized(values, parameter.shape))
        for parameter, values in both
        if _trains(parameter) and values is not None
    ]


def _trains(parameter: object) -> TypeGuard[nn.Parameter]:
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad


def _affine(
    module: nn.Module,
    output_gradient: Tensor,
    normalized: Callable[[], Tensor],
    features_last: int | None = None,
) -> Gradient:
    """Yield the per-example gradients of y = weight * normalized + bias.

    The features are the last `features_last` dimensions, or else the second one.
    """
    gradient = accurate(output_gradient)
    if features_last is None:
        shared = tuple(range(2, gradient.dim()))
    else:
        shared = tuple(range(1, gradient.dim() - features_last))
    weight, bias = module.weight, getattr(module, "bias", None)
    if _trains(weight):
        products = gradient * normalized()
        yield weight, Materialized(products.sum(shared) if shared else products, weight.shape)
    if _trains(bias):
        yield bias, Materialized(gradient.sum(shared) if shared else gradient, bias.shape)
