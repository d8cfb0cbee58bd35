"""Individual accounting: running sums against sums over the steps, and conversions against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd.accounting.gaussian import gaussian_epsilon, gaussian_mu
from pdpsgd.accounting.individual import FINENESS, ORDERS, IndividualSums, Share, round_up
from pdpsgd.accounting.rdp import renyi_of_step
from pdpsgd.accounting.theorems import epsilon_from_renyi, epsilon_from_renyi_as_published

DELTA = 1e-5


def share(rate: float, *, noise: float = 2.0, steps: int = 20, scales: tuple[float, ...] = (1.0,)) -> Share:
    return Share(np.full(len(scales), rate), np.array(scales), noise, steps)


@pytest.mark.parametrize(
    ("epsilon", "papers", "tighter"), [(1, 1.32, 1.09), (2, 2.53, 2.17), (3, 3.71, 3.25)]
)
def test_what_the_conversions_say_where_the_exact_figure_is_known(
    epsilon: float, papers: float, tighter: float
) -> None:
    mu = float(gaussian_mu(epsilon, DELTA))
    sums = IndividualSums([share(1.0, noise=1 / mu, steps=1)], np.array([0]))
    sums.add(0, np.array([0]), np.array([1.0]))
    found = sums.epsilons(np.array([DELTA]))
    assert found.at_most[0] == pytest.approx(epsilon, abs=2e-4)
    assert found.by_paper[0] == pytest.approx(papers, abs=6e-3)
    assert found.tighter[0] == pytest.approx(tighter, abs=6e-3)
    assert found.estimate[0] == found.at_most[0]


def test_in_every_step_the_sum_of_squares_is_exact_and_one_gaussian() -> None:
    rng = np.random.default_rng(0)
    levels = np.repeat([0, 1], [3, 2])
    shares = [share(1.0, noise=5.0, steps=30, scales=(0.5, 1.0)), share(1.0, noise=3.0, scales=(0.5, 1.0))]
    sums, squares = IndividualSums(shares, levels), np.zeros(5)
    for index, each in enumerate(shares):
        for _ in range(each.steps):
            norms = rng.uniform(0, each.scales[levels])
            sums.add(index, np.arange(5), norms)
            squares += (norms / each.noise_multiplier) ** 2
    assert len(sums.saved) == 0, "nothing is kept by order where all is Gaussian"
    exact = gaussian_epsilon(np.sqrt(squares), DELTA)
    found = sums.epsilons(np.array([DELTA, DELTA])).at_most
    assert (found >= exact).all()
    np.testing.assert_allclose(found, exact, atol=2e-4)


def test_where_people_are_sampled_each_order_is_a_sum_over_the_steps() -> None:
    rng = np.random.default_rng(1)
    levels = np.repeat([0, 1], [4, 3])
    rates, scales = np.array([0.2, 0.05]), np.array([1.0, 0.5])
    share = Share(rates, scales, 1.5, 25)
    sums = IndividualSums([share], levels)
    by_hand, without_rounding = np.zeros((7, len(ORDERS))), np.zeros((7, len(ORDERS)))
    for _ in range(share.steps):
        sampled = rng.random(7) < 0.6
        norms = rng.uniform(0, scales[levels])
        sums.add(0, np.flatnonzero(sampled), norms[sampled])
        for person, level in enumerate(levels.tolist()):
            part = norms[person] / scales[level] if sampled[person] else 1.0
            for curve, used in ((by_hand, np.ceil(part * FINENESS) / FINENESS), (without_rounding, part)):
                noise = share.noise_multiplier / (used * scales[level])
                curve[person] += renyi_of_step(rates[[level]], noise, ORDERS)[0]
    found = sums.epsilons(np.array([DELTA, 1e-6]))
    delta = np.array([DELTA, 1e-6])[levels][:, None]
    expected = epsilon_from_renyi(np.array(ORDERS), by_hand, delta).min(1)
    np.testing.assert_allclose(found.at_most, expected, atol=2e-4)
    np.testing.assert_allclose(
        found.by_paper, epsilon_from_renyi_as_published(np.array(ORDERS), by_hand, delta).min(1), atol=2e-4
    )
    finest = epsilon_from_renyi(np.array(ORDERS), without_rounding, delta).min(1)
    assert (found.at_most >= finest).all()
    assert (found.at_most <= 1.03 * finest).all()
    assert (found.tighter <= found.by_paper).all()
    assert (found.estimate <= found.at_most).all()


def test_a_step_in_which_somebody_was_not_sampled_counts_at_their_clipping_norm() -> None:
    sums = IndividualSums([share(0.1)], np.array([0, 0]))
    for _ in range(5):
        sums.add(0, np.array([1]), np.array([1.0]))
    full = epsilon_from_renyi(
        np.array(ORDERS), 20 * renyi_of_step(np.array([0.1]), 2.0, ORDERS)[0], DELTA
    ).min()
    found = sums.epsilons(np.array([DELTA]))
    np.testing.assert_allclose(found.at_most, full, atol=1e-4)
    assert np.isnan(found.estimate[0]), "never sampled: there is nothing to go by"
    assert found.estimate[1] == pytest.approx(full, abs=1e-4)


def test_whoever_gave_nothing_has_spent_nothing_where_everybody_is_in_every_step() -> None:
    sums = IndividualSums([share(1.0), share(1.0)], np.array([0, 0]))
    sums.add(0, np.array([0, 1]), np.array([0.0, 0.3]))
    assert sums.epsilons(np.array([DELTA])).at_most[0] == 0.0
    assert sums.epsilons(np.array([DELTA])).at_most[1] > 0


def test_figures_are_rounded_up_and_never_down() -> None:
    values = np.array([0.12345, 1.0, 0.99999999])
    assert round_up(values).tolist() == [0.1235, 1.0, 1.0]
