"""Temperature and biases fitted by the last steps of a plan: gradients of a few numbers, with the plan's noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import fail
from pdpsgd.training.temperature import Calibration

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.rounds import Round

SHARE = 0.1
"""Of the plan's steps, these fit the calibration; 0.05 was tried, too (`experiments.probabilities`)."""
TRAVEL, LARGEST_MOVE = 3.0, 0.4
"""The most that ln(temperature) and biases move in all steps together, and in one."""
MEMORY, MEMORY_OF_SQUARES = 0.8, 0.95
"""How long gradients and their squares are remembered, as in Adam."""
CAUTION = 4.0
"""Moves are divided by what the gradient is, or by so many standard deviations of its noise if that is more."""
SPAN = 10.0
"""Logits up to so far from their mean count in full when the temperature is fitted."""


def calibrating_steps(plan: Plan) -> int:
    """Return how many steps at the end of a plan fit the calibration.

    Args:
        plan: The plan of the run; it stays as it is, and so does what it proves.

    Raises:
        PdpsgdError: If it trains several models, which have no common last steps, or has too few steps.
    """
    if any(r.fresh_model for r in plan.rounds[1:]):
        fail(
            f"Expected a mechanism that trains one model, to calibrate by its last steps. Got {plan.mechanism!r}: "
            "calibrate on people outside the list instead."
        )
    if plan.steps < 2 / SHARE:
        fail(
            f"Expected {2 / SHARE:.0f} steps or more, to calibrate by the last tenth of them. Got {plan.steps}."
        )
    return round(SHARE * plan.steps)


class CalibrationLayer(nn.Module):
    """Logits over a temperature, plus a bias per class, in units in which nobody's gradient exceeds the clipping norm.

    Gradients of biases are at most sqrt(2) long, and those of ln(temperature) grow with the logits; in these units
    both are within the norm for logits up to `SPAN`, so that clipping takes nothing away: it would count confident
    mistakes, which temperatures are about, for less.
    """

    def __init__(self, classes: int, max_grad_norm: float) -> None:
        super().__init__()
        self.unit = max_grad_norm / 2
        self.free = nn.Parameter(torch.zeros(classes + 1))

    def forward(self, logits: Tensor) -> Tensor:
        """Return calibrated logits."""
        centered = logits - logits.mean(1, keepdim=True)
        return centered * torch.exp(-self.free[0] * (self.unit / SPAN)) + self.free[1:] * self.unit


class CalibratedModule(nn.Module):
    """A network, and after it, while `calibrating`, the layer that alone is trained then."""

    def __init__(self, network: nn.Module, layer: CalibrationLayer) -> None:
        super().__init__()
        self.network = network
        self.layer = layer
        self.calibrating = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the network says, or what the layer makes of it."""
        if not self.calibrating:
            return self.network(*inputs, **named)
        with torch.no_grad():
            logits = self.network(*inputs, **named)
        return self.layer(logits)


class PrivateCalibration:
    """Fits the layer from noised gradients, which the plan's last steps release.

    Guarantee: these steps are steps of the plan like the others: of each sampled person the gradient, of a few numbers
    instead of all weights, clipped to the same norm, with the same noise. What a step takes the gradient of may depend
    on what earlier steps released (adaptive composition), so the plan's promise holds as it stands.
    """

    def __init__(self, network: nn.Module, classes: int, plan: Plan) -> None:
        device = next((parameter.device for parameter in network.parameters()), None)
        self.steps = calibrating_steps(plan)
        self.begin = plan.steps - self.steps
        self.norm = plan.max_grad_norm
        self.layer = CalibrationLayer(classes, plan.max_grad_norm).to(device)
        self.module = CalibratedModule(network, self.layer)
        self._mean = torch.zeros_like(self.layer.free.detach())
        self._squares = torch.zeros_like(self._mean)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds beside the layer's own numbers."""
        return {"mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._mean.copy_(state["mean"])
        self._squares.copy_(state["squares"])

    def update(self, step: int, planned: Round) -> None:
        """Move temperature and biases by the noised gradient of a step."""
        free, done = self.layer.free, step - self.begin
        if free.grad is None:
            return
        gradient = free.grad / self.norm
        deviation = planned.noise_multiplier / planned.expected_batch_size
        self._mean.lerp_(gradient, 1 - MEMORY)
        self._squares.lerp_(gradient**2, 1 - MEMORY_OF_SQUARES)
        mean = self._mean / (1 - MEMORY ** (done + 1))
        squares = self._squares / (1 - MEMORY_OF_SQUARES ** (done + 1))
        most = min(LARGEST_MOVE, 2 * TRAVEL / self.steps) * (1 - done / self.steps)
        moved = most * mean / (squares + (CAUTION * deviation) ** 2).sqrt()
        units = torch.full_like(moved, self.layer.unit)
        units[0] /= SPAN
        with torch.no_grad():
            free.sub_(moved / units)

    def result(self) -> Calibration:
        """Return what was found."""
        free = self.layer.free.detach().double().cpu() * self.layer.unit
        bias = free[1:] - free[1:].mean()
        return Calibration(
            math.exp(float(free[0]) / SPAN),
            tuple(map(float, bias)),
            f"the last {self.steps} steps of the plan, within its promise",
        )
