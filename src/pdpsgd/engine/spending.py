"""The individual filter: what each person has spent so far, and what they may still give. Sensitive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.engine.execution import Execution
    from pdpsgd.planning.plans import Plan

NORMS_PER_UNIT = 2**20
"""Norms over noise are charged as whole multiples of 2^-20, rounded up, and spending as multiples of 2^-40: exactly."""


class SpendingFilter(StepObserver):
    """Ends the spending of each person at their level's limit.

    At a step of the filtered round person i may give a gradient of norm at most the noise's standard deviation times
    sqrt(B_i - spent_i), and of at most C_i. What they give is charged: the square of its norm over the deviation.
    Whoever was shrunk to what was left has spent all of it. Spending is in whole numbers, and counts from just before a
    step is released.

    Guarantee: over all released steps, the sum of squares of what person i's record moves the sums by, over the noise's
    standard deviation, is at most B_i, rounding included; and what is charged to i depends on i's own records and on
    what was released alone. So the round is at most one Gaussian mechanism with mu^2 = B_i towards i
    (docs/theory.md, "Filters").
    """

    def __init__(self, execution: Execution, level_of_person: IntArray) -> None:
        plan = execution.plan
        assert plan.filtered_round is not None
        self._execution = execution
        self._round = plan.filtered_round
        self.limits = limits_of_people(plan, level_of_person)
        self.spent = np.zeros(len(level_of_person), dtype=np.int64)
        self._pending = self.spent
        self._allowed = np.zeros(0, dtype=np.int64)

    def step_begins(self, step: int, round: int) -> None:
        """Forget what an abandoned batch would have spent."""
        self._pending = self.spent.copy()

    def is_on(self, step: int) -> bool:
        """Tell whether the step is in the filtered round."""
        return self._execution.round_index(step) == self._round

    def clip_norms(self, batch: PhysicalBatch) -> Tensor:
        """Return the clipping norms of a batch: those of the plan, or what people may still give."""
        left = (self.limits - self._pending)[batch.people]
        self._allowed = np.where(batch.people < 0, 0, square_roots(left))
        norms: FloatArray = np.minimum(batch.clip_norms.double().numpy(), self._allowed * self._norm_unit)
        return torch.from_numpy(norms)

    def charge(self, batch: PhysicalBatch, given: Tensor) -> None:
        """Charge people for what they give to the step; whoever gives all that was left has nothing left."""
        units = np.ceil(given.cpu().double().numpy() / self._norm_unit).astype(np.int64)
        own = np.ceil(batch.clip_norms.double().numpy() / self._norm_unit).astype(np.int64)
        # What is given is within what was allowed, but for float64's rounding in the last unit.
        units = np.minimum(units, np.minimum(own, self._allowed))
        is_all = (self._allowed < own) & (units >= self._allowed - 1) & (units > 0)
        real = batch.people >= 0
        people = batch.people[real]
        spent = self._pending[people] + units[real] ** 2
        self._pending[people] = np.where(is_all[real], self.limits[people], spent)

    def settle(self) -> None:
        """Count what was charged, before the step is released: an interruption then releases nothing uncharged."""
        if (self._pending > self.limits).any():
            fail(
                "Expected nobody to spend more than their limit. Got somebody who did: this is an error in pdpsgd."
            )
        self.spent = self._pending

    def load(self, spent: Tensor) -> None:
        """Go on from what people had spent at a checkpoint."""
        values = spent.numpy()
        if values.dtype != np.int64 or values.shape != self.spent.shape:
            fail(
                f"Expected {len(self.spent)} whole numbers of what people have spent. Got {tuple(values.shape)}."
            )
        if (values < 0).any() or (values > self.limits).any():
            fail("Expected what people have spent to be from 0 to their limits. Got something else.")
        self.spent = values.copy()

    @property
    def _norm_unit(self) -> float:
        plan = self._execution.plan
        deviation = plan.rounds[self._round].noise_multiplier * plan.max_grad_norm
        return deviation / NORMS_PER_UNIT


def limits_of_people(plan: Plan, level_of_person: IntArray) -> IntArray:
    """Return each person's limit in the filtered round, in units of 2^-40, rounded down."""
    assert plan.filtered_round is not None
    limits = plan.rounds[plan.filtered_round].spending_limits
    of_level = np.floor(np.array(limits) * NORMS_PER_UNIT**2).astype(np.int64)
    chosen: IntArray = of_level[level_of_person]
    return chosen


def square_roots(numbers: IntArray) -> IntArray:
    """Return whole square roots, rounded down, exactly.

    >>> square_roots(np.array([0, 3, 4, 2**50 - 1])).tolist()
    [0, 1, 2, 33554431]
    """
    roots = np.sqrt(numbers.astype(float)).astype(np.int64)
    roots -= roots * roots > numbers
    roots += (roots + 1) ** 2 <= numbers
    return roots
