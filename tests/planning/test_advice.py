"""Advice before anything is spent: the signal of plans, and rules that follow from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.planning.advice import advise, choose_setting, doubt_about_rate, outlook, rate_for
from pdpsgd.planning.signal import signal, signal_efficiency

TIERS = {0.5: 0.3, 2.0: 0.5, 8.0: 0.2}


@pytest.mark.parametrize(
    ("people", "batch", "steps", "efficiency"),
    [
        (60_000, 1024, 600, 0.754),
        (60_000, 2048, 400, 0.862),
        (60_000, 4096, 1000, 0.977),
        (73_257, 1024, 400, 0.617),
    ],
)
def test_the_efficiency_of_known_plans_is_reproduced(people, batch, steps, efficiency):
    made = plan(Budgets.from_tiers({1: 0.34, 2: 0.43, 3: 0.23}, people), steps=steps, batch_size=batch)
    assert signal_efficiency(made.levels, made.rounds) == pytest.approx(efficiency, abs=0.002)


def test_one_round_has_the_signal_of_its_batch_over_its_noise():
    made = plan(Budgets.from_tiers(TIERS, 5_000), steps=100, batch_size=300)
    (only,) = made.rounds
    expected = 10 * only.expected_batch_size / only.noise_multiplier
    assert signal(made.levels, made.rounds) == pytest.approx(expected)


def test_full_batches_with_clipping_in_proportion_reach_everything():
    made = plan(Budgets(np.full(50, 1.0)), "dp-sgd", steps=20, batch_size=50)
    assert signal_efficiency(made.levels, made.rounds) == pytest.approx(1, abs=2e-3)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.0]), min_size=1, max_size=6),
    st.integers(50, 5_000),
    st.sampled_from(["pdp-sgd-exact", "dp-sgd", "dp-sgd-exclude"]),
)
def test_no_plan_makes_more_than_everything_of_what_people_allow(epsilons, people, mechanism):
    budgets = Budgets(np.resize(epsilons, people))
    made = plan(budgets, mechanism, steps=50, batch_size=max(1, people // 20))
    assert 0 < (signal_efficiency(made.levels, made.rounds) or 0) <= 1 + 1e-9


@pytest.mark.parametrize("people", [60, 1_500, 30_000, 300_000])
def test_the_chosen_batch_makes_nearly_everything_of_what_people_allow(people):
    budgets = Budgets.from_tiers(TIERS, people, 0.1 / people)
    setting = choose_setting(budgets)
    made = plan(budgets, steps=setting.steps, batch_size=setting.batch_size)
    assert (signal_efficiency(made.levels, made.rounds) or 0) > 0.85


def test_one_generous_person_does_not_make_batches_small():
    budgets = Budgets(np.r_[np.full(2_000, 0.5), 8.0], delta=1e-5)
    assert choose_setting(budgets).batch_size >= 200


def test_what_is_said_stays():
    setting = choose_setting(Budgets(np.ones(1_000)), steps=77, batch_size=33, max_grad_norm=0.5)
    assert (setting.steps, setting.batch_size, setting.max_grad_norm) == (77, 33, 0.5)


def test_the_learning_rate_follows_steps_clipping_norm_and_momentum():
    budgets = Budgets.from_tiers(TIERS, 5_000)
    one = plan(budgets, steps=300, batch_size=300)
    other = plan(budgets, steps=300, batch_size=300, max_grad_norm=0.1)
    rate = rate_for(one, 1_000)
    assert rate_for(other, 1_000) == pytest.approx(10 * rate, rel=0.05)
    assert rate_for(one, 1_000, momentum=0.9) == pytest.approx(rate / 10, rel=0.05)
    assert rate_for(one, 1_000, schedule="constant") == pytest.approx(rate / 2, rel=0.05)
    assert rate_for(one, 100_000) < rate  # more parameters, more noise


def test_a_learning_rate_far_off_is_named_with_the_one_to_take_and_an_ordinary_one_passes():
    made = plan(Budgets.from_tiers(TIERS, 30_000), steps=1000, batch_size=1024)
    rate = rate_for(made, 3_800)
    assert doubt_about_rate(made, 3_800, rate / 4) is None
    assert doubt_about_rate(made, 3_800, rate * 4) is None
    low = doubt_about_rate(made, 3_800, 0.1)
    assert f"{rate:g}" in str(low)
    assert "below" in str(low)


def test_momentum_with_a_rate_that_is_meant_for_none_is_named():
    made = plan(Budgets.from_tiers({1: 0.34, 2: 0.43, 3: 0.23}, 1_437), steps=300, batch_size=256)
    rate = rate_for(made, 2_410)
    assert doubt_about_rate(made, 2_410, rate) is None
    said = doubt_about_rate(made, 2_410, rate, momentum=0.9)
    assert "Momentum 0.9" in str(said)


def test_advice_compares_with_what_people_do_without_personalization():
    budgets = Budgets.from_tiers(TIERS, 4_000)
    found = advise(budgets, 500)
    by_name = {each.mechanism: each for each in found.mechanisms}
    assert by_name["dp-sgd-exclude"].people_used == 2_800
    ratio = by_name["dp-sgd"].signal_to_noise * math.sqrt(500)
    mu = float(gaussian_mu(0.5, 1e-5))
    assert ratio == pytest.approx(4_000 * mu, rel=0.05)
    assert found.best.signal_to_noise == max(each.signal_to_noise for each in found.mechanisms)
    assert any("worth it" in sentence for sentence in found.reasons())
    planned = outlook(found.plan, 500)
    assert found.best == replace(planned, batch_size=found.best.batch_size)
    assert found.best.batch_size == found.recommended.batch_size  # one figure in text and chart
    assert planned.batch_size == pytest.approx(found.best.batch_size, rel=0.02)


def test_alike_budgets_need_no_personalization_and_advice_says_so():
    found = advise(Budgets(np.ones(2_000)), 500)
    assert any("changes nothing" in sentence for sentence in found.reasons())


def test_a_short_list_is_told_what_it_can_expect():
    found = advise(Budgets.from_tiers(TIERS, 60, 1e-3), 2_000)
    assert any("too little" in sentence for sentence in found.reasons())
    assert not any("too little" in s for s in advise(Budgets.from_tiers(TIERS, 6_000), 2_000).reasons())


def test_a_list_on_which_nobody_allows_anything_is_refused():
    with pytest.raises(PdpsgdError, match="nobody does"):
        advise(Budgets(np.zeros(10)), 100)


def test_the_clipping_norm_grows_with_the_signal_and_stays_between_one_and_eight():
    norms = [
        choose_setting(Budgets.from_tiers(TIERS, people), 3_800).max_grad_norm
        for people in (60, 6_000, 2_000_000)
    ]
    assert norms[0] == 1
    assert 1 < norms[1] < 8
    assert norms[2] == 8
    assert choose_setting(Budgets.from_tiers(TIERS, 6_000)).max_grad_norm == 1  # the network is not known


@pytest.mark.parametrize("mechanism", ["pdp-sgd-exact", "dp-sgd", "dp-sgd-exclude", "idp-scale"])
@pytest.mark.parametrize("people", [1, 2, 7, 60, 3_000])
def test_a_plan_without_a_batch_size_has_one_for_lists_of_any_length(people, mechanism):
    budgets = Budgets(np.resize([0.5, 2.0, 8.0], people), 1e-4)
    made = plan(budgets, mechanism)
    assert made.steps == 300
    assert made.rounds[0].expected_batch_size <= people


def test_whom_nobody_can_help_gets_the_first_refusal():
    with pytest.raises(PdpsgdError, match="nobody to train on"):
        plan(Budgets([0.0, 0.0]))


def test_few_steps_do_not_make_steps_longer_than_any_that_was_tried():
    made = plan(Budgets.from_tiers(TIERS, 30_000), steps=2)
    assert rate_for(made, 1_000) * made.max_grad_norm <= 11
    assert doubt_about_rate(made, 1_000, 1e-3) is None
