"""The same data have the same digest; other data have another."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from pdpsgd.engine.fingerprints import fingerprint_data
from pdpsgd.errors import PdpsgdError

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20)


def test_equal_data_have_equal_digests() -> None:
    assert fingerprint_data(TensorDataset(X, Y)) == fingerprint_data(TensorDataset(X.clone(), Y.clone()))
    assert fingerprint_data((X, Y)) == fingerprint_data(TensorDataset(X, Y))
    assert fingerprint_data(X) == fingerprint_data(X.t().contiguous().t())
    assert fingerprint_data({"x": X.numpy()}) == fingerprint_data({"x": X.numpy().copy()})


def test_any_difference_changes_the_digest() -> None:
    changed = X.clone()
    changed[7, 1] = torch.nextafter(changed[7, 1], torch.tensor(100.0))
    others: list[Any] = [
        (X, Y), (Y, X), (changed, Y), (X[:-1], Y[:-1]), (X.double(), Y), (X.reshape(20, 3, 1), Y),
        (X.flip(0), Y), X, [X], {"x": X}, {"y": X}, X.numpy(), [1, 12], [11, 2], ["11", "2"],
        [], {}, None, [None],
    ]  # fmt: skip
    digests = [fingerprint_data(other) for other in others]
    # A sequence of tensors is told from one tensor, but not a list from a tuple.
    assert len(set(digests)) == len(digests)


def test_without_the_key_a_guess_cannot_be_checked() -> None:
    digests = {fingerprint_data(X, key=key) for key in (b"", bytes(32), b"k" * 32)}
    assert len(digests) == 3


class Items(Dataset[Any]):
    """A map-style dataset, with or without augmentation."""

    def __init__(self, values: torch.Tensor, noise: Any = None) -> None:
        self.values = values
        self.noise = noise

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.values[index] + (self.noise() if self.noise else 0.0), index


def test_a_dataset_is_known_by_its_length_and_all_its_items() -> None:
    original = fingerprint_data(Items(X))
    assert original == fingerprint_data(Items(X.clone()))
    assert original != fingerprint_data(Items(X[:-1]))
    for item in range(len(X)):
        changed = X.clone()
        changed[item] += 1
        assert fingerprint_data(Items(changed)) != original
    long = torch.zeros(1000)
    for item in (0, 1, 437, 998, 999):
        changed = long.clone()
        changed[item] = 1
        assert fingerprint_data(Items(changed)) != fingerprint_data(Items(long))


@pytest.mark.parametrize(
    "noise",
    [lambda: torch.rand(1), lambda: random.random(), lambda: np.random.rand()],  # noqa: NPY002
    ids=["torch", "python", "numpy"],
)
def test_random_augmentation_repeats_and_leaves_the_global_generators_alone(noise: Any) -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    original = fingerprint_data(Items(X, noise))
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    noise()
    assert fingerprint_data(Items(X, noise)) == original
    assert fingerprint_data(Items(X + 1, noise)) != original


def test_items_that_never_repeat_do_not_stop_a_run_from_being_resumed() -> None:
    generator = np.random.default_rng()
    dataset = Items(X, generator.random)
    assert fingerprint_data(dataset) == fingerprint_data(dataset)


def test_data_without_a_length_are_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"Expected tensors, arrays, or a dataset .* Got generator"):
        fingerprint_data(x for x in ())
