"""Every private name of torch that the integrations use, in one place; checked with torch 2.13."""

from __future__ import annotations

from functools import partial
from typing import Any

CHECKED_WITH = "2.13"


def move_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Let a learning-rate scheduler belong to a wrapper of its optimizer, without a warning.

    torch's schedulers look for the marks that they left on the optimizer's own `step`.
    """
    scheduler.optimizer = optimizer
    optimizer._opt_called = True
    optimizer.step = partial(optimizer.step)
    optimizer.step._wrapped_by_lr_sched = True
