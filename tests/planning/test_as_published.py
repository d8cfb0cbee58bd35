"""As-published plans say what the paper claims and what is provable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdpsgd import Budgets, PdpsgdError, Plan, PromiseBroken
from pdpsgd.planning.as_published import claims, plan_as_published, verify


@pytest.mark.parametrize("mechanism", ["sampling", "adapdp", "pdp-sgd-fixed", "pdp-sgd-adaptive"])
def test_as_published_plans_say_what_the_paper_claims_and_what_is_provable(mechanism: str) -> None:
    budgets = Budgets.exponential(2000)
    made = plan_as_published(budgets, mechanism, steps=200, batch_size=64, rounds=3, seed=1)
    assert made.not_for_release
    assert '"not_for_release"' in made.to_json()
    assert '"bookkeeping": "as-published"' in made.to_json()
    for level, claim in zip(made.levels, claims(made.levels, made.rounds), strict=True):
        assert level.proven_epsilon is None
        assert claim.claimed_epsilon <= level.epsilon
        assert claim.provable_epsilon <= level.epsilon + max(r.threshold for r in made.rounds)
        assert claim.provable_delta == pytest.approx(level.delta * len(made.rounds), rel=0.5)
    assert all(set(r.participation) <= {0.0, 1.0} for r in made.rounds)
    assert (
        Plan.from_json(made.to_json()).level_of_person(budgets).tolist()
        == made.level_of_person(budgets).tolist()
    )
    with pytest.raises(PdpsgdError, match="not for release: As published, only people in a round pay"):
        made.verify()
    if len(made.rounds) > 1:
        found = verify(made)
        assert any(c.provable_epsilon > x.epsilon for c, x in zip(found, made.levels, strict=True))


def test_a_tampered_as_published_plan_is_refused() -> None:
    made = plan_as_published(
        Budgets.exponential(500), "pdp-sgd-fixed", steps=50, batch_size=20, rounds=3, seed=1
    )
    document = json.loads(made.to_json())
    rates = document["rounds"][0]["sample_rates"]
    last = max(i for i, rate in enumerate(rates) if rate > 0)
    added = document["levels"][last]["people"] * (1.0 - rates[last])
    rates[last] = 1.0
    document["rounds"][0]["expected_batch_size"] += added
    with pytest.raises(PromiseBroken, match="is below what the round costs"):
        verify(Plan.from_json(json.dumps(document)))


def test_nobody_is_in_more_rounds_than_their_budget_pays() -> None:
    made = plan_as_published(
        Budgets.exponential(500), "pdp-sgd-fixed", steps=50, batch_size=20, rounds=3, seed=1
    )
    verify(made)
    with pytest.raises(PromiseBroken, match=r"levels\[\d+\] is in more rounds than its budget"):
        verify(replace(made, rounds=made.rounds * 2))


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (
            Budgets([1.0, 1.0], [1e-5, 1e-6]),
            "one delta for all: the paper has no others. Got 1e-06 and 1e-05",
        ),
        (
            Budgets([1.0, float("inf")], allow_infinite=True),
            "finite budgets: the paper has no others. Got epsilon=inf",
        ),
    ],
)
def test_budgets_that_the_paper_has_not_are_refused(budgets: Budgets, message: str) -> None:
    with pytest.raises(PdpsgdError) as caught:
        plan_as_published(budgets, "adapdp", steps=5)
    assert message in str(caught.value)


def test_as_published_coins_follow_the_seed() -> None:
    budgets = Budgets.exponential(500)
    options = {"steps": 50, "batch_size": 20, "rounds": 2}
    one, same, other = (plan_as_published(budgets, "pdp-sgd-fixed", seed=s, **options) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_given_noise_1_3_the_published_steps_are_of_the_papers_order() -> None:
    made = plan_as_published(
        Budgets.exponential(60_000), "sampling", noise_multiplier=1.3, batch_size=64, seed=0
    )
    assert 20_000 < made.steps < 45_000


def test_given_noise_published_rounds_end_where_not_one_step_at_it_is_left() -> None:
    given = {"batch_size": 64, "accountant": "rdp", "seed": 0}
    made = plan_as_published(Budgets.exponential(60_000), "adapdp", noise_multiplier=1.3, **given)
    # The paper's table 2 has 72,908 parameters for AdaPDP, 1.92 models of 38,009.
    assert len(made.rounds) == 2
    assert all(r.noise_multiplier == 1.3 for r in made.rounds)
    with pytest.raises(PdpsgdError, match="somebody who allows more than"):
        plan_as_published(Budgets([1e-3] * 100), "adapdp", noise_multiplier=1.3, **given)
    with pytest.raises(PdpsgdError, match=r"at which the budgets pay for a step\. Got 0\.3"):
        plan_as_published(Budgets.exponential(60_000), "adapdp", noise_multiplier=0.3, **given)


def test_files_of_version_0_1_0_are_read_and_marked() -> None:
    made = plan_as_published(Budgets.exponential(200), "adapdp", steps=50, batch_size=20, rounds=2, seed=1)
    document = json.loads(made.to_json())
    del document["not_for_release"]
    for level in document["levels"]:
        level |= {"claimed_epsilon": 0.5, "provable_epsilon": 1.2, "provable_delta": 2e-5}
    assert "as-published" in Plan.from_json(json.dumps(document)).not_for_release
    document["sensitive"] = "This file tells who was drawn in which round."
    older = Plan.from_json(json.dumps(document))
    assert older.not_for_release == "This file tells who was drawn in which round."
    assert (older.levels, older.rounds) == (made.levels, made.rounds)


def test_a_plan_cannot_lose_its_mark_or_claim_a_proof_beside_it() -> None:
    made = plan_as_published(Budgets.exponential(200), "adapdp", steps=50, batch_size=20, rounds=2, seed=1)
    with pytest.raises(PdpsgdError, match="whose not_for_release says why"):
        replace(made, not_for_release=None)
    proven = tuple(replace(level, proven_epsilon=level.epsilon) for level in made.levels)
    with pytest.raises(PdpsgdError, match="no proven_epsilon in a plan that is not for release"):
        replace(made, levels=proven)
