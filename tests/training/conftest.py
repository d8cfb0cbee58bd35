"""A small problem and plans made by hand, for runs that take a second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.training.fitting import TrainingResult, fit


class Problem:
    """Two tiers of people with an easy task, and a plan for them."""

    people = (60, 40)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        truth = torch.randn(5, 3, generator=generator)
        self.inputs = torch.randn(100, 5, generator=generator)
        self.targets = (self.inputs @ truth).argmax(1)
        self.test_inputs = torch.randn(50, 5, generator=generator)
        self.test_targets = (self.test_inputs @ truth).argmax(1)
        self.test_tiers = [1.0, 2.0] * 25
        self.budgets = Budgets([1.0] * 60 + [2.0] * 40, ids=[f"p{index}" for index in range(100)])

    @property
    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs, self.targets

    @property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.test_inputs, self.test_targets

    def plan(self, *, steps: Any = (30,), noise: float = 1.0, fresh: bool = False) -> Plan:
        rates = (0.2, 0.4)
        expected = sum(n * q for n, q in zip(self.people, rates, strict=True))
        # These plans are about what a run does: what they claim to prove is made up, so that none is refused.
        levels = tuple(Level(i + 1.0, 1e-5, n, proven_epsilon=i + 1.0) for i, n in enumerate(self.people))
        rounds = tuple(
            Round(
                length, noise, expected, (1.0, 1.0), rates, (1.0, 1.0), threshold=1.0 + i, fresh_model=fresh
            )
            for i, length in enumerate(steps)
        )
        return Plan(mechanism="dp-sgd", levels=levels, rounds=rounds).remember_proof()

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def fit(self, **options: Any) -> TrainingResult:
        """Train with settings that every part of a checkpoint matters for: momentum, averages, a schedule."""
        defaults: dict[str, Any] = {
            "plan": self.plan(),
            "seed": 5,
            "learning_rate": 0.3,
            "momentum": 0.9,
            "weight_average": 0.9,
            "progress": False,
        }
        model = options.pop("model", None) or self.model()
        data = options.pop("data", self.data)
        budgets = options.pop("budgets", self.budgets)
        return fit(model, data, budgets, **(defaults | options))


def weights(result: TrainingResult) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in result.model.parameters()])


@pytest.fixture
def problem() -> Problem:
    return Problem()


@pytest.fixture
def flat() -> Any:
    """All parameters of a result's model in one vector."""
    return weights
