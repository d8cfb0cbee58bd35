"""Personal least squares for linear models: statistics that are released once, and their solution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd.errors import fail
from pdpsgd.planning.mechanisms.least_squares import NAME

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.options import TrainingOptions

MOST_FEATURES = 8192
"""The statistics have the square of this many numbers: half a gigabyte in double precision."""
SHARE_OF_INPUTS = math.sqrt(0.5)
"""a: of a person's vector (a x x', b x y') of norm 1, half of the square is for the inputs' moments."""
RIDGE = 0.1
"""Of sqrt(2 d) s / a, the norm of the noise in the moments."""
ONE_STEP: dict[str, Any] = {
    "optimizer": "sgd",
    "optimizer_options": {},
    "learning_rate": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
    "weight_average": None,
    "augment": None,
    "views": 1,
}
"""One plain step from zero leaves the noised sums in the parameters."""
WITHOUT_USE = (*ONE_STEP, "start", "steps", "noise_multiplier")
"""Options that have no meaning here."""


class Statistics(nn.Module):
    """Moments of inputs and targets, as the parameters of a module of which they are the gradient.

    The output for x is x'Mx and Vx, x at norm 1. The gradient of a x'Mx + b y'Vx is (a x x', b y x'), so that one step
    of gradient descent from zero leaves the sums of these, and the private engine makes them private like anything
    else: clipped to what each person allows, with noise, once.

    Guarantee: with a^2 + b^2 (1 - 1/k) = 1 the vector of a person has norm 1, of which a plan's clip scale is their
    weight; noise is independent in all d^2 + d k numbers. (Halving M + M' afterwards is post-processing.)
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.moments = nn.Linear(features, features, bias=False)
        self.targets = nn.Linear(features, classes, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return x'Mx and Vx, side by side."""
        directions = functional.normalize(inputs.flatten(1), eps=1e-30)
        squares = (self.moments(directions) * directions).sum(1, keepdim=True)
        return torch.cat((squares, self.targets(directions)), 1)


@dataclass(frozen=True)
class StatisticsLoss:
    """The sum over people of what has their statistics as its gradient, with the sign of gradient descent."""

    classes: int
    clipping_norm: float

    @property
    def share_of_targets(self) -> float:
        """The factor b."""
        return math.sqrt((1 - SHARE_OF_INPUTS**2) / (1 - 1 / self.classes))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a batch."""
        centered = functional.one_hot(targets, self.classes).to(outputs) - 1 / self.classes
        products = (outputs[:, 1:] * centered).sum(1)
        return (
            -self.clipping_norm * (SHARE_OF_INPUTS * outputs[:, 0] + self.share_of_targets * products).sum()
        )


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """A linear model that is to be solved for."""

    head: nn.Linear
    model: nn.Module
    statistics: Statistics

    @classmethod
    def of(cls, model: nn.Module, options: TrainingOptions) -> LeastSquares:
        """Make the statistics of a linear model, and refuse others, and options that have no meaning here."""
        said = [name for name in WITHOUT_USE if options.said(name)]
        if said:
            fail(
                f"Expected no {said[0]} with {NAME}: nothing is tuned there. Got {getattr(options, said[0])!r}."
            )
        if options.calibrate == "steps":
            fail(f"Expected calibration by other people's data, or none, with {NAME}. Got calibrate='steps'.")
        if options.loss != "cross-entropy":
            fail(
                f"Expected classes to tell apart (loss='cross-entropy') for {NAME}. Got loss={options.loss!r}."
            )
        layers: Sequence[nn.Module] = list(model.children()) if isinstance(model, nn.Sequential) else [model]
        others = [layer for layer in layers if not isinstance(layer, (nn.Flatten, nn.Identity))]
        head = others[0] if len(others) == 1 else None
        if not isinstance(head, nn.Linear) or head.out_features < 2:
            fail(
                f"Expected a linear model with an output for each class for {NAME}, such as --model linear. "
                f"Got {type(model).__name__} of {', '.join(type(layer).__name__ for layer in layers)}."
            )
        if head.in_features > MOST_FEATURES:
            fail(f"Expected at most {MOST_FEATURES:,} features for {NAME}. Got {head.in_features:,}.")
        made = Statistics(head.in_features, head.out_features).to(head.weight.device)
        return cls(head, model, made)

    def loss(self, plan: Plan) -> StatisticsLoss:
        """Return what is summed up."""
        return StatisticsLoss(self.head.out_features, plan.max_grad_norm)

    @torch.no_grad()
    def solve(self, plan: Plan) -> nn.Module:
        """Put the solution into the model, which then is as public as the statistics are.

        Negative eigenvalues, which the truth has not, become 0. The head goes through the origin, so that an input's
        length changes nothing about which class is the largest.
        """
        (released,) = plan.rounds
        norm, size = plan.max_grad_norm, released.expected_batch_size
        deviation = released.noise_multiplier / size / SHARE_OF_INPUTS
        moments = self.statistics.moments.weight.double() / (norm * SHARE_OF_INPUTS)
        products = self.statistics.targets.weight.double() / (norm * self.loss(plan).share_of_targets)
        values, vectors = torch.linalg.eigh((moments + moments.T) / 2)
        ridge = RIDGE * math.sqrt(2 * len(values)) * deviation
        solved = (products @ vectors / (values.clamp(min=0) + ridge)) @ vectors.T
        self.head.weight.copy_(solved)
        if self.head.bias is not None:
            self.head.bias.zero_()
        return self.model
