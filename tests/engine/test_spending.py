"""What a run has spent, and what must never be shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pdpsgd.accounting import accountant
from pdpsgd.errors import PdpsgdError


def test_nothing_is_spent_before_the_first_step(private):
    assert [spent.epsilon for spent in private().engine.spent()] == [0.0]


def test_spending_is_that_of_the_steps_taken(private, helpers):
    plan = helpers.plan(people=(20, 20), rates=(0.1, 0.3), steps=(4, 4))
    run = private(plan=plan)
    for batch in run.loader:
        run.step(*batch)
        if run.engine.steps_taken == 6:
            break
    spent = run.engine.spent()
    account = accountant("pld")
    for level in range(2):
        history = plan.prefix(6).history_of(level)
        assert sum(exposure.steps for exposure in history) == 6
        assert spent[level].epsilon == pytest.approx(account.epsilon(history, 1e-5))
        assert spent[level].delta == 1e-5
    assert spent[0].epsilon < spent[1].epsilon


def test_at_the_end_the_whole_plan_is_spent(private, helpers):
    plan = helpers.plan(people=(20, 20), rates=(0.1, 0.3), steps=5)
    run = private(plan=plan)
    run.train()
    account = accountant("pld")
    assert [s.epsilon for s in run.engine.spent()] == pytest.approx(
        [account.epsilon(plan.history_of(level), 1e-5) for level in range(2)]
    )


def test_a_forfeited_step_is_spent(private):
    run = private()
    next(iter(run.loader))
    before = run.engine.spent()[0].epsilon
    run.engine.forfeit_step()
    assert run.engine.spent()[0].epsilon > before


def test_a_plan_that_tells_who_was_drawn_is_marked(private, helpers):
    plan = replace(helpers.plan(), bookkeeping="as-published")
    run = private(plan=plan, seed=None)
    assert "not for release" in run.engine.release_note
    assert "as-published" in run.engine.release_note


def test_no_message_tells_the_size_of_a_batch(private):
    run = private(plan=None)
    inputs, targets = next(iter(run.loader))
    with pytest.raises(PdpsgdError) as caught:
        run.step(inputs[1:], targets[1:])
    assert not {str(len(inputs)), str(len(inputs) - 1)} & set(re.findall(r"\d+", str(caught.value)))
