"""Small plans made by hand, and small data, so that tests can say what must happen exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.loader import PrivateLoader
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round


@dataclass
class Private:
    """A private run, ready to go."""

    engine: PrivacyEngine
    module: nn.Module
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    plan: Plan

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(inputs), targets).backward()
        self.optimizer.step()

    def train(self) -> None:
        for inputs, targets in self.loader:
            self.step(inputs, targets)


def make_plan(
    *,
    people: int | Sequence[int] = 40,
    rates: Sequence[float] = (0.5,),
    steps: int | Sequence[int] = 6,
    noise: float = 1.0,
    clip_scales: Sequence[float] | None = None,
    participation: Sequence[float] | None = None,
    max_grad_norm: float = 1.0,
    fresh: bool = False,
    thresholds: Sequence[float] | None = None,
) -> Plan:
    sizes = (people,) if isinstance(people, int) else tuple(people)
    lengths = (steps,) if isinstance(steps, int) else tuple(steps)
    shares = tuple(participation or [1.0] * len(sizes))
    expected = sum(n * p * q for n, p, q in zip(sizes, shares, rates, strict=True))
    # These plans are about what a run does: what they claim to prove is made up, so that none is refused.
    levels = tuple(
        Level(index + 1.0, 1e-5, size, proven_epsilon=index + 1.0) for index, size in enumerate(sizes)
    )
    return Plan(
        mechanism="dp-sgd",
        levels=levels,
        rounds=tuple(
            Round(
                length,
                noise,
                expected,
                shares,
                tuple(rates),
                tuple(clip_scales or [1.0] * len(sizes)),
                threshold=None if thresholds is None else thresholds[index],
                fresh_model=fresh,
            )
            for index, length in enumerate(lengths)
        ),
        max_grad_norm=max_grad_norm,
    ).remember_proof()


def budgets_of(plan: Plan) -> Budgets:
    """Everybody at their level's own budget, level after level."""
    return Budgets([level.epsilon for level in plan.levels for _ in range(level.people)])


def make_data(people: int, *, features: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(people, features, generator=generator)
    return inputs, (inputs @ torch.randn(features, classes, generator=generator)).argmax(1)


def make_module(*, features: int = 5, classes: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


class Rows(Dataset[Any]):
    """The same data, one record at a time."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.inputs, self.targets = data

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@pytest.fixture
def private() -> Callable[..., Private]:
    """Make a private run; plan options are those of `make_plan`, the rest goes to `make_private`."""

    def make(
        *,
        plan: Plan | None = None,
        module: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
            parameters, lr=0.5
        ),
        data: Any = None,
        engine: PrivacyEngine | None = None,
        **options: Any,
    ) -> Private:
        plan = make_plan() if plan is None else plan
        module = make_module() if module is None else module
        engine = PrivacyEngine() if engine is None else engine
        options.setdefault("seed", 1)
        options.setdefault("budgets", budgets_of(plan))
        made = engine.make_private(
            module=module,
            optimizer=optimizer(module.parameters()),
            data_loader=make_data(plan.people) if data is None else data,
            plan=plan,
            **options,
        )
        return Private(engine, *made, plan)

    return make


@pytest.fixture
def helpers() -> Any:
    """The functions above, for tests that need them bare."""

    class Helpers:
        plan = staticmethod(make_plan)
        budgets = staticmethod(budgets_of)
        data = staticmethod(make_data)
        module = staticmethod(make_module)
        Rows = Rows

    return Helpers


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.fixture
def flat() -> Callable[[nn.Module], Tensor]:
    """All parameters of a module in one vector."""
    return weights
