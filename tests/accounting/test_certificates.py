"""Certificates: never below the truth, as small as stated, and safe where the natural filter is not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from pdpsgd import Budgets, plan
from pdpsgd._typing import FloatArray
from pdpsgd.accounting import Exposure, accountant, pld
from pdpsgd.accounting.certificates import (
    Certificate,
    allowance,
    certificate,
    certificate_of_declared,
    certificate_of_renyi,
    certificate_of_two_ids,
    certificate_within,
    compose,
    corners_of,
    rate_within,
    smallest_d,
    smallest_mu,
)
from pdpsgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from pdpsgd.accounting.rdp import RdpAccountant
from pdpsgd.errors import PdpsgdError, PromiseBroken
from pdpsgd.planning.certificate_check import certificate_holds, mu_upper_bound

PLD = accountant("pld")
DELTA = 1e-5

# sigma, q, steps, participation: epsilon, mu, by certificate, four runs, by four, by one
FIGURES = [
    (2.77, 1024 / 60_000, 1000, 1.0, 0.7475, 0.2052, 0.7515, 1.585, 1.610, 1.591),
    (1.3, 64 / 60_000, 1000, 1.0, 0.0985, 0.0321, 0.0995, 0.2038, 0.2119, 0.2043),
    (1.3, 64 / 60_000, 20_000, 1.0, 0.4815, 0.1372, 0.4844, 1.020, 1.033, 1.025),
    (6, 0.2, 100, 1.0, 1.313, 0.3427, 1.319, 2.808, 2.858, 2.817),
    (20, 1, 25, 1.0, 0.9263, 0.2500, 0.9328, 1.993, 2.006, 2.006),
    (2.79, 0.02, 1000, 0.5, 0.5048, 0.1456, 0.5167, 0.9754, 1.103, 0.9755),
    (0.8, 0.01, 500, 1.0, 2.400, 0.6293, 2.596, 4.295, 5.757, 4.314),
    (1, 0.01, 10, 1.0, 0.3799, 0.1537, 0.5485, 0.5476, 1.171, 0.6195),
]


@pytest.mark.parametrize("row", FIGURES)
def test_the_figures_of_eight_runs(row: tuple[float, ...]) -> None:
    sigma, q, steps, participation, *expected = row
    run = (Exposure(participation, q, sigma, int(steps)),)
    one = certificate(run, d=2.5e-7)
    found = [
        PLD.epsilon(run, DELTA),
        one.mu,
        float(gaussian_epsilon(one.mu, 0.9 * DELTA)),
        PLD.epsilon(run * 4, DELTA),
        compose([one] * 4).epsilon(DELTA),
        certificate(run * 4, d=1e-6).epsilon(DELTA),
    ]
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_the_figures_of_allowances() -> None:
    found = np.sqrt(allowance([0.5, 1, 2], DELTA).b)
    np.testing.assert_allclose(found, [0.1412, 0.2664, 0.4987], rtol=1e-3)
    whole = allowance(2.0, 1e-6).b
    apart = allowance(2.0, 1e-6, set_aside=[0.3, 0.1]).b
    np.testing.assert_allclose(1 - apart / whole, [0.26, 0.09], atol=0.005)
    from_b = [certificate_of_declared(e, 0.0).mu ** 2 / whole for e in (0.3, 0.1)]
    np.testing.assert_allclose(from_b, [0.71, 0.08], atol=0.005)


def one_step_curves(q: float, sigma: float) -> list[tuple[str, object]]:
    """The exact curves of one step, for every real epsilon: participation q in one Gaussian."""
    mu = 1 / sigma

    def removing(epsilon: FloatArray) -> FloatArray:
        inner = 1 + np.expm1(epsilon) / q
        safe = np.where(inner > 0, inner, 1.0)
        return np.where(inner > 0, q * gaussian_delta(mu, np.log(safe)), -np.expm1(epsilon))

    def adding(epsilon: FloatArray) -> FloatArray:
        x = 1 + np.expm1(-epsilon) / q
        safe = np.where(x > 0, x, 1.0)
        return np.where(x > 0, q * x * np.exp(epsilon) * gaussian_delta(mu, -np.log(safe)), 0.0)

    return [("removing", removing), ("adding", adding)]


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e-4, 0.999), st.floats(0.3, 20.0), st.sampled_from([1e-9, 1e-7, 1e-5, 1e-3]),
)  # fmt: skip
def test_one_step_is_never_below_its_exact_curve(q: float, sigma: float, d: float) -> None:
    found = certificate((Exposure(1.0, q, sigma, 1),), d=d)
    epsilon = np.concatenate([np.linspace(-8, 8, 4001), np.geomspace(1e-9, 20, 2000)])
    for _, curve in one_step_curves(q, sigma):
        # One part in 1e12 for the rounding of the two curves themselves.
        assert (curve(epsilon) <= found.delta(epsilon) + 1e-12).all()  # type: ignore[operator]


exposures = st.builds(
    Exposure,
    st.sampled_from([1.0, 1.0, 0.7, 0.1]), st.floats(1e-3, 0.999), st.floats(0.4, 20.0), st.integers(1, 500),
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.lists(exposures, min_size=1, max_size=2), st.sampled_from([1e-8, 1e-6, 1e-4]))
def test_a_run_is_never_below_the_accountants_curve(rounds: list[Exposure], d: float) -> None:
    run = tuple(rounds)
    found = certificate(run, d=d)
    epsilon = np.concatenate([np.linspace(0, 5, 4001), np.geomspace(1e-7, 60, 2000)])
    for losses in pld._distribution(run):
        assert (pld._delta_curve(losses)(epsilon) <= found.delta(epsilon) * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("d", [1e-8, 1e-6])
@pytest.mark.parametrize(
    "run",
    [
        *[(Exposure(row[3], row[1], row[0], int(row[2])),) for row in FIGURES if row[2] < 20_000],
        (Exposure(1.0, 0.01, 0.5, 30), Exposure(0.3, 0.05, 2.0, 40)),
        (Exposure(0.1, 0.0078125, 0.5, 1),),
    ],
)
def test_an_independent_computation_agrees(run: tuple[Exposure, ...], d: float) -> None:
    found = certificate(run, d=d).mu
    again = mu_upper_bound(run, d=d, fineness=24)
    assert 0.998 * found <= again <= found * (1 + 1e-6)
    assert certificate_holds(run, mu=found, d=d)
    if d == 1e-6:
        assert not certificate_holds(run, mu=found * 0.995, d=d)


def test_smallest_means_that_less_is_too_little() -> None:
    run = (Exposure(1.0, 0.01, 1.0, 50),)
    found = certificate(run, d=1e-6)
    again = certificate_within(run, mu=found.mu)
    assert again.d == pytest.approx(1e-6, rel=1e-3)
    assert certificate_within(run, mu=0.9 * found.mu).d > 2e-6
    epsilon = np.linspace(0, 6, 20_001)
    removing, _ = pld._distribution(run)
    less = Certificate(0.99 * found.mu, 1e-6).delta(epsilon)
    assert (pld._delta_curve(removing)(epsilon) > less).any()


def test_corners_decide_not_the_grid_points_of_delta() -> None:
    # Randomized response: at every grid point delta is 0 or as at mu = 0, and still mu is 1.232.
    corners = corners_of(-1, 1.0, np.array([1 / (1 + math.e), 0.0, math.e / (1 + math.e)]), 0.0)
    assert smallest_mu(corners, 0.0) == pytest.approx(1.232, abs=1e-3)
    assert smallest_mu(corners, 0.0) == pytest.approx(certificate_of_declared(1.0, 0.0).mu, rel=1e-9)
    assert smallest_d(corners, 1.2321) <= 1e-9
    assert smallest_d(corners, 1.1) > 0.01


def test_one_direction_alone_is_not_enough() -> None:
    run = (Exposure(1.0, 0.05, 0.5, 1),)
    each = [
        smallest_mu(corners_of(losses.first, losses.interval, losses.mass, losses.infinite), 1e-6)
        for losses in pld._distribution(run)
    ]
    assert min(each) < 0.9 * max(each)
    assert certificate(run, d=1e-6).mu == max(each)


def test_mass_at_infinity_needs_d() -> None:
    corners = corners_of(0, 0.1, np.array([0.999]), 1e-3)
    assert smallest_mu(corners, 5e-4) == math.inf
    assert smallest_mu(corners, 0.01) < 1
    assert smallest_d(corners, 1.0) >= 1e-3
    assert certificate((Exposure(1.0, 0.01, 1.0, 10),), d=0.0).mu == math.inf


def test_everybody_in_every_step_is_exact() -> None:
    found = certificate((Exposure(1.0, 1.0, 20.0, 25), Exposure(1.0, 1.0, 10.0, 4)), d=0.0)
    assert found.mu == pytest.approx(math.sqrt(25 / 400 + 4 / 100), rel=1e-9)
    assert certificate((Exposure(1.0, 0.0, 1.0, 10),), d=0.0) == Certificate(0.0, 0.0)


def chosen_by_loss(second_runs: list[tuple[float, float]], sigma: float, epsilon: float) -> float:
    """delta at epsilon of removing, if run 2 is the worst of these single steps for run 1's loss."""
    mu = 1 / sigma

    def worst(loss: float) -> float:
        at = np.array([epsilon - loss])
        return max(float(one_step_curves(q, s)[0][1](at)[0]) for q, s in second_runs)  # type: ignore[operator]

    center = mu * mu / 2
    value, _ = quad(
        lambda x: worst(x) * norm.pdf(x, center, mu), center - 10 * mu, center + 10 * mu,
        limit=500, points=[0.448, 0.917, epsilon],
    )  # fmt: skip
    return float(value)


def test_the_natural_filter_overspends_and_certificates_do_not() -> None:
    epsilon, delta, sigma = 2.0, 1e-6, 3.0
    natural = [(1.0, 3.34), (0.0611, 1.0), (0.00184, 0.5)]
    first = Exposure(1.0, 1.0, sigma, 1)
    for q, s in natural:
        assert (
            PLD.delta((first, Exposure(1.0, q, s, 1)), epsilon) <= 1e-6
        )  # each one is let in by the natural filter
    assert chosen_by_loss(natural, sigma, epsilon) == pytest.approx(2.07e-6, rel=0.01)

    allowed = allowance(epsilon, delta)
    left = Certificate(math.sqrt(allowed.b - certificate((first,), d=0.0).mu ** 2), float(allowed.d))
    for q, s in natural:
        assert certificate((Exposure(1.0, q, s, 1),), d=left.d).mu > left.mu
    let_in = [(1.0, 1 / left.mu)]
    let_in += [(rate_within(left, noise_multiplier=s, steps=1), s) for s in (1.0, 0.5)]
    np.testing.assert_allclose(
        [let_in[0][1], let_in[1][0], let_in[2][0]], [3.371, 0.0346, 0.00067], rtol=0.01
    )
    reached = chosen_by_loss(let_in, sigma, epsilon)
    assert reached == pytest.approx(9.43e-7, rel=0.01)
    assert reached <= delta


@settings(max_examples=12, deadline=None)
@given(st.floats(0.02, 1.5), st.floats(0.5, 10.0), st.integers(1, 2000), st.sampled_from([1.0, 0.5]))
def test_the_reverse_stays_within_and_uses_what_is_there(
    mu: float, sigma: float, steps: int, pi: float
) -> None:
    target = Certificate(mu, 1e-7)
    rate = rate_within(target, noise_multiplier=sigma, steps=steps, participation=pi)
    found = certificate((Exposure(pi, rate, sigma, steps),), d=target.d).mu
    assert found <= mu
    assert (
        rate == 1.0
        or found >= 0.99 * mu
        or certificate((Exposure(pi, rate * 1.02, sigma, steps),), d=1e-7).mu > mu
    )


def test_nothing_is_within_nothing() -> None:
    assert rate_within(Certificate(0.0, 1e-7), noise_multiplier=1.0, steps=10) == 0.0
    assert rate_within(Certificate(0.5, 0.0), noise_multiplier=1.0, steps=10) == 0.0
    assert rate_within(Certificate(5.0, 0.0), noise_multiplier=1.0, steps=10) == 1.0


def test_renyi_of_a_gaussian_costs_a_quarter_more() -> None:
    orders = np.concatenate([1 + np.geomspace(0.01, 1, 15), np.geomspace(2, 500, 40)])
    for rho in (0.1, 2.0):
        ratio = certificate_of_renyi(orders, rho * orders, d=1e-9).mu / math.sqrt(2 * rho)
        assert 1.25 < ratio < 1.40
    assert certificate_of_renyi(orders, 0 * orders, d=0.0).mu == 0
    assert certificate_of_renyi(orders, orders, d=0.0).mu == math.inf


def test_renyi_is_never_below_the_run_it_came_from() -> None:
    rdp = RdpAccountant([1.5, 2, 3, 5, 8, 16, 32, 64, 128, 256])
    run = (Exposure(1.0, 0.02, 1.5, 200),)
    bound = certificate_of_renyi(rdp.orders, rdp.renyi(run), d=1e-6)
    assert certificate(run, d=1e-6).mu <= bound.mu <= 2 * certificate(run, d=1e-6).mu


def test_two_ids_of_one_person_are_not_a_sum_of_squares() -> None:
    both = certificate_of_two_ids(Certificate(0.3, 0.0), Certificate(0.4, 0.0))
    assert both == Certificate(pytest.approx(0.7), 0.0)  # type: ignore[arg-type]
    with_d = certificate_of_two_ids(Certificate(0.3, 1e-6), Certificate(0.4, 1e-6))
    assert 2e-6 < with_d.d < 1e-5


def test_the_curve_and_its_inverses_fit_together() -> None:
    rng = np.random.default_rng(0)
    epsilon, delta = np.exp(rng.uniform(-7, 3, 2000)), 10 ** rng.uniform(-12, -2, 2000)
    mu = gaussian_mu(epsilon, delta)
    assert (gaussian_delta(mu, epsilon) <= delta).all()
    assert (gaussian_delta(mu * (1 + 1e-8), epsilon) >= delta * (1 - 1e-9)).all()
    back = gaussian_epsilon(mu, delta)
    assert (gaussian_delta(mu, back) <= delta * (1 + 1e-15)).all()
    np.testing.assert_allclose(back, epsilon, rtol=1e-5)
    exact = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    np.testing.assert_allclose(gaussian_delta(mu, epsilon), exact, rtol=1e-4, atol=1e-16)


def test_an_allowance_of_nothing_and_of_everything() -> None:
    found = allowance(
        [0.0, 1.0, np.inf, 0.3, 0.5], [DELTA, 0.0, DELTA, DELTA, DELTA], set_aside=[0, 0, 0, 0.3, 0.2]
    )
    assert found.b[:2].tolist() == [0.0, 0.0]
    assert found.d[:2].tolist() == [0.0, 0.0]
    assert found.b[2] == np.inf
    assert (found.b[3], found.e[3]) == (0.0, 0.3)
    assert found.b[4] == pytest.approx(float(allowance(0.3, DELTA).b))
    with pytest.raises(PdpsgdError, match="0 < kappa < 1"):
        allowance(1.0, DELTA, kappa=1.0)


def test_the_accountant_plans_by_certificates() -> None:
    by = accountant("certificate")
    run = (Exposure(1.0, 1024 / 60_000, 2.77, 1000),)
    assert by.epsilon(run, DELTA) == pytest.approx(certificate(run, d=1e-6).epsilon(DELTA))
    assert PLD.epsilon(run, DELTA) <= by.epsilon(run, DELTA) <= 1.01 * PLD.epsilon(run, DELTA)
    assert PLD.delta(run, 0.7) <= by.delta(run, 0.7) <= 1.2 * PLD.delta(run, 0.7)


def test_a_plan_by_certificates_verifies_and_a_smaller_claim_does_not() -> None:
    made = plan(Budgets([0.5, 1.0, 1.0, 2.0] * 100), steps=50, batch_size=40, accountant="certificate")
    made.verify()
    exact = PLD.epsilon(made.history_of(1), DELTA)
    assert exact <= made.levels[1].proven_epsilon <= 1.05 * exact  # type: ignore[operator]
    lower = tuple(replace(x, proven_epsilon=0.99 * x.proven_epsilon) for x in made.levels)  # type: ignore[operator]
    with pytest.raises(PromiseBroken, match=r"levels\[0\]"):
        replace(made, levels=lower).verify()
