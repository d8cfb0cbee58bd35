"""Whose record is which, and records by number: the private data as training sees it.

People are known by their place on the public list, records by their place in the data. A person has one record, none,
or, with `records_per_person`, any number. Somebody without a record is sampled like anyone and has a row like anyone: a
placeholder (the first record, whose weight is 0 there), so that the rows of a batch tell nothing of who supplied one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from pdpsgd._typing import IdArray, IntArray
from pdpsgd.engine.batches import Batch, reseed, seeded
from pdpsgd.engine.fingerprints import fingerprint_data, is_plain_tensor_dataset
from pdpsgd.errors import fail
from pdpsgd.sampling.record_choice import HOW_TO_HAVE_MANY, NO_RECORD, RecordsOfPeople

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pdpsgd.engine.batches import PhysicalBatch


class Shapes(Protocol):
    """What the rows of a batch must look like."""

    def check(self, batch: Batch) -> None:
        """Refuse a batch whose rows look otherwise."""


class Records(Protocol):
    """The supplied records, and how to put some of them together as a batch."""

    def fingerprint(self, key: bytes) -> str:
        """Digest the data, with a key."""

    def __len__(self) -> int:
        """Return how many records there are (sensitive: people may have supplied none)."""

    def example(self) -> Batch:
        """Return a batch of one record, to know its shapes; None if there is no record."""

    def batches(self, batches: Iterable[PhysicalBatch]) -> Iterator[tuple[PhysicalBatch, Batch]]:
        """Yield each physical batch with its records put together, in order."""


def records_of(data: DataLoader[Any] | Dataset[Any] | Sequence[Tensor] | Tensor) -> Records:
    """Take records from a data loader, a map-style dataset, or tensors whose first dimension counts records.

    Tensors (also inside a `TensorDataset` with the default collation) are indexed directly: no loop over
    items. A subclass may give other items than its tensors' rows, so its items are read one by one.
    """
    if isinstance(data, Tensor):
        return TensorRecords((data,))
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        return TensorRecords(tuple(data))
    loader = data if isinstance(data, DataLoader) else None
    dataset: Any = data if loader is None else loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        fail(
            "Expected data whose records can be read by number: a map-style Dataset, a DataLoader over one, "
            f"or tensors. Got {type(dataset).__name__}."
        )
    if loader is not None:
        _check_takes_all(loader)
    plain = loader is None or (loader.collate_fn is default_collate and not loader.pin_memory)
    if plain and is_plain_tensor_dataset(dataset):
        return TensorRecords(dataset.tensors)
    return DatasetRecords(dataset, loader)


def _check_takes_all(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose sampler leaves records out: who is in a batch is the plan's business, of all records."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) or loader.batch_sampler is None:
        return  # ranks are told apart by the engine; without batches there is nothing to choose from
    try:
        fewer = len(sampler) < len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return
    if fewer:
        fail(
            f"Expected a loader of all records of its dataset, as the plan samples people among all of them. Got "
            f"{type(sampler).__name__}, which leaves some out: give the records to train on as a dataset of their own, "
            "torch.utils.data.Subset(dataset, indices)."
        )


def match_records(
    *,
    people: int,
    records: int,
    ids: IdArray | None = None,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
) -> IntArray:
    """Return the number of each person's record, -1 for those who supplied none.

    By default person i of the list has record i. `record_of_person` gives the numbers outright; `record_ids`
    names, for each record, the person on the list (`ids`) whose record it is.

    >>> match_records(people=3, records=2, ids=np.array(["ann", "bob", "cy"]), record_ids=["cy", "ann"])
    array([ 1, -1,  0])
    """
    named = _checked_names(record_ids, record_of_person)
    if named is not None:
        return _one_each(people, _persons_of_records(people, records, ids, named), named)
    if record_of_person is None:
        if records != people:
            fail(
                f"Expected one record for each of the {people} people on the list, in the list's order. Got "
                f"{records} records. Name each record's person (record_ids), or give each person's record "
                "number, -1 for none (record_of_person)."
            )
        return np.arange(people, dtype=np.int64)
    return _check_record_of_person(people, records, np.asarray(record_of_person))


def match_many_records(
    *,
    people: int,
    records: int,
    ids: IdArray | None = None,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
) -> RecordsOfPeople:
    """Return everybody's records, of whom some may have many and some none; given as for `match_records`.

    >>> found = match_many_records(people=3, records=3, record_ids=[2, 0, 2])
    >>> found.order.tolist(), found.starts.tolist()
    ([1, 0, 2], [0, 1, 1, 3])
    """
    named = _checked_names(record_ids, record_of_person)
    if named is not None:
        return RecordsOfPeople.of(_persons_of_records(people, records, ids, named), people=people)
    numbers = match_records(people=people, records=records, record_of_person=record_of_person)
    persons = np.empty(records, dtype=np.int64)
    supplied = np.flatnonzero(numbers != NO_RECORD)
    persons[numbers[supplied]] = supplied
    return RecordsOfPeople.of(persons, people=people)


def _checked_names(record_ids: ArrayLike | None, record_of_person: ArrayLike | None) -> IdArray | None:
    """Return the ids of records as an array, or None where whose they are is said otherwise."""
    for name, given in (("record_ids", record_ids), ("record_of_person", record_of_person)):
        if np.ma.is_masked(given):
            fail(
                f"Expected {name} without masked values: what is under a mask is not known. Got a masked array."
            )
    if record_ids is not None and record_of_person is not None:
        fail("Expected record_ids or record_of_person, not both.")
    if isinstance(record_ids, (KeysView, ValuesView)):
        record_ids = list(record_ids)
    return None if record_ids is None else np.asarray(record_ids)


class TensorRecords:
    """Records that lie in tensors already: a batch is one gather per tensor."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        sizes = {len(tensor) for tensor in tensors}
        if len(sizes) != 1:
            fail(f"Expected tensors with the same number of records. Got {sorted(sizes)}.")
        self.tensors = tensors
        self._fingerprint = cache(partial(_fingerprint, tensors))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def fingerprint(self, key: bytes) -> str:
        """Digest all tensors, with a key."""
        return self._fingerprint(key)

    def example(self) -> Batch:
        """Return a batch of one record; None if there is no record."""
        return [part[:1] for part in self.tensors] if len(self) else None

    def batches(self, batches: Iterable[PhysicalBatch]) -> Iterator[tuple[PhysicalBatch, Batch]]:
        """Yield each batch with its records as a list of tensors."""
        for batch in batches:
            numbers = torch.from_numpy(np.maximum(batch.records, 0))
            if len(self):
                yield batch, [part.index_select(0, numbers.to(part.device)) for part in self.tensors]
            else:
                yield batch, [part.new_zeros(batch.size, *part.shape[1:]) for part in self.tensors]


class DatasetRecords:
    """Records fetched one by one from a map-style dataset and collated, by workers if there are any."""

    def __init__(self, dataset: Dataset[Any], loader: DataLoader[Any] | None) -> None:
        self.dataset = dataset
        self.loader = loader
        self.shapes: Shapes | None = (
            None  # what rows must look like, where a collation of the user's makes them
        )
        self._empty: Batch = None
        self._fingerprint = cache(partial(_fingerprint, dataset))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def fingerprint(self, key: bytes) -> str:
        """Digest all items, with a key."""
        return self._fingerprint(key)

    def batches(self, batches: Iterable[PhysicalBatch]) -> Iterator[tuple[PhysicalBatch, Batch]]:
        """Yield each batch with its records collated; workers fetch ahead (sampling needs no training)."""
        fetched: deque[PhysicalBatch] = deque()
        for examples in self._torch_loader(_seeds_and_numbers(batches, fetched)):
            batch = fetched.popleft()
            if len(batch.records) == 0:
                yield batch, self.empty()
                continue
            if self.shapes is not None:
                self.shapes.check(examples)
            yield batch, examples

    def example(self) -> Batch:
        """Return a batch of one record; None if there is no record."""
        return self.collate(self.some_items(1)[:1]) if len(self) else None

    def empty(self) -> Batch:
        """Return a batch of no records, with the shapes and types of any other."""
        if self._empty is None:
            if len(self) == 0:
                fail("Expected at least one record, to know the shapes of a batch. Got none.")
            self._empty = _first_none(self.collate([self.dataset[0]]))
        return self._empty

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """What puts items together as a batch."""
        return default_collate if self.loader is None else self.loader.collate_fn

    def some_items(self, most: int) -> list[Any]:
        """Read up to `most` items, spread over the data, under a fixed seed."""
        numbers = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        return _SeededItems(self.dataset).__getitems__([0, *numbers.tolist()])

    def _torch_loader(self, numbers: Iterable[list[int | None]]) -> Iterable[Batch]:
        loader, items = self.loader, _SeededItems(self.dataset)
        collate = _CollateUnlessEmpty(self.collate)
        if loader is None or loader.num_workers == 0:
            return (collate(items.__getitems__(some)) for some in numbers)
        return DataLoader(
            items,
            batch_sampler=numbers,
            collate_fn=collate,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )


class _SeededItems(Dataset[Any]):
    """Items of a dataset, each read under a seed of its step and row, so that random augmentation repeats.

    What a record does with random numbers changes nothing for the others.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, seed_and_numbers: list[int | None]) -> _ItemsOfStep:
        seed, *numbers = seed_and_numbers
        items = _ItemsOfStep()
        if seed is None or not numbers:
            items.extend(self._item(number) for number in numbers)
            return items
        items.seed = seed ^ _FOR_COLLATION
        with seeded(seed):
            for row, number in enumerate(numbers):
                reseed(seed + row)
                items.append(self._item(number))
        return items

    def _item(self, number: int | None) -> Any:
        return self.dataset[0 if number is None or number == NO_RECORD else number]


_FOR_COLLATION = 0x636F6C6C617465  # the seed of a step's collation is none of its rows' seeds


class _ItemsOfStep(list[Any]):
    """Items with the seed that they are collated under, so that a random collation repeats, too."""

    seed: int | None = None


class _CollateUnlessEmpty:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> Any:
        if not items:
            return []
        seed = getattr(items, "seed", None)
        with seeded(seed) if seed is not None and self.collate is not default_collate else nullcontext():
            return self.collate(list(items))


def _seeds_and_numbers(
    batches: Iterable[PhysicalBatch], fetched: deque[PhysicalBatch]
) -> Iterator[list[int | None]]:
    for batch in batches:
        fetched.append(batch)
        yield [batch.seed, *batch.records.tolist()]


def _fingerprint(data: Any, key: bytes) -> str:
    return fingerprint_data(data, key=key)


def _first_none(batch: Any) -> Any:
    """Take no rows of everything in a collated batch."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _first_none(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_first_none, batch))
    if isinstance(batch, (list, tuple)) and not all(isinstance(part, str) for part in batch):
        return type(batch)(map(_first_none, batch))
    return batch[:0]


def _persons_of_records(people: int, records: int, ids: IdArray | None, record_ids: IdArray) -> IntArray:
    """Return the place on the list of each record's person."""
    if len(record_ids) != records:
        fail(f"Expected one id for each of the {records} records. Got {len(record_ids)}.")
    names = np.arange(people) if ids is None else np.asarray(ids)
    if names.dtype.kind == record_ids.dtype.kind and names.dtype.kind in "iuU":
        result = _places_of(record_ids, names)
        if result is not None:
            return result
    person_of_id = {name: person for person, name in enumerate(names.tolist())}
    result = np.empty(records, dtype=np.int64)
    for record, name in enumerate(record_ids.tolist()):
        person = person_of_id.get(name)
        if person is None:
            fail(
                f"Expected every record's person to be on the list. Got record {record} of {name!r}, who is "
                "not."
            )
        result[record] = person
    return result


def _places_of(wanted: IdArray, names: IdArray) -> IntArray | None:
    """Look up millions of ids without an object for each; None if one is not there."""
    if names.shape == wanted.shape and (names == wanted).all():
        return np.arange(names.size, dtype=np.int64)
    order = np.argsort(names, kind="stable")
    places = np.minimum(np.searchsorted(names, wanted, sorter=order), names.size - 1)
    found = order[places]
    return found if (names[found] == wanted).all() else None


def _one_each(people: int, persons: IntArray, record_ids: IdArray) -> IntArray:
    """Turn the person of each record into the record of each person, who must not have two."""
    result = np.full(people, NO_RECORD, dtype=np.int64)
    if not persons.size or np.bincount(persons, minlength=people).max() == 1:
        result[persons] = np.arange(persons.size)
        return result
    for record, person in enumerate(persons.tolist()):
        if result[person] != NO_RECORD:
            fail(
                f"Expected one record per person. Got rows {result[person]} and {record}, both of "
                f"{record_ids.tolist()[record]!r}. {HOW_TO_HAVE_MANY}"
            )
        result[person] = record
    return result


def _check_record_of_person(people: int, records: int, numbers: IntArray) -> IntArray:
    if numbers.shape != (people,) or numbers.dtype.kind not in "iu":
        fail(
            f"Expected record_of_person to have one whole number for each of the {people} people. "
            f"Got shape {numbers.shape}, type {numbers.dtype}."
        )
    numbers = numbers.astype(np.int64)
    supplied = numbers[numbers != NO_RECORD]
    if supplied.size and (supplied.min() < 0 or supplied.max() >= records):
        wrong = supplied[(supplied < 0) | (supplied >= records)][0]
        fail(f"Expected record numbers from 0 to {records - 1}, or -1 for none. Got {wrong}.")
    if np.unique(supplied).size != supplied.size:
        fail("Expected one record a person and one person a record. Got a record given to two people.")
    if supplied.size != records:
        missing = np.setdiff1d(np.arange(records), supplied)[0]
        fail(f"Expected every record's person to be on the list. Got record {missing}, which is nobody's.")
    return numbers
