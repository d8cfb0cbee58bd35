"""The theorems as functions: amplification, composition, conversions, and why everybody pays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdpsgd.accounting.gdp import delta_of_gaussian
from pdpsgd.accounting.theorems import (
    amplify,
    amplify_adding,
    amplify_removing,
    compose,
    delta_from_renyi,
    epsilon_from_renyi,
    epsilon_from_renyi_as_published,
    participation_for,
    post_process,
)
from pdpsgd.planning.as_published import as_published_bound

chances = st.floats(0.01, 0.99)


def hockey_stick(upper: np.ndarray, lower: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum())


def two_distributions(seed: int, size: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))


@given(st.integers(0, 2**32), chances, st.floats(-2, 3))
def test_amplification_is_exact_in_both_orders(seed: int, pi: float, epsilon: float) -> None:
    with_record, without = two_distributions(seed)
    mixed = (1 - pi) * without + pi * with_record
    removing = amplify_removing(lambda e: hockey_stick(with_record, without, e), pi)
    adding = amplify_adding(lambda e: hockey_stick(without, with_record, e), pi)
    assert removing(epsilon) == pytest.approx(hockey_stick(mixed, without, epsilon), abs=1e-12)
    assert adding(epsilon) == pytest.approx(hockey_stick(without, mixed, epsilon), abs=1e-12)


@given(chances, st.floats(0.01, 5), st.floats(0.1, 3))
def test_theorem_1_is_never_below_the_exact_form(pi: float, epsilon: float, mu: float) -> None:
    delta = delta_of_gaussian(mu, epsilon)
    simple_epsilon, simple_delta = amplify(epsilon, delta, pi)
    for exact in (amplify_removing, amplify_adding):
        assert (
            exact(lambda e: delta_of_gaussian(mu, e), pi)(simple_epsilon) <= simple_delta * (1 + 1e-9) + 1e-15
        )


@given(st.floats(0.05, 3), st.floats(0.05, 3))
def test_participation_makes_theorem_1_give_exactly_the_budget(epsilon: float, tau: float) -> None:
    pi = float(participation_for(epsilon, tau))
    assert amplify(tau, 1e-5, pi)[0] == pytest.approx(min(epsilon, tau))


def test_composition_adds_person_by_person() -> None:
    epsilon, delta = compose(([0.5, 1.0], [1e-6, 0]), ([0.25, 0.5], 1e-6))
    assert epsilon.tolist() == [0.75, 1.5]
    assert delta.tolist() == [2e-6, 1e-6]


@given(st.integers(0, 2**32), st.floats(0, 2), st.floats(0, 2))
def test_composition_holds_for_arbitrary_pairs(seed: int, e1: float, e2: float) -> None:
    (p1, q1), (p2, q2) = two_distributions(seed), two_distributions(seed + 1)
    d1, d2 = hockey_stick(p1, q1, e1), hockey_stick(p2, q2, e2)
    together = hockey_stick(np.outer(p1, p2).ravel(), np.outer(q1, q2).ravel(), e1 + e2)
    assert together <= d1 + d2 + 1e-12


@given(st.integers(0, 2**32), st.floats(0, 2))
def test_post_processing_never_adds_loss(seed: int, epsilon: float) -> None:
    upper, lower = two_distributions(seed)
    channel = np.random.default_rng(seed + 2).dirichlet(np.ones(4), size=upper.size)
    assert (
        hockey_stick(upper @ channel, lower @ channel, epsilon) <= hockey_stick(upper, lower, epsilon) + 1e-12
    )
    promise = (np.array([epsilon]), np.array([0.0]))
    assert post_process(promise) is promise


@given(st.floats(1.01, 5000), st.floats(0, 50), st.floats(1e-12, 0.5))
def test_the_modern_conversion_is_never_worse_than_the_published_one(
    alpha: float, rho: float, delta: float
) -> None:
    published = float(epsilon_from_renyi_as_published(alpha, rho, delta))
    assert float(epsilon_from_renyi(alpha, rho, delta)) <= published + 1e-9


@given(st.integers(0, 2**32), st.floats(1.1, 40), st.floats(1e-6, 0.2))
def test_both_conversions_hold_for_arbitrary_pairs(seed: int, alpha: float, delta: float) -> None:
    upper, lower = two_distributions(seed)
    rho = math.log(np.sum(upper**alpha * lower ** (1 - alpha))) / (alpha - 1)
    for convert in (epsilon_from_renyi, epsilon_from_renyi_as_published):
        assert hockey_stick(upper, lower, float(convert(alpha, rho, delta))) <= delta + 1e-12
    epsilon = max(0.0, rho)
    assert hockey_stick(upper, lower, epsilon) <= float(delta_from_renyi(alpha, rho, epsilon)) + 1e-12


# Why everybody pays: randomised response with tau in each round, by exact enumeration.


def real_loss(budget: float, tau: float, rounds: int, *, everybody_pays: bool) -> float:
    """The exact loss of somebody in up to `rounds` rounds of tau-randomised response, drawn with the paper's
    chance.

    As published, whoever is not drawn keeps everything and enters again with the same chance, until drawn
    (tau is above the budget, so one draw uses it up). Sound: the budget is spent after the first round, drawn
    or not.
    """
    pi = float(participation_for(budget, tau))
    yes, no = math.exp(tau) / (1 + math.exp(tau)), 1 / (1 + math.exp(tau))
    rounds = 1 if everybody_pays else rounds
    with_record: dict[tuple[int, ...], float] = {}
    without: dict[tuple[int, ...], float] = {}
    for answers in itertools.product((0, 1), repeat=rounds):
        # Without the record, or not drawn: the answer is that of the reference value 0.
        reference = [yes if a == 0 else no for a in answers]
        without[answers] = math.prod(reference)
        total, not_yet = 0.0, 1.0
        for r in range(rounds):
            truthful = yes if answers[r] == 1 else no
            total += not_yet * pi * math.prod(reference[:r]) * truthful * math.prod(reference[r + 1 :])
            not_yet *= 1 - pi
        with_record[answers] = total + not_yet * math.prod(reference)
    ratios = [with_record[a] / without[a] for a in without]
    return max(abs(math.log(ratio)) for ratio in ratios)


@pytest.mark.parametrize(("rounds", "stated"), [(1, 0.500), (2, 0.653), (3, 0.710), (5, 0.743)])
def test_as_published_bookkeeping_exceeds_the_promise_by_the_stated_amounts(
    rounds: int, stated: float
) -> None:
    loss = real_loss(0.5, 0.75, rounds, everybody_pays=False)
    pi = float(participation_for(0.5, 0.75))
    assert loss == pytest.approx(stated, abs=5e-4)
    assert loss == pytest.approx(math.log1p((1 - (1 - pi) ** rounds) * math.expm1(0.75)))
    assert loss <= as_published_bound(0.5, [0.75] * rounds) + 1e-12


def test_ours_keeps_the_promise() -> None:
    for rounds in (1, 2, 3, 5):
        assert real_loss(0.5, 0.75, rounds, everybody_pays=True) <= 0.5 + 1e-12


@given(st.floats(0.1, 3), st.lists(st.floats(0.05, 2), min_size=1, max_size=6))
def test_the_provable_bound_of_as_published_is_at_most_budget_plus_the_largest_threshold(
    budget: float, taus: list[float]
) -> None:
    assert as_published_bound(budget, taus) <= budget + max(taus) + 1e-12
