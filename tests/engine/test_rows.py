"""Whoever is sampled has a row in the batch: for the same key, rows do not tell who supplied a record."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pdpsgd.engine.noising import Recording, WithoutNoise, released_by
from pdpsgd.engine.privacy_engine import PrivacyEngine
from tests.engine.conftest import Rows, make_data, make_plan

PEOPLE = 40
MISSING = 3


class Augmented(Rows):
    """Draws as many random numbers for a record as the record says."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        extra = int(inputs.abs().sum() * 10) % 7
        return inputs + 0.1 * torch.rand(1 + extra)[0] + 0.1 * np.random.rand(1 + extra)[0], target  # noqa: NPY002


def without(missing, *, people=PEOPLE):
    """The data without some people's records, and everybody's number."""
    inputs, targets = make_data(people)
    kept = np.setdiff1d(np.arange(people), missing)
    numbers = np.full(people, -1)
    numbers[kept] = np.arange(len(kept))
    return (inputs[kept], targets[kept]), numbers


KINDS = {
    "tensors": lambda data: data,
    "tensor dataset": lambda data: TensorDataset(*data),
    "dataset": Rows,
    "augmented dataset": Augmented,
    "loader": lambda data: DataLoader(Rows(data), batch_size=4),
    "loader with workers": lambda data: DataLoader(Rows(data), num_workers=1),
}


def sums(private, data, numbers, **options):
    """Batches, and clipped sums without noise, of a run in which the model stays as it is."""
    double = Recording(inner=WithoutNoise())
    with released_by(double):
        run = private(
            plan=options.pop("plan", None) or make_plan(steps=3),
            data=data,
            record_of_person=numbers,
            optimizer=partial(torch.optim.SGD, lr=0.0),
            **options,
        )
    batches = []
    for batch in run.loader:
        batches.append([part.clone() for part in batch])
        run.step(*batch)
    return batches, [torch.cat([part.reshape(-1) for part in double.totals[step]]) for step in range(3)]


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_a_record_batches_have_the_same_rows(private, kind, limit):
    """The others' rows are equal by bit, and the sums differ by at most the clipping norm, where they may."""
    found = {}
    for missing in ([], [MISSING]):
        data, numbers = without(missing)
        found[len(missing)] = sums(private, KINDS[kind](data), numbers, max_physical_batch_size=limit)
    (full, with_record), (fewer, without_record) = found[0], found[1]
    assert len(full) == len(fewer)
    for whole, other in zip(full, fewer, strict=True):
        assert [part.shape for part in whole] == [part.shape for part in other]
        differing = (whole[0] != other[0]).any(1)
        assert differing.sum() <= 1
    distances = [float((a - b).norm()) for a, b in zip(with_record, without_record, strict=True)]
    assert max(distances) <= 1.0
    assert sum(distance > 0.1 for distance in distances) in (1, 2)  # sampled in some of the three steps


def test_with_everybody_sampled_the_sum_is_that_of_the_supplied_records(private):
    data, numbers = without(range(10, PEOPLE))
    everybody = make_plan(rates=(1.0,), steps=3)
    batches, totals = sums(private, data, numbers, plan=everybody)
    assert all(len(inputs) >= PEOPLE for inputs, _ in batches)
    ten = make_plan(people=10, rates=(1.0,), steps=3)
    _, expected = sums(private, data, np.arange(10), plan=ten)
    for total, other in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, other, rtol=0, atol=1e-6)


def test_where_nobody_supplied_a_record_the_sum_is_exactly_zero(private):
    data, numbers = without(range(PEOPLE))
    batches, totals = sums(private, data, numbers)
    assert all(len(inputs) > 0 for inputs, _ in batches)
    assert all(bool((total == 0).all()) for total in totals)


def test_a_placeholder_with_a_gradient_that_is_not_finite_adds_nothing(private):
    data, numbers = without([MISSING])
    data[0][0] = float("nan")  # the record that stands in for the missing one, and somebody's own
    _, totals = sums(private, data, numbers, engine=PrivacyEngine(watch_loop=False))
    assert all(bool(total.isfinite().all()) for total in totals)


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_whether_others_supplied_a_record_does_not_change_who_is_sampled(private, kind):
    inputs, _ = make_data(PEOPLE)
    data, numbers = without([3, 30])
    full, partly = private(), private(data=KINDS[kind](data), record_of_person=numbers)
    for whole, fewer in zip(full.loader, partly.loader, strict=True):
        missing = (whole[0][:, None] == inputs[[3, 30]]).all(2).any(1)
        assert torch.equal(whole[0][~missing], fewer[0][~missing])
        assert torch.equal(whole[1][~missing], fewer[1][~missing])
        full.step(*whole)
        partly.step(*fewer)


def test_the_result_of_a_double_is_not_for_release(private):
    with released_by(WithoutNoise()):
        run = private(seed=None)
    run.train()
    assert "left out" in run.engine.release_note
    assert private(seed=None).engine.release_note is None


class Sorted(nn.Module):
    """Needs at least one positive input, as a sequence needs a length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs):
        if not bool((inputs.abs().sum(1) > 0).all()):
            raise ValueError("an empty record")
        return self.linear(inputs)


def test_a_placeholder_looks_like_a_record_to_the_model(private):
    data, numbers = without([MISSING])
    run = private(data=data, record_of_person=numbers, module=Sorted())
    run.train()
    assert run.engine.steps_left == 0


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20], ids=["tiny", "one", "huge"])
def test_integer_sums_are_as_fine_as_the_largest_clipping_norm_of_the_round(scale, private):
    # In units of the plan's own norm, the sum of people who are clipped far below it would be off by more than
    # their margin, 2^-10 of what they are clipped to.
    plan = make_plan(people=1, rates=(1.0,), steps=1, clip_scales=(scale,), max_grad_norm=0.5)
    data = make_data(1, features=5_000)
    module = nn.Linear(5_000, 3)
    loss = nn.functional.cross_entropy(module(data[0]), data[1]) * 2**24
    exact = torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(module.parameters()))])
    double = Recording(inner=WithoutNoise())
    with released_by(double):
        run = private(plan=plan, module=module, data=data)
    for inputs, targets in run.loader:
        (nn.functional.cross_entropy(run.module(inputs), targets) * 2**24).backward()
        run.optimizer.step()
    total = torch.cat([part.flatten() for part in double.totals[0]])
    limit = scale * 0.5
    assert total.norm() <= limit
    assert (total - exact * (total.norm() / exact.norm())).norm() <= 2**-12 * limit
