"""Where a run stands in its plan: the current step, who was sampled for it, and what counts as spent.

A step is *sampled*, yielded to the user's loop in one or more physical batches, and *released* when its noisy
sum leaves through the optimizer. The loop is the user's, so everything it may do wrong meets a check here.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdpsgd._typing import IntArray
from pdpsgd.engine.batches import PhysicalBatch
from pdpsgd.engine.layout import NOBODY, Layout, order_of
from pdpsgd.errors import fail
from pdpsgd.sampling.record_choice import NO_RECORD
from pdpsgd.sampling.sampler import PoissonSampler, steps_at_once

if TYPE_CHECKING:
    from pdpsgd.engine.many_records import ManyRecords
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.rounds import Round
    from pdpsgd.sampling.source import RandomSource


class Execution:
    """The position in the plan, and the current step.

    Guarantee: step t of the plan is released at most once, with the people sampled for step t, each clipped to
    their own level's norm; a batch that was sampled is either released, sampled again as it was (nothing was
    seen of it), or skipped explicitly and counted all the same. Whoever is sampled has a row, of weight 0 if
    no record was supplied: for the same key, batches have the same rows whoever supplied a record (or, with many
    records per person, the same rows of everybody else). Rows stand where `layout` says, and are filled up with
    further placeholders: what becomes of a row does not depend on who else was sampled.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        level_of_person: IntArray,
        record_of_person: IntArray,
        source: RandomSource,
        rank: int = 0,
        world_size: int = 1,
        layout: Layout | None = None,
        many_records: ManyRecords | None = None,
    ) -> None:
        self.plan = plan
        self.steps_done = 0
        self.forfeited: list[int] = []
        self.current: PhysicalBatch | None = None
        self._rank = rank
        self._world_size = world_size
        self._level_of_person = level_of_person
        self._record_of_person = record_of_person
        self.layout = layout or Layout()
        self._ahead: dict[int, list[PhysicalBatch]] = {}
        self._many = many_records
        self._ends = np.cumsum([r.steps for r in plan.rounds]).tolist()
        self._norm_of_level = [
            np.asarray(r.clip_scales, dtype=np.float32) * np.float32(plan.max_grad_norm) for r in plan.rounds
        ]
        self.use_source(source)

    def use_source(self, source: RandomSource) -> None:
        """Take all that is random from this source from now on."""
        self._ahead.clear()
        self.source = source
        self.sampler = PoissonSampler(
            self.plan, self._level_of_person, source, rank=self._rank, world_size=self._world_size
        )

    @property
    def steps_left(self) -> int:
        """How many steps of the plan are still to be taken."""
        return self.plan.steps - self.steps_done

    def round_index(self, step: int) -> int:
        """Return the number of the round that a step is in."""
        return bisect_right(self._ends, step)

    def round_of(self, step: int) -> Round:
        """Return the round that a step is in."""
        return self.plan.rounds[self.round_index(step)]

    def starts_round(self, step: int) -> bool:
        """Tell whether the step is the first of its round."""
        return step == 0 or step in self._ends

    def seed(self, step: int, *, purpose: str) -> int:
        """Return a seed for what is random in a step besides sampling and noise: augmentation, dropout.

        It comes from the key and the step's number, so that these repeat when a step is repeated after an
        interruption: were they to differ, the same noise would be used on different gradients.
        """
        place = step.to_bytes(8, "little") + self._rank.to_bytes(8, "little")
        person = f"pdpsgd {purpose}".encode()
        digest = hashlib.blake2b(place, digest_size=8, key=self.source.key_bytes(), person=person).digest()
        return int.from_bytes(digest, "little") >> 1

    def physical_batches(self, steps: int) -> Iterator[PhysicalBatch]:
        """Sample the next steps, from where the run stands, and cut each into physical batches."""
        begin = self.steps_done
        for step in range(begin, min(begin + steps, self.plan.steps)):
            yield from self._sample(step)

    def begin_batch(self, batch: PhysicalBatch) -> None:
        """Make the batch, which the user's loop is about to get, the one that the next `step()` is about."""
        if batch.step != self.steps_done or (self.current is not None and not self._follows(batch)):
            self._fail_iterated_twice()
        self.current = batch

    def is_left_out(self, batch: PhysicalBatch) -> bool:
        """Tell whether nobody was sampled and the loop did not step: then the step is noise alone."""
        return self.current is batch and not batch.added and batch.size == 0 and batch.first

    def end_batch(self, batch: PhysicalBatch) -> None:
        """Refuse to go on where the batch, whose successor the loop asks for, was not stepped.

        Guarantee: skipping a batch because of what is in it would itself tell something about it, so a batch
        that was not stepped stops the run.
        """
        if self.current is not batch:
            if batch.step in self.forfeited:
                return
            self._fail_iterated_twice()
        if not batch.added:
            fail(
                f"Expected optimizer.step() for every batch. Got none for the batch of step {batch.step}. A "
                "batch must not be left out because of what is in it. If it was left out for another reason, "
                "call engine.forfeit_step() before going on: the step then counts as taken. To accumulate gradients, "
                "write make_private(..., max_physical_batch_size=64), and call step() for each batch that comes."
            )

    def batch_to_step(self) -> PhysicalBatch:
        """Return the batch that `step()` is about; refuses where there is none."""
        if self.steps_left == 0:
            fail(
                f"Expected at most the plan's {self.plan.steps} steps. Got one more. The plan is complete; "
                "training on would cost people more than the plan says. Make a new plan that counts this one "
                "as history."
            )
        batch = self.current
        if batch is None:
            fail("Expected a batch from the private loader before optimizer.step(). Got none.")
        if batch.added:
            fail(
                "Expected one optimizer.step() per batch. Got a second one for the batch of step "
                f"{batch.step}."
            )
        return batch

    def released(self) -> None:
        """Count the current step: it has left with its noise."""
        self.steps_done += 1

    def forfeit(self) -> None:
        """Skip the current batch: nothing of it is released, and its step counts as taken."""
        batch = self.current
        if batch is None or batch.step != self.steps_done:
            fail("Expected a current batch that could be skipped. Got none.")
        self.forfeited.append(batch.step)
        self.current = None
        self.steps_done += 1

    def forget(self) -> None:
        """Drop what was sampled ahead."""
        self._ahead.clear()
        self.sampler.forget()

    def _sample(self, step: int) -> Iterator[PhysicalBatch]:
        if step not in self._ahead:
            # Several steps at once, where batches are small: between steps, everything is out of the cache.
            index = self.round_index(step)
            several = steps_at_once(self.plan.rounds[index].expected_batch_size)
            sample = self._sample_one if self._many is None or self._many.most == 1 else self._sample_many
            self._ahead = {
                number: sample(number, index)
                for number in range(step, min(step + several, self._ends[index]))
            }
        return iter(self._ahead.pop(step))

    def _sample_one(self, step: int, round: int) -> list[PhysicalBatch]:
        people = self.sampler.draw(step)
        norms = self._norm_of_level[round][self._level_of_person[people]]
        records = self._records_of(people, step)
        norms[records == NO_RECORD] = 0.0
        places = self.layout.places(self.source.place_words(step=step, rank=self._rank, count=len(people)))
        rows = self.layout.rows_of_step(int(places.max()) + 1) if len(people) else 0
        of_rows, norms_of_rows = np.full(rows, NO_RECORD), np.zeros(rows, dtype=np.float32)
        people_of_rows = np.full(rows, NOBODY)
        of_rows[places], norms_of_rows[places], people_of_rows[places] = records, norms, people
        size = self.layout.at_once or max(rows, 1)
        starts = range(0, max(rows, 1), size)
        seed = self.seed(step, purpose="fetch")
        return [
            PhysicalBatch(
                step=step,
                records=of_rows[start : start + size],
                clip_norms=torch.from_numpy(norms_of_rows[start : start + size]),
                people=people_of_rows[start : start + size],
                first=start == 0,
                last=start == starts[-1],
                seed=seed + start,
            )
            for start in starts
        ]

    def _records_of(self, people: IntArray, step: int) -> IntArray:
        """Return one record of each of these people, `NO_RECORD` for those who supplied none."""
        if self._many is None:
            return self._record_of_person[people]
        return self._many.of_people.choose(people, most=1, source=self.source, step=step)[0]

    def _sample_many(self, step: int, round: int) -> list[PhysicalBatch]:
        assert self._many is not None
        people = self.sampler.draw(step)
        words = self.source.place_words(step=step, rank=self._rank, count=len(people))
        people = people[order_of(words)]
        norms = self._norm_of_level[round][self._level_of_person[people]]
        pieces = list(self._many.pieces(people, norms, source=self.source, step=step, layout=self.layout))
        seed = self.seed(step, purpose="fetch")
        return [
            PhysicalBatch(
                step=step,
                records=piece.records,
                clip_norms=torch.from_numpy(piece.clip_norms),
                people=piece.people,
                first=piece is pieces[0],
                last=piece is pieces[-1],
                starts=piece.starts,
                seed=seed + piece.first_row,
            )
            for piece in pieces
        ]

    def _follows(self, batch: PhysicalBatch) -> bool:
        """Tell whether the batch comes after the current one, or begins its step (or the next one) anew."""
        before = self.current
        return (
            before is None or batch.first or (before.step == batch.step and before.added and not before.last)
        )

    def _fail_iterated_twice(self) -> None:
        fail(
            "Expected one pass over the private loader at a time. Got two at once: the batch that this pass "
            "yielded is no longer the current one."
        )
