"""Test people who are trained on are found without ids; others are taken without a word, however alike they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pdpsgd.engine.checks.held_out import CHANCE, _chance_of_pairs, check_held_out
from pdpsgd.errors import PdpsgdError


def people(number, kinds=None, seed=0):
    """Rows of numbers that nobody shares, or of few kinds, most of which have twins."""
    generator = torch.Generator().manual_seed(seed)
    if kinds is None:
        inputs = torch.randn(number, 4, generator=generator)
    else:
        inputs = torch.randint(0, kinds, (number, 3), generator=generator).float()
    return inputs, torch.randint(0, 2, (number,), generator=generator)


def part(data, rows):
    return tuple(each[rows] for each in data)


def copied(data):
    return tuple(each.clone() for each in data)


class Pictures(Dataset):
    """Items that are made when they are asked for."""

    def __init__(self, number, seed=0):
        self.number, self.seed = number, seed

    def __len__(self):
        return self.number

    def __getitem__(self, place):
        if place >= self.number:
            raise IndexError(place)
        return torch.randn(3, generator=torch.Generator().manual_seed(1000 * self.seed + place)), place % 2


ALL = people(400)
TRAINED_ON = {
    "the same tensors": (ALL, ALL),
    "one row of overlap in memory": (part(ALL, slice(0, 301)), part(ALL, slice(300, 400))),
    "a copy": (ALL, copied(ALL)),
    "a copy in another precision": (ALL, (ALL[0].double(), ALL[1].int())),
    "some of the records, in another order": (ALL, part(ALL, torch.arange(80, 20, -1))),
    "half of them are new": (ALL, tuple(map(torch.cat, zip(part(ALL, slice(50)), people(50, seed=1), strict=True)))),
    "a copy of a table of few kinds": (people(1000, 3), copied(people(1000, 3))),
    "a loader of the same tensors": (DataLoader(TensorDataset(*ALL)), ALL),
    "one dataset": (DataLoader(pictures := Pictures(90)), pictures),
    "parts of one dataset that overlap": (Subset(pictures, range(50)), Subset(pictures, range(49, 90))),
    "two datasets of the same items": (Pictures(90), Pictures(60)),
}  # fmt: skip
OTHERS = {
    "other rows": (ALL, people(400, seed=1)),
    "two parts of one tensor": (part(ALL, slice(0, 300)), part(ALL, slice(300, 400))),
    "every other row of one tensor": (part(ALL, slice(0, None, 2)), part(ALL, slice(1, None, 2))),
    "a row again and again": ((torch.ones(1, 3).expand(50, 3), torch.zeros(50)),) * 2,
    "rows that are all alike": tuple((torch.ones(n, 3), torch.zeros(n)) for n in (50, 20)),
    "a few that are trained on, too few to tell": (ALL, part(ALL, torch.arange(15))),
    "a few twins": (ALL, tuple(map(torch.cat, zip(part(ALL, slice(9)), people(50, seed=1), strict=True)))),
    "another shape": (ALL, (torch.zeros(50, 7), torch.zeros(50))),
    "nobody": (ALL, part(ALL, slice(0, 0))),
    "parts of one dataset": (Subset(pictures, range(50)), Subset(pictures, range(50, 90))),
    "other items": (Pictures(90), Pictures(90, seed=1)),
    "a dataset and tensors": (pictures, ALL),
}


@pytest.mark.parametrize("name", TRAINED_ON)
def test_records_that_are_trained_on_are_refused(name):
    with pytest.raises(PdpsgdError, match="Expected other people to calibrate on, who are not trained on"):
        check_held_out(*TRAINED_ON[name], purpose="to calibrate on")


@pytest.mark.parametrize("name", OTHERS)
def test_other_people_are_taken_without_a_word(name):
    check_held_out(*OTHERS[name])


def test_records_that_nobody_on_the_list_has_may_be_tested_on():
    tested = part(ALL, slice(300, 400))
    check_held_out(ALL, copied(tested), used=np.arange(300))
    check_held_out(ALL, tested, used=np.arange(300))
    with pytest.raises(PdpsgdError, match="100 of 100 records"):
        check_held_out(ALL, tested, used=np.arange(400))


@pytest.mark.parametrize("kinds", [1, 2, 4, 8, 16])
def test_tables_of_few_kinds_of_rows_are_taken_however_many_twins_there_are(kinds):
    """40 draws for each; by the guarantee one of all 200 is refused with probability 4e-4 at most."""
    for seed in range(40):
        drawn = people(900, kinds, seed=seed)
        check_held_out(part(drawn, slice(0, 600)), copied(part(drawn, slice(600, 900))))


def test_the_bound_on_chance_is_above_what_chance_does():
    """Places of the test rows are drawn; 20,000 times, so that three standard deviations are below 0.011."""
    random, n, m, pairs = np.random.default_rng(0), 30, 20, 12
    drawn = np.argsort(random.random((20_000, n + m)), axis=1) < m
    split = (drawn[:, : 2 * pairs : 2] != drawn[:, 1 : 2 * pairs : 2]).sum(1)
    for least in range(pairs + 1):
        assert (split >= least).mean() <= np.exp(_chance_of_pairs(least, pairs, n, m)) + 0.011
    assert np.exp(_chance_of_pairs(40, 40, 200, 200)) < CHANCE < np.exp(_chance_of_pairs(15, 15, 200, 200))
