"""Which of a person's records take part in a step: at most K of them, all choices equally likely, fresh every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd._typing import AnyIntArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.sampling.native import calls, dispatch
from pdpsgd.sampling.subsets import subsets_of

if TYPE_CHECKING:
    from pdpsgd.sampling.source import RandomSource

NO_RECORD = -1
"""Stands in the row of somebody who supplied nothing."""

HOW_TO_HAVE_MANY = (
    "Where people have many records, say how many of one person take part at a time, as in --records-per-person 4 "
    "(records_per_person=4): their mean gradient is clipped as a whole. Where every row is another person, leave ids "
    "out (--one-row-per-person), or give them ids of their own."
)
"""What to do about repeated ids."""


@dataclass(frozen=True, eq=False)
class RecordsOfPeople:
    """The records of everybody on the list: person i has the records order[starts[i] : starts[i + 1]], or none.

    Sensitive: who has how many records, their sum and their maximum are never shown.
    """

    order: IntArray
    starts: IntArray

    @classmethod
    def of(cls, person_of_record: AnyIntArray, *, people: int) -> RecordsOfPeople:
        """Sort records by their person, given by place on the list; a person's own keep their order.

        >>> found = RecordsOfPeople.of(np.array([2, 0, 2, 0]), people=4)
        >>> found.order.tolist(), found.starts.tolist()
        ([1, 3, 0, 2], [0, 2, 2, 4, 4])
        """
        if len(person_of_record) and not 0 <= person_of_record.min() <= person_of_record.max() < people:
            fail(f"Expected records of people from 0 to {people - 1}, their places on the list.")
        counts = np.bincount(person_of_record, minlength=people)
        order = np.argsort(person_of_record, kind="stable").astype(np.int64, copy=False)
        return cls(order, np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False))

    @property
    def people(self) -> int:
        """How many people are on the list."""
        return len(self.starts) - 1

    def choose(
        self, people: IntArray, *, most: int, source: RandomSource, step: int
    ) -> tuple[IntArray, IntArray]:
        """Choose min(most, m_i) records of each of these people, who has m_i, side by side.

        Args:
            people: Places on the list, nobody twice.
            most: K, the largest number of records of one person.
            source: The run's randomness.
            step: The step's number, counted from 0 over the whole plan.

        Returns:
            The numbers of the records, and `starts`: person i of `people` has rows starts[i] to starts[i + 1].
            Somebody without a record has one row, `NO_RECORD`.

        Guarantee: what is chosen of a person depends on their own records, their place on the list, the key and the
        step alone. Each subset is chosen with its probability to within m_i K 2^-64.
        """
        first = self.starts[people]
        counts = self.starts[people + 1] - first
        starts = np.zeros(len(people) + 1, dtype=np.int64)
        rows = np.minimum(np.maximum(counts, 1), most)
        rows.cumsum(out=starts[1:])
        # Everything somebody has: the place among all rows, shifted from where their rows begin to where records do.
        places = np.arange(starts[-1]) + np.repeat(first - starts[:-1], rows)
        many = np.flatnonzero(counts > most)
        if len(many):
            words = source.record_words(step=step, people=people[many], count=most)
            code = dispatch.library()
            limits = counts[many]
            chosen = subsets_of(words, limits) if code is None else calls.subsets(code, words, limits)
            chosen += first[many, None]
            places[starts[many, None] + np.arange(most)] = chosen
        if len(self.order) == 0:
            return np.full(len(places), NO_RECORD, dtype=np.int64), starts
        records = self.order.take(places, mode="clip")
        records[starts[:-1][counts == 0]] = NO_RECORD
        return records, starts
