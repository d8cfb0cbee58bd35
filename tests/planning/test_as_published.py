"""As-published plans say what the paper claims and what is provable."""

from __future__ import annotations

import json

import pytest

from pdpsgd import Budgets, PdpsgdError, Plan, plan
from pdpsgd.planning.verification import PromiseBroken


@pytest.mark.parametrize("mechanism", ["sampling", "adapdp", "pdp-sgd-fixed", "pdp-sgd-adaptive"])
def test_as_published_plans_say_what_the_paper_claims_and_what_is_provable(mechanism: str) -> None:
    budgets = Budgets.exponential(2000)
    made = plan(budgets, mechanism, steps=200, batch_size=64, rounds=3, bookkeeping="as-published", seed=1)
    assert made.sensitive
    assert '"sensitive"' in made.to_json()
    for level in made.levels:
        assert level.proven_epsilon is None
        assert level.claimed_epsilon <= level.epsilon
        assert level.provable_epsilon <= level.epsilon + max(r.threshold for r in made.rounds)
        assert level.provable_delta == pytest.approx(level.delta * len(made.rounds), rel=0.5)
    assert all(set(r.participation) <= {0.0, 1.0} for r in made.rounds)
    assert (
        Plan.from_json(made.to_json()).level_of_person(budgets).tolist()
        == made.level_of_person(budgets).tolist()
    )
    if len(made.rounds) > 1:
        assert not made.verify().kept


def test_a_tampered_as_published_plan_is_refused() -> None:
    made = plan(
        Budgets.exponential(500),
        "pdp-sgd-fixed",
        steps=50,
        batch_size=20,
        rounds=3,
        bookkeeping="as-published",
        seed=1,
    )
    document = json.loads(made.to_json())
    rates = document["rounds"][0]["sample_rates"]
    last = max(i for i, rate in enumerate(rates) if rate > 0)
    added = document["levels"][last]["people"] * (1.0 - rates[last])
    rates[last] = 1.0
    document["rounds"][0]["expected_batch_size"] += added
    with pytest.raises(PromiseBroken, match="is below what the round costs"):
        Plan.from_json(json.dumps(document))


def test_as_published_coins_follow_the_seed() -> None:
    budgets = Budgets.exponential(500)
    options = {"steps": 50, "batch_size": 20, "rounds": 2, "bookkeeping": "as-published"}
    one, same, other = (plan(budgets, "pdp-sgd-fixed", seed=s, **options) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_given_noise_1_3_the_published_steps_are_of_the_papers_order() -> None:
    made = plan(
        Budgets.exponential(60_000),
        "sampling",
        noise_multiplier=1.3,
        batch_size=64,
        bookkeeping="as-published",
        seed=0,
    )
    assert 20_000 < made.steps < 45_000


def test_given_noise_published_rounds_end_where_not_one_step_at_it_is_left() -> None:
    given = {"batch_size": 64, "bookkeeping": "as-published", "accountant": "rdp", "seed": 0}
    made = plan(Budgets.exponential(60_000), "adapdp", noise_multiplier=1.3, **given)
    # The paper's table 2 has 72,908 parameters for AdaPDP, 1.92 models of 38,009.
    assert len(made.rounds) == 2
    assert all(r.noise_multiplier == 1.3 for r in made.rounds)
    with pytest.raises(PdpsgdError, match="somebody who allows more than"):
        plan(Budgets([1e-3] * 100), "adapdp", noise_multiplier=1.3, **given)
    with pytest.raises(PdpsgdError, match=r"at which the budgets pay for a step\. Got 0\.3"):
        plan(Budgets.exponential(60_000), "adapdp", noise_multiplier=0.3, **given)
