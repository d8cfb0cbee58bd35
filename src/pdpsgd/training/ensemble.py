"""Several models as one, and a running average of one model's weights: post-processing, so free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import check_probability

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan


class WeightedModels(nn.Module):
    """Outputs of several models, averaged with weights that sum to 1: AdaPDP's combined model."""

    weights: Tensor

    def __init__(self, models: Sequence[tuple[float, nn.Module]]) -> None:
        super().__init__()
        self.models = nn.ModuleList(model for _, model in models)
        shares = torch.tensor([weight for weight, _ in models], dtype=torch.float64)
        self.register_buffer("weights", (shares / shares.sum()).to(torch.float32))

    def forward(self, *inputs: Any) -> Tensor:
        """Return the weighted mean of the models' outputs."""
        outputs = torch.stack([model(*inputs) for model in self.models])
        return torch.einsum("m,m...->...", self.weights.to(outputs), outputs)


def round_weight(plan: Plan, index: int) -> float:
    """Weight of the model that ends with a round: its threshold times the *expected* number of participants.

    The paper takes the drawn size of the round's data, which is sensitive.
    """
    r = plan.rounds[index]
    participants = sum(
        level.people * share for level, share in zip(plan.levels, r.participation, strict=True)
    )
    return (1.0 if r.threshold is None else r.threshold) * participants


class WeightAverage:
    """An exponential moving average of a module's parameters.

    The average starts quickly and slows down to the given decay, so that early weights do not linger:
    decay_t = min(decay, (1 + t) / (10 + t)).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        check_probability(weight_average=decay)
        self.decay = decay
        self._parameters = dict(module.named_parameters())
        self.restart()

    def restart(self) -> None:
        """Begin anew from the parameters as they are."""
        self.steps = 0
        self.average = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def update(self) -> None:
        """Take in the parameters after a step."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values()), [p.detach() for p in self._parameters.values()], 1 - decay
            )

    def load(self, average: Mapping[str, Tensor], steps: int) -> None:
        """Take up a saved average."""
        self.steps = steps
        for name, value in average.items():
            self.average[name].copy_(value)

    def write_to(self, module: nn.Module) -> None:
        """Put the averaged parameters into a module of the same structure."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.average[name])
