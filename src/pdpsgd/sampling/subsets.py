"""Random subsets of people's records: of each, every set of so many equally likely (Floyd's way)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdpsgd._typing import IntArray, WordArray

NO_RECORD = -1
"""Stands in the row of somebody who supplied nothing."""


def choose_records(
    people: IntArray,
    most: int,
    *,
    order: IntArray,
    starts: IntArray,
    words_of: Callable[[IntArray], WordArray],
) -> tuple[IntArray, IntArray]:
    """Choose at most so many records of each of these people, side by side.

    Args:
        people: Places on the list.
        most: The largest number of records of one person.
        order: Person i has the records order[starts[i] : starts[i + 1]].
        starts: See `order`.
        words_of: Gives uniform words for people: (people, most).

    Returns:
        The numbers of the records, and where those of each of `people` begin; the end is the last of these. Somebody
        without a record has `NO_RECORD`.
    """
    first = starts[people]
    counts = starts[people + 1] - first
    begins = np.zeros(len(people) + 1, dtype=np.int64)
    rows = np.minimum(np.maximum(counts, 1), most)
    rows.cumsum(out=begins[1:])
    # Everything somebody has: the place among all rows, shifted from where their rows begin to where records do.
    places = np.arange(begins[-1]) + np.repeat(first - begins[:-1], rows)
    many = np.flatnonzero(counts > most)
    if len(many):
        chosen = subsets_of(words_of(people[many]), counts[many]) + first[many, None]
        places[begins[many, None] + np.arange(most)] = chosen
    if len(order) == 0:
        return np.full(len(places), NO_RECORD, dtype=np.int64), begins
    records = order.take(places, mode="clip")
    records[begins[:-1][counts == 0]] = NO_RECORD
    return records, begins


def subsets_of(words: WordArray, limits: IntArray) -> IntArray:
    """Return, for each limit, as many distinct numbers below it as there are words: (people, K) in and out.

    The t-th number is uniform below limit - K + t + 1; if it is there already, the largest of that range, which cannot
    be, takes its place.

    >>> subsets_of(np.array([[5, 5, 7]], dtype=np.uint64), np.array([4])).tolist()
    [[1, 2, 3]]
    """
    people, most = words.shape
    chosen = np.empty((people, most), dtype=np.int64)
    for place in range(most):
        end = limits - most + place + 1
        number = (words[:, place] % end.astype(np.uint64)).view(np.int64)
        again = (chosen[:, :place] == number[:, None]).any(axis=1)
        chosen[:, place] = np.where(again, end - 1, number)
    return chosen
