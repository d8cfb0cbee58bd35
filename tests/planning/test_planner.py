"""Plans: every mechanism keeps every promise, spends what it can, and says what it does."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdpsgd import Budgets, PdpsgdError, Plan, plan
from pdpsgd.gradients.weights import clip_limits
from pdpsgd.planning.mechanisms.registry import MECHANISMS

RNG = np.random.default_rng(0)
BUDGET_SETS = {
    "one person": Budgets([1.0]),
    "all equal": Budgets(np.full(500, 0.8)),
    "an outlier": Budgets(np.append(np.full(400, 1.0), 0.01)),
    "lognormal": Budgets(RNG.lognormal(0, 0.5, 300)),
    "a hundred tiers": Budgets(np.repeat(np.linspace(0.3, 3, 100), 10)),
    "mixed deltas": Budgets(np.repeat([0.5, 1.0, 2.0], 100), np.tile([1e-6, 1e-5, 1e-4], 100)),
    "zeros": Budgets(np.repeat([0.0, 0.5, 1.0], 100), np.resize([1e-5, 1e-5, 0.0], 300)),
}
few_settings = settings(
    deadline=None,
    max_examples=3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def check(made: Plan, budgets: Budgets) -> None:
    assert made.verify().kept
    place = made.level_of_person(budgets)
    for index, level in enumerate(made.levels):
        members = place == index
        assert level.people == members.sum()
        assert (budgets.epsilon[members] >= level.epsilon).all()
        assert (budgets.delta[members] >= level.delta).all()
        assert level.proven_epsilon is not None
        assert level.proven_epsilon <= level.epsilon
    for r in made.rounds:
        for delta in {level.delta for level in made.levels}:
            same = [i for i, level in enumerate(made.levels) if level.delta == delta and level.epsilon > 0]
            same.sort(key=lambda i: made.levels[i].epsilon)
            if made.mechanism in ("pdp-sgd-exact", "idp-sample", "sampling", "dp-sgd"):
                effective = [r.participation[i] * r.sample_rates[i] for i in same]
                # Rates are found to 0.2 %, so neighbours that nearly agree may be out of order by that much.
                assert all(b >= a * (1 - 2.5e-3) for a, b in itertools.pairwise(effective))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(few_settings, max_examples=6)
@given(st.sampled_from(list(BUDGET_SETS)), st.integers(1, 400), st.floats(0.02, 0.3), st.integers(1, 3))
def test_every_plan_of_every_mechanism_keeps_every_promise(
    mechanism: str, name: str, steps: int, share: float, rounds: int
) -> None:
    budgets = BUDGET_SETS[name]
    used = int(((budgets.epsilon > 0) & (budgets.delta > 0)).sum())
    try:
        made = plan(budgets, mechanism, steps=steps, batch_size=share * used, rounds=rounds)
    except PdpsgdError as error:
        # A random request may be impossible; then it is refused with what to ask for instead.
        assert "Expected a" in str(error)  # noqa: PT017
        return
    check(made, budgets)


@pytest.mark.parametrize("name", ["all equal", "mixed deltas", "zeros"])
@few_settings
@given(st.integers(5, 100), st.floats(0.05, 0.2))
def test_drawing_once_a_round_keeps_every_promise(name: str, steps: int, share: float) -> None:
    budgets = BUDGET_SETS[name]
    used = int(((budgets.epsilon > 0) & (budgets.delta > 0)).sum())
    for mechanism in ("pdp-sgd-exact", "pdp-sgd-fixed"):
        made = plan(budgets, mechanism, steps=steps, batch_size=share * used, rounds=2, drawn="round")
        assert made.verify().kept
        assert all(level.proven_epsilon <= level.epsilon for level in made.levels)
        assert all(max(r.participation) == 1 for r in made.rounds[:1])


@few_settings
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.5, 2), st.floats(0.3, 1.5)), min_size=1, max_size=3)
)
def test_any_schedule_is_spent_to_the_end(schedule: list[tuple[int, float, float]]) -> None:
    budgets = Budgets(np.repeat([0.5, 1.0, 2.0], 200))
    made = plan(budgets, schedule=schedule, batch_size=40)
    check(made, budgets)
    assert [r.steps for r in made.rounds] == [steps for steps, _, _ in schedule]
    first, relative = made.rounds[0], schedule[0]
    for r, (_, noise, batch) in zip(made.rounds, schedule, strict=True):
        assert r.noise_multiplier / first.noise_multiplier == pytest.approx(noise / relative[1])
        assert r.expected_batch_size / first.expected_batch_size == pytest.approx(
            batch / relative[2], rel=1e-6
        )
    assert all(level.proven_epsilon >= 0.995 * level.epsilon for level in made.levels)


@pytest.mark.parametrize("name", ["all equal", "an outlier", "lognormal", "a hundred tiers", "mixed deltas"])
def test_exact_spends_every_level_to_at_least_99_5_percent(name: str) -> None:
    budgets = BUDGET_SETS[name]
    made = plan(budgets, steps=300, batch_size=30)
    assert sum(r.expected_batch_size for r in made.rounds) == pytest.approx(30, rel=5e-3)
    for level, rate in zip(made.levels, made.rounds[0].sample_rates, strict=True):
        assert level.proven_epsilon >= 0.995 * level.epsilon or rate == 1


def test_levels_capped_at_rate_1_are_named() -> None:
    made = plan(Budgets([1.0] * 50 + [400.0] * 10), steps=5, batch_size=20)
    assert max(made.rounds[0].sample_rates) == 1
    assert any("rate 1" in note for note in made.notes)
    assert made.verify().kept


def test_practically_unusable_levels_do_not_disturb_the_rest() -> None:
    plain = plan(Budgets([1.0] * 1000), steps=100, batch_size=50)
    disturbed = plan(Budgets([1.0] * 1000 + [1e-6] * 10), steps=100, batch_size=50)
    assert disturbed.rounds[0].noise_multiplier == pytest.approx(plain.rounds[0].noise_multiplier, rel=5e-3)
    assert disturbed.verify().kept


def test_the_known_noise_of_the_papers_setting_comes_out() -> None:
    budgets = Budgets.exponential(60_000)
    assert plan(budgets, steps=1000, batch_size=1024).rounds[0].noise_multiplier == pytest.approx(
        2.77, abs=0.01
    )
    assert plan(budgets, "dp-sgd", steps=1000, batch_size=1024).rounds[0].noise_multiplier == pytest.approx(
        3.91, abs=0.01
    )


def test_more_steps_never_lower_the_noise() -> None:
    budgets = BUDGET_SETS["lognormal"]
    noises = [plan(budgets, steps=n, batch_size=20).rounds[0].noise_multiplier for n in (10, 40, 160, 640)]
    assert noises == sorted(noises)


WITHOUT_SAMPLING = ("pdp-gd-filter", "least-squares")


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m not in ("dp-sgd", *WITHOUT_SAMPLING)])
def test_equal_budgets_make_every_mechanism_the_same_as_dp_sgd(mechanism: str) -> None:
    budgets = BUDGET_SETS["all equal"]
    made = plan(budgets, mechanism, steps=100, batch_size=25, rounds=4)
    uniform = plan(budgets, "dp-sgd", steps=made.steps, batch_size=25, accountant=made.accountant)
    assert made.rounds[0].noise_multiplier == pytest.approx(uniform.rounds[0].noise_multiplier, rel=5e-3)
    assert made.rounds[0].sample_rates == pytest.approx(uniform.rounds[0].sample_rates, rel=5e-3)


@pytest.mark.parametrize("mechanism", ["dp-sgd", "pdp-sgd-exact"])
def test_what_a_plan_proves_is_in_plain_numbers(mechanism: str) -> None:
    made = plan(Budgets([1.0] * 60 + [4.0] * 40), mechanism=mechanism, steps=3, batch_size=10)
    assert {type(level.proven_epsilon) for level in made.levels} == {float}


def test_given_the_noise_the_steps_follow() -> None:
    made = plan(Budgets.exponential(60_000), noise_multiplier=2.77, batch_size=1024)
    assert made.rounds[0].noise_multiplier == 2.77
    assert made.steps == pytest.approx(1000, rel=0.02)
    assert made.rounds[0].expected_batch_size == pytest.approx(1024, rel=5e-3)


def test_people_who_ask_for_no_protection_follow_the_largest_finite_level() -> None:
    made = plan(
        Budgets([0.5] * 100 + [2.0] * 100 + [np.inf] * 50, allow_infinite=True), steps=50, batch_size=20
    )
    assert made.levels[-1].epsilon == math.inf
    assert made.rounds[0].sample_rates[-1] == made.rounds[0].sample_rates[-2]
    assert made.levels[-1].proven_epsilon == pytest.approx(2.0, rel=5e-3)
    assert '"epsilon": "inf"' in made.to_json()
    assert Plan.from_json(made.to_json()) == made


def test_gdp_plans_but_proves_nothing() -> None:
    made = plan(BUDGET_SETS["all equal"], accountant="gdp", steps=500, batch_size=20)
    assert all(level.proven_epsilon is None for level in made.levels)
    assert any("nothing is proven" in note for note in made.notes)


def test_idp_scale_clips_instead_of_drawing_more_often() -> None:
    made = plan(Budgets([1.0] * 340 + [2.0] * 430 + [3.0] * 230), "idp-scale", steps=100, batch_size=100)
    (only,) = made.rounds
    assert len(set(only.sample_rates)) == 1
    assert list(only.clip_scales) == sorted(only.clip_scales)
    people = np.array([level.people for level in made.levels])
    assert people @ np.array(only.clip_scales) / people.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "pdp"}, "mechanism='pdp'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1e6}, "at most the 500 people"),
        ({"steps": 0}, "at least 1. Got 0"),
        ({"steps": 10, "noise_multiplier": 1.0}, "one follows from the other"),
        ({"mechanism": "idp-sample", "accountant": "pld"}, "use pdp-sgd-exact"),
        ({"weights": (0.5, 0.5), "loss": "adaptive"}, "not both"),
        ({"loss": "none"}, "loss='none'"),
        ({"schedule": [(10, 0.0, 1.0)]}, "relative_noise"),
        ({"mechanism": "adapdp", "schedule": [(10, 1.0, 1.0)]}, "pdp-sgd-exact"),
        ({"drawn": "epoch"}, "drawn='epoch'"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1"),
        ({"drawn": "round", "noise_multiplier": 1.0}, 'noise or schedule goes with drawn="step"'),
        ({"drawn": "round", "schedule": [(3, 1, 1), (2, 1, 1)]}, 'noise or schedule goes with drawn="step"'),
        ({"drawn": "round", "batch_size": 501}, "at most 500, the people expected in a round. Got 501"),
        ({"schedule": []}, "at least one round in the schedule. Got an empty one"),
        ({"schedule": [(3, 1, 1), (2, 1, 1)], "steps": 6}, "schedule's 5, or left out. Got steps=6"),
        ({"noise_multiplier": 1e-3, "batch_size": 250}, "these budgets do not allow 250 people a step"),
        ({"batch_size": 1e-300}, "under these budgets 1e-300 people a step would need next to no noise"),
    ],
)
def test_impossible_requests_are_refused_with_the_value(options: dict, message: str) -> None:
    with pytest.raises(PdpsgdError) as caught:
        plan(BUDGET_SETS["all equal"], **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_nobody_to_train_on_is_refused(mechanism: str) -> None:
    with pytest.raises(PdpsgdError, match="Expected a budget that is left"):
        plan(Budgets([0.0] * 10), mechanism=mechanism)
    with pytest.raises(PdpsgdError, match="Expected somebody with a finite budget"):
        plan(Budgets([math.inf] * 10, allow_infinite=True), mechanism=mechanism)


@pytest.mark.parametrize("mechanism", ["pdp-sgd-exact", "idp-scale"])
def test_budgets_that_no_noise_keeps_are_refused_with_the_largest(mechanism: str) -> None:
    budgets = Budgets([0.005] * 20 + [0.01] * 20, 1e-300)
    with pytest.raises(PdpsgdError, match=r"left of epsilon=0\.01 at delta=1e-300"):
        plan(budgets, mechanism=mechanism, steps=5, batch_size=20)
    plan(Budgets([0.005] * 20 + [0.01] * 20, 1e-9), mechanism=mechanism, steps=5, batch_size=20)


def test_levels_are_at_least_as_many_as_deltas_and_infinity_need() -> None:
    budgets = Budgets([1.0, 2.0, math.inf], [1e-5, 1e-5, 1e-6], allow_infinite=True)
    with pytest.raises(PdpsgdError, match=r"Expected max_levels >= 2 for these budgets\. Got 1"):
        plan(budgets, max_levels=1, steps=3, batch_size=1)
    assert len(plan(budgets, max_levels=2, steps=3, batch_size=1).levels) == 2


def test_a_batch_of_everybody_has_the_noise_it_needs_and_no_more() -> None:
    everybody = plan(Budgets(np.full(100, 8.0)), steps=2, batch_size=100)
    nearly = plan(Budgets(np.full(100, 8.0)), steps=2, batch_size=99)
    assert everybody.rounds[0].noise_multiplier < 2 * nearly.rounds[0].noise_multiplier
    assert everybody.rounds[0].sample_rates == (1.0,)
    assert any("rate 1" in note for note in everybody.notes)


@pytest.mark.parametrize(("epsilon", "contributes"), [(0.001, False), (0.01, True)])
def test_people_whose_clipping_norm_rounding_takes_are_named(epsilon: float, contributes: bool) -> None:
    budgets = Budgets([epsilon] * 10 + [16.0] * 90)
    made = plan(budgets, mechanism="idp-scale", steps=20, batch_size=10)
    norms = torch.tensor(made.rounds[0].clip_scales)
    limits = clip_limits(norms, float(norms.max()))
    assert bool(limits[0] > 0) == contributes
    assert any("10 people" in note and "contribute nothing" in note for note in made.notes) != contributes


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.filterwarnings("ignore:.*epsilon above")
def test_an_epsilon_of_twenty_digits_is_planned_like_any_other(mechanism: str) -> None:
    made = plan(Budgets([1.0, 1e20]), mechanism=mechanism, steps=10, batch_size=1)
    assert all(level.proven_epsilon is not None for level in made.levels)
    assert all((level.proven_epsilon or 0) <= level.epsilon for level in made.levels)
