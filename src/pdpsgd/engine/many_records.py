"""People with many records: chosen afresh at every step, and cut into physical batches between people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.engine.layout import NOBODY
from pdpsgd.errors import fail
from pdpsgd.sampling.record_choice import NO_RECORD, RecordsOfPeople

if TYPE_CHECKING:
    from pdpsgd.engine.layout import Layout
    from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of some of the people who were sampled: the records, the norms, the starts, and whose they are."""

    first_row: int
    records: IntArray
    clip_norms: FloatArray
    starts: IntArray
    people: IntArray


@dataclass(frozen=True, eq=False)
class ManyRecords:
    """Everybody's records, of which at most `most` (K) take part when their person is sampled.

    With K > 1 the number of rows depends on who has how many records. The rows of others must come out alike all the
    same: batches are filled up as their layout says. A summed loss needs nothing else; with a mean one every batch is
    filled up to a power of two of rows, by placeholders of weight 0: dividing by it is exact.

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
        self, people: IntArray, clip_norms: FloatArray, *, source: RandomSource, step: int, layout: Layout
    ) -> Iterator[Piece]:
        """Choose records of the people who were sampled, and cut the step between people.

        Guarantee: cuts are after a number of people that K alone decides, so with people in a uniform order, one more
        of them changes where one other person stands; somebody without records has a row of weight 0; what is chosen
        of everybody else is the same whoever supplied how many records; and so are the lanes of their rows:
        everybody's rows begin in lane 0.

        Args:
            people: Places on the list, in a uniform order.
            clip_norms: The clipping norm of each of them.
            source: The run's randomness.
            step: The step's number, counted from 0 over the whole plan.
            layout: How many rows there may be, and how many lanes.
        """
        records, starts = self.of_people.choose(people, most=self.most, source=source, step=step)
        norms = clip_norms.copy()
        norms[records[starts[:-1]] == NO_RECORD] = 0
        limit = self._most_rows(layout)
        lanes = layout.lanes if limit is None or self._in_lanes(layout.lanes) <= limit else 1
        at_once = max(1, len(people)) if limit is None else limit // self._in_lanes(lanes)
        first_row = 0
        # A cut that followed the records would show how many there are, in whatever is shared by a physical batch.
        for begin in range(0, max(1, len(people)), at_once):
            end = min(begin + at_once, len(people))
            first, last = int(starts[begin]), int(starts[end])
            piece = records[first:last], norms[begin:end], starts[begin : end + 1] - first
            whose = people[begin:end]
            if lanes > 1:
                piece, whose = _from_lane_0(*piece, whose, lanes)
            yield Piece(first_row, *_filled(*piece, whose, self._rows(len(piece[0]), layout)))
            first_row += len(piece[0])

    @property
    def _limit(self) -> int | None:
        return 1 << (self.limit.bit_length() - 1) if self.limit and self.fills else self.limit

    def _in_lanes(self, lanes: int) -> int:
        """Return the most rows that a person takes."""
        return -(-self.most // lanes) * lanes

    def _most_rows(self, layout: Layout) -> int | None:
        """Return the largest number of rows of a physical batch: one that the layout has, if a person fits in."""
        if self.fills or layout.at_once is None or self.most > layout.at_once:
            return self._limit
        return layout.at_once

    def _rows(self, rows: int, layout: Layout) -> int:
        """Return how many rows a physical batch has that has to hold so many."""
        if not rows:
            return 0
        wanted = max(rows, layout.rows(rows))
        wanted = 1 << (wanted - 1).bit_length() if self.fills else wanted
        return wanted if self._limit is None else max(rows, min(wanted, self._limit))


def _from_lane_0(
    records: IntArray, clip_norms: FloatArray, starts: IntArray, people: IntArray, lanes: int
) -> tuple[tuple[IntArray, FloatArray, IntArray], IntArray]:
    """Let everybody's rows begin in lane 0, after placeholders that are people of their own with weight 0."""
    sizes = np.diff(starts)
    taken = -(-sizes // lanes) * lanes
    begins = np.cumsum(taken) - taken
    rows = np.arange(len(records)) + np.repeat(begins - starts[:-1], sizes)
    moved = np.full(int(taken.sum()), NO_RECORD)
    moved[rows] = records
    is_start = np.ones(len(moved), dtype=np.bool_)
    is_start[rows] = False
    is_start[begins] = True
    all_starts = np.flatnonzero(is_start)
    norms, whose = np.zeros(len(all_starts), dtype=clip_norms.dtype), np.full(len(all_starts), NOBODY)
    own = np.searchsorted(all_starts, begins)
    norms[own], whose[own] = clip_norms, people
    return (moved, norms, np.append(all_starts, len(moved))), whose


def _filled(
    records: IntArray, clip_norms: FloatArray, starts: IntArray, people: IntArray, rows: int
) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    """Fill up with placeholders, each nobody and with weight 0, to so many rows."""
    missing = rows - len(records)
    if not missing:
        return records, clip_norms, starts, people
    return (
        np.concatenate((records, np.full(missing, NO_RECORD))),
        np.concatenate((clip_norms, np.zeros(missing, dtype=clip_norms.dtype))),
        np.concatenate((starts, len(records) + 1 + np.arange(missing))),
        np.concatenate((people, np.full(missing, NOBODY))),
    )
