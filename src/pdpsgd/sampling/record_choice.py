"""Which of a person's records take part in a step: at most K of them, all choices equally likely, fresh every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd._typing import AnyIntArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.sampling.subsets import NO_RECORD as NO_RECORD
from pdpsgd.sampling.subsets import choose_records

if TYPE_CHECKING:
    from pdpsgd.sampling.source import RandomSource

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
        held = {"order": self.order, "starts": self.starts}
        stream = source.record_stream(step=step)
        if stream is not None:
            return stream.choose_records(people, most, **held)
        return choose_records(
            people,
            most,
            words_of=lambda some: source.record_words(step=step, people=some, count=most),
            **held,
        )
