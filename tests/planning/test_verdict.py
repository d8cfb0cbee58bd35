"""The verdict: one test per reason, and none without one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pdpsgd import Budgets, Plan, plan
from pdpsgd.planning.verdict import EXCEPT, HOLDS, NOT_FOR_RELEASE, verdict


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(Budgets([0.5] * 40 + [2.0] * 60, ids=np.arange(100)), steps=20, batch_size=10)


def test_the_promise_holds_for_all_where_nothing_speaks_against_it(made: Plan) -> None:
    found = verdict(made)
    assert (found.outcome, found.reasons, found.note) == (HOLDS, (), None)
    assert found.sentences == ("The promise holds for all 100 people.",)
    assert found.is_for_release


@pytest.mark.parametrize(
    ("circumstance", "code", "words"),
    [
        ({"schema_from_data": True}, "schema-from-data", "learned from the private data"),
        ({"seeded": True}, "seeded", "come from a seed"),
        ({"weak_generator": "sfc64"}, "weak-generator", "come from sfc64, which is not cryptographic"),
        ({"test_double": True}, "test-double", "left out, recorded or injected"),
        ({"ledger_off": True}, "ledger-off", "not entered in these people's ledger"),
        ({"verified": False}, "unverified-plan", "The plan was not verified"),
        ({"start_not_for_release": "It was seeded."}, "start", "Of that one: It was seeded."),
        ({"other_fits": "An earlier fit was on them, too."}, "other-fits", "An earlier fit was on them"),
        ({"unseen_code": ["a hook on fc1", "model.scale"]}, "unseen-code", "a hook on fc1; model.scale"),
    ],
)
def test_each_circumstance_is_a_reason_against_release(
    made: Plan, circumstance: dict[str, object], code: str, words: str
) -> None:
    found = verdict(made, **circumstance)
    assert found.outcome == NOT_FOR_RELEASE
    assert [reason.code for reason in found.reasons] == [code]
    assert words in found.sentences[1]
    assert found.headline == "Not for release."
    assert found.note.endswith("not for release")


def test_a_plan_that_nobody_has_verified_is_a_reason(made: Plan) -> None:
    louder = replace(made, rounds=tuple(replace(r, noise_multiplier=9.0) for r in made.rounds))
    assert [reason.code for reason in verdict(louder).reasons] == ["unverified-plan"]
    assert verdict(louder, verified=True).outcome == HOLDS
    louder.verify()
    assert verdict(louder).outcome == HOLDS


def test_a_marked_plan_says_why_itself(made: Plan) -> None:
    levels = tuple(replace(level, proven_epsilon=None) for level in made.levels)
    marked = replace(made, levels=levels, not_for_release="It tells who is in which round.")
    found = verdict(marked)
    assert found.sentences == ("Not for release.", "It tells who is in which round.")
    assert [reason.code for reason in found.reasons] == ["marked-plan"]


def test_an_accountant_that_only_approximates_is_a_reason() -> None:
    found = verdict(plan(Budgets([1.0] * 50), steps=10, batch_size=5, accountant="gdp"))
    assert [reason.code for reason in found.reasons] == ["unproven-accountant"]
    assert "gdp, only approximates" in found.sentences[1]


def test_a_history_counts_as_chosen_after_results_unless_it_is_said_to_be_fixed(made: Plan) -> None:
    later = Budgets([3.0] * 100, ids=np.arange(100))
    chosen = plan(later, steps=20, batch_size=10, history=[made])
    assert verdict(chosen).outcome == HOLDS  # by certificates, which allow any choice
    composed = plan(later, steps=20, batch_size=10, history=[made], accountant="pld")
    assert [reason.code for reason in verdict(composed).reasons] == ["adaptive-history"]
    fixed = plan(later, steps=20, batch_size=10, history=[made], history_fixed=True)
    assert verdict(fixed).outcome == HOLDS
    again = Plan.from_json(fixed.to_json())
    assert again.history_fixed
    assert verdict(again).outcome == HOLDS


def test_people_whom_earlier_runs_cost_more_than_they_allow_now_are_counted(made: Plan) -> None:
    now = Budgets([0.1] * 3 + [4.0] * 97, ids=np.arange(100))
    found = verdict(plan(now, steps=20, batch_size=10, history=[made], history_fixed=True))
    assert found.outcome == EXCEPT
    assert found.headline == "The promise holds for 97 of 100 people."
    (reason,) = found.reasons
    assert (reason.code, reason.people) == ("above-budget", 3)
    assert "more than 3 people now allow (up to" in reason.sentence


def test_people_who_withdrew_after_being_used_are_counted(made: Plan) -> None:
    found = verdict(made, withdrawn=2)
    assert found.headline == "The promise holds for 98 of 100 people."
    (reason,) = found.reasons
    assert (reason.code, reason.people) == ("withdrawn", 2)
    assert reason.sentence.startswith("2 people have withdrawn since earlier runs")
    assert "1 person has withdrawn" in verdict(made, withdrawn=1).reasons[0].sentence


def test_people_who_came_to_allow_less_while_the_run_was_under_way_are_counted(made: Plan) -> None:
    found = verdict(made, changed=2)
    assert found.headline == "The promise holds for 98 of 100 people."
    (reason,) = found.reasons
    assert (reason.code, reason.people) == ("changed", 2)
    assert reason.sentence.startswith("2 people now allow less than this run and those before have spent")


def test_people_who_asked_for_no_protection_and_test_people_are_counted() -> None:
    budgets = Budgets([1.0] * 90 + [np.inf] * 10, allow_infinite=True)
    found = verdict(plan(budgets, steps=20, batch_size=10), without_promise=1)
    assert found.outcome == EXCEPT
    assert found.headline == "The promise holds for 90 of 101 people."
    assert {reason.code: reason.people for reason in found.reasons} == {
        "no-protection-asked": 10,
        "without-promise": 1,
    }
    assert found.is_for_release


def test_every_reason_is_kept_those_against_release_first(made: Plan) -> None:
    found = verdict(made, seeded=True, schema_from_data=True, without_promise=5)
    assert [reason.code for reason in found.reasons] == ["seeded", "schema-from-data", "without-promise"]
    document = json.loads(json.dumps(found.to_dict()))
    assert document["outcome"] == "not for release"
    assert document["reasons"][2] == {
        "code": "without-promise",
        "sentence": "The records of 5 people are used to test on, without a promise.",
        "people": 5,
    }
    assert "people" not in document["reasons"][0]
