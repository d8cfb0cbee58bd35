"""Checks the first batches of a run, until they were enough to tell: do examples mix in model, loss or loop?

A later batch is checked again if it has a class, or a padding value, that no batch had before: a heavy class, or an
ignored target, shows only where it occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pdpsgd.engine.batches import to_device
from pdpsgd.engine.checks.probe import check_examples_do_not_mix
from pdpsgd.engine.checks.rows import SeenValues
from pdpsgd.engine.checks.sizes import UNSETTLED
from pdpsgd.engine.checks.watch import LossWatch, say_unseen
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.gradients.clipping import ClippedGradients


class FirstBatches(StepObserver):
    """Probes the criterion, if there is one, and watches what the loop does with a batch.

    With `watch_loop=False` the loop is not watched: whoever calls knows that nothing happens between loader and
    model. `is_cut` says that a step may be cut into physical batches, `steps` how many there are, and `unseen` what
    could not be checked before the first of them.
    """

    def __init__(
        self,
        gradients: ClippedGradients,
        *,
        criterion: Callable[..., Tensor] | None,
        loss_reduction: str,
        views: int,
        watch_loop: bool,
        steps: int,
        is_cut: bool = False,
        unseen: Sequence[str] = (),
    ) -> None:
        self._gradients = gradients
        self._criterion = criterion
        self._loss_reduction = loss_reduction
        self._views = views
        self._is_cut = is_cut
        self._criterion_is_checked = criterion is None
        self._watch_loop = watch_loop
        self._loop_is_checked = not watch_loop
        self._seen = SeenValues()
        self._last: LossWatch | None = None  # of the batch before, if that was not enough
        self._watch: LossWatch | None = None  # of the current batch
        self._steps = steps
        self._unseen = list(unseen)

    @property
    def unseen(self) -> list[str]:
        """What could not be checked so far, and why."""
        return [*self._unseen, *([UNSETTLED] if self._last is not None and self._last.waits else [])]

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Try the criterion on the batch, and look at what the loop does with it."""
        self.stop()
        if self._seen.has_news(batch.examples, batch.size):
            self._criterion_is_checked = self._criterion is None
            self._loop_is_checked = not self._watch_loop
        self._criterion_is_checked = self._criterion_is_checked or self._probe(batch.examples)
        if not self._loop_is_checked and batch.size > 1:
            self._start_watch(batch)

    def check(self, loss: Callable[..., Tensor], inputs: Any, targets: Any = None) -> bool:
        """Refuse a loss or module in which examples mix; returns whether the batch was enough to tell."""
        module = self._gradients.module
        return check_examples_do_not_mix(
            module, loss, inputs, targets, loss_reduction=self._loss_reduction, is_cut=self._is_cut
        )

    def stop(self, *, report: bool = False) -> None:
        """Stop watching the current batch; an abandoned one is nothing to report."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(report=report)
            self._unseen += watch.findings if report else []
            self._loop_is_checked = watch.concluded
            if watch.concluded:
                self._last = None
            elif report:
                self._last = watch

    def _start_watch(self, batch: PhysicalBatch) -> None:
        self._watch = LossWatch(
            self._gradients,
            batch.examples,
            batch.size,
            owner=self,
            loss_reduction=self._loss_reduction,
            views=self._views,
            is_cut=self._is_cut,
            criterion_is_checked=self._criterion is not None,
            last=self._last,
        )
        whole = batch.size * self._views
        is_last = batch.last and batch.step == self._steps - 1

        def stepped() -> None:
            self.stop(report=self._gradients.recorded_batch_size == whole)
            if is_last and self._last is not None and self._last.waits:
                say_unseen(UNSETTLED)

        batch.when_stepped.append(stepped)
        self._watch.start()

    def _probe(self, examples: Any) -> bool:
        """Try the criterion on a batch; returns whether it was enough to tell."""
        assert self._criterion is not None
        if not isinstance(examples, (list, tuple)) or len(examples) != 2:
            fail("Expected batches of (inputs, targets), to try the criterion on them. Got something else.")
        device = next((parameter.device for parameter in self._gradients.module.parameters()), None)
        inputs, targets = (to_device(part, device) for part in examples)
        return self.check(self._criterion, inputs, targets)
