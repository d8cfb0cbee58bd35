"""Normalizations over an example's own features, with a scale and a shift per feature."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients._torch import check_instance_norm_input
from pdpsgd.gradients.per_example import Gradient, Materialized, accurate, detached
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

        yield from _affine(module, output_gradient, normalized, features_last=len(shape))

    return site.record(outputs, inputs, gradients)


@rule_for(nn.RMSNorm)
def rms_norm(site: Site, module: nn.RMSNorm, input: Tensor) -> Tensor:
    """Rule of nn.RMSNorm."""
    inputs, shape = site.batched(input), module.normalized_shape
    outputs = F.rms_norm(inputs, shape, detached(module.weight), module.eps)

    def gradients(output_gradient: Tensor) -> Gradient:
        def normalized() -> Tensor:
            # Without eps the layer uses the machine epsilon of its input's type.
            eps = torch.finfo(inputs.dtype).eps if module.eps is None else module.eps
            return F.rms_norm(accurate(inputs), shape, None, eps)

        yield from _affine(module, output_gradient, normalized, features_last=len(shape))

    return site.record(outputs, inputs, gradients)


@rule_for(nn.GroupNorm)
def group_norm(site: Site, module: nn.GroupNorm, input: Tensor) -> Tensor:
    """Rule of nn.GroupNorm."""
    inputs, groups = site.batched(input), module.num_groups
    outputs = F.group_norm(inputs, groups, detached(module.weight), detached(module.bias), module.eps)

    def gradients(output_gradient: Tensor) -> Gradient:
        yield from _affine(
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
        yield from _affine(module, output_gradient, lambda: F.instance_norm(accurate(inputs), eps=module.eps))

    return site.record(outputs, inputs, gradients)


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
    if isinstance(weight, nn.Parameter) and weight.requires_grad:
        products = gradient * normalized()
        yield weight, Materialized(products.sum(shared) if shared else products, weight.shape)
    if isinstance(bias, nn.Parameter) and bias.requires_grad:
        yield bias, Materialized(gradient.sum(shared) if shared else gradient, bias.shape)
