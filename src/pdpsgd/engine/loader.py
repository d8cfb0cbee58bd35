"""The loader of a private run: the plan's remaining steps, each a Poisson batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdpsgd.engine.batches import Batch
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.records import Records


class PrivateLoader:
    """Yields the batches of the plan's remaining steps, one step a batch.

    An empty batch is delivered as an empty batch. A new pass begins where the last one ended: a batch that
    was handed out and not yet stepped comes again as it was, because draws depend on the key and the step
    alone. Once the plan is carried out, a pass yields nothing. With a limit on physical batches, a step comes
    as several batches, and `optimizer.step()` moves the model at the last of them.

    `steps_per_epoch` ends each pass after so many steps, for loops that count epochs.
    """

    def __init__(self, execution: Execution, records: Records, *, steps_per_epoch: int | None = None) -> None:
        self._execution = execution
        self._records = records
        self.steps_per_epoch = steps_per_epoch
        self.inspect: Callable[[Batch], None] | None = None  # looks at batches before they are handed out

    def __len__(self) -> int:
        """How many steps a pass takes from here (not the number of physical batches: that is sensitive)."""
        left = self._execution.steps_left
        return left if self.steps_per_epoch is None else min(left, self.steps_per_epoch)

    def __iter__(self) -> Iterator[Batch]:
        execution = self._execution
        for chunk, batch in self._records.batches(execution.chunks(len(self))):
            if chunk.step in execution.forfeited:
                continue
            execution.hand_out(chunk)
            if self.inspect is not None:
                self.inspect(batch)
            yield batch
            execution.take_back(chunk)
