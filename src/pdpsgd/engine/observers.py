"""Who watches, or takes part in, a step of training: `StepObserver`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.gradients.clipping import ClippedGradients


class StepObserver(Protocol):
    """A watcher of steps, given to `PrivacyEngine(observers=...)`; each method may refuse by raising an error.

    A class that inherits from this one overrides what it needs; one with an attribute `assumed`, sentences on what it
    takes for granted, has them in the run's verdict, and so has one with `beside`, on what no promise covers. What
    observers see (who was sampled, sums without noise) is sensitive: publishing any of it ends the guarantee.
    """

    def step_begins(self, step: int, round: int) -> None:
        """Prepare for a step of the plan, counted from 0; again where its batch is yielded a second time."""
        return None

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Look at a batch just before the loop gets it; `batch.when_stepped` takes checks for its `step()`."""
        return None

    def step_releases(self, step: int, sums: Sequence[Tensor]) -> None:
        """Look at the sums of all ranks just before noise is added to them (called on rank 0); copy what you keep."""
        return None


class Observers:
    """All observers of a run, told one after the other; nobody is told what they do not look at."""

    def __init__(self, execution: Execution, observers: Sequence[StepObserver]) -> None:
        self._execution = execution
        self._all = list(observers)
        self._of_steps = [one for one in observers if _looks_at("step_begins", one)]
        self._of_batches = [one for one in observers if _looks_at("batch_yielded", one)]
        self._of_releases = [one for one in observers if _looks_at("step_releases", one)]

    @property
    def assumed(self) -> tuple[str, ...]:
        """What observers take for granted of the run, in sentences for its verdict."""
        return tuple(sentence for each in self._all for sentence in getattr(each, "assumed", ()))

    @property
    def beside(self) -> tuple[str, ...]:
        """What observers know to lie beside the model and to be covered by no promise, in sentences."""
        return tuple(sentence for each in self._all for sentence in getattr(each, "beside", ()))

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Tell everybody of a batch, and of the step that it begins."""
        if batch.first:
            index = self._execution.round_index(batch.step)
            for observer in self._of_steps:
                observer.step_begins(batch.step, index)
        for observer in self._of_batches:
            observer.batch_yielded(batch)

    def step_releases(self, step: int, sums: Sequence[Tensor]) -> None:
        """Tell everybody of sums to which noise is about to be added."""
        for observer in self._of_releases:
            observer.step_releases(step, sums)


def _looks_at(method: str, observer: StepObserver) -> bool:
    """Tell whether an observer has a method of its own, or has been given one."""
    given = getattr(observer, "__dict__", {})
    return method in given or getattr(type(observer), method, None) is not getattr(StepObserver, method)


class FreshModels(StepObserver):
    """Starts a fresh model where the plan's next round asks for one."""

    def __init__(
        self,
        *,
        execution: Execution,
        module: nn.Module,
        optimizer: Optimizer,
        ranks: Ranks,
        on_fresh_model: Callable[[int], None] | None,
    ) -> None:
        self._execution = execution
        self._module = module
        self._optimizer = optimizer
        self._ranks = ranks
        self._on_fresh_model = on_fresh_model
        self._last_round = -1  # a step may be yielded twice, but its round begins once

    def step_begins(self, step: int, round: int) -> None:
        """Let the user's function reset the parameters, and forget the optimizer's state."""
        begins = self._execution.starts_round(step) and round > self._last_round
        self._last_round = max(round, self._last_round)
        if begins and round > 0 and self._execution.plan.rounds[round].fresh_model:
            assert self._on_fresh_model is not None
            self._on_fresh_model(round)
            self._ranks.broadcast_module(self._module)
            self._optimizer.state.clear()


class Seeding(StepObserver):
    """Seeds torch at every step, so that dropout repeats when a step is repeated after an interruption."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._on_gpu = torch.cuda.is_available()

    def step_begins(self, step: int, round: int) -> None:
        """Seed torch's generators from the key and the step's number."""
        seed = self._execution.seed(step, purpose="torch")
        torch.default_generator.manual_seed(seed)
        if self._on_gpu:
            torch.cuda.manual_seed_all(seed)


class ClearedGradients(StepObserver):
    """Forgets what an abandoned batch left behind."""

    def __init__(self, gradients: ClippedGradients) -> None:
        self._gradients = gradients

    def step_begins(self, step: int, round: int) -> None:
        """Begin the step's sum at zero."""
        self._gradients.zero_sums()
        for parameter in self._gradients.sums:
            parameter.grad = None

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Drop a backward pass that was not stepped."""
        self._gradients.forget()
