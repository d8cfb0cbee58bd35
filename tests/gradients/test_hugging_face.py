"""Layers of Hugging Face's transformers have rules by name, which compute what the layers compute."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.rules.registry import NAMED_RULES, rule_of

pytest.importorskip("transformers")


def layer(name: str) -> nn.Module:
    module, _, kind = name.rpartition(".")
    found: Any = getattr(importlib.import_module(module), kind)
    made: nn.Module = found(5, 6) if kind == "Conv1D" else found(6, eps=0.01)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("name", NAMED_RULES)
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6), (4, 2, 3, 6)])
def test_a_named_rule_gives_each_example_its_own_gradient(
    name: str, shape: tuple[int, ...], oracle: Any
) -> None:
    module = layer(name)
    assert rule_of(module) is NAMED_RULES[name]
    oracle.check(module, torch.randn(shape), tolerance=2e-5)
    # Llama's normalization is in float32 whatever it is given.
    oracle.check(module.double(), torch.randn(shape, dtype=torch.float64), tolerance=1e-5)


@pytest.mark.parametrize("name", NAMED_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_named_rule_computes_what_the_layer_computes(name: str, dtype: torch.dtype) -> None:
    module, inputs = layer(name).to(dtype), torch.randn(4, 3, 6, dtype=dtype)
    wanted = module(inputs)
    clipped = ClippedGradients(module)
    found = module(inputs)
    clipped.remove()
    assert found.dtype == wanted.dtype
    assert torch.allclose(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_a_layer_of_another_forward_is_left_to_the_general_rule() -> None:
    kind: Any = type(layer("transformers.pytorch_utils.Conv1D"))

    class Doubled(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = 2 * super().forward(x)
            return result

    assert rule_of(Doubled(5, 6)) is None
