"""Lower bounds: right on cases that can be worked out, and above the truth no more often than stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from pdpsgd.audit.bounds import (
    bonferroni,
    clopper_pearson_upper,
    epsilon_of_gaussian,
    gaussian_mu,
    many_runs_epsilon,
    one_run_epsilon,
    one_run_gaussian_epsilon,
    one_run_p_value,
)
from pdpsgd.errors import PdpsgdError


def test_without_delta_the_p_value_is_the_binomial_tail():
    p_value = one_run_p_value(epsilon=1.0, delta=0.0, canaries=100, guesses=60, correct=50)
    assert p_value == pytest.approx(binom.sf(49, 60, math.e / (1 + math.e)))


def test_delta_raises_the_p_value_by_the_worst_price_of_a_shortfall():
    epsilon, delta, canaries, guesses, correct = 0.5, 1e-3, 50, 30, 25
    success = 1 / (1 + math.exp(-epsilon))
    tail = sum(binom.pmf(k, guesses, success) for k in range(correct, guesses + 1))
    prices = [
        sum(binom.pmf(k, guesses, success) for k in range(correct - i, correct)) / i
        for i in range(1, correct + 1)
    ]
    expected = tail + 2 * canaries * delta * max(prices)
    p_value = one_run_p_value(
        epsilon=epsilon, delta=delta, canaries=canaries, guesses=guesses, correct=correct
    )
    assert p_value == pytest.approx(expected)


def test_the_bound_is_an_epsilon_that_the_guesses_do_refute():
    counts = {"canaries": 1000, "guesses": 200, "correct": 170, "delta": 1e-5}
    bound = one_run_epsilon(**counts, significance=0.05)
    assert one_run_p_value(epsilon=bound, **counts) <= 0.05
    assert one_run_p_value(epsilon=bound + 1e-4, **counts) > 0.05


@pytest.mark.parametrize("correct", [0, 10, 50])
def test_guesses_no_better_than_coins_refute_nothing(correct):
    assert one_run_epsilon(canaries=100, guesses=100, correct=correct, delta=1e-5, significance=0.05) == 0


def test_no_guess_refutes_nothing():
    assert one_run_epsilon(canaries=100, guesses=0, correct=0, delta=1e-5, significance=0.05) == 0


def test_many_right_guesses_in_one_run_are_capped_by_the_number_of_guesses():
    # 0.05^(1/1000) = e^eps/(1+e^eps): nobody can show more with a thousand guesses.
    bound = one_run_epsilon(canaries=1000, guesses=1000, correct=1000, delta=0.0, significance=0.05)
    success = 0.05 ** (1 / 1000)
    assert bound == pytest.approx(math.log(success / (1 - success)), abs=1e-4)


def test_impossible_counts_are_refused_with_the_counts():
    with pytest.raises(PdpsgdError, match="correct=5, guesses=4"):
        one_run_p_value(epsilon=1.0, delta=0.0, canaries=10, guesses=4, correct=5)


def test_clopper_pearson_is_exact_at_its_edge():
    upper = clopper_pearson_upper(7, 100, 0.025)
    assert binom.cdf(7, 100, upper) == pytest.approx(0.025)
    assert clopper_pearson_upper(100, 100, 0.025) == 1.0


def test_both_orders_of_neighbours_count_in_many_runs():
    one = {"positives": 1000, "negatives": 1000, "delta": 1e-5, "significance": 0.05}
    in_is_sure = many_runs_epsilon(true_positives=300, false_positives=1, **one)
    out_is_sure = many_runs_epsilon(true_positives=999, false_positives=700, **one)
    assert in_is_sure == pytest.approx(out_is_sure)
    assert in_is_sure > 3


def test_an_attack_that_shows_nothing_gives_zero_also_with_very_few_runs():
    few = {
        "true_positives": 1,
        "positives": 2,
        "false_positives": 1,
        "negatives": 2,
        "significance": 0.05,
    }
    assert many_runs_epsilon(**few, delta=1e-5) == 0
    assert gaussian_mu(**few) == 0


def test_gaussian_dp_turns_into_epsilon_and_back():
    for mu in (0.1, 0.5, 1.0, 2.0, 5.0):
        epsilon = epsilon_of_gaussian(mu, 1e-5)
        delta = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        assert delta == pytest.approx(1e-5, rel=1e-3)
    assert epsilon_of_gaussian(0.0, 1e-5) == 0


def test_several_comparisons_share_the_significance():
    assert bonferroni(0.05, 5) == pytest.approx(0.01)
    with pytest.raises(PdpsgdError, match="comparisons=0"):
        bonferroni(0.05, 0)


def test_the_one_run_bound_on_randomised_response_is_too_high_no_more_often_than_stated():
    """Canaries answer by randomised response at epsilon 1, the hardest case of the theorem (tight at delta
    0).

    2,000 audits at significance 0.05; the count of bounds above the truth passes the limit below with chance
    under 1e-6.
    """
    generator, repeats = np.random.default_rng(11), 2000
    correct = generator.binomial(100, math.e / (1 + math.e), size=repeats)
    bounds = {
        int(k): one_run_epsilon(canaries=100, guesses=100, correct=int(k), delta=0.0, significance=0.05)
        for k in np.unique(correct)
    }
    too_high = sum(bounds[int(k)] > 1.0 for k in correct)
    assert 0 < too_high <= binom.isf(1e-6, repeats, 0.05)


def test_many_run_bounds_on_a_gaussian_are_too_high_no_more_often_than_stated():
    """A Gaussian mechanism with mu = 1 at a threshold of one: 500 audits at significance 0.1, limit passed
    under 1e-6."""
    generator, repeats, runs = np.random.default_rng(12), 500, 2000
    true_positives = generator.binomial(runs, norm.sf(0.0), size=repeats)
    false_positives = generator.binomial(runs, norm.sf(1.0), size=repeats)
    epsilon_too_high = mu_too_high = 0
    for hits, alarms in zip(true_positives, false_positives, strict=True):
        counts = {"true_positives": int(hits), "false_positives": int(alarms)}
        mu = gaussian_mu(**counts, positives=runs, negatives=runs, significance=0.1)
        epsilon = many_runs_epsilon(**counts, positives=runs, negatives=runs, delta=1e-5, significance=0.1)
        mu_too_high += mu > 1.0
        epsilon_too_high += epsilon > epsilon_of_gaussian(1.0, 1e-5)
        assert mu > 0.6
    limit = binom.isf(1e-6, repeats, 0.1)
    assert mu_too_high <= limit
    assert epsilon_too_high <= limit


def test_the_gaussian_one_run_bound_is_higher_but_not_above_the_truth():
    """Gaussian canaries with mu = 1, 50 audits of 1,000 canaries at significance 1e-6 each."""
    generator, canaries, guesses = np.random.default_rng(13), 1000, 100
    truth = epsilon_of_gaussian(1.0, 1e-5)
    for _ in range(50):
        coins = generator.random(canaries) < 0.5
        scores = generator.normal(size=canaries) + coins
        order = np.argsort(scores)
        correct = int(coins[order[-guesses:]].sum())
        counts = {
            "canaries": canaries,
            "guesses": guesses,
            "correct": correct,
            "delta": 1e-5,
            "significance": 1e-6,
        }
        assert one_run_epsilon(**counts) <= one_run_gaussian_epsilon(**counts) <= truth
