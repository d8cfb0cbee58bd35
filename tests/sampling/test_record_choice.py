"""Which of a person's records take part: as many as there are, K at most, every choice equally likely."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.record_choice import NO_RECORD, RecordsOfPeople
from pdpsgd.sampling.source import RandomSource

FALSE_ALARM = 1e-6


def source(secure: bool = True) -> RandomSource:
    return RandomSource.from_key(bytes(range(32)), secure=secure)


def held(*counts: int) -> RecordsOfPeople:
    """People with so many records, numbered by person and shuffled in the data."""
    person = np.repeat(np.arange(len(counts)), counts)
    return RecordsOfPeople.of(np.random.default_rng(1).permutation(person), people=len(counts))


def chosen(
    records: RecordsOfPeople, most: int, step: int, *, people: list[int] | None = None
) -> list[list[int]]:
    drawn = np.arange(records.people) if people is None else np.array(people, dtype=np.int64)
    numbers, starts = records.choose(drawn, most=most, source=source(), step=step)
    return [part.tolist() for part in np.split(numbers, starts[1:-1])]


@pytest.mark.parametrize("most", [1, 3, 4, 50])
def test_everybody_has_min_of_k_and_own_records_side_by_side(most: int) -> None:
    counts = (0, 1, 7, 3, 0, 40, 4)
    records = held(*counts)
    own = [set(part.tolist()) for part in np.split(records.order, records.starts[1:-1])]
    for person, rows in enumerate(chosen(records, most, step=5)):
        if counts[person] == 0:
            assert rows == [NO_RECORD]
        else:
            assert len(rows) == len(set(rows)) == min(most, counts[person])
            assert set(rows) <= own[person]


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(("own", "most"), [(5, 1), (5, 2), (6, 3), (4, 3)])
def test_every_choice_is_equally_likely(own: int, most: int, secure: bool) -> None:
    """Chi-square over all subsets; false alarms with probability 1e-6 for each case."""
    records, found = held(2, own), Counter[tuple[int, ...]]()
    randomness = source(secure)
    steps = 4000 if secure else 1500
    for step in range(steps):
        numbers, _ = records.choose(np.array([1]), most=most, source=randomness, step=step)
        found[tuple(sorted(numbers.tolist()))] += 1
    subsets = list(combinations(sorted(records.order[records.starts[1] :].tolist()), most))
    assert set(found) == set(subsets)
    counts = [found[subset] for subset in subsets]
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_choices_of_steps_and_people_are_independent() -> None:
    """Pairs of choices, of two steps and of two people; false alarms with probability 2e-6."""
    records = held(4, 4)
    both = np.array([chosen(records, 1, step) for step in range(4000)])[:, :, 0]
    place = np.array(
        [{n: i % 4 for i, n in enumerate(records.order.tolist())}[n] for n in both.ravel().tolist()]
    )
    first, second = place.reshape(both.shape).T
    for one, other in ((first, second), (first[:-1:2], first[1::2])):
        assert stats.chisquare(np.bincount(4 * one + other, minlength=16)).pvalue > FALSE_ALARM


def test_what_is_chosen_depends_on_own_records_and_own_place_alone() -> None:
    """The same words whoever else is sampled, and however many records others have."""
    many, fewer = held(9, 30, 12), held(9, 0, 12)
    among_all, among_fewer, alone = (
        chosen(many, 4, 7)[2],
        chosen(fewer, 4, 7)[2],
        chosen(many, 4, 7, people=[2])[0],
    )
    assert among_all == alone
    place = {n: i for i, n in enumerate(many.order[many.starts[2] :].tolist())}
    other = {n: i for i, n in enumerate(fewer.order[fewer.starts[2] :].tolist())}
    assert [place[n] for n in among_all] == [other[n] for n in among_fewer]
    assert chosen(many, 4, 8, people=[2])[0] != alone  # fresh at another step


def test_a_batch_of_nobody_and_data_without_records() -> None:
    assert chosen(held(2, 3), 2, 0, people=[]) == [[]]
    assert chosen(held(0, 0), 2, 0) == [[NO_RECORD], [NO_RECORD]]


def test_records_of_strangers_are_refused() -> None:
    for person in (-1, 3):
        with pytest.raises(PdpsgdError, match="from 0 to 2"):
            RecordsOfPeople.of(np.array([0, person]), people=3)
