"""A failure here says which release of torch changed what `models/_torch.py` relies on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pdpsgd.models import _torch


def test_onednn_computes_linear_layers():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN here")
    product = _torch.onednn_linear()
    assert product is not None, (
        f"torch {torch.__version__} has no torch.ops.mkldnn._linear_pointwise, which pdpsgd/models/_torch.py uses "
        f"as it was in torch {_torch.CHECKED_WITH}: texts are embedded more slowly"
    )


@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 5), (0,)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers_are_those_of_torch_up_to_rounding(rows, biased):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(*rows, 24, generator=generator)
    weight = torch.randn(16, 24, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    torch.testing.assert_close(_torch.linear(inputs, weight, bias), F.linear(inputs, weight, bias))


def test_other_numbers_than_float32_go_the_ordinary_way():
    inputs, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    assert _torch.linear(inputs, weight, None).dtype == torch.float64


def test_without_onednn_all_is_as_it_was(monkeypatch):
    monkeypatch.setattr(_torch, "onednn_linear", lambda: None)
    inputs, weight = torch.randn(5, 3), torch.randn(4, 3)
    assert torch.equal(_torch.linear(inputs, weight, None), F.linear(inputs, weight))
