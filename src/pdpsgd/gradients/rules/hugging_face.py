"""Layers of Hugging Face's transformers that are not PyTorch's own: rules by name, nothing is imported."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients.per_example import (
    Gradient,
    OuterProducts,
    accurate,
    detached,
    positions,
    shift_gradient,
)
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.normalization import scale_gradient
from pdpsgd.gradients.rules.registry import rule_for_named

_ROOT_MEAN_SQUARES = ("llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3", "phi3.Phi3")


@rule_for_named("transformers.pytorch_utils.Conv1D")
def transposed_linear(site: Site, module: nn.Linear, x: Tensor) -> Tensor:
    """Rule of GPT-2's Conv1D: a linear layer whose weight is (in, out)."""
    inputs = site.batched(x)
    outputs = F.linear(inputs, detached(module.weight).t(), detached(module.bias))

    def gradients(output_gradient: Tensor) -> Gradient:
        if module.weight.requires_grad:
            left, right = positions(output_gradient), positions(inputs)
            workspace, shape = site.recorder.workspace, module.weight.shape
            yield (
                module.weight,
                OuterProducts(left, right, shape, workspace, lambda rows: rows.transpose(1, 2)),
            )
        if module.bias.requires_grad:
            yield module.bias, shift_gradient(output_gradient)

    return site.record(outputs, inputs, gradients)


@rule_for_named(
    *(f"transformers.models.{kind.split('.')[0]}.modeling_{kind}RMSNorm" for kind in _ROOT_MEAN_SQUARES),
    parameters=("weight",),
)
def root_mean_square(site: Site, module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Rule of Llama's RMSNorm and its copies, which normalize in float32."""
    inputs = site.batched(hidden_states)
    weight, eps = module.weight, float(module.variance_epsilon)  # type: ignore[arg-type]

    def normalized() -> Tensor:
        return F.rms_norm(inputs.float(), inputs.shape[-1:], None, eps).to(inputs.dtype)

    outputs = detached(weight) * normalized()

    def gradients(output_gradient: Tensor) -> Gradient:
        def given() -> Tensor:
            return accurate(normalized())

        yield from scale_gradient(module, inputs, output_gradient, given, eps=eps)

    return site.record(outputs, inputs, gradients)
