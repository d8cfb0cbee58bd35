"""Refuses people to test or calibrate on whose records are trained on, where no ids tell.

Figures on test people are published as they are, without noise, so they must be of other people. Three things tell that
they are not: the same place in memory, the same items of one dataset, and rows that are equal far more often than
chance makes them.

Equal rows alone mean nothing: in a table of few categories most rows have a twin. But if test people and people who are
trained on come from the same population, which of two equal rows is a test person's is a matter of chance. Equal
rows are put in pairs, one pair for each kind of row, and the pairs with one row on either side are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import gammaln
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.engine.batches import reseed, seeded
from pdpsgd.engine.fingerprints import fingerprint_value, is_plain_tensor_dataset
from pdpsgd.errors import fail

CHANCE = 1e-6
"""How probable it may be that others' rows are refused: others who come from the same population."""
SHARE = 0.5
"""The share of the others' records that has to have an equal among those that are trained on."""
FEWEST = 16
"""Equal rows that there must be: nobody's record decides alone whether a run is refused."""
ITEMS = 64  # of a dataset that is no tensor, read to compare
AT_ONCE = 2**16  # rows that are digested together


def check_held_out(
    trained: Any,
    others: Any,
    *,
    purpose: str = "to test on",
    used: IntArray | None = None,
    by_values: bool = True,
) -> None:
    """Refuse other people whose records are trained on.

    Args:
        trained: The records that are trained on: tensors, a dataset, or a loader of one.
        others: Those of other people, in the same form.
        purpose: What the others are for, as it ends a sentence.
        used: The numbers of the records that are trained on, if not all are.
        by_values: Whether to look at records, beside where they are.

    Raises:
        PdpsgdError: Records are the same by their place, or at least half of the others' rows (16 or more) have an
            equal, more than chance explains but once in a million.
    """
    one, other = _tensors_of(trained), _tensors_of(others)
    if one is not None and other is not None:
        if used is None and (both := _same_memory(one[0], other[0])):
            _refuse(both, len(other[0]), "by their place in memory", purpose)
        if by_values and (both := _equal_rows(one, other, used)):
            _refuse(both, len(other[0]), "value by value", purpose)
        return
    if one is None and other is None and used is None:
        if both := _same_items(trained, others):
            _refuse(both, len(_items(others)[1]), "as items of one dataset", purpose)
        if by_values and (both := _equal_items(trained, others)):
            _refuse(
                both, min(ITEMS, len(_items(others)[1])), "value by value, of those that were read", purpose
            )


def _refuse(both: int, number: int, how: str, purpose: str) -> None:
    fail(
        f"Expected other people {purpose}, who are not trained on. Got {both:,} of {number:,} records that are among "
        f"the records trained on, {how}: what is published about them would have no noise. Leave them out of either."
    )


def _tensors_of(data: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors whose rows are the records; None if records are something else."""
    whole: Any = data.dataset if isinstance(data, DataLoader) else data
    if is_plain_tensor_dataset(whole):
        whole = whole.tensors
    if isinstance(whole, Tensor):
        whole = (whole,)
    if isinstance(whole, (tuple, list)) and whole and all(isinstance(part, Tensor) for part in whole):
        return tuple(whole)
    return None


def _same_memory(one: Tensor, other: Tensor) -> int:
    """Count rows that lie at the same place; two parts of one tensor share none."""
    if one.device != other.device or one.dim() == 0 or other.dim() == 0 or not (len(one) and len(other)):
        return 0
    if one.stride(0) == 0 or other.stride(0) == 0:
        return 0  # one row, again and again
    starts = [
        part.data_ptr() + part.element_size() * part.stride(0) * np.arange(len(part)) for part in (one, other)
    ]
    if max(starts[0][0], starts[1][0]) > min(starts[0][-1], starts[1][-1]):
        return 0
    return int(np.isin(starts[1], starts[0]).sum())


# --- rows that are equal ----------------------------------------------------------------------------------


def _equal_rows(one: tuple[Tensor, ...], other: tuple[Tensor, ...], used: IntArray | None) -> int:
    """Count the others' rows that have an equal; 0 where chance explains as many."""
    alike = [part.shape[1:] for part in one] == [part.shape[1:] for part in other]
    if not alike or not len(one[0]) or not len(other[0]):
        return 0
    mine, theirs = row_digests(one), row_digests(other)
    return more_than_chance(mine if used is None else mine[used], theirs)


def more_than_chance(mine: WordArray, theirs: WordArray, *, share: float = SHARE) -> int:
    """Count values of the second that are in the first; 0 if fewer than a share, or if chance explains them.

    Guarantee: if which values are in the first and which in the second was drawn by chance, the count is 0 with
    probability 1 - 2 `CHANCE`. Given the values of both, the places of the second are then a uniform subset. (a) k
    given disjoint pairs all have one place on either side with probability p_k = prod 2 (n-j)(m-j) / ((N-2j)(N-2j-1)),
    j < k; so at least k of D pairs do with probability at most C(D, j) p_j / C(k, j), for every j. (b) Both have every
    value equally often with probability prod C(2c, c) / C(2n, n).
    """
    both = int(np.isin(theirs, mine).sum())
    if both < max(FEWEST, share * len(theirs)):
        return 0
    split, pairs = _split_pairs(mine, theirs)
    chance = min(_chance_of_pairs(split, pairs, len(mine), len(theirs)), _chance_of_same(mine, theirs))
    return both if chance < np.log(CHANCE) else 0


def _split_pairs(mine: WordArray, theirs: WordArray) -> tuple[int, int]:
    """Put two of each kind of value in a pair; return how many pairs have one of either, and how many there are."""
    values = np.concatenate([mine, theirs])
    is_theirs = np.arange(len(values)) >= len(mine)
    shuffled = np.random.default_rng(0).permutation(len(values))  # the same on every rank
    order = shuffled[np.argsort(values[shuffled], kind="stable")]
    values, is_theirs = values[order], is_theirs[order]
    first = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    first = first[np.diff(np.r_[first, len(values)]) > 1]
    return int((is_theirs[first] != is_theirs[first + 1]).sum()), len(first)


def _chance_of_pairs(split: int, pairs: int, n: int, m: int) -> float:
    """Return the logarithm of a bound on the probability of so many split pairs."""
    j = np.arange(min(split, n, m) + 1)
    logs = np.log(2.0) * j + _falling(n, j) + _falling(m, j) - _falling(n + m, 2 * j)
    bounds = logs + _choose(pairs, j) - _choose(split, j)
    return float(min(0.0, bounds.min()))


def _chance_of_same(mine: WordArray, theirs: WordArray) -> float:
    """Return the logarithm of the probability that both have each value equally often, if they do."""
    (values, counts), (others, of_others) = (np.unique(each, return_counts=True) for each in (mine, theirs))
    if not (np.array_equal(values, others) and np.array_equal(counts, of_others)):
        return 0.0
    return float(_choose(2 * counts, counts).sum() - _choose(2 * len(mine), len(mine)))


def _falling(number: int, factors: Any) -> Any:
    return gammaln(number + 1.0) - gammaln(number + 1.0 - factors)


def _choose(number: Any, chosen: Any) -> Any:
    return gammaln(number + 1.0) - gammaln(chosen + 1.0) - gammaln(number - chosen + 1.0)


def row_digests(tensors: tuple[Tensor, ...], *, seed: int = 0) -> WordArray:
    """Return one word for each row: a sum of its words, each times a random number.

    Two rows that differ have the same one with probability 2^-60. The numbers are those of the seed, so the same on
    every rank.
    """
    keys = np.random.default_rng(seed)
    multipliers = [
        keys.integers(0, 2**64, (2, _words(part[:1]).shape[1]), dtype=np.uint64) | np.uint64(1)
        for part in tensors
    ]
    found = np.empty(len(tensors[0]), dtype=np.uint64)
    for start in range(0, len(found), AT_ONCE):
        part = found[start : start + AT_ONCE]
        sums = np.zeros((2, len(part)), dtype=np.uint64)
        for tensor, numbers in zip(tensors, multipliers, strict=True):
            words = _words(tensor[start : start + AT_ONCE])
            sums += np.stack([words @ each for each in numbers])
        part[:] = (sums[0] & np.uint64(0xFFFFFFFF00000000)) | (sums[1] >> np.uint64(32))
    return found


def _words(tensor: Tensor) -> npt.NDArray[np.uint64]:
    """Return the numbers of each row, whatever their type, as words of 32 bits."""
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    rows = tensor.detach().cpu().reshape(len(tensor), -1).to(kind).contiguous().numpy()
    return rows.view(np.uint32).astype(np.uint64)


# --- datasets -------------------------------------------------------------------------------------------


def _items(data: Any) -> tuple[Any, npt.NDArray[Any]]:
    """Return the dataset at the bottom, and which of its items are the records."""
    whole: Any = data.dataset if isinstance(data, DataLoader) else data
    chosen: npt.NDArray[Any] | None = None
    while isinstance(whole, Subset):
        indices = np.asarray(whole.indices)
        chosen = indices if chosen is None else indices[chosen]
        whole = whole.dataset
    try:
        return whole, np.arange(len(whole)) if chosen is None else chosen
    except TypeError:
        return whole, np.arange(0)


def _same_items(one: Any, other: Any) -> int:
    (whole, chosen), (others, of_others) = _items(one), _items(other)
    return int(np.isin(of_others, chosen).sum()) if whole is others else 0


def _equal_items(one: Any, other: Any) -> int:
    """Count items that are equal at the same place of both, of a few; 0 where chance explains as many."""
    (whole, chosen), (others, of_others) = _items(one), _items(other)
    common = min(len(chosen), len(of_others))
    places = np.unique(np.linspace(0, max(common - 1, 0), min(ITEMS, common)).astype(int))
    mine, theirs = (
        np.array([_digest_of_item(data, int(numbers[place])) for place in places], dtype=np.uint64)
        for data, numbers in ((whole, chosen), (others, of_others))
    )
    if int((mine == theirs).sum()) < len(places) * (1 + SHARE) / 2:
        return 0
    return more_than_chance(mine, theirs)


def _digest_of_item(dataset: Any, place: int) -> int:
    """Digest an item, read under a fixed seed so that random augmentation repeats."""
    with seeded(0):
        reseed(0)
        return int(fingerprint_value(dataset[place])[:16], 16)
