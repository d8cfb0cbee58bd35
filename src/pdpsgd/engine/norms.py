"""Norms of people's gradients, added up over a run that was asked to keep them: sensitive, never released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.individual import IndividualSums, Share
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.engine.execution import Execution
    from pdpsgd.planning.plans import Plan


KEPT = ("squares", "seen", "saved")


class NormKeeper(StepObserver):
    """Adds up what released steps cost each person by the norm of what they gave, rounding included.

    Guarantee: looks on. Sums, noise and draws are those of a run that keeps nothing, to the bit; what is kept is
    sensitive, and for `private/` alone.
    """

    def __init__(self, execution: Execution, level_of_person: IntArray) -> None:
        check_norms_can_be_kept(execution.plan)
        self._execution = execution
        self.sums = IndividualSums(shares_of(execution.plan), level_of_person)
        self._pending: list[tuple[IntArray, FloatArray]] = []

    def step_begins(self, step: int, round: int) -> None:
        """Forget an abandoned batch."""
        self._pending = []

    def note(self, batch: PhysicalBatch, given: Tensor) -> None:
        """Note the norms of what the people of a batch give to the step."""
        real = batch.people >= 0
        norms: FloatArray = given.cpu().double().numpy()[real] / self._execution.plan.max_grad_norm
        self._pending.append((batch.people[real], norms))

    def settle(self, step: int) -> None:
        """Add up what was noted: the step is released."""
        index = self._execution.round_index(step)
        for people, norms in self._pending:
            self.sums.add(index, people, norms)
        self._pending = []

    def state(self) -> dict[str, Tensor]:
        """Say what a checkpoint holds of the sums."""
        return {name: torch.from_numpy(getattr(self.sums, name)) for name in KEPT}

    def load(self, state: Mapping[str, Any], place: str) -> None:
        """Go on from the sums of a checkpoint."""
        for name, now in self.state().items():
            saved = state.get(name)
            if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (now.shape, now.dtype):
                fail(f"Expected {name}, the sums of norms, in the checkpoint {place!r}. Got none that fit.")
            now.copy_(saved)


def check_norms_can_be_kept(plan: Plan) -> None:
    """Refuse plans for which individual costs are not those of their steps."""
    if any(0 < chance < 1 for r in plan.rounds for chance in r.participation):
        fail(
            "Expected a plan that samples people at every step, to keep norms. Got one that draws them once a round: "
            "what a step costs somebody then depends on a draw that nobody knows. Plan with drawn='step'."
        )


def shares_of(plan: Plan) -> list[Share]:
    """Return what each level gives to the steps of each round."""
    return [
        Share(
            np.array(r.sample_rates) * np.array(r.participation),
            np.array(r.clip_scales),
            r.noise_multiplier,
            r.steps,
        )
        for r in plan.rounds
    ]
