"""One audited training run: the package's own engine, loader and optimizer, with each step's noisy sum observed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.engine.observers import StepObserver
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.source import RandomSource

Criterion = Callable[[Tensor, Tensor], Tensor]
Tamper = Callable[[PrivacyEngine], None]


@dataclass(frozen=True)
class Optimization:
    """How a run moves along its noisy sums: an optimizer, and the factor of its learning rate over the steps.

    `sgd_rate` is the learning rate where the optimizer is plain SGD.
    """

    make: Callable[[Iterable[nn.Parameter]], Optimizer]
    schedule: Callable[[float], float] = lambda progress: 1.0
    sgd_rate: float | None = None

    @classmethod
    def of(cls, chosen: float | Optimization) -> Optimization:
        """Take a number as the learning rate of plain SGD."""
        if isinstance(chosen, Optimization):
            return chosen
        return cls(lambda parameters: torch.optim.SGD(parameters, lr=chosen), sgd_rate=chosen)


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
    plan: Plan,
    learning_rate: float | Optimization,
    record_of_person: npt.ArrayLike | None = None,
    person_of_record: npt.ArrayLike | None = None,
    records_per_person: int | None = None,
    seed: int | None = None,
    source: RandomSource | None = None,
    before_step: Callable[[int], None] | None = None,
    tamper: Tamper | None = None,
    observers: Sequence[StepObserver] = (),
) -> Iterator[ObservedStep]:
    """Train as a user would, with the real engine, and yield every step after it was taken.

    `records` are inputs and targets, whose people either `record_of_person` or `person_of_record` (places on the list)
    tells. `before_step` is called with the step's number while the model is still as the step will find it. `tamper`
    may change the engine once it is set up: tests plant faults with it.
    """
    engine = PrivacyEngine(observers=observers)
    initial = copy.deepcopy(module.state_dict())
    chosen = Optimization.of(learning_rate)
    own = chosen.make(module.parameters())
    rates = [group["lr"] for group in own.param_groups]
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=own,
        data_loader=tuple(records),
        plan=plan,
        record_of_person=record_of_person,
        record_ids=person_of_record,
        records_per_person=records_per_person,
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
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * chosen.schedule(number / plan.steps)
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
