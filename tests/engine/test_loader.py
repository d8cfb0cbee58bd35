"""Which batches the loader yields, from which kinds of data, for people with and without a record."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.checks.watch import MOST_BATCHES
from pdpsgd.engine.records import match_records, records_of
from pdpsgd.errors import PdpsgdError


class Rows(Dataset):
    """A map-style dataset whose items are dictionaries."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return {"inputs": self.data[0][index], "targets": self.data[1][index], "name": f"row {index}"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("limit", [None, 16])
def test_batches_made_ready_ahead_are_those_made_one_at_a_time(private, helpers, monkeypatch, limit):
    plan = helpers.plan(steps=(5, 20))  # more than are made ready at once, over two rounds
    seen = []
    for at_once in (None, 1):
        if at_once is not None:
            monkeypatch.setattr("pdpsgd.engine.execution.steps_at_once", lambda expected: 1)
        run = private(plan=plan, max_physical_batch_size=limit)
        batches = run.engine.execution.physical_batches(plan.steps)
        seen.append(
            [(batch.step, batch.records.tolist(), batch.clip_norms.tolist(), batch.seed) for batch in batches]
        )
        if at_once is None:  # from the middle, as a resumed run does
            run.engine.execution.steps_done = 7
            batches = run.engine.execution.physical_batches(plan.steps)
            later = [
                (batch.step, batch.records.tolist(), batch.clip_norms.tolist(), batch.seed)
                for batch in batches
            ]
            assert later == [batch for batch in seen[0] if batch[0] >= 7]
    assert seen[0] == seen[1]
    assert len({step for step, *_ in seen[0]}) == 25


def test_nothing_that_was_made_ready_is_kept_by_a_run_that_has_ended(private):
    run = private()
    next(iter(run.loader))
    assert run.engine.execution._ahead
    run.engine.close()
    assert not run.engine.execution._ahead


def test_a_pass_is_exactly_the_plans_steps(private):
    run = private()
    assert len(run.loader) == 6
    run.train()
    assert len(run.loader) == 0


def test_epochs_end_after_their_steps(private, flat):
    usual, counted = private(), private(steps_per_epoch=4)
    usual.train()
    lengths = []
    for _ in range(2):
        lengths.append(len(counted.loader))
        counted.train()
    lengths.append(len(counted.loader))
    with pytest.warns(UserWarning, match="this pass over the loader is empty"):
        counted.train()
    assert lengths == [4, 2, 0]
    assert torch.equal(flat(counted.module), flat(usual.module))


@pytest.mark.parametrize("kind", ["tuple", "list", "TensorDataset", "DataLoader"])
def test_tensors_are_taken_as_they_come(private, helpers, flat, kind):
    data = helpers.data(40)
    given = {
        "tuple": data,
        "list": list(data),
        "TensorDataset": TensorDataset(*data),
        "DataLoader": DataLoader(TensorDataset(*data), batch_size=7, shuffle=True),
    }[kind]
    usual, run = private(), private(data=given)
    usual.train()
    run.train()
    assert torch.equal(flat(run.module), flat(usual.module))


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_datasets_are_collated_by_the_loader_they_came_with(private, helpers, flat, workers):
    data = helpers.data(40)
    usual = private()
    run = private(data=DataLoader(Rows(data), batch_size=3, num_workers=workers))
    usual.train()
    for batch in run.loader:
        assert all(name.startswith("row ") for name in batch["name"])
        run.step(batch["inputs"], batch["targets"])
    assert torch.equal(flat(run.module), flat(usual.module))


def test_a_dataset_without_a_loader_will_do(private, helpers, flat):
    usual, run = private(), private(data=Rows(helpers.data(40)))
    usual.train()
    for batch in run.loader:
        run.step(batch["inputs"], batch["targets"])
    assert torch.equal(flat(run.module), flat(usual.module))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_batch_of_a_dataset_has_the_right_shapes(private, helpers, workers):
    plan = helpers.plan(people=40, rates=(1e-9,), steps=2)
    run = private(plan=plan, data=DataLoader(Rows(helpers.data(40)), num_workers=workers))
    for batch in run.loader:
        assert batch["inputs"].shape == (0, 5)
        assert batch["targets"].dtype == torch.int64
        assert batch["name"] == []
        run.step(batch["inputs"], batch["targets"])
    assert run.engine.steps_left == 0


def test_a_custom_collation_is_kept(private, helpers):
    def collate(items):
        return torch.stack([item["inputs"] for item in items]) * 2, torch.stack(
            [item["targets"] for item in items]
        )

    run = private(data=DataLoader(Rows(helpers.data(40)), collate_fn=collate))
    for inputs, targets in run.loader:
        run.step(inputs, targets)
    assert run.engine.steps_left == 0


def stacked(items):
    return torch.stack([item["inputs"] for item in items]), torch.stack([item["targets"] for item in items])


def by_first_feature(items):
    return stacked(sorted(items, key=lambda item: float(item["inputs"][0])))


def backwards(items):
    return stacked(items[::-1])


def mixed(items):
    inputs, targets = stacked(items)
    return 0.9 * inputs + 0.1 * inputs[:1], targets


@pytest.mark.parametrize("collate", [by_first_feature, backwards])
@pytest.mark.parametrize("clip_scales", [(0.5, 1.0), (1.0, 1.0)])
def test_a_collation_that_loses_whose_row_is_whose_is_refused(private, helpers, collate, clip_scales):
    data = DataLoader(Rows(helpers.data(40)), collate_fn=collate)
    plan = helpers.plan(people=(20, 20), rates=(0.5, 0.5), clip_scales=clip_scales)
    with pytest.raises(
        PdpsgdError, match="Expected a collate_fn that gives each record the row of its place"
    ):
        private(plan=plan, data=data)


def rows_in_lists(items):
    return [item["inputs"] for item in items], [item["targets"] for item in items]


def noisy(items):
    inputs, targets = stacked(items)
    return inputs + torch.randn_like(inputs), targets


@pytest.mark.parametrize("collate", [rows_in_lists, noisy])
def test_where_norms_differ_it_has_to_be_seen_whose_row_is_whose(private, helpers, collate):
    data = DataLoader(Rows(helpers.data(40)), collate_fn=collate)
    plan = helpers.plan(people=(20, 20), rates=(0.5, 0.5), clip_scales=(0.5, 1.0))
    with pytest.raises(PdpsgdError, match="randomly changes records, or gives no tensor with a row a record"):
        private(plan=plan, data=data)


def test_a_collation_that_keeps_the_order_is_accepted_where_norms_differ(private, helpers):
    data = DataLoader(Rows(helpers.data(40)), collate_fn=stacked)
    run = private(plan=helpers.plan(people=(20, 20), rates=(0.5, 0.5), clip_scales=(0.5, 1.0)), data=data)
    run.train()
    assert run.engine.steps_left == 0


def test_what_a_batch_looks_like_is_known_from_a_record_only(helpers):
    assert [len(part) for part in records_of(helpers.Rows(helpers.data(1))).empty()] == [0, 0]
    with pytest.raises(PdpsgdError, match="Expected at least one record, to know the shapes of a batch"):
        records_of(helpers.Rows(helpers.data(0))).empty()


def test_tensors_of_different_lengths_are_no_records(private, helpers):
    inputs, targets = helpers.data(40)
    with pytest.raises(PdpsgdError, match=r"tensors with the same number of records\. Got \[39, 40\]"):
        private(data=(inputs, targets[:39]))
    assert len(private(data=(inputs, targets)).loader) == 6


def test_a_sampler_that_leaves_records_out_is_refused(private, helpers):
    """They would be trained on all the same, and be tested on afterwards."""
    data = TensorDataset(*helpers.data(40))
    left_out = DataLoader(data, sampler=SubsetRandomSampler(range(30)))
    with pytest.raises(PdpsgdError, match=r"Got SubsetRandomSampler, which leaves some out.*Subset"):
        private(data=left_out)
    some = DataLoader(Subset(data, range(30)), shuffle=True)
    assert len(private(data=some, plan=helpers.plan(people=30)).loader) == 6
    for sampler in (SequentialSampler(data), WeightedRandomSampler([1.0] * 40, 40)):
        assert len(private(data=DataLoader(data, sampler=sampler)).loader) == 6


def test_a_stream_is_refused(private):
    with pytest.raises(PdpsgdError, match=r"read by number.*Got Stream"):
        private(data=DataLoader(Stream()))


def test_records_find_their_people_by_id(private, helpers):
    inputs, targets = helpers.data(2)
    budgets = Budgets([1.0] * 40, ids=[f"person {index}" for index in range(40)])
    run = private(
        plan=helpers.plan(rates=(1.0,)),
        data=(inputs, targets),
        budgets=budgets,
        record_ids=["person 7", "person 3"],
    )
    assert run.engine.record_of_person[7] == 0
    assert run.engine.record_of_person[3] == 1
    assert (run.engine.record_of_person >= 0).sum() == 2


def test_a_record_of_somebody_who_is_not_on_the_list_is_refused(private, helpers):
    budgets = Budgets([1.0] * 40, ids=[f"person {index}" for index in range(40)])
    with pytest.raises(PdpsgdError, match="record 1 of 'stranger', who is not"):
        private(data=helpers.data(2), budgets=budgets, record_ids=["person 7", "stranger"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": 3}, "one record for each of the 4 people"),
        ({"records": 2, "record_ids": [0, 0]}, "one record per person"),
        ({"records": 2, "record_ids": [0]}, "one id for each of the 2 records"),
        ({"records": 2, "record_of_person": [0, 1]}, "for each of the 4 people"),
        ({"records": 2, "record_of_person": [0, 1, 2, -1]}, "from 0 to 1, or -1"),
        ({"records": 2, "record_of_person": [0, 0, 1, -1]}, "a record given to two people"),
        ({"records": 3, "record_of_person": [0, 1, -1, -1]}, "record 2, which is nobody's"),
        ({"records": 2, "record_of_person": [0.0, 1.0, -1.0, -1.0]}, "whole number"),
        ({"records": 2, "record_of_person": [0, 1, -1, -1], "record_ids": [0, 1]}, "not both"),
    ],
)
def test_matching_refuses_what_does_not_fit(options, message):
    with pytest.raises(PdpsgdError, match=message):
        match_records(people=4, **options)


def test_the_plans_own_list_of_people_will_do(private, helpers):
    plan = helpers.plan(people=(15, 25), rates=(0.0, 1.0), steps=1)
    with pytest.warns(UserWarning, match="does not say for whom it was made"):
        known = plan.with_people(helpers.budgets(plan))
    run = private(plan=known, budgets=None)
    next(iter(run.loader))
    assert (run.engine.execution.current.records >= 0).sum() == 25
    with pytest.raises(PdpsgdError, match="which of the plan's 2 levels"):
        private(plan=plan, budgets=None)


def test_masked_record_numbers_are_refused(private):
    numbers = np.ma.masked_array(np.arange(40), mask=np.arange(40) == 3)
    with pytest.raises(PdpsgdError, match="record_of_person without masked values"):
        private(record_of_person=numbers)


def test_a_batch_is_freed_when_the_next_one_comes_without_a_garbage_collection(private, helpers):
    run = private(plan=helpers.plan(steps=20))
    alive = []
    gc.disable()
    try:
        for inputs, targets in run.loader:
            alive.append(weakref.ref(inputs))
            run.step(inputs, targets)
            held = [number for number, batch in enumerate(alive) if batch() is not None]
    finally:
        gc.enable()
    # The first batches are compared with each other, and may be held for as long as that takes.
    assert [number for number in held if number >= MOST_BATCHES] == [19]
