"""Thresholds of the paper, and the noise search with history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdpsgd import PdpsgdError
from pdpsgd.accounting import Exposure
from pdpsgd.accounting.registry import accountant
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.planning.thresholds import (
    adaptive_loss,
    best_threshold,
    fixed_loss,
    printed_adaptive_loss,
    waste_sampled,
    waste_unsampled,
)

TWENTY = np.linspace(0.5, 1, 20)
ONES = np.ones(20)
budget_sets = st.lists(st.floats(0.05, 5), min_size=1, max_size=12)


def test_the_wastes_are_the_papers_sums() -> None:
    budgets, people = np.array([0.5, 1.0, 2.0]), np.array([2.0, 1.0, 3.0])
    expected = 2 * 0.5 * (1 - np.expm1(0.5) / np.expm1(1.5)) + 1.0 * (1 - np.expm1(1.0) / np.expm1(1.5))
    assert waste_unsampled(budgets, people, 1.5) == pytest.approx(expected)
    assert waste_sampled(budgets, people, 1.5) == pytest.approx(3 * 0.5)


@pytest.mark.parametrize(("w1", "tau"), [(0.2, 0.921053), (0.5, 0.763158), (0.7, 0.631579)])
def test_the_minimiser_of_loss_f_is_the_known_level(w1: float, tau: float) -> None:
    assert best_threshold(TWENTY, ONES, fixed_loss(w1, 1 - w1)) == pytest.approx(tau, abs=1e-6)


def test_the_minimiser_of_loss_a_lies_inside_and_that_of_the_printed_one_at_the_end() -> None:
    assert best_threshold(TWENTY, ONES, adaptive_loss) == pytest.approx(0.752812, abs=1e-6)
    assert best_threshold(TWENTY, ONES, printed_adaptive_loss) == 0.5


@settings(deadline=None, max_examples=60)
@given(budget_sets, st.floats(0.05, 0.95))
def test_no_grid_of_thresholds_beats_the_exact_minimiser(budgets: list[float], w1: float) -> None:
    values, people = np.array(budgets), np.ones(len(budgets))
    for loss in (fixed_loss(w1, 1 - w1), adaptive_loss, printed_adaptive_loss):
        best = loss(values, people, best_threshold(values, people, loss))
        grid = [loss(values, people, tau) for tau in np.linspace(values.min(), values.max(), 200)]
        assert best <= min(grid) + 1e-9


@given(budget_sets, st.floats(0.05, 0.95))
def test_the_minimiser_of_loss_f_is_always_a_level(budgets: list[float], w1: float) -> None:
    assert best_threshold(budgets, np.ones(len(budgets)), fixed_loss(w1, 1 - w1)) in budgets


def test_equal_budgets_have_themselves_as_threshold() -> None:
    for loss in (fixed_loss(0.2, 0.8), adaptive_loss, printed_adaptive_loss):
        assert best_threshold([0.7, 0.7], [3, 4], loss) == 0.7


def test_zero_and_infinite_budgets_stay_out() -> None:
    with_extremes = best_threshold([0.0, *TWENTY, np.inf], [9, *ONES, 9], fixed_loss(0.5, 0.5))
    assert with_extremes == best_threshold(TWENTY, ONES, fixed_loss(0.5, 0.5))
    with pytest.raises(PdpsgdError, match="at least one person"):
        best_threshold([0.0, np.inf], [1, 1], adaptive_loss)


def test_counting_people_equals_repeating_them() -> None:
    counted = best_threshold([0.5, 1.0, 2.0], [5, 1, 2], adaptive_loss)
    assert counted == pytest.approx(best_threshold([0.5] * 5 + [1.0] + [2.0] * 2, np.ones(8), adaptive_loss))


@settings(deadline=None, max_examples=12)
@given(st.floats(0.2, 4), st.floats(0.001, 0.5), st.integers(1, 300), st.booleans())
@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_the_noise_found_never_exceeds_the_target_and_hardly_less_would(
    name: str, target: float, rate: float, steps: int, with_history: bool
) -> None:
    history = (Exposure(1, 0.01, 4.0, 50),) if with_history else ()
    sigma = smallest_noise_multiplier(
        target, 1e-5, sample_rate=rate, steps=steps, history=history, accounting=name, tolerance=1e-3
    )
    by = accountant(name)
    assert by.epsilon((*history, Exposure(1, rate, sigma, steps)), 1e-5) <= target
    if sigma > 0.1:
        assert by.epsilon((*history, Exposure(1, rate, sigma * (1 - 4e-3), steps)), 1e-5) > target * (
            1 - 1e-3
        )


def test_a_spent_budget_is_refused_with_what_was_spent() -> None:
    history = (Exposure(1, 0.1, 1.0, 100),)
    with pytest.raises(PdpsgdError, match="spent already"):
        smallest_noise_multiplier(0.5, 1e-5, sample_rate=0.01, steps=10, history=history)


def test_the_history_makes_the_noise_larger() -> None:
    plain = smallest_noise_multiplier(1.0, 1e-5, sample_rate=0.01, steps=100)
    history = (Exposure(1, 0.01, plain * 1.2, 100),)
    assert smallest_noise_multiplier(1.0, 1e-5, sample_rate=0.01, steps=100, history=history) > plain
