"""Partitioning, stretching and ProPer, and the fairness knob, against closed forms at full batch."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from pdpsgd import Budgets, PdpsgdError, Plan, plan
from pdpsgd.ledger.charges import charges_of_plan
from pdpsgd.planning.mechanisms.partitioning import best_groups
from pdpsgd.planning.signal import signal_efficiency
from pdpsgd.planning.verification import PromiseBroken
from tests.planning.closed_forms import gaussian

CASES = {"34/43/23": (34, 43, 23), "54/37/9": (54, 37, 9)}
MU = [brentq(lambda mu, e=e: gaussian(mu, e) - 1e-5, 0.01, 5) for e in (1.0, 2.0, 3.0)]
STEPS = 4000


def full_batch(people: tuple[int, ...], mechanism: str, **options: object) -> Plan:
    epsilon = np.repeat([1.0, 2.0, 3.0], people)
    made = plan(Budgets(epsilon), mechanism, steps=STEPS, batch_size=len(epsilon), **options)  # type: ignore[arg-type]
    made.verify()
    return made


def efficiency(made: Plan) -> float:
    """The sum of steps * q * c / sigma over people, against its ceiling sqrt(T) * sum of mu."""
    people = np.array([level.people for level in made.levels])
    signal = sum(
        r.steps * float(people @ (np.array(r.sample_rates) * np.array(r.clip_scales))) / r.noise_multiplier
        for r in made.rounds
    )
    return signal / (math.sqrt(made.steps) * float(people @ np.array(MU)))


@pytest.mark.parametrize("case", CASES)
def test_partitioning_has_the_closed_forms_noise_and_efficiency(case: str) -> None:
    people = CASES[case]
    made = full_batch(people, "partitioning").rounds[0]
    counts, mu = np.array([people[0], people[1] + people[2]]), np.array(MU[:2])
    weights = counts * mu**2
    noise = math.sqrt(STEPS * np.sum((weights / mu) ** 2)) / weights.max()
    assert made.noise_multiplier == pytest.approx(noise, rel=1e-4)
    assert made.clip_scales == pytest.approx((weights[0] / weights[1], 1.0, 1.0), rel=1e-3)
    best = math.sqrt(np.sum((counts * mu) ** 2)) / float(np.dot(people, MU))
    assert efficiency(full_batch(people, "partitioning")) == pytest.approx(best, rel=1e-3)


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 1000)), min_size=1, max_size=7),
)
@settings(max_examples=50, deadline=None)
def test_partitioning_finds_the_best_of_all_groupings(levels: list[tuple[float, int]]) -> None:
    inverse, people = (np.array(column, dtype=float) for column in zip(*levels, strict=True))

    def signal(group: np.ndarray) -> float:
        return sum(
            float((people[group == g].sum() * inverse[group == g].min()) ** 2) for g in np.unique(group)
        )

    every = itertools.product(range(len(levels)), repeat=len(levels)) if len(levels) <= 4 else []
    found = signal(best_groups(inverse, people))
    assert all(found >= signal(np.array(group)) * (1 - 1e-12) for group in every)
    order = np.argsort(inverse)
    for cut in range(len(levels)):  # two intervals
        assert found >= signal((np.argsort(order) >= cut).astype(int)) * (1 - 1e-12)


@pytest.mark.parametrize(("case", "expected"), [("34/43/23", 0.959), ("54/37/9", 0.9405)])
def test_stretching_clips_in_proportion_to_epsilon(case: str, expected: float) -> None:
    made = full_batch(CASES[case], "stretching")
    assert made.rounds[0].clip_scales == pytest.approx((1 / 3, 2 / 3, 1))
    assert made.rounds[0].noise_multiplier == pytest.approx(math.sqrt(STEPS) / MU[2], rel=1e-4)
    assert efficiency(made) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_in_proper_a_level_leaves_after_its_share_of_the_steps(case: str) -> None:
    made = full_batch(CASES[case], "proper")
    exits = np.cumsum([r.steps for r in made.rounds])
    assert exits == pytest.approx([STEPS * (mu / MU[2]) ** 2 for mu in MU], abs=2)
    present = np.array([np.array(r.sample_rates) > 0 for r in made.rounds])
    assert present.tolist() == [[True, True, True], [False, True, True], [False, False, True]]
    people = np.array(CASES[case])
    ceiling = float(people @ np.square(MU)) / (MU[2] * float(people @ np.array(MU)))
    assert efficiency(made) == pytest.approx(ceiling, rel=1e-3)


@pytest.mark.parametrize("mechanism", ["dp-sgd", "dp-sgd-exclude"])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_uniform_plans_with_everybody_in_every_step_are_verified(mechanism: str, epsilon: float) -> None:
    made = plan(Budgets([epsilon] * 100), mechanism, steps=STEPS, batch_size=100)
    made.verify()
    assert made.rounds[0].sample_rates == (1.0,)
    assert (made.levels[0].proven_epsilon or 0.0) >= epsilon * (1 - 3e-4)


def test_idp_scale_at_full_batch_reaches_the_ceiling() -> None:
    assert efficiency(full_batch(CASES["34/43/23"], "idp-scale")) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("mechanism", ["partitioning", "stretching", "proper"])
def test_sampled_batches_a_history_and_people_who_allow_nothing_are_taken(mechanism: str) -> None:
    budgets = Budgets([0.0] * 5 + [0.5] * 200 + [1.0] * 100 + [2.0] * 100, ids=range(405))
    first = plan(budgets, mechanism, steps=300, batch_size=40)
    first.verify()
    assert first.rounds[0].expected_batch_size == pytest.approx(40)
    assert all(r.sample_rates[0] == 0 for r in first.rounds)
    generous = Budgets(budgets.epsilon * 3, ids=range(405))
    plan(generous, mechanism, steps=300, batch_size=40, history=[first]).verify()
    with pytest.raises(PdpsgdError, match=f"only for {mechanism}"):
        plan(budgets, mechanism, batch_size=40, noise_multiplier=2.0)


@pytest.mark.parametrize(("case", "expected"), [("34/43/23", 0.741), ("54/37/9", 0.810)])
def test_gamma_one_half_plans_at_the_geometric_mean(case: str, expected: float) -> None:
    made = full_batch(CASES[case], "idp-scale", gamma=0.5)
    mu = [math.sqrt(MU[0] * m) for m in MU]
    assert np.array(made.rounds[0].clip_scales) / made.rounds[0].clip_scales[0] == pytest.approx(
        np.array(mu) / mu[0], rel=1e-3
    )
    assert efficiency(made) == pytest.approx(expected, abs=2e-3)
    assert [level.epsilon for level in made.levels] == [1.0, 2.0, 3.0]


def test_gamma_zero_is_uniform_or_a_threshold_and_gamma_one_is_the_default() -> None:
    budgets = Budgets([1.0] * 340 + [2.0] * 430 + [3.0] * 230)
    settings_ = {"steps": 50, "batch_size": 100}
    uniform = plan(budgets, gamma=0.0, **settings_).rounds[0]  # type: ignore[arg-type]
    assert max(uniform.sample_rates) == pytest.approx(min(uniform.sample_rates), rel=2e-3)
    capped = plan(budgets, gamma=0.0, gamma_from=2.0, **settings_)  # type: ignore[arg-type]
    assert capped.rounds[0].sample_rates[2] == pytest.approx(capped.rounds[0].sample_rates[1], rel=2e-3)
    assert [level.proven_epsilon for level in capped.levels] == pytest.approx([1, 2, 2], rel=3e-3)
    assert plan(budgets, gamma=1.0, **settings_) == plan(budgets, **settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"gamma": -0.1}, {"gamma": 1.5}, {"gamma_from": 1.0}, {"gamma": 0.5, "gamma_from": 0.0}]
)
def test_a_gamma_that_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(PdpsgdError, match="gamma"):
        plan(Budgets([1.0] * 100), steps=5, batch_size=10, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
def test_a_filter_promises_each_level_one_gaussian_mechanism(share: float | None) -> None:
    made = full_batch(CASES["34/43/23"], "pdp-gd-filter", filter_noise=share)
    (r,) = made.rounds
    assert r.sample_rates == (1, 1, 1)
    assert r.noise_multiplier == pytest.approx((share or 0.9) * math.sqrt(STEPS) / MU[2], rel=1e-4)
    assert r.spending_limits == pytest.approx(np.square(MU), rel=3e-4)
    assert [level.proven_epsilon for level in made.levels] == pytest.approx([1, 2, 3], rel=1e-3)
    assert Plan.from_json(made.to_json()).rounds == made.rounds
    assert signal_efficiency(made.levels, made.rounds) == pytest.approx(1, abs=1e-3)


def test_a_reader_that_does_not_know_limits_refuses_the_plan_instead_of_trusting_it() -> None:
    made = full_batch(CASES["34/43/23"], "pdp-gd-filter")
    document = json.loads(made.to_json())
    del document["rounds"][0]["spending_limits"]
    with pytest.raises(PromiseBroken):
        Plan.from_json(json.dumps(document))


def test_a_filter_takes_a_history_people_who_allow_nothing_and_those_without_limit() -> None:
    budgets = Budgets(
        [0.0] * 5 + [0.5] * 20 + [2.0] * 10 + [math.inf] * 3, ids=range(38), allow_infinite=True
    )
    first = plan(budgets, "pdp-gd-filter", steps=30)
    first.verify()
    assert first.rounds[0].sample_rates == (0, 1, 1, 1)
    assert first.rounds[0].spending_limits[2] == first.rounds[0].spending_limits[3]
    generous = Budgets(np.minimum(budgets.epsilon * 3, 9.0), ids=range(38))
    later = plan(generous, "pdp-gd-filter", steps=30, history=[first])
    later.verify()
    charges = charges_of_plan(first)
    assert [charge.mu**2 for charge in charges] == pytest.approx(
        [0, *first.rounds[0].spending_limits[1:]], rel=1e-9
    )
    assert all(charge.d == 0 for charge in charges)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_noise": 1.5}, "Expected 0 < filter_noise <= 1. Got 1.5"),
        ({"filter_noise": -1.0}, "filter_noise"),
        ({"mechanism": "dp-sgd", "filter_noise": 0.5}, "Expected mechanism='pdp-gd-filter'"),
        ({"noise_multiplier": 2.0}, "only for pdp-gd-filter"),
        ({"drawn": "round"}, "only for pdp-gd-filter"),
    ],
)
def test_what_a_filter_refuses(options: dict[str, object], message: str) -> None:
    asked = {"mechanism": "pdp-gd-filter", **options}
    with pytest.raises(PdpsgdError, match=message):
        plan(Budgets([1.0, 2.0]), **asked)  # type: ignore[arg-type]
