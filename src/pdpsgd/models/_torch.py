"""Every private name of torch that models use, in one place; checked with torch 2.13.

`tests/models/test_torch_private.py` says whether a release of torch has changed it. Without it all is the same, but
slower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHECKED_WITH = "2.13"


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `F.linear` does, without gradients, by oneDNN where it can.

    On AMD processors that is more than twice as fast as MKL. Sums are in another order: the last bits differ.
    """
    product = onednn_linear()
    if product is None or not _suits(inputs) or not _suits(weight) or inputs.numel() == 0:
        return F.linear(inputs, weight, bias)
    answer: Tensor = product(inputs, weight, bias, "none", [], "")
    return answer


def onednn_linear() -> Any:
    """Return oneDNN's linear layer; None where torch has none."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _suits(values: Tensor) -> bool:
    return values.dtype == torch.float32 and values.device.type == "cpu"
