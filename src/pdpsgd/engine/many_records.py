"""People with many records: chosen afresh at every step, and cut into physical batches between people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.sampling.record_choice import NO_RECORD, RecordsOfPeople

if TYPE_CHECKING:
    from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of some of the people who were sampled: the records, norms, unless all are one the starts, and whose."""

    first_row: int
    records: IntArray
    clip_norms: FloatArray
    starts: IntArray | None
    people: IntArray


@dataclass(frozen=True, eq=False)
class ManyRecords:
    """Everybody's records, of which at most `most` (K) take part when their person is sampled.

    With K > 1 the number of rows depends on who has how many records. The rows of others must come out alike all the
    same. A summed loss sees to that; with a mean one every batch is filled up to a power of two of rows, by
    placeholders of weight 0: dividing by it is exact.

    Attributes:
        of_people: Whose record is which.
        most: K, a public setting.
        limit: The largest number of records in a physical batch.
        fill: Whether to fill up batches, because the loss is a mean.
    """

    of_people: RecordsOfPeople
    most: int
    limit: int | None = None
    fill: bool = False

    def __post_init__(self) -> None:
        if self._limit is not None and self.most > self._limit:
            why = ", the power of two below the limit, as the loss is a mean" if self.fills else ""
            fail(
                f"Expected records_per_person <= {self._limit}, the records of a physical batch "
                f"(max_physical_batch_size, divided by views{why}): those of a person go through the model together. "
                f"Got {self.most}."
            )

    @property
    def fills(self) -> bool:
        """Whether batches are filled up: with one row per person there is nothing to hide."""
        return self.fill and self.most > 1

    @property
    def record_of_person(self) -> IntArray:
        """The number of each person's first record, -1 for none (sensitive)."""
        first, order = self.of_people.starts[:-1], self.of_people.order
        if not len(order):
            return np.full(self.of_people.people, NO_RECORD)
        some = np.diff(self.of_people.starts) > 0
        return np.where(some, order.take(first, mode="clip"), NO_RECORD)

    def pieces(
        self, people: IntArray, clip_norms: FloatArray, *, source: RandomSource, step: int
    ) -> Iterator[Piece]:
        """Choose records of the people who were sampled, and cut the step between people.

        Guarantee: cuts depend on how many people were sampled and on K alone; somebody without records has a row of
        weight 0; and what is chosen of everybody else is the same whoever supplied how many records.

        Args:
            people: Places on the list.
            clip_norms: The clipping norm of each of them.
            source: The run's randomness.
            step: The step's number, counted from 0 over the whole plan.
        """
        records, starts = self.of_people.choose(people, most=self.most, source=source, step=step)
        norms = np.where(records[starts[:-1]] == NO_RECORD, 0, clip_norms).astype(clip_norms.dtype)
        for begin, end in self._cuts(len(people)):
            first, last = int(starts[begin]), int(starts[end])
            piece = records[first:last], norms[begin:end], starts[begin : end + 1] - first
            if self.most == 1:
                yield Piece(first, *piece[:2], None, people[begin:end])
            else:
                piece = _filled(*piece) if self.fills else piece
                nobody = np.full(len(piece[1]) - (end - begin), -1)
                yield Piece(first, *piece, np.concatenate((people[begin:end], nobody)))

    @property
    def _limit(self) -> int | None:
        return 1 << (self.limit.bit_length() - 1) if self.limit and self.fills else self.limit

    def _cuts(self, people: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of people, all about the same, whose rows keep to the limit whatever anybody holds.

        A cut that followed the records would show how many there are, in whatever is shared by a physical batch.
        """
        at_once = people if self._limit is None else self._limit // self.most
        pieces = -(-people // at_once) if people else 1
        ends = [people * (number + 1) // pieces for number in range(pieces)]
        yield from zip([0, *ends[:-1]], ends, strict=True)


def _filled(
    records: IntArray, clip_norms: FloatArray, starts: IntArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """Fill up with placeholders, each a person of its own with weight 0, to a power of two of rows."""
    rows = len(records)
    missing = (1 << (rows - 1).bit_length()) - rows if rows else 0
    return (
        np.concatenate((records, np.full(missing, NO_RECORD))),
        np.concatenate((clip_norms, np.zeros(missing, dtype=clip_norms.dtype))),
        np.concatenate((starts, rows + 1 + np.arange(missing))),
    )
