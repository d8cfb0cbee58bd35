"""People with many records, in anybody's loop: chosen, averaged, clipped as a whole, and cut between people."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd.engine.batches import PhysicalBatch
from pdpsgd.engine.layout import Layout
from pdpsgd.engine.noising import Recording, WithoutNoise, released_by
from pdpsgd.engine.observers import StepObserver
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.engine.records import match_many_records
from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.native import dispatch as native
from tests.engine.conftest import Private, Rows, make_data, make_module, make_plan, weights

PEOPLE = 12
COUNTS = np.array([1, 1, 3, 0, 7, 1, 20, 2, 1, 0, 4, 1])
WHOSE = np.repeat(np.arange(PEOPLE), COUNTS)

Make = Callable[..., Private]


class Batches(StepObserver):
    """Keeps the batches that the loop got."""

    def __init__(self) -> None:
        self.seen: list[PhysicalBatch] = []

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        self.seen.append(batch)


def train(run: Private, reduction: str = "sum") -> Tensor:
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        functional.cross_entropy(run.module(inputs), targets, reduction=reduction).backward()
        run.optimizer.step()
    return weights(run.module)


def many(make: Make, **options: Any) -> Private:
    settings: dict[str, Any] = {
        "plan": make_plan(people=PEOPLE, rates=(0.7,), steps=4),
        "data": make_data(len(WHOSE)),
        "record_ids": WHOSE,
        "records_per_person": 4,
        "loss_reduction": "sum",
    }
    return make(**(settings | options))


def mean_gradients(module: nn.Module, data: tuple[Tensor, Tensor], whose: np.ndarray) -> Tensor:
    """Each person's mean gradient by plain autograd, one record at a time."""
    module, rows = copy.deepcopy(module), []
    for inputs, target in zip(*data, strict=True):
        module.zero_grad()
        functional.cross_entropy(module(inputs[None]), target[None]).backward()
        rows.append(torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()]))  # type: ignore[union-attr]
    found = torch.zeros(PEOPLE, len(rows[0]))
    for person in np.unique(whose):
        found[person] = torch.stack([rows[i] for i in np.flatnonzero(whose == person)]).mean(0)
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_sum_is_that_of_peoples_clipped_mean_gradients(private: Make, reduction: str) -> None:
    plan = make_plan(people=PEOPLE, rates=(1.0,), steps=1, max_grad_norm=0.3)
    double = Recording(inner=WithoutNoise())
    with released_by(double):
        run = many(private, plan=plan, records_per_person=20, loss_reduction=reduction)
    wanted = mean_gradients(run.module, make_data(len(WHOSE)), WHOSE)
    limit = 0.3 * (1 - 2**-11 - 2**-10)
    wanted *= (limit / wanted.norm(dim=1).clamp(min=1e-9)).clamp(max=1)[:, None]
    before = weights(run.module)
    after = train(run, reduction)
    assert torch.allclose(torch.cat(double.totals[0]).float(), wanted.sum(0), atol=1e-5)
    # The public divisor is the expected number of people, not of records. (The learning rate is 0.5.)
    assert torch.allclose(before - after, 0.5 * wanted.sum(0) / PEOPLE, atol=1e-5)


@pytest.mark.parametrize("most", [1, 4, 20])
def test_physical_batches_are_cut_between_people_and_change_nothing(private: Make, most: int) -> None:
    batches = Batches()
    cut = many(
        private,
        records_per_person=most,
        max_physical_batch_size=20,
        engine=PrivacyEngine(observers=[batches]),
    )
    whole = many(private, records_per_person=most)
    assert torch.allclose(train(cut), train(whole), atol=1e-6)
    assert all(batch.size <= 20 for batch in batches.seen)
    assert (most == 1) == all(batch.starts is None for batch in batches.seen)
    for batch in batches.seen:
        if batch.starts is not None:
            assert len(batch.clip_norms) == len(batch.starts) - 1
            own = np.split(batch.records, batch.starts[1:-1])
            assert all(len({int(WHOSE[n]) for n in rows if n >= 0}) <= 1 for rows in own)
    steps: dict[int, list[int]] = {batch.step: [] for batch in batches.seen}
    for batch in batches.seen:
        steps[batch.step] += [int(WHOSE[n]) for n in batch.records if n >= 0]
    for people in steps.values():
        assert max(np.bincount(people)) <= most


def physical_batches(private: Make, steps: int, *, rate: float = 0.7, **options: Any) -> list[PhysicalBatch]:
    """What would be yielded at so many steps."""
    run = many(private, plan=make_plan(people=PEOPLE, rates=(rate,), steps=steps), **options)
    return [batch for step in range(steps) for batch in run.engine.execution._sample(step)]


def test_cuts_are_after_a_number_of_people_that_k_alone_decides(private: Make) -> None:
    """With one person more or less, nobody else goes from one physical batch to another, but for the last one."""
    steps: dict[int, list[int]] = {}
    for batch in physical_batches(private, 60, max_physical_batch_size=20):
        steps.setdefault(batch.step, []).append(int((batch.people >= 0).sum()))
    assert len({len(cuts) for cuts in steps.values()}) > 1
    for cuts in steps.values():
        assert set(cuts[:-1]) <= {5}
        assert cuts[-1] <= 5


def test_physical_batches_have_rows_as_the_layout_wants_them(private: Make) -> None:
    run = many(private, max_physical_batch_size=22)  # not a multiple of what rows are a multiple of
    run.engine.execution.layout = Layout(multiple=16, limit=22)
    sizes = {batch.size for step in range(4) for batch in run.engine.execution._sample(step)}
    assert sizes <= {16, 20}  # the largest of them are as many as Layout.at_once


def test_people_stand_in_a_uniform_order(private: Make) -> None:
    """Chi-square of who stands where, as for random permutations; false alarm 1e-6."""
    steps, counts = 3000, np.zeros((PEOPLE, PEOPLE))
    for batch in physical_batches(private, steps, rate=1.0):
        counts[batch.people[batch.people >= 0], np.arange(PEOPLE)] += 1
    statistic = (PEOPLE - 1) / steps * np.square(counts - steps / PEOPLE).sum()
    assert stats.chi2((PEOPLE - 1) ** 2).sf(statistic) > 1e-6


def test_one_record_each_by_k_is_as_it_was_without_k(private: Make) -> None:
    plain = private(loss_reduction="sum")
    one = private(loss_reduction="sum", records_per_person=1)
    alone = train(plain)
    assert torch.equal(alone, train(one))
    several = private(loss_reduction="sum", records_per_person=4)
    assert torch.allclose(train(several), alone, atol=1e-6)


def test_an_ordinary_loop_with_a_mean_loss_is_accepted_without_a_word(private: Make) -> None:
    batches = Batches()
    run = many(private, loss_reduction="mean", engine=PrivacyEngine(observers=[batches]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(run, "mean")
    assert torch.allclose(found, train(many(private)), atol=1e-6)
    # Filled up to a power of two of rows, so that the rows of others do not depend on anybody's number of records.
    assert all(batch.size & (batch.size - 1) == 0 for batch in batches.seen)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_who_is_never_sampled_leaves_no_trace_however_many_records_they_have(
    private: Make, reduction: str
) -> None:
    """Equal by the byte for a key under which the person is not sampled."""
    plan = make_plan(people=PEOPLE, rates=(0.3,), steps=3)
    batches = Batches()
    options: dict[str, Any] = {"plan": plan, "loss_reduction": reduction, "seed": 5}
    everybody = many(private, engine=PrivacyEngine(observers=[batches]), **options)
    found = train(everybody, reduction)
    sampled = {int(WHOSE[n]) for batch in batches.seen for n in batch.records if n >= 0}
    absent = max(set(range(PEOPLE)) - sampled, key=lambda person: COUNTS[person])
    assert COUNTS[absent] > 1
    others = ~np.isin(WHOSE, absent)
    data = tuple(part[torch.from_numpy(others)] for part in make_data(len(WHOSE)))
    assert torch.equal(train(many(private, data=data, record_ids=WHOSE[others], **options), reduction), found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_rows_of_others_are_the_same_whatever_somebody_has(private: Make, reduction: str) -> None:
    """What everybody else adds is the same, up to the rounding of a block's sum that clipping leaves room for."""
    plan = make_plan(people=PEOPLE, rates=(1.0,), steps=1, clip_scales=(1.0,))
    totals = []
    for kept in (COUNTS[6], 1, 0):
        chosen = np.concatenate([np.flatnonzero(WHOSE != 6), np.flatnonzero(WHOSE == 6)[:kept]])
        data = tuple(part[torch.from_numpy(chosen)].clone() for part in make_data(len(WHOSE)))
        data[0][len(chosen) - kept :] = float("nan")  # present, and of no weight
        double = Recording(inner=WithoutNoise())
        with released_by(double):
            run = many(private, plan=plan, data=data, record_ids=WHOSE[chosen], loss_reduction=reduction)
        train(run, reduction)
        totals.append(torch.cat(double.totals[0]))
    # Rows stand elsewhere in a sum over b rows, whose order is the kernel's own: docs/theory.md bounds what that moves.
    rows = len(WHOSE)
    bound = 2 * rows * (rows + 2) * 2**-24
    assert (totals[0] - totals[1]).norm() <= bound
    assert (totals[0] - totals[2]).norm() <= bound


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("power", [26, 40, 50, 60])
def test_records_that_cancel_round_away_nothing_of_others(
    private: Make, power: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added one after the other, 2^50 and its opposite leave no digit of a sum that others are in."""
    if not is_compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    targets, whose = torch.randn(41, 1000), np.r_[0, np.arange(40)]
    sums = []
    for size in (2.0**power, 0.0):
        targets[0], targets[1] = size, -size
        double = Recording(inner=WithoutNoise())
        with released_by(double):
            run = private(
                module=nn.Linear(1, 1000),
                data=(torch.zeros(41, 1), targets),
                plan=make_plan(people=40, rates=(1.0,), steps=1),
                record_ids=whose,
                records_per_person=2,
                loss_reduction="sum",
            )
        nn.init.zeros_(run.module.bias)
        for inputs, wanted in run.loader:
            run.optimizer.zero_grad()
            (run.module(inputs) - wanted).square().sum().backward()
            run.optimizer.step()
        sums.append(torch.cat([total.flatten() for total in double.totals[0]]).double())
    assert float((sums[0] - sums[1]).norm()) < 2.0**-20  # of a clipping norm of 1


def test_any_dataset_and_loader_will_do(private: Make) -> None:
    data = make_data(len(WHOSE))
    loader = torch.utils.data.DataLoader(Rows(data), num_workers=2)
    assert torch.equal(train(many(private, data=loader)), train(many(private)))


def test_repeated_ids_are_refused_with_what_to_write(private: Make) -> None:
    with pytest.raises(PdpsgdError, match=r"one record per person. Got rows 2 and 3, both of 2") as refused:
        many(private, records_per_person=None)
    for remedy in ("records_per_person=", "--records-per-person", "--one-row-per-person"):
        assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records_per_person": 0}, "whole number >= 1"),
        ({"records_per_person": 2.5}, "whole number >= 1"),
        ({"records_per_person": 8, "max_physical_batch_size": 7}, "records_per_person <= 7"),
        (
            {"records_per_person": 5, "max_physical_batch_size": 7, "loss_reduction": "mean"},
            "records_per_person <= 4.*power of two",
        ),
        ({"record_ids": np.where(WHOSE == 2, 77, WHOSE)}, "of 77, who is not"),
    ],
)
def test_what_cannot_be_is_refused(private: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        many(private, **options)


def test_a_collation_that_sorts_is_refused_because_rows_have_owners(private: Make) -> None:
    def by_size(items: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(items)
        order = inputs.abs().sum(1).argsort()
        return inputs[order], targets[order]

    loader = torch.utils.data.DataLoader(Rows(make_data(len(WHOSE))), collate_fn=by_size)
    with pytest.raises(PdpsgdError, match="row of its place"):
        many(private, data=loader)


def test_a_checkpoint_is_resumed_with_the_same_k_and_the_same_records_only(
    private: Make, tmp_path: Any
) -> None:
    whole = train(many(private))
    first = many(private)
    for inputs, targets in first.loader:
        first.optimizer.zero_grad()
        functional.cross_entropy(first.module(inputs), targets, reduction="sum").backward()
        first.optimizer.step()
        if first.engine.steps_taken == 2:
            break
    first.engine.save(tmp_path / "run")
    for changed in ({"records_per_person": 3}, {"record_ids": np.sort(np.roll(WHOSE, 1))[::-1].copy()}):
        with pytest.raises(PdpsgdError):
            many(private, module=make_module(), **changed).engine.resume(tmp_path / "run")
    again = many(private)
    again.engine.resume(tmp_path / "run")
    assert torch.equal(train(again), whole)


def test_records_are_matched_by_any_ids_and_people_may_have_none() -> None:
    found = match_many_records(
        people=3, records=4, ids=np.array(["ann", "bob", "cy"]), record_ids=["cy", "ann", "cy", "cy"]
    )
    assert found.order.tolist() == [1, 0, 2, 3]
    assert found.starts.tolist() == [0, 1, 1, 4]
    by_number = match_many_records(people=3, records=2, record_of_person=[1, -1, 0])
    assert by_number.order.tolist() == [1, 0]
    assert by_number.starts.tolist() == [0, 1, 1, 2]
