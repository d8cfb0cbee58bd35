"""The loader of a private run: the plan's remaining steps, each a Poisson batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdpsgd.errors import warn

if TYPE_CHECKING:
    from pdpsgd.engine.batches import Batch
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.observers import Observers
    from pdpsgd.engine.optimizer import PrivateOptimizer
    from pdpsgd.engine.records import Records


class PrivateLoader:
    """Yields the batches of the plan's remaining steps, one step a batch.

    An empty batch is yielded as an empty batch; where the loop leaves it out, its noise is released all the
    same. A new pass begins where the last one ended: a batch that was yielded and not yet stepped comes again
    as it was, because sampling depends on the key and the step alone. Once the plan is complete, a pass yields
    nothing, and says so once if an earlier pass took steps. With a limit on physical batches, a step comes as several
    batches, and `optimizer.step()` moves the model at the last of them.

    `steps_per_epoch` ends each pass after so many steps, for loops that count epochs.
    """

    def __init__(
        self,
        execution: Execution,
        records: Records,
        *,
        optimizer: PrivateOptimizer,
        observers: Observers,
        steps_per_epoch: int | None = None,
    ) -> None:
        self._execution = execution
        self._records = records
        self._optimizer = optimizer
        self._observers = observers
        self.steps_per_epoch = steps_per_epoch
        self._took_steps = False

    def __len__(self) -> int:
        """Return how many steps a pass takes from here (not the number of physical batches: that is sensitive)."""
        left = self._execution.steps_left
        return left if self.steps_per_epoch is None else min(left, self.steps_per_epoch)

    def __iter__(self) -> Iterator[Batch]:
        execution = self._execution
        if not execution.steps_left and self._took_steps:
            self._say_empty()
        for batch, examples in self._records.batches(execution.physical_batches(len(self))):
            if batch.step in execution.forfeited:
                continue
            batch.examples = examples
            execution.begin_batch(batch)
            self._optimizer.expect(batch)
            self._took_steps = True
            self._observers.batch_yielded(batch)
            yield examples
            if execution.is_left_out(batch):
                self._optimizer.step()
            execution.end_batch(batch)

    def _say_empty(self) -> None:
        """Warn of an epoch without steps, which would look like training."""
        self._took_steps = False  # said once
        taken = self._execution.steps_done
        remedy = (
            f"One pass takes all steps of the plan: for E epochs, give make_private(..., steps_per_epoch={taken} // E)."
            if self.steps_per_epoch is None
            else "Let the epochs add up to the plan's steps, or plan for more steps."
        )
        warn(f"All {taken:,} steps of the plan are taken, so this pass over the loader is empty. {remedy}")
