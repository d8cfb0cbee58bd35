"""Keeping norms changes nothing that a run does, and what is kept is what happened, seen from outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdpsgd.engine.noising import Injecting, Recording, released_by
from pdpsgd.engine.norms import KEPT
from pdpsgd.errors import PdpsgdError
from tests.engine.conftest import budgets_of, make_data, make_plan


def sampled_plan():
    return make_plan(people=(12, 8), rates=(0.4, 0.7), clip_scales=(0.5, 1.0), steps=6, max_grad_norm=0.3)


def everybody_plan(steps=6):
    return make_plan(people=(6, 4), rates=(1.0, 1.0), clip_scales=(0.5, 1.0), steps=steps, max_grad_norm=0.3)


@pytest.mark.parametrize("make", [sampled_plan, everybody_plan])
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 4}])
def test_a_run_that_keeps_norms_releases_what_one_does_that_keeps_none(private, make, options) -> None:
    runs = []
    for keep in (False, True):
        recording = Recording()
        with released_by(recording):
            run = private(plan=make(), keep_norms=keep, **options)
        run.train()
        runs.append((run, recording))
    (without, one), (kept, other) = runs
    assert without.engine.individual_sums is None
    assert kept.engine.individual_sums is not None
    for a, b in zip(one.noised, other.noised, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.noised[a], other.noised[b], strict=True))
    for a, b in zip(without.module.parameters(), kept.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_norms_are_what_a_person_moves_the_sums_by_measured_from_outside(private) -> None:
    plan = everybody_plan()

    def run(release=None, **options):
        recording = Recording() if release is None else Recording(release)
        with released_by(recording):
            made = private(plan=plan, keep_norms=True, **options)
        made.train()
        return made.engine.individual_sums, recording

    sums, recorded = run()
    everybody = np.arange(plan.people)
    deviation = plan.rounds[0].noise_multiplier * plan.max_grad_norm
    for person in (0, 5, 9):
        others = everybody != person
        data = tuple(part[others] for part in make_data(plan.people))
        without, other = run(Injecting(recorded.noised), data=data, record_ids=everybody[others])
        moved = sum(
            float((a - b).square().sum())
            for step in range(plan.steps)
            for a, b in zip(recorded.totals[step], other.totals[step], strict=True)
        )
        kept = sums.squares[person] / 2**40
        assert 0.97 * kept < moved / deviation**2 <= kept
        # On the same releases nobody else's sums notice who is there.
        assert np.array_equal(without.squares[others], sums.squares[others])
        assert without.squares[person] == 0


def test_a_resumed_run_keeps_what_the_whole_one_does(private, tmp_path) -> None:
    plan, path = sampled_plan(), tmp_path / "checkpoint.safetensors"
    whole = private(plan=plan, keep_norms=True)
    whole.train()
    part = private(plan=plan, keep_norms=True)
    for batch in part.loader:
        part.step(*batch)
        if part.engine.steps_taken == 3:
            break
    part.engine.save(path)
    again = private(plan=plan, keep_norms=True)
    again.engine.resume(path)
    again.train()
    for name in KEPT:
        assert np.array_equal(
            getattr(again.engine.individual_sums, name), getattr(whole.engine.individual_sums, name)
        )
    with pytest.raises(PdpsgdError, match="keep_norms"):
        private(plan=plan).engine.resume(path)


def test_a_double_releases_the_steps_that_were_recorded_only(private) -> None:
    recorded = Recording()
    with released_by(recorded):
        private(plan=sampled_plan()).train()
    for step in (0, sampled_plan().steps - 1):
        some = {number: sums for number, sums in recorded.noised.items() if number != step}
        with released_by(Injecting(some)):
            run = private(plan=sampled_plan())
        with pytest.raises(PdpsgdError, match=f"Expected recorded sums for step {step}"):
            run.train()
        run.engine.close()


def test_sums_of_norms_that_do_not_fit_are_not_gone_on_from(private) -> None:
    plan = sampled_plan()
    run = private(plan=plan, keep_norms=True)
    run.train()
    keeper = run.engine._run.norms
    state = {name: value.clone() for name, value in keeper.state().items()}
    keeper.load(state, "the file")
    for name, value in state.items():
        for other in (None, value[:-1], value.float()):
            with pytest.raises(PdpsgdError, match=f"Expected {name}, the sums of norms, in the checkpoint"):
                keeper.load(state | {name: other}, "the file")


def test_a_batch_that_is_not_released_is_not_kept(private) -> None:
    run = private(plan=everybody_plan(), keep_norms=True)
    for batch in run.loader:
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.module(batch[0]), batch[1]).backward()
        break
    assert not run.engine.individual_sums.squares.any()
    run.train()
    assert (run.engine.individual_sums.seen == 6).all()


def test_people_with_many_records_are_kept_as_people(private) -> None:
    plan = everybody_plan()
    whose = np.repeat(np.arange(plan.people), np.arange(plan.people) % 4)
    data = make_data(len(whose))
    run = private(
        plan=plan,
        data=data,
        record_ids=whose,
        records_per_person=2,
        budgets=budgets_of(plan),
        keep_norms=True,
    )
    run.train()
    has_records = np.arange(plan.people) % 4 > 0
    assert ((run.engine.individual_sums.squares > 0) == has_records).all()


def test_a_plan_that_draws_people_once_a_round_is_refused_and_others_are_not(private) -> None:
    drawn = make_plan(people=20, participation=(0.5,))
    with pytest.raises(PdpsgdError, match="samples people at every step"):
        private(plan=drawn, keep_norms=True)
    private(plan=drawn)
    private(plan=make_plan(people=20), keep_norms=True)
