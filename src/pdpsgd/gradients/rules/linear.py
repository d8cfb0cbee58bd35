"""Linear layers: an example's gradient is a sum of outer products, one per position."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients.compiled_kernels import in_best_form
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.native.dispatch import AtOnce
from pdpsgd.gradients.per_example import (
    Gradient,
    OuterProducts,
    detached,
    positions,
    shift_gradient,
)
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.registry import rule_for

ALL = slice(None)


@rule_for(nn.Linear)
def linear(site: Site, module: nn.Linear, input: Tensor) -> Tensor:
    """Rule of nn.Linear, with any dimensions between the first and the last."""
    return project(site, site.batched(input), module.weight, module.bias)


def project(site: Site, inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: slice = ALL) -> Tensor:
    """Apply `rows` of a weight and a bias as a linear layer."""
    fixed, fixed_bias = detached(weight), detached(bias)
    if rows is not ALL:
        fixed, fixed_bias = fixed[rows], None if fixed_bias is None else fixed_bias[rows]
    outputs = F.linear(inputs, fixed, fixed_bias)

    def gradients(output_gradient: Tensor) -> Gradient:
        if weight.requires_grad:
            products = OuterProducts(
                positions(output_gradient), positions(inputs), workspace=site.recorder.workspace
            )
            yield weight, in_best_form(products).within(weight.shape, rows)
        if bias is not None and bias.requires_grad:
            yield bias, shift_gradient(output_gradient).within(bias.shape, rows)

    if rows is not ALL or not (inputs.dim() == 2 or _is_taken_at_once(inputs, weight)):
        return site.record(outputs, inputs, gradients)

    def in_place(output_gradient: Tensor, at_once: AtOnce) -> bool:
        return at_once.take_linear(inputs, output_gradient, weight, bias)

    return site.record(outputs, inputs, gradients, in_place=in_place)


def _is_taken_at_once(inputs: Tensor, weight: Tensor) -> bool:
    """Whether products over several positions are left where they lie until the step."""
    return native.library() is not None and native.takes_products(
        math.prod(inputs.shape[1:-1]), *weight.shape
    )
