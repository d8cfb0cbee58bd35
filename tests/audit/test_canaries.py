"""Canaries join the list without changing anything that the plan proves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdpsgd.audit.canaries import add_canaries, tiers_of
from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round


def plan_with(*levels: Level, rates: tuple[float, ...], noise: float = 1.0) -> Plan:
    drawn = sum(level.people * rate for level, rate in zip(levels, rates, strict=True))
    ones = (1.0,) * len(levels)
    return Plan("by-hand", levels, (Round(10, noise, drawn, ones, rates, ones),))


PLAN = plan_with(
    Level(1.0, 1e-5, 10, proven_epsilon=0.9),
    Level(2.0, 1e-6, 20, proven_epsilon=1.9),
    Level(4.0, 1e-5, 30, proven_epsilon=3.9),
    rates=(0.1, 0.2, 0.3),
)


def test_what_each_level_is_exposed_to_stays_the_same():
    canaries = add_canaries(PLAN, 7, np.random.default_rng(0))
    for level in range(3):
        assert canaries.plan.history_of(level) == PLAN.history_of(level)
    assert [level.people for level in canaries.plan.levels] == [17, 27, 37]
    assert canaries.plan.rounds[0].expected_batch_size == pytest.approx(0.1 * 17 + 0.2 * 27 + 0.3 * 37)


def test_a_canary_without_its_record_keeps_its_place_on_the_list():
    canaries = add_canaries(PLAN, 50, np.random.default_rng(0))
    records = canaries.record_of_person()
    assert records.size == canaries.plan.people
    own = records[-len(canaries) :]
    assert ((own >= 0) == canaries.has_record).all()
    assert sorted(own[own >= 0]) == list(range(canaries.has_record.sum()))
    assert canaries.plan.roster is not None
    assert (canaries.plan.roster.level[-len(canaries) :] == canaries.level).all()


def test_canaries_stand_behind_the_records_of_others():
    canaries = add_canaries(PLAN, 2, np.random.default_rng(0))
    others = np.arange(60)
    others[5:] = -1
    records = canaries.record_of_person(others)
    assert records[:60].tolist() == others.tolist()
    assert records[60:][canaries.has_record].min() == 5


def test_coins_are_fair():
    """A false alarm has a chance below 1e-6: five standard deviations."""
    coins = add_canaries(PLAN, 10_000, np.random.default_rng(1)).has_record
    assert abs(coins.mean() - 0.5) < 5 * 0.5 / math.sqrt(coins.size)


def test_a_tier_of_several_levels_is_judged_by_its_largest_epsilon_and_delta():
    low, high = tiers_of(PLAN, at_most=2)
    assert low.levels == (0, 1)
    assert (low.promised, low.proven, low.delta) == (2.0, 1.9, 1e-5)
    assert (low.name, high.name) == ("1 to 2", "4")


def test_tiers_are_named_in_as_few_digits_as_tell_them_apart():
    levels = tuple(Level(epsilon, 1e-5, 5) for epsilon in (1.0, 1.0001, 2 / 3))
    names = [tier.name for tier in tiers_of(plan_with(*levels, rates=(0.1, 0.1, 0.1)))]
    assert names == ["0.66667", "1", "1.0001"]


def test_levels_of_one_epsilon_are_one_tier():
    levels = (Level(1.0, 1e-5, 5), Level(1.0, 1e-6, 5), Level(2.0, 1e-6, 5))
    assert [tier.levels for tier in tiers_of(plan_with(*levels, rates=(0.1, 0.2, 0.3)))] == [(0, 1), (2,)]


def test_people_who_are_never_drawn_or_ask_for_nothing_are_in_no_tier():
    plan = plan_with(
        Level(0.0, 1e-5, 5), Level(1.0, 1e-5, 5), Level(math.inf, 1e-5, 5), rates=(0.0, 0.5, 0.5)
    )
    (tier,) = tiers_of(plan)
    assert tier.levels == (1,)
    assert tier.proven is None


def test_a_plan_that_draws_nobody_has_nothing_to_audit():
    plan = plan_with(Level(math.inf, 1e-5, 5), rates=(0.5,))
    with pytest.raises(PdpsgdError, match="draws somebody"):
        tiers_of(plan)
