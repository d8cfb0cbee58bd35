"""A collation in which records mix is refused before training, or when it first shows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pdpsgd.errors import PdpsgdError


class Records(Dataset):
    """Rows of 5 numbers with a class; with `lengths`, that many of them."""

    def __init__(self, data, lengths=None):
        self.inputs, self.targets = data
        self.lengths = lengths

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        row = self.inputs[index]
        return (row if self.lengths is None else row[: self.lengths[index]]), self.targets[index]


def stacked(items):
    return torch.stack([row for row, _ in items]), torch.stack([target for _, target in items])


def mixup(items):
    inputs, targets = stacked(items)
    return 0.8 * inputs + 0.2 * inputs[torch.randperm(len(inputs))], targets


def mixup_by_numpy(items):
    inputs, targets = stacked(items)
    return 0.8 * inputs + 0.2 * inputs[np.random.permutation(len(inputs))], targets  # noqa: NPY002


def standardised(items):
    inputs, targets = stacked(items)
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-3), targets


def targets_of_others(items):
    inputs, targets = stacked(items)
    return inputs, targets[list(random.sample(range(len(items)), len(items)))]


def padded_to_the_longest(items):
    rows = nn.utils.rnn.pad_sequence([row for row, _ in items], batch_first=True)
    return rows, torch.stack([target for _, target in items])


def padded_to_five(items):
    rows = torch.stack([nn.functional.pad(row, (0, 5 - len(row))) for row, _ in items])
    return rows, torch.stack([target for _, target in items])


def noisy(items):
    inputs, targets = stacked(items)
    return inputs + 0.1 * torch.randn_like(inputs), targets


def by_first_number(items):
    return stacked(sorted(items, key=lambda item: float(item[0][0])))


def by_class(items):
    return stacked(sorted(items, key=lambda item: int(item[1])))


def backwards(items):
    return stacked(items[::-1])


def shuffled(items):
    return stacked(random.sample(items, len(items)))


@pytest.mark.parametrize("collate", [mixup, mixup_by_numpy, standardised, targets_of_others])
def test_a_collation_that_mixes_records_is_refused(private, helpers, collate):
    state = random.getstate()
    with pytest.raises(PdpsgdError, match="replacing a record changes the rows of others"):
        private(data=DataLoader(Records(helpers.data(40)), collate_fn=collate))
    assert random.getstate() == state


@pytest.mark.parametrize("collate", [by_first_number, by_class, backwards, shuffled])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_collation_that_moves_rows_is_refused_although_all_norms_are_equal(
    private, helpers, collate, is_sorted
):
    """A placeholder has weight 0 and the first record's content: moved, that record would count in every step."""
    inputs, targets = helpers.data(40)
    if is_sorted:
        order = inputs[:, 0].argsort() if collate is by_first_number else targets.argsort(stable=True)
        inputs, targets = inputs[order], targets[order]
    with pytest.raises(PdpsgdError, match=r"the row of its place in the list.*sorts or shuffles"):
        private(data=DataLoader(Records((inputs, targets)), collate_fn=collate))


@pytest.mark.parametrize("collate", [stacked, noisy])
def test_a_collation_that_treats_records_one_by_one_is_kept(private, helpers, collate):
    run = private(data=DataLoader(Records(helpers.data(40)), collate_fn=collate))
    run.train()
    assert run.engine.steps_left == 0


def test_padding_to_the_longest_is_refused_and_to_a_public_length_is_not(private, helpers):
    lengths = [1 + index % 5 for index in range(40)]
    with pytest.raises(PdpsgdError, match="Pad, or cut, every record to one public length"):
        private(data=DataLoader(Records(helpers.data(40), lengths), collate_fn=padded_to_the_longest))
    run = private(data=DataLoader(Records(helpers.data(40), lengths), collate_fn=padded_to_five))
    run.train()
    assert run.engine.steps_left == 0


def test_a_longer_record_that_turns_up_later_ends_the_run(private, helpers):
    # Of 40 records those at 0, 2, 5, 7 ... are looked at beforehand; number 1 is the only long one.
    lengths = [5 if index == 1 else 4 for index in range(40)]
    run = private(
        data=DataLoader(Records(helpers.data(40), lengths), collate_fn=padded_to_the_longest),
        module=helpers.module(features=4),
        plan=helpers.plan(rates=(0.5,), steps=20),
    )
    with pytest.raises(PdpsgdError, match="rows whose shape depends"):
        run.train()
    run.engine.close()


def test_where_no_tensor_has_a_row_a_record_a_warning_says_so(private, helpers):
    def lists(items):
        return [row for row, _ in items], [int(target) for _, target in items]

    with pytest.warns(UserWarning, match="records mix in collate_fn could not be checked"):
        private(data=DataLoader(Records(helpers.data(40)), collate_fn=lists))
