"""The published accounting of votes: its bound holds for a fixed pair, and its order of groups breaks the promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import log_ndtr

from pdpsgd import PdpsgdError
from pdpsgd.pate.as_published import (
    ORDERS,
    charged_weights,
    log_chance_of_another,
    renyi_of_answer,
    vote_as_published,
)

EPSILONS = [1.0, 2.0, 3.0]
CODES = {"34/43/23": [0.53, 1.34, 1.07], "54/37/9": [0.92, 1.25, 0.46]}


def agreed(examples: int = 3000) -> torch.Tensor:
    """Votes of 250 teachers that mostly agree."""
    rng = np.random.default_rng(0)
    most = rng.integers(150, 245, examples)
    counts = np.zeros((examples, 10))
    winner = rng.integers(0, 10, examples)
    counts[np.arange(examples), winner] = most
    counts[np.arange(examples), (winner + 1) % 10] = 250 - most
    return torch.from_numpy(counts)


@pytest.mark.parametrize("gap", [5.0, 60.0, 150.0, 240.0])
@pytest.mark.parametrize("deviation", [20.0, 40.0])
def test_the_bound_is_above_the_divergence_of_two_neighboring_votes(gap: float, deviation: float) -> None:
    votes = np.array([200.0, 200.0 - gap])
    log_q = log_chance_of_another(votes, deviation)
    bound = renyi_of_answer(log_q, deviation)
    scale = math.sqrt(2) * deviation
    assert log_q == pytest.approx(float(log_ndtr(-gap / scale)), rel=1e-9)

    def order_of(own: float, against: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return ORDERS * own + (1 - ORDERS) * against

    for moved in (gap - 2, gap + 2):  # one teacher changes its mind
        # In logarithms: chances of 1e-17 to the power of -49.
        right, wrong = (
            order_of(own, against)
            for own, against in (
                (log_ndtr(gap / scale), log_ndtr(moved / scale)),
                (log_ndtr(-gap / scale), log_ndtr(-moved / scale)),
            )
        )
        divergence = np.logaddexp(right, wrong)
        assert (divergence / (ORDERS - 1) <= bound + 1e-15).all()
    assert (bound <= ORDERS / deviation**2 + 1e-15).all()


def test_votes_that_agree_cost_less_and_votes_that_do_not_cost_what_any_do() -> None:
    sure = renyi_of_answer(log_chance_of_another(np.array([250.0, 0.0]), 40.0), 40.0)
    assert (sure < 0.05 * ORDERS / 40**2).all()
    tied = renyi_of_answer(log_chance_of_another(np.array([125.0, 125.0]), 40.0), 40.0)
    np.testing.assert_array_equal(tied, ORDERS / 40**2)


@pytest.mark.parametrize("weights", CODES.values(), ids=CODES)
def test_charged_by_rank_somebody_spends_more_than_they_allow(weights: list[float]) -> None:
    by_rank = vote_as_published(agreed(), weights, EPSILONS)
    own = vote_as_published(agreed(), weights, EPSILONS, charge="own")
    assert (by_rank.charged <= EPSILONS).all()
    assert (by_rank.own > EPSILONS).any(), "the promise is broken"
    assert (own.own <= EPSILONS).all()
    np.testing.assert_array_equal(own.own, own.charged)
    assert len(own.labels) < len(by_rank.labels)
    assert (own.exact > EPSILONS).any(), "what follows from the votes is no bound"
    assert "no promise" in by_rank.not_for_release


def test_where_weights_grow_with_budgets_both_orders_are_the_same() -> None:
    one, other = (
        vote_as_published(agreed(), [0.5, 1.0, 1.5], EPSILONS, charge=c) for c in ("by-rank", "own")
    )
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_array_equal(one.own, other.own)


@pytest.mark.parametrize("charge", ["by-rank", "own"])
def test_charges_do_not_change_when_levels_are_listed_in_another_order(charge: str) -> None:
    weights, order = CODES["54/37/9"], [2, 0, 1]
    one = vote_as_published(agreed(), weights, EPSILONS, charge=charge)
    other = vote_as_published(
        agreed(), [weights[i] for i in order], [EPSILONS[i] for i in order], charge=charge
    )
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_array_equal(one.charged[order], other.charged)
    np.testing.assert_array_equal(one.own[order], other.own)


def test_equal_weights_do_not_merge_levels() -> None:
    found = vote_as_published(agreed(), [1.0, 1.0, 1.0], EPSILONS)
    assert found.charged.shape == (3,)
    assert len(set(found.charged.tolist())) == 1
    assert charged_weights([1.0, 1.0], [2, 1], "by-rank").tolist() == [1.0, 1.0]


def test_levels_of_one_budget_are_refused() -> None:
    with pytest.raises(PdpsgdError, match="budget of its own"):
        charged_weights([1.0, 2.0], [1.0, 1.0], "own")
