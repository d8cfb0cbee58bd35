"""One oracle for every rule: a loop of plain autograd over single examples, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.gradients.clipping import ClippedGradients


class Oracle:
    """Compares ClippedGradients with the definition, on a loss that is not symmetric in the outputs."""

    def loss(self, module: nn.Module, inputs: tuple[Any, ...], first: int, last: int) -> Tensor:
        outputs = module(*(value[first:last] if isinstance(value, Tensor) else value for value in inputs))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        flat = outputs.flatten(1)
        generator = torch.Generator().manual_seed(7)
        direction = torch.randn(flat.shape[1], generator=generator, dtype=torch.float64).to(flat.dtype)
        return ((flat * direction).sum(1) + 0.3 * flat.square().sum(1)).sum() / max(1, last - first)

    def gradients(self, module: nn.Module, inputs: tuple[Any, ...], size: int) -> dict[str, Tensor]:
        """Each example's gradient, the model seeing that example only."""
        rows: dict[str, list[Tensor]] = {}
        for example in range(size):
            module.zero_grad()
            self.loss(module, inputs, example, example + 1).backward()
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                    rows.setdefault(name, []).append(gradient.detach().clone())
        module.zero_grad()
        return {name: torch.stack(parts) for name, parts in rows.items()}

    def clipped(self, gradients: dict[str, Tensor], clip_norms: Tensor) -> dict[str, Tensor]:
        norms = torch.cat([rows.reshape(len(rows), -1) for rows in gradients.values()], 1).norm(dim=1)
        limits = (clip_norms * (1 - 2**-11) - clip_norms.max() * 2**-10).clamp(min=0)
        weights = (limits / norms.clamp(min=1e-100)).clamp(max=1)
        return {name: torch.tensordot(weights, rows, 1) for name, rows in gradients.items()}

    def check(self, module: nn.Module, *inputs: Any, tolerance: float = 1e-10) -> None:
        """Per-example gradients, norms and clipped sums of the module are those of the loop."""
        size = inputs[0].shape[0]
        expected = self.gradients(copy.deepcopy(module), inputs, size)
        norms = torch.cat([rows.reshape(len(rows), -1) for rows in expected.values()], 1).norm(dim=1)
        clip_norms = norms * torch.linspace(0.3, 1.7, size, dtype=norms.dtype)
        sums = self.clipped(expected, clip_norms)
        clipped = ClippedGradients(module)
        try:
            self.loss(module, inputs, 0, size).backward()
            assert clipped.recorded_batch_size == size
            found = clipped.per_example_gradients()
            names = {parameter: name for name, parameter in module.named_parameters()}
            scale = float(norms.max())
            for parameter, rows in found.items():
                assert torch.allclose(rows, expected[names[parameter]], rtol=0, atol=tolerance * scale), (
                    names[parameter]
                )
            assert torch.allclose(
                clipped.per_example_norms(), norms.double(), rtol=10 * tolerance, atol=tolerance * scale
            )
            assert clipped.clipped_sum(clip_norms, largest_clip_norm=float(clip_norms.max())) == 0
            for parameter, total in clipped.sums.items():
                assert torch.allclose(
                    total, sums[names[parameter]].double(), rtol=0, atol=10 * tolerance * size * scale
                ), names[parameter]
                assert parameter.grad is None
        finally:
            clipped.remove()


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
