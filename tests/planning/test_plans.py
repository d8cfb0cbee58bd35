"""A plan's file, its table and its prefixes: they say what the plan says, and refuse to say more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdpsgd import Budgets, PdpsgdError, Plan, plan
from pdpsgd.accounting.registry import accountant
from pdpsgd.planning.certificate_check import check_claims
from pdpsgd.planning.planner import prove
from pdpsgd.planning.verification import PromiseBroken


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(Budgets([0.0] * 5 + [0.5] * 100 + [1.0] * 100), steps=50, batch_size=10)


def test_a_plan_survives_the_round_trip(small: Plan) -> None:
    again = Plan.from_json(small.to_json())
    assert again == small
    assert again.to_json() == small.to_json()
    assert again.digest == small.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["rounds"][0]["sample_rates"].pop(), "one value for each of the 3 levels. Got 2"),
        (lambda d: d["rounds"][0].update(noise_multiplier=float("nan")), "NaN"),
        (lambda d: d["rounds"][0]["sample_rates"].__setitem__(1, 1.5), "sample_rates[1] in [0, 1]. Got 1.5"),
        (
            lambda d: d["rounds"][0]["sample_rates"].__setitem__(1, -0.1),
            "sample_rates[1] in [0, 1]. Got -0.1",
        ),
        (lambda d: d["rounds"][0]["sample_rates"].__setitem__(0, 0.1), "never to sample level 0"),
        (lambda d: d["levels"][1].update(proven_epsilon=0.3), "below the truth"),
        (lambda d: d["levels"][1].update(epsilon=0.3), "is promised epsilon=0.3"),
        (lambda d: d["rounds"][0].update(noise_multiplier=0.5), "is promised epsilon=0.5"),
        (lambda d: d["rounds"][0].update(steps=5000), "is promised epsilon=0.5"),
        (lambda d: d["rounds"][0].update(steps=0), "steps from 1"),
        (lambda d: d["rounds"][0].update(steps=1.5), "whole number"),
        (lambda d: d["rounds"][0].update(expected_batch_size=500.0), "people times their rates"),
        (lambda d: d["rounds"][0]["clip_scales"].__setitem__(1, 3.0), "is promised epsilon=0.5"),
        (lambda d: d["rounds"][0]["participation"].__setitem__(1, 2.0), "participation[1] in [0, 1]"),
        (lambda d: d["levels"][1].update(delta=1.0), "delta < 1"),
        (lambda d: d["levels"][1].update(people=-1), "at least 0"),
        (lambda d: d.update(version=2), "version 1. Got version 2"),
        (lambda d: d.update(version=True), "version 1. Got version True"),
        (lambda d: d["levels"][1].update(epsilon=10**400), "fits in double precision"),
        (lambda d: d["levels"][1].update(history=None), "a list 'history'"),
        (lambda d: d["levels"][1].update(history=[[1, 0.1, "inf", 5]]), "noise > 0"),
        (lambda d: d["levels"][1].update(history=[[1, 0.1, 1.0, 50]]), "is promised epsilon=0.5"),
        (lambda d: d.update(neighbours="replace"), "neighbours='replace'"),
        (lambda d: d.update(bookkeeping="free"), "no proven_epsilon in a plan that is not for release"),
        (lambda d: d.update(accountant="mine"), "accountant='mine'"),
        (lambda d: d.update(accountant=["rdp"]), "a text 'accountant' in the plan. Got ['rdp']"),
        (lambda d: d.update(mechanism=None), "a text 'mechanism' in the plan. Got None"),
        (lambda d: d.pop("levels"), "a list 'levels'"),
        (lambda d: d.update(levels=[]), "at least one level in the plan"),
        (
            lambda d: d["levels"][1].update(history=[{"mu": -1, "d": 0, "exposures": []}]),
            "mu of at least 0 and d in [0, 1) in levels[1].history[0]",
        ),
        (
            lambda d: d["levels"][1].update(history=[[1, 0.1, 1.0]]),
            "levels[1].history[0] to be [participation, sample rate, noise multiplier, steps]",
        ),
        (
            lambda d: d.update(people={"ids": [1, "a"], "levels": [0, 0]}),
            "people.ids to be all whole numbers or all text",
        ),
        (
            lambda d: d.update(people={"ids": [1, 2], "levels": [0, 3]}),
            "people.levels to give one of the 3 levels for each of the 2 people.ids",
        ),
        (
            lambda d: d.update(
                people={"ids": [*range(205)], "levels": [0] * 5 + [2] * 100 + [1] * 100, "named": False}
            ),
            "people whose digest is people_digest",
        ),
        (lambda d: d.update(max_grad_norm=0), "max_grad_norm > 0"),
        (lambda d: d.update(people_digest=7), "begin with 'ids:' or 'places:'. Got 7"),
    ],
)
def test_tampered_files_are_refused_with_the_reason(small: Plan, change, message: str) -> None:
    document = json.loads(small.to_json())
    change(document)
    with pytest.raises(PdpsgdError) as caught:
        Plan.from_json(json.dumps(document))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', '{"version": 2, "version": 1}'])
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PdpsgdError):
        Plan.from_json(text)


def test_a_plan_that_breaks_its_promise_fails_loudly(small: Plan) -> None:
    louder = replace(
        small, rounds=tuple(replace(r, noise_multiplier=r.noise_multiplier / 2) for r in small.rounds)
    )
    with pytest.raises(PromiseBroken, match="Do not train with this plan"):
        louder.verify()


def test_the_people_that_the_digest_states_may_be_in_the_file(small: Plan) -> None:
    document = json.loads(small.to_json())
    document["people"] = {"ids": [*range(205)], "levels": [0] * 5 + [1] * 100 + [2] * 100, "named": False}
    assert Plan.from_json(json.dumps(document)).people_digest == small.people_digest


def test_levels_of_the_same_budget_need_to_know_who_is_on_which(small: Plan) -> None:
    budgets = Budgets([0.0] * 5 + [0.5] * 200)
    alike = replace(small, levels=(*small.levels[:2], replace(small.levels[2], epsilon=0.5)), roster=None)
    with pytest.raises(PdpsgdError, match="several levels with the same budget: its roster says"):
        alike.level_of_person(budgets)


def test_a_step_is_of_a_round_of_the_plan(small: Plan) -> None:
    twice = replace(small, rounds=small.rounds * 2)
    assert [twice.round_of_step(step) for step in (0, 49, 50, 99)] == [0, 0, 1, 1]
    with pytest.raises(PdpsgdError, match=r"a step below the plan's 100 steps\. Got 100"):
        twice.round_of_step(100)


def test_a_draft_that_spends_more_than_a_level_allows_is_never_proven(small: Plan) -> None:
    draft = replace(small, levels=tuple(replace(level, proven_epsilon=None) for level in small.levels))
    assert prove(draft, accountant(small.accountant)).levels == small.levels
    less = tuple(replace(level, epsilon=0.99 * level.epsilon) for level in draft.levels)
    with pytest.raises(
        PdpsgdError, match=r"Level 1 would spend 0\.\d+ of epsilon=0\.495: no plan was computed"
    ):
        prove(replace(draft, levels=less), accountant(small.accountant))


def test_a_claim_below_what_a_certificate_gives_is_refused(small: Plan) -> None:
    levels = [replace(level, delta=1e-3) for level in small.levels]
    check_claims(levels, small.rounds)
    levels[1] = replace(levels[1], proven_epsilon=0.1)
    with pytest.raises(
        PromiseBroken, match=r"levels\[1\]\.proven_epsilon=0\.1 is below what a certificate gives"
    ):
        check_claims(levels, small.rounds)


def test_other_people_are_refused(small: Plan) -> None:
    with pytest.raises(PdpsgdError, match="other people"):
        small.level_of_person(Budgets([0.5] * 100 + [1.0] * 100))
    with pytest.raises(PdpsgdError, match="other people"):
        small.level_of_person(Budgets([0.0] * 5 + [0.4] * 100 + [1.0] * 100))


def test_the_table_says_what_is_promised_proven_and_unused(small: Plan) -> None:
    text = small.table()
    for word in (
        "epsilon allowed",
        "proven",
        "used",
        "sampling rate",
        "people",
        "% of all that people allow is used",
    ):
        assert word in text


def test_many_levels_are_grouped_in_the_table() -> None:
    made = plan(Budgets(np.repeat(np.linspace(0.3, 3, 100), 10)), steps=20, batch_size=30)
    assert len(made.levels) == 100
    assert len(made.table().splitlines()) < 40


def test_a_prefix_of_a_plan_drops_what_is_no_longer_proven(small: Plan) -> None:
    half = small.prefix(25)
    assert half.steps == 25
    assert all(level.proven_epsilon is None for level in half.levels)
    assert half.verify().epsilon[2] < small.verify().epsilon[2]


def test_who_has_nothing_left_is_known_of_a_plan_with_people(small: Plan) -> None:
    with pytest.raises(PdpsgdError, match=r"attach them with plan\.with_people\(budgets\)"):
        Plan.from_json(small.to_json()).people_with_nothing_left()
    some = Budgets([0.0, 1.0], ids=["ann", "bob"])
    assert plan(some, steps=3, batch_size=1).with_people(some).people_with_nothing_left() == ["ann"]


def test_a_file_that_is_no_plan_is_named(small: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(small.to_json())
    assert Plan.read(tmp_path / "plan.json") == small
    (tmp_path / "plan.json").write_text(small.to_json().replace('"steps"', '"stops"'))
    with pytest.raises(PdpsgdError, match=r"plan\.json: .*steps"):
        Plan.read(tmp_path / "plan.json")


def test_values_that_are_no_budgets_are_refused(small: Plan) -> None:
    for change, message in {
        ("epsilon", -1.0): r"levels\[0\]\.epsilon >= 0",
        ("delta", 1.0): r"0 <= levels\[0\]\.delta < 1",
        ("people", 2**53 + 1): r"levels\[0\]\.people from 0 to",
        ("proven_epsilon", -0.5): r"levels\[0\]\.proven_epsilon >= 0 or null",
    }.items():
        document = json.loads(small.to_json())
        document["levels"][0][change[0]] = change[1]
        with pytest.raises(PdpsgdError, match=message):
            Plan.from_json(json.dumps(document))


def filtered(plan: Plan, limits: tuple[float, ...], *, rate: float = 1.0) -> Plan:
    first = replace(
        plan.rounds[0],
        spending_limits=limits,
        participation=(0.0, 1.0, 1.0),
        sample_rates=(0.0, rate, rate),
        expected_batch_size=rate * 200,
    )
    return replace(plan, rounds=(first,))


def test_a_filter_has_a_limit_for_every_level_and_everybody_in_every_step(small: Plan) -> None:
    fine = (2.0,) * len(small.levels)
    assert filtered(small, fine).rounds[0].spending_limits == fine
    for limits, rate, message in (
        (fine[1:], 1.0, "one value for each of the"),
        ((-1.0, *fine[1:]), 1.0, r"spending_limits\[0\] from 0 to 2\^20"),
        (fine, 0.5, r"sample_rates\[1\] of 0 or 1 with spending_limits"),
    ):
        with pytest.raises(PdpsgdError, match=message):
            filtered(small, limits, rate=rate)
    first = filtered(small, fine)
    with pytest.raises(PdpsgdError, match="spending_limits in at most one round of a plan"):
        replace(first, rounds=first.rounds * 2)
    assert (
        len(replace(first, rounds=(*first.rounds, replace(first.rounds[0], spending_limits=None))).rounds)
        == 2
    )
