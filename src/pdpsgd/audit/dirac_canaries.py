"""Dirac canaries: each contributes its own direction of the gradient, orthogonal to everybody else's.

This is the strongest attack there is on the Gaussian mechanism (Nasr et al. 2023, arXiv 2302.07956): nothing
but noise and the canary itself lies along its direction, so the audit measures the mechanism and not how well
a network remembers. The directions are rows of embedding tables, so contributions pass through the real
gradients, clipping, noise and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import FloatArray
from pdpsgd.audit.canaries import Canaries
from pdpsgd.audit.conformance import Observation
from pdpsgd.audit.observed_run import ObservedStep, Tamper, observe_run
from pdpsgd.gradients.weights import clip_limits
from pdpsgd.sampling.source import RandomSource

OVERSHOOT = 10.0
"""How far unclipped contributions are above the clipping norm, so that leaving out the clipping shows."""


class DiracModule(nn.Module):
    """An embedding with a row for each canary, and as many that are nobody's, in every layer.

    The output is linear in the rows.

    The gradient of record i is the same at every step: `OVERSHOOT` times the clipping norm, spread evenly
    over row i of all layers.
    """

    def __init__(self, rows: int, *, layers: int, width: int, norm: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(2 * rows, width) for _ in range(layers))
        self.slope = OVERSHOOT * norm / math.sqrt(layers * width)
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, index: Tensor) -> Tensor:
        """Return one number per record."""
        total = sum(layer(index).sum(dim=-1) for layer in self.layers)
        return self.slope * torch.as_tensor(total)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of Dirac canaries: its gradient is the row itself."""
    return outputs.mean()


def dirac_steps(
    canaries: Canaries,
    *,
    layers: int = 2,
    width: int = 1,
    seed: int | None = None,
    source: RandomSource | None = None,
    tamper: Tamper | None = None,
) -> Iterator[Observation]:
    """Train with Dirac canaries as the only records, and yield what each step shows of them."""
    plan = canaries.plan
    module = DiracModule(len(canaries), layers=layers, width=width, norm=_largest_norm(canaries))
    members = torch.from_numpy(np.flatnonzero(canaries.has_record))
    steps = observe_run(
        module=module,
        criterion=mean_output,
        records=(members, torch.zeros(len(members))),
        record_of_person=canaries.record_of_person(),
        plan=plan,
        learning_rate=1e-3,
        seed=seed,
        source=source,
        tamper=tamper,
    )
    lengths = [_lengths(canaries, index) for index in range(len(plan.rounds))]
    for step in steps:
        yield _observe(step, canaries, lengths[step.round], layers, width)


def tensor_names(layers: int = 2) -> tuple[str, ...]:
    """Return the names of the tensors that `dirac_steps` looks at, in their order."""
    return tuple(f"layers.{place}.weight" for place in range(layers))


def projections(seen: Observation) -> FloatArray:
    """Return each canary's projection on its direction, in units of its contribution: 1 if sampled, plus noise."""
    squared = seen.products.sum(axis=0)
    return np.asarray(seen.dots.sum(axis=0) / np.where(squared > 0, squared, np.inf))


def _observe(
    step: ObservedStep, canaries: Canaries, lengths: FloatArray, layers: int, width: int
) -> Observation:
    count = len(canaries)
    share = lengths / math.sqrt(layers * width)
    tables = [table.to(torch.float64).numpy() for table in step.noisy_sums]
    return Observation(
        round=step.round,
        dots=np.stack([table[:count].sum(axis=1) * share for table in tables]),
        products=np.broadcast_to(lengths**2 / layers, (layers, count)),
        noise_energy=np.array([np.square(table[count:]).sum() for table in tables]),
        noise_dimensions=np.full(layers, count * width),
        noise_only=np.ones(layers, dtype=bool),
    )


def _lengths(canaries: Canaries, round_index: int) -> FloatArray:
    plan = canaries.plan
    of_levels = torch.tensor(plan.rounds[round_index].clip_scales, dtype=torch.float64) * plan.max_grad_norm
    return np.asarray(clip_limits(of_levels, float(of_levels.max())).numpy()[canaries.level])


def _largest_norm(canaries: Canaries) -> float:
    return canaries.plan.max_grad_norm * max(max(r.clip_scales) for r in canaries.plan.rounds)
