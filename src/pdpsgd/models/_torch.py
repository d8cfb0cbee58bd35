"""Every private name of torch that models use, in one place; checked with torch 2.13.

`tests/models/test_torch_private.py` says whether a release of torch has changed them. Without them all is the same, but
slower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHECKED_WITH = "2.13"


def frozen_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `F.linear` does with a weight that is not trained, by oneDNN where it can.

    On AMD processors that is more than twice as fast as MKL. Sums are in another order: the last bits differ.
    """
    if onednn_linear() is None or not _suits(inputs) or not _suits(weight) or inputs.numel() == 0:
        return F.linear(inputs, weight, bias)
    if torch.is_grad_enabled() and inputs.requires_grad:
        answer: Tensor = _FrozenLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
        return answer
    return _product(inputs, weight, bias)


def onednn_linear() -> Any:
    """Return oneDNN's linear layer; None where torch has none."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class _FrozenLinear(torch.autograd.Function):
    """A linear layer with a gradient for its inputs alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _product(gradients, weight.t(), None), None, None


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    answer: Tensor = onednn_linear()(inputs, weight, bias, "none", [], "")
    return answer


def _suits(values: Tensor) -> bool:
    """Tell whether these are plain numbers that oneDNN takes, and not inside a transform such as `vmap`."""
    return (
        values.dtype == torch.float32
        and values.device.type == "cpu"
        and type(values) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(values)
    )
