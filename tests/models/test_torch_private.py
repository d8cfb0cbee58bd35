"""A failure here says which release of torch changed what `models/_torch.py` relies on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pdpsgd.models import _torch
from pdpsgd.models.encoders import FrozenLinear


def test_onednn_computes_linear_layers():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN here")
    product = _torch.onednn_linear()
    assert product is not None, (
        f"torch {torch.__version__} has no torch.ops.mkldnn._linear_pointwise, which pdpsgd/models/_torch.py uses "
        f"as it was in torch {_torch.CHECKED_WITH}: texts are read more slowly"
    )


@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 5), (0,)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers_are_those_of_torch_up_to_rounding(rows, biased):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(*rows, 24, generator=generator)
    weight = torch.randn(16, 24, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    torch.testing.assert_close(_torch.frozen_linear(inputs, weight, bias), F.linear(inputs, weight, bias))


@pytest.mark.parametrize("rows", [(3,), (2, 5)])
def test_inputs_get_the_gradient_that_torch_gives_them(rows):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(*rows, 24, generator=generator, requires_grad=True)
    weight, bias = torch.randn(16, 24, generator=generator), torch.randn(16, generator=generator)
    downstream = torch.randn(*rows, 16, generator=generator)
    (found,) = torch.autograd.grad(_torch.frozen_linear(inputs, weight, bias), inputs, downstream)
    (expected,) = torch.autograd.grad(F.linear(inputs, weight, bias), inputs, downstream)
    torch.testing.assert_close(found, expected)


def test_inside_vmap_all_is_as_it_was():
    inputs, weight = torch.randn(4, 2, 3), torch.randn(5, 3)
    found = torch.func.vmap(lambda row: _torch.frozen_linear(row, weight, None))(inputs)
    torch.testing.assert_close(found, F.linear(inputs, weight))


def test_a_layer_of_an_encoder_that_is_trained_after_all_gets_its_gradient():
    layer = nn.Linear(3, 2)
    layer.__class__ = FrozenLinear
    layer(torch.ones(4, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad.tolist() == [4.0, 4.0]


def test_other_numbers_than_float32_go_the_ordinary_way():
    inputs, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    assert _torch.frozen_linear(inputs, weight, None).dtype == torch.float64


def test_without_onednn_all_is_as_it_was(monkeypatch):
    monkeypatch.setattr(_torch, "onednn_linear", lambda: None)
    inputs, weight = torch.randn(5, 3), torch.randn(4, 3)
    assert torch.equal(_torch.frozen_linear(inputs, weight, None), F.linear(inputs, weight))
