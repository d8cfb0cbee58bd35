"""Where a run stands in its plan: which step is in hand, whom it drew, and what counts as spent.

A step is *drawn*, handed to the user's loop in one or more chunks, and *released* when its noisy sum leaves
through the optimizer. The loop is the user's, so everything it may do wrong meets a check here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdpsgd._typing import IntArray
from pdpsgd.engine.batches import NO_RECORD, Chunk
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.rounds import Round
    from pdpsgd.sampling.sampler import PoissonSampler


class Execution:
    """The position in the plan, and the one step in hand.

    Guarantee: step t of the plan is released at most once, with the people drawn for step t, each clipped to
    their own level's norm; a batch that was drawn is either released, drawn again as it was (nothing was seen
    of it), or given up explicitly and counted all the same.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        level_of_person: IntArray,
        record_of_person: IntArray,
        sampler: PoissonSampler,
        max_physical_batch_size: int | None = None,
    ) -> None:
        self.plan = plan
        self.steps_done = 0
        self.forfeited: list[int] = []
        self.in_hand: Chunk | None = None
        # What others want to do when a chunk is handed out, or when an empty batch was not stepped.
        self.when_handed_out: list[Callable[[Chunk], None]] = []
        self.finish_empty_step: Callable[[], None] = lambda: None
        self.seed_of_step: Callable[[int], int] | None = None
        self.sampler = sampler
        self._level_of_person = level_of_person
        self._record_of_person = record_of_person
        self._everybody_supplied = bool((record_of_person == np.arange(len(record_of_person))).all())
        self._limit = max_physical_batch_size
        self._ends = np.cumsum([r.steps for r in plan.rounds]).tolist()
        self._norm_of_level = [
            np.asarray(r.clip_scales, dtype=np.float32) * np.float32(plan.max_grad_norm) for r in plan.rounds
        ]

    @property
    def steps_left(self) -> int:
        """How many steps of the plan are still to be taken."""
        return self.plan.steps - self.steps_done

    def round_index(self, step: int) -> int:
        """The round of a step."""
        return next(index for index, end in enumerate(self._ends) if step < end)

    def round_of(self, step: int) -> Round:
        """The round of a step."""
        return self.plan.rounds[self.round_index(step)]

    def starts_round(self, step: int) -> bool:
        """Whether the step is the first of its round."""
        return step == 0 or step in self._ends

    def chunks(self, steps: int) -> Iterator[Chunk]:
        """Draw the next so many steps, from where the run stands, and cut each into chunks."""
        begin = self.steps_done
        for step in range(begin, min(begin + steps, self.plan.steps)):
            yield from self._draw(step)

    def hand_out(self, chunk: Chunk) -> None:
        """The chunk is given to the user's loop; it is the one that the next `step()` is about."""
        if chunk.step != self.steps_done or (self.in_hand is not None and not self._follows(chunk)):
            self._fail_iterated_twice()
        self.in_hand = chunk
        for tell in self.when_handed_out:
            tell(chunk)

    def take_back(self, chunk: Chunk) -> None:
        """The loop asks for the next chunk: this one must have been stepped.

        Guarantee: skipping a batch because of what is in it would itself tell something about it, so a batch
        that was not stepped stops the run. The exception is an empty one: releasing its noise is what the
        plan says, and the same whether the loop noticed the batch or not.
        """
        if self.in_hand is not chunk:
            if chunk.step in self.forfeited:
                return
            self._fail_iterated_twice()
        if not chunk.added and chunk.size == 0 and chunk.first:
            self.finish_empty_step()
        if not chunk.added:
            fail(
                f"Expected optimizer.step() for every batch. Got none for the batch of step {chunk.step}. A "
                "batch must not be left out because of what is in it. If it was left out for another reason, "
                "call engine.forfeit_step() before going on: the step then counts as taken."
            )

    def chunk_to_step(self) -> Chunk:
        """The chunk that `step()` is about; refuses where there is none."""
        if self.steps_left == 0:
            fail(
                f"Expected at most the plan's {self.plan.steps} steps. Got one more. The plan is carried "
                "out; training on would cost people more than the plan says. Make a new plan that counts "
                "this one as history."
            )
        chunk = self.in_hand
        if chunk is None:
            fail("Expected a batch from the private loader before optimizer.step(). Got none.")
        if chunk.added:
            fail(
                "Expected one optimizer.step() per batch. Got a second one for the batch of step "
                f"{chunk.step}."
            )
        return chunk

    def released(self) -> None:
        """The step in hand has left with its noise."""
        self.steps_done += 1

    def forfeit(self) -> None:
        """Give up the batch in hand: nothing of it is released, and its step counts as taken."""
        chunk = self.in_hand
        if chunk is None or chunk.step != self.steps_done:
            fail("Expected a batch in hand that could be given up. Got none.")
        self.forfeited.append(chunk.step)
        self.in_hand = None
        self.steps_done += 1

    def _draw(self, step: int) -> Iterator[Chunk]:
        people = self.sampler.draw(step)
        levels = self._level_of_person[people]
        norms = self._norm_of_level[self.round_index(step)][levels]
        records = people if self._everybody_supplied else self._record_of_person[people]
        if not self._everybody_supplied:
            supplied = records != NO_RECORD
            records, norms = records[supplied], norms[supplied]
        count = max(len(records), 1)
        pieces = -(-count // self._limit) if self._limit else 1
        size = -(-count // pieces)  # all pieces about the same
        starts = range(0, count, size)
        seed = None if self.seed_of_step is None else self.seed_of_step(step)
        for start in starts:
            yield Chunk(
                step=step,
                records=records[start : start + size],
                clip_norms=torch.from_numpy(norms[start : start + size]),
                first=start == 0,
                last=start == starts[-1],
                seed=None if seed is None else seed ^ start,
            )

    def _follows(self, chunk: Chunk) -> bool:
        """Whether the chunk comes after the one in hand, or begins its step (or the next one) anew."""
        before = self.in_hand
        return (
            before is None or chunk.first or (before.step == chunk.step and before.added and not before.last)
        )

    def _fail_iterated_twice(self) -> None:
        fail(
            "Expected one pass over the private loader at a time. Got two at once: the batch this pass "
            "handed out is no longer the one in hand."
        )
