"""Spectral normalization goes on by one power iteration a step, however many batches the step is cut into.

torch iterates in every forward pass, and what it iterates on are buffers, which are released. How often it did would
show how many batches a step had, so how many people were sampled, or that nobody was. So in the passes of a private
module it does not iterate (`gradients.instrument.ConstantForward`), and this does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from pdpsgd.engine.observers import StepObserver
from pdpsgd.gradients._torch import SpectralNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdpsgd.engine.batches import PhysicalBatch


class PowerIterations(StepObserver):
    """Has spectral norms iterate where a step begins, as the first of its passes would.

    Guarantee: what they keep is a function of the weights and of how many steps were begun.
    """

    def __init__(self, module: nn.Module) -> None:
        chains = (part for part in module.modules() if isinstance(part, parametrize.ParametrizationList))
        norms = ((chain, [part for part in chain if isinstance(part, SpectralNorm)]) for chain in chains)
        # A module may be in evaluation mode between steps, and is then put back into training mode.
        self._chains = [(chain, {part for part in found if part.training}) for chain, found in norms if found]
        # The last one that was begun, as a checkpoint notes: it iterates once, also if it is resumed.
        self.step = -1

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Iterate once a step, also where its batch is yielded a second time."""
        if batch.step != self.step:
            self.step = batch.step
            for chain, iterating in self._chains:
                _iterate(chain, iterating)


@torch.no_grad()
def _iterate(chain: Any, iterating: set[SpectralNorm]) -> None:
    """Compute a weight in training mode, from what it is computed from."""
    parts: Sequence[nn.Module] = list(chain)
    values = (
        [chain.original]
        if chain.is_tensor
        else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]
    )
    for part in parts:
        if isinstance(part, SpectralNorm):
            mode, part.training = part.training, part.training or part in iterating
            values = [type(part).forward(part, *values)]  # not what stands in for it
            part.training = mode
        else:
            values = [part(*values)]
