"""One audited training run: the package's own engine, loader and optimizer, with each step's noisy sum observed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch
from torch import Tensor, nn

from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.source import RandomSource

Criterion = Callable[[Tensor, Tensor], Tensor]
Tamper = Callable[[PrivacyEngine], None]


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """The noisy sum of a step, tensor by tensor: all that an attacker who watches training sees of it.

    `noisy_sums` are what left the mechanism, before the division by the plan's public expected batch size.
    """

    number: int
    round: int
    noisy_sums: tuple[Tensor, ...]


def observe_run(
    *,
    module: nn.Module,
    criterion: Criterion,
    records: Sequence[Tensor],
    record_of_person: npt.ArrayLike,
    plan: Plan,
    learning_rate: float,
    momentum: float = 0.0,
    seed: int | None = None,
    source: RandomSource | None = None,
    before_step: Callable[[int], None] | None = None,
    tamper: Tamper | None = None,
) -> Iterator[ObservedStep]:
    """Train as a user would, with the real engine, and yield every step after it was taken.

    `records` are inputs and targets. `before_step` is called with the step's number while the model is still
    as the step will find it. `tamper` may change the engine once it is set up: tests plant faults with it.
    """
    engine = PrivacyEngine()
    initial = copy.deepcopy(module.state_dict())
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=momentum),
        data_loader=tuple(records),
        plan=plan,
        record_of_person=record_of_person,
        source=source,
        seed=None if source is not None else seed,
        criterion=criterion,
        on_fresh_model=lambda _: module.load_state_dict(initial),
    )
    if tamper is not None:
        tamper(engine)
    ends = [sum(r.steps for r in plan.rounds[: index + 1]) for index in range(len(plan.rounds))]
    round_index = 0
    try:
        for number, (inputs, targets) in enumerate(loader):
            while number >= ends[round_index]:
                round_index += 1
            if before_step is not None:
                before_step(number)
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            divisor = plan.rounds[round_index].expected_batch_size
            sums = tuple(
                parameter.grad.detach() * divisor
                for parameter in module.parameters()
                if parameter.grad is not None
            )
            yield ObservedStep(number, round_index, sums)
    finally:
        engine.close()
