"""The progress bar of a run: step, time left, privacy spent, accuracy on test people. Public things only."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from pdpsgd.accounting.registry import accountant

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

SECONDS_BETWEEN_UPDATES = 0.2


class ProgressBar:
    """Shows where a run stands; does nothing where it was not asked for."""

    def __init__(self, plan: Plan, *, show: bool, begin: int = 0) -> None:
        self._show = show
        self._next_update = 0.0
        self._figure = ""
        if not show:
            return
        self._share = spending_curve(plan)
        spent = "spent" if plan.ledger is None else "of its share spent"
        self._bar = Progress(
            BarColumn(bar_width=None),  # takes what the words leave of the line
            TextColumn("step {task.completed:,} of {task.total:,},", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            TextColumn("left, {task.fields[spent]:.0%} " + spent + "{task.fields[figure]}"),
            console=Console(stderr=True),
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=plan.steps, completed=begin, spent=self._share(begin), figure=""
        )

    def __enter__(self) -> ProgressBar:
        if self._show:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._show:
            self._bar.stop()

    def step(self, steps_done: int, *, last: bool = False) -> None:
        """Say how many steps are done."""
        now = time.monotonic()
        if self._show and (last or now >= self._next_update):
            self._next_update = now + SECONDS_BETWEEN_UPDATES
            self._bar.update(
                self._task, completed=steps_done, spent=self._share(steps_done), figure=self._figure
            )

    def figure(self, text: str) -> None:
        """Say how good the model is on test people."""
        self._figure = f", {text}" if text else ""


def spending_curve(plan: Plan, points: int = 5) -> Callable[[int], float]:
    """Return a function from steps done to the share of epsilon spent, for the largest level that is sampled.

    Interpolated between a few calls of the accountant: for looking at, not for proving.
    """
    used = [
        index
        for index in range(len(plan.levels))
        if any(not r.exposure(index).costs_nothing for r in plan.rounds)
    ]
    if not used:
        return lambda steps: 0.0
    level = max(used, key=lambda index: plan.levels[index].people)
    account = accountant(plan.accountant)
    steps = np.unique(np.round(np.linspace(0, 1, points) ** 2 * plan.steps).astype(int))
    spent = np.array(
        [account.epsilon(plan.prefix(int(s)).history_of(level), plan.levels[level].delta) for s in steps]
    )
    return lambda done: float(np.interp(done, steps, spent / spent[-1]))
