"""The filter on real runs: nobody spends more than B_i, by an outside sum of squares, nor notices others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdpsgd
from pdpsgd.engine import checkpoints
from pdpsgd.engine.execution import Execution
from pdpsgd.engine.noising import Injecting, Recording, released_by
from pdpsgd.engine.spending import SpendingFilter, square_roots
from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plans import Plan
from tests.engine.conftest import budgets_of, make_data, make_module

PEOPLE = (12, 8)
STEPS = 12


def filter_plan(noise: float = 0.3, *, max_grad_norm: float = 0.5, steps: int = STEPS) -> Plan:
    """Little noise, so that most people run out on the way."""
    budgets = pdpsgd.Budgets([1.0] * PEOPLE[0] + [2.0] * PEOPLE[1])
    return pdpsgd.plan(budgets, "pdp-gd-filter", steps=steps, filter_noise=noise, max_grad_norm=max_grad_norm)


def limits_of(plan: Plan) -> np.ndarray:
    limits = plan.rounds[0].spending_limits
    assert limits is not None
    return np.repeat(limits, PEOPLE)


def deviation(plan: Plan) -> float:
    return plan.rounds[0].noise_multiplier * plan.max_grad_norm


def run_of(private: Any, plan: Plan, release: Any, **options: Any) -> tuple[Any, Recording]:
    """Train with these releases; also what was summed up before noise."""
    recording = Recording(release) if release is not None else Recording()
    with released_by(recording):
        run = private(plan=plan, **options)
    run.train()
    return run, recording


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 7}])
def test_what_a_person_moves_the_sums_by_stays_within_their_limit(private, options) -> None:
    """Everything is trained again without the person, on the same releases; sums are compared from outside."""
    plan = filter_plan()
    whole, recorded = run_of(private, plan, None, **options)
    spent, limits = whole.engine.spent_of_people, limits_of(plan)
    assert (spent <= limits).all()
    out = spent > 0.999 * limits
    assert out.sum() > 3, "the noise is too little for everybody to last"
    everybody = np.arange(plan.people)
    for person in (0, 5, 12, 19):
        others = everybody != person
        data = tuple(part[others] for part in make_data(plan.people))
        without, other = run_of(
            private, plan, Injecting(recorded.noised), data=data, record_ids=everybody[others], **options
        )
        moved = sum(
            float(
                sum((a - b).square().sum() for a, b in zip(recorded.totals[t], other.totals[t], strict=True))
            )
            for t in range(STEPS)
        )
        square = moved / deviation(plan) ** 2
        assert square <= spent[person] <= limits[person]
        assert square > 0.98 * spent[person], "charges are what happened, but for margins of rounding"
        # Non-interference: on the same releases nobody else's spending notices who is there, to the bit.
        assert np.array_equal(without.engine.spent_of_people[others], spent[others])
        assert without.engine.spent_of_people[person] == 0


def test_noise_and_divisor_are_the_same_whoever_is_out(private) -> None:
    tight, loose = filter_plan(), filter_plan()
    limits = tuple(limit * 1e-6 for limit in tight.rounds[0].spending_limits)
    tight = replace(tight, rounds=(replace(tight.rounds[0], spending_limits=limits),)).remember_proof()
    noises = []
    for plan in (tight, loose):
        before = make_module()
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
        run, recorded = run_of(private, plan, None, optimizer=optimizer)
        noises.append([recorded.noised[t][0] - recorded.totals[t][0].float() for t in range(STEPS)])
        moved = torch.cat(
            [(a - b).flatten() for a, b in zip(before.parameters(), run.module.parameters(), strict=True)]
        )
        noised = torch.stack([recorded.noised[t][0] for t in range(STEPS)]).sum(0)
        torch.testing.assert_close(moved, noised / plan.people, rtol=1e-4, atol=1e-5)
    for one, other in zip(*noises, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2 * deviation(loose))


def test_whoever_has_spent_their_budget_gives_nothing_more(private) -> None:
    plan = filter_plan(0.05)
    run, recorded = run_of(private, plan, None)
    assert (run.engine.spent_of_people > 0.999 * limits_of(plan)).all()
    assert float(recorded.totals[0][0].norm()) > 0
    assert float(recorded.totals[STEPS - 1][0].norm()) == 0


def test_with_all_the_noise_nobody_is_ever_out_and_the_run_is_that_of_clipping_alone(private) -> None:
    plan = filter_plan(1.0)
    bare = replace(plan, rounds=(replace(plan.rounds[0], spending_limits=None),)).remember_proof()
    filtered, plain = private(plan=plan), private(plan=bare)
    filtered.train()
    plain.train()
    for one, other in zip(filtered.module.parameters(), plain.module.parameters(), strict=True):
        # But for the last step of those who were always clipped: rounding up leaves them a little less.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_resumed_run_spends_what_the_whole_one_does(private, tmp_path) -> None:
    plan, path = filter_plan(), tmp_path / "checkpoint.safetensors"
    whole = private(plan=plan)
    whole.train()
    part = private(plan=plan)
    for batch in part.loader:
        part.step(*batch)
        if part.engine.steps_taken == 5:
            break
    part.engine.save(path)
    again = private(plan=plan)
    again.engine.resume(path)
    assert np.array_equal(again.engine.spent_of_people, part.engine.spent_of_people)
    again.train()
    assert np.array_equal(again.engine.spent_of_people, whole.engine.spent_of_people)


def test_what_nobody_can_have_spent_is_not_gone_on_from(private) -> None:
    spending = SpendingFilter(private(plan=filter_plan()).engine._run.execution, np.repeat([0, 1], PEOPLE))
    for spent, message in (
        (
            torch.zeros(sum(PEOPLE) - 1, dtype=torch.int64),
            r"20 whole numbers of what people have spent\. Got \(19,\)",
        ),
        (torch.zeros(sum(PEOPLE)), r"20 whole numbers of what people have spent"),
        (torch.full((sum(PEOPLE),), -1), "from 0 to their limits"),
        (torch.from_numpy(spending.limits + 1), "from 0 to their limits"),
    ):
        with pytest.raises(PdpsgdError, match=message):
            spending.load(spent)
    spending.load(torch.from_numpy(spending.limits))
    assert np.array_equal(spending.spent, spending.limits)
    spending.settle()


def test_a_checkpoint_without_what_people_have_spent_is_refused(private, tmp_path) -> None:
    path = tmp_path / "checkpoint"
    private(plan=filter_plan()).engine.save(path)
    private(plan=filter_plan()).engine.resume(path)
    saved = checkpoints.load(path)
    tensors = {name: value for name, value in saved.tensors.items() if name != "spent"}
    checkpoints.save(path, tensors, saved.state, saved.key)
    with pytest.raises(PdpsgdError, match="Expected what people have spent in the checkpoint"):
        private(plan=filter_plan()).engine.resume(path)


def test_a_step_that_spends_more_than_a_limit_is_never_counted(private) -> None:
    """The norms that are allowed make it impossible; should they ever not, the run ends."""
    spending = SpendingFilter(private(plan=filter_plan()).engine._run.execution, np.repeat([0, 1], PEOPLE))
    spending._pending = spending.limits.copy()
    spending.settle()
    spending._pending = spending.limits + 1
    with pytest.raises(PdpsgdError, match="nobody to spend more than their limit"):
        spending.settle()
    assert np.array_equal(spending.spent, spending.limits)


def test_a_batch_that_is_not_released_spends_nothing(private) -> None:
    run = private(plan=filter_plan())
    for batch in run.loader:
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.module(batch[0]), batch[1]).backward()
        break  # the pass is given up
    assert not run.engine.spent_of_people.any()
    for _ in run.loader:
        run.engine.forfeit_step()
        break
    assert not run.engine.spent_of_people.any()
    run.train()
    assert run.engine.spent_of_people.any()


def test_a_step_that_is_interrupted_once_it_was_released_is_charged(private, monkeypatch) -> None:
    whole, run, honest = (*(private(plan=filter_plan()) for _ in range(2)), Execution.released)
    whole.step(*next(iter(whole.loader)))

    def interrupted(execution: Execution) -> None:
        honest(execution)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Execution, "released", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step(*next(iter(run.loader)))
    assert run.engine.steps_taken == 1
    next(iter(run.loader))  # begins the next step
    assert np.array_equal(run.engine.spent_of_people, whole.engine.spent_of_people)


def test_people_with_many_records_spend_as_people(private) -> None:
    plan = filter_plan()
    whose = np.repeat(np.arange(plan.people), np.arange(plan.people) % 4)
    run = private(
        plan=plan,
        data=make_data(len(whose)),
        record_ids=whose,
        records_per_person=2,
        budgets=budgets_of(plan),
    )
    run.train()
    spent = run.engine.spent_of_people
    assert (spent <= limits_of(plan)).all()
    assert (spent[np.arange(plan.people) % 4 == 0] == 0).all()
    assert (spent[np.arange(plan.people) % 4 > 0] > 0).all()


def test_a_filter_needs_everybody_in_every_step_and_one_round(private) -> None:
    plan = filter_plan()
    (r,) = plan.rounds
    with pytest.raises(PdpsgdError, match=r"sample_rates\[0\] of 0 or 1 with spending_limits.*Got 0\.5"):
        replace(plan, rounds=(replace(r, sample_rates=(0.5, 1.0), expected_batch_size=14.0),))
    with pytest.raises(PdpsgdError, match="at most one round"):
        replace(plan, rounds=(r, r))
    with pytest.raises(PdpsgdError, match=r"spending_limits\[0\] from 0 to 2\^20. Got -1"):
        replace(plan, rounds=(replace(r, spending_limits=(-1.0, 0.0)),))


@given(st.lists(st.integers(0, 2**61), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_square_roots_are_exact(numbers: list[int]) -> None:
    assert square_roots(np.array(numbers)).tolist() == [math.isqrt(number) for number in numbers]
