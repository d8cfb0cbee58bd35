"""What a run has spent, and what must never be shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import pdpsgd
from pdpsgd.accounting.registry import accountant
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.verification import PromiseBroken


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
    plan = replace(unproven(helpers.plan(), epsilon=1.0), not_for_release="It tells who is in which round.")
    run = private(plan=plan, seed=None)
    assert "not for release" in run.engine.release_note
    assert "who is in which round" in run.engine.release_note


def unproven(plan, *, epsilon):
    return replace(plan, levels=tuple(replace(x, epsilon=epsilon, proven_epsilon=None) for x in plan.levels))


def test_a_plan_without_proof_is_verified_and_refused_if_it_breaks_its_promise(private, helpers):
    with pytest.raises(PromiseBroken, match="Do not train with this plan"):
        private(plan=unproven(helpers.plan(), epsilon=1.0))
    assert private(plan=unproven(helpers.plan(), epsilon=100.0), seed=None).engine.release_note is None


def test_a_plan_changed_after_its_proof_is_verified_and_refused(private):
    made = pdpsgd.plan(Budgets([1.0] * 40), steps=5, batch_size=10)
    assert made.is_proven_here
    private(plan=replace(made, max_grad_norm=0.5))  # nothing that the proof depends on
    quieter = replace(
        made, rounds=tuple(replace(r, noise_multiplier=r.noise_multiplier / 2) for r in made.rounds)
    )
    longer = replace(made, rounds=made.rounds * 2)
    bolder = replace(made, levels=tuple(replace(x, proven_epsilon=0.1) for x in made.levels))
    # Python gives a number and the same times 2^-61 one hash.
    hidden = replace(
        made, rounds=tuple(replace(r, noise_multiplier=r.noise_multiplier * 2.0**-61) for r in made.rounds)
    )
    for changed in (quieter, longer, hidden, bolder, replace(bolder, accountant="gdp")):
        assert not changed.is_proven_here
        with pytest.raises(PromiseBroken):
            private(plan=changed)
    louder = replace(
        made, rounds=tuple(replace(r, noise_multiplier=2 * r.noise_multiplier) for r in made.rounds)
    )
    private(plan=louder)


def test_a_plan_whose_accountant_only_approximates_is_marked_and_its_spending_proven(private, helpers):
    run = private(plan=replace(unproven(helpers.plan(), epsilon=1.0), accountant="gdp"), seed=None)
    assert "Nothing is proven" in run.engine.release_note
    run.train()
    truth = accountant("pld").epsilon(run.plan.history_of(0), 1e-5)
    assert run.engine.spent()[0].epsilon == pytest.approx(truth)


def test_no_message_tells_the_size_of_a_batch(private):
    run = private(plan=None)
    inputs, targets = next(iter(run.loader))
    with pytest.raises(PdpsgdError) as caught:
        run.step(inputs[1:], targets[1:])
    assert not {str(len(inputs)), str(len(inputs) - 1)} & set(re.findall(r"\d+", str(caught.value)))
