"""The verifier never answers below the truth, hardly above it, and refuses what it cannot tell."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft as scipy_fft
from scipy.special import log_ndtr, ndtr

from pdpsgd import Level, PdpsgdError, Plan, PromiseBroken, Round
from pdpsgd.accounting.history import Exposure
from pdpsgd.accounting.registry import accountant
from pdpsgd.planning import drawn_rounds, verifier_steps
from pdpsgd.planning.contour import Contour, ContourChoice, Integral, Part, Sum
from pdpsgd.planning.verification import epsilon_upper_bound
from pdpsgd.planning.verifier_directions import Direction
from tests.planning.closed_forms import draw, exact_epsilon, gaussian, with_participation


def plan_of(
    *rounds: tuple[float, float, float, int], epsilon: float, delta: float, proven: float | None = None
) -> Plan:
    """A plan for one level of a thousand people."""
    made = tuple(Round(steps, sigma, 1000 * pi * q, (pi,), (q,), (1.0,)) for pi, q, sigma, steps in rounds)
    return Plan("pdp-sgd-exact", (Level(epsilon, delta, 1000, proven),), made)


def test_a_false_claim_for_a_small_participation_is_refused() -> None:
    """Rounding in the transform was multiplied by e^-loss and normalized away: the claim of 0.01 was accepted."""
    issue = (0.001, 1.0, 10 / 7, 100)
    with pytest.raises(PromiseBroken, match=r"cost 28\.2"):
        plan_of(issue, epsilon=0.01, delta=5e-5, proven=0.01).verify()
    found = plan_of(issue, epsilon=28.3, delta=5e-5, proven=28.3).verify()
    assert 28.211779 <= found.epsilon[0] <= 28.24


@pytest.mark.parametrize(
    ("exposure", "delta", "exact"),
    [
        (Exposure(1.0, 1.0, 40.0, 100), 1e-5, 0.926342),
        (Exposure(1.0, 1.0, 10.0, 100), 1e-5, 4.377178),
        (Exposure(0.001, 1.0, 10 / 7, 100), 5e-5, 28.21178),
        (Exposure(0.5, 1.0, 10.0, 100), 1e-5, 3.533998),
    ],
)
def test_known_figures(exposure: Exposure, delta: float, exact: float) -> None:
    assert exact * (1 - 1e-6) <= epsilon_upper_bound((exposure,), delta) <= exact * 1.001


def test_the_two_directions_are_those_of_the_closed_forms() -> None:
    for (pi, mu, delta), adding in {(0.001, 7.0, 5e-5): 0.000950403, (0.5, 1.0, 1e-5): 0.662561}.items():
        exposure = Exposure(pi, 1.0, 10 / mu, 100)
        with np.errstate(all="ignore"):
            found = Direction((exposure,), delta, 16, removing=False).epsilon()
        assert adding * (1 - 1e-6) <= found <= adding * 1.05


@pytest.mark.parametrize("number", range(200))
def test_never_below_closed_forms_and_hardly_above(number: int) -> None:
    case = draw(np.random.default_rng([2, number]))
    if case.epsilon is None:
        proven = accountant("pld").epsilon(case.history, case.delta)
        assert epsilon_upper_bound(case.history, case.delta) == pytest.approx(proven, rel=5e-3, abs=1e-5)
        return
    found = epsilon_upper_bound(case.history, case.delta)
    assert case.epsilon * (1 - 1e-9) - 1e-12 <= found <= case.epsilon * 1.005 + 1e-5, case


@settings(deadline=None, max_examples=40)
@given(
    st.floats(1e-4, 0.999), st.floats(0.05, 8.0), st.integers(1, 2000), st.floats(-9, -2), st.integers(1, 4)
)
def test_participation_over_any_range(
    pi: float, mu: float, steps: int, log_delta: float, rounds: int
) -> None:
    """One round has a closed form; more of them cost at least as much as one."""
    delta = 10**log_delta
    exposure = Exposure(pi, 1.0, math.sqrt(steps) / mu, steps)
    exact = exact_epsilon(lambda e: with_participation(pi, lambda x: gaussian(mu, x), e), delta)
    found = epsilon_upper_bound((exposure,), delta)
    assert exact * (1 - 1e-9) - 1e-12 <= found <= exact * 1.005 + 1e-5
    assert epsilon_upper_bound((exposure,) * rounds, delta) >= exact * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize(("q", "pi", "steps"), [(0.1, 1.0, 3), (0.01, 0.3, 50), (0.5, 0.9, 1)])
def test_next_to_no_noise_tells_whom_a_step_sampled(q: float, pi: float, steps: int) -> None:
    chance = pi * (1 - (1 - q) ** steps)
    exposure = Exposure(pi, q, 1e-4, steps)
    assert epsilon_upper_bound((exposure,), 0.99 * chance) == math.inf
    assert epsilon_upper_bound((exposure,), chance * 1.01) < math.inf


@pytest.mark.parametrize(
    ("pi", "q", "sigma", "steps"),
    [
        *itertools.product((1.0, 1e-300, 0.5), (1.0, 1e-9), (1e-4, 2.0**63), (1, 2**53)),
        (1.0, 1e-300, 1e-4, 2**53),
        (1 - 2**-53, 1 - 2**-53, 0.01, 2**53),
        (1e-9, 1.0, 1e-300, 10**9),
        (1.0, 0.3, 0.01, 10**9),
        (0.5, 0.3, 1e300, 10**9),
    ],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-300])
def test_extreme_plans_are_refused_or_proven_and_never_end_in_a_raw_error(
    pi: float, q: float, sigma: float, steps: int, delta: float
) -> None:
    try:
        found = plan_of((pi, q, sigma, steps), epsilon=1.0, delta=delta).verify()
    except PdpsgdError:
        return
    # Whoever is told to be safe is: the loss is at most that of the Gaussian with rate 1 and participation pi.
    mu = math.sqrt(steps) / sigma
    chance = pi * min(1.0, steps * q)
    if chance <= delta or mu > 30:
        return
    reached = gaussian(mu, found.epsilon[0])
    if pi < 1:
        reached = with_participation(pi, lambda x: gaussian(mu, x), found.epsilon[0])
    assert reached * 0.999 <= delta


def scaled_plan(*rounds: tuple[float, float, float, float, int], epsilon: float, delta: float) -> Plan:
    """Rounds with a clip scale each, between rate's noise and steps."""
    made = tuple(Round(steps, sigma, 1000 * pi * q, (pi,), (q,), (c,)) for pi, q, sigma, c, steps in rounds)
    return Plan("pdp-sgd-exact", (Level(epsilon, delta, 1000),), made)


@pytest.mark.parametrize(
    ("rounds", "delta"),
    [
        ([(0.0212, 0.36, 0.1, 0.972, 10)], 3e-9),
        ([(1 - 1e-16, 0.5, 0.684, 0.21, 1)], 1.8e-3),
        ([(0.5, 0.0019, 1e-160, 1e155, 1)], 1e-7),
        # Places on the grid that no int64 counts.
        ([(2.1e-43, 5.6e-5, 2e62, 1e-3, 10)], 1.8e-249),
        ([(0.045, 1.9e-8, 9e137, 8.8e103, 10)], 1e-176),
        ([(0.12, 1.0, 1.05, 3.6e-56, 1), (1.0, 4.3e-64, 5.2e-3, 1.0, 5878)], 2.8e-102),
        ([(1.0, 1.0, 0.42, 7.8e-20, 10), (0.54, 1.1e-7, 3e-3, 1.1e-85, 61826231924568)], 9e-258),
    ],
)
@pytest.mark.parametrize("epsilon", [1.0, 100.0])
def test_plans_that_once_ended_in_a_raw_error_are_proven_or_refused(
    rounds: list[tuple[float, float, float, float, int]], delta: float, epsilon: float
) -> None:
    with contextlib.suppress(PdpsgdError):
        assert scaled_plan(*rounds, epsilon=epsilon, delta=delta).verify().kept


@pytest.mark.parametrize("number", range(25))
def test_random_extremes_are_proven_or_refused(number: int) -> None:
    """The figures of each plan are spread over all of double precision."""
    rng = np.random.default_rng([4, number])

    def power(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    rounds = [
        (
            float(rng.choice([1.0, power(-8, 0), 1 - power(-16, -1), power(-300, 0)])),
            float(rng.choice([1.0, power(-8, 0), 1 - power(-16, -1), power(-300, 0)])),
            float(rng.choice([power(-2, 2), power(-160, 160), power(-3, -1)])),
            float(rng.choice([1.0, power(-3, 0), power(-160, 155)])),
            int(rng.choice([1, 10, int(power(0, 6)), int(power(0, 15))])),
        )
        for _ in range(rng.integers(1, 4))
    ]
    delta = float(rng.choice([power(-9, -2), power(-300, 0)]))
    with contextlib.suppress(PdpsgdError):
        assert scaled_plan(*rounds, epsilon=power(-3, 2), delta=delta).verify().kept


def test_a_promise_slightly_too_small_is_refused_and_one_slightly_larger_is_kept() -> None:
    """Only a finer grid tells them apart."""
    exposure = (1.0, 1.0, 10.0, 100)
    with pytest.raises(PromiseBroken, match=r"cost 4\.37"):
        plan_of(exposure, epsilon=4.377178 * (1 - 1e-6), delta=1e-5).verify()
    assert plan_of(exposure, epsilon=4.377178 * (1 + 1e-4), delta=1e-5).verify().kept


@pytest.mark.parametrize("steps", [10**30, 10**400, 2**53 + 1])
def test_more_steps_than_can_be_counted_are_refused(steps: int) -> None:
    document = json.loads(plan_of((1.0, 0.1, 1.0, 10), epsilon=100.0, delta=1e-5).to_json())
    document["rounds"][0]["steps"] = steps
    with pytest.raises(PdpsgdError, match="steps"):
        Plan.from_json(json.dumps(document))
    with pytest.raises(PdpsgdError, match="steps"):
        plan_of((1.0, 0.1, 1.0, steps), epsilon=100.0, delta=1e-5)
    crowd = replace(plan_of((1.0, 0.1, 1.0, 10), epsilon=100.0, delta=1e-5).levels[0], people=steps)
    with pytest.raises(PdpsgdError, match="people"):
        Plan("dp-sgd", (crowd,), ())


def test_rounds_that_hardly_count_are_charged_to_delta_and_change_nothing() -> None:
    step = Exposure(1.0, 0.01, 1.0, 100)
    alone = epsilon_upper_bound((step,), 1e-5)
    hardly = (
        step,
        Exposure(1e-300, 1.0, 1e-4, 10),
        Exposure(1.0, 1.0, 2.0**63, 10),
        Exposure(1e-13, 0.5, 1.0, 9),
    )
    assert alone <= epsilon_upper_bound(hardly, 1e-5) <= alone * 1.0001


@pytest.mark.parametrize("steps", [100, 30_000])
def test_what_rounding_hides_in_a_transform_is_within_its_bound(steps: int) -> None:
    """Against the same transform in long doubles: sums from the top, of the masses of both."""
    q, sigma = 0.3 / math.sqrt(steps), 1.0
    with np.errstate(all="ignore"):
        step, _ = drawn_rounds._one_step(q, sigma, q / 4, 1e-12 / steps, removing=True)
        total = drawn_rounds._Composed(step, steps, most=1 << 22, tail=1e-12)
    wrapped = np.zeros(total.size, dtype=np.longdouble)
    np.add.at(wrapped, np.arange(step.mass.size) % total.size, step.mass.astype(np.longdouble))
    exact = scipy_fft.irfft(scipy_fft.rfft(wrapped) ** steps, n=total.size)
    exact = np.roll(exact, (step.first * steps - total._first) % total.size)
    lost = np.abs(np.cumsum(exact[::-1]) - np.cumsum(total._mass[::-1].astype(np.longdouble)))
    assert float(lost.max()) <= total.error


def test_mass_that_is_not_1_is_an_error() -> None:
    with pytest.raises(PdpsgdError, match=r"sum to 1\. Got 0\.5"):
        drawn_rounds.checked(drawn_rounds.Points(np.zeros(1), np.array([0.25]), 0.25), slack=1e-6)
    with pytest.raises(PdpsgdError, match=r"sum to 1\. Got 0\.5"):
        verifier_steps.checked(Part(np.zeros(1), np.array([0.25]), 0.25, 10))


def random_sum(rng: np.random.Generator) -> tuple[Sum, float]:
    """Losses of one to three distributions of a few points, and a delta."""
    parts = []
    for _ in range(rng.integers(1, 4)):
        losses = np.sort(rng.normal(0, 10 ** rng.uniform(-3, 0.5), rng.integers(1, 7)))
        mass = rng.dirichlet(np.full(losses.size, 0.5)) * (1 - 1e-9)
        parts.append(Part(losses, mass, 1e-9, int(rng.integers(1, 6))))
    return Sum(tuple(parts), 10 ** rng.uniform(-6, 0)), 10 ** rng.uniform(-8, -2)


def exactly(total: Sum, epsilon: float) -> float:
    """The divergence by summing over all outcomes: each sum of losses, with the Gaussian part in closed form."""
    losses, mass = np.zeros(1), np.ones(1)
    for part in total.parts:
        for _ in range(part.times):
            losses = np.add.outer(losses, part.losses).reshape(-1)
            mass = np.multiply.outer(mass, part.mass).reshape(-1)
            losses, place = np.unique(losses.round(14), return_inverse=True)
            mass = np.bincount(place, weights=mass)
    mu = math.sqrt(total.variance)
    above, below = epsilon - losses, mu / 2
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        each = ndtr(below - above / mu) - np.exp(above + log_ndtr(-below - above / mu))
    return float(mass @ np.maximum(each, 0.0)) + total.infinite


@pytest.mark.parametrize("number", range(60))
def test_the_integral_is_never_below_a_sum_over_all_outcomes_on_any_contour(number: int) -> None:
    """Also with a tilt and a period that are far from good ones; with good ones it is hardly above."""
    rng = np.random.default_rng([5, number])
    total, delta = random_sum(rng)
    choice = ContourChoice(total, delta)
    contour = choice.first()
    epsilon = Integral(total, contour).epsilon(delta, contour.epsilon)
    for _ in range(20):
        contour = choice.near(max(epsilon, contour.least))
        integral = Integral(total, contour)
        epsilon = min(epsilon, integral.epsilon(delta, epsilon))
    exact = exactly(total, epsilon)
    assert exact * (1 - 1e-11) <= integral.delta(epsilon)
    assert epsilon < contour.least or exact >= delta * (1 - 1e-3)
    for factor, longer in ((0.2, 1.0), (1.7, 1.0), (1.0, 0.2), (0.7, 4.0)):
        other = Integral(total, Contour(contour.tilt * factor, contour.period * longer, epsilon))
        for there in (0.0, epsilon / 3, epsilon, 1.5 * epsilon):
            assert other.delta(there) >= exactly(total, there) * (1 - 1e-11)


@pytest.mark.parametrize("cells", [2, 5, 30])
@pytest.mark.parametrize("removing", [True, False])
def test_any_cells_overstate_and_fine_ones_hardly(cells: int, removing: bool) -> None:
    """One step, for which there is a closed form, between outcomes at random places."""
    q, sigma = 0.03, 0.8
    rng = np.random.default_rng(cells)
    at = np.sort(rng.normal(0.5, 2, cells))
    exposure = Exposure(1.0, q, sigma, 1)
    for places in (at, np.linspace(-7, 8, 3000)):
        part = verifier_steps.step(exposure, places, removing)
        for epsilon in (0.0, 0.01, 0.3, 1.0):
            curve = float(part.mass @ np.maximum(-np.expm1(epsilon - part.losses), 0.0)) + part.infinite
            amplified = math.log1p(math.expm1(epsilon) / q)
            kept = 1 + math.expm1(-epsilon) / q
            adding = q * kept * math.exp(epsilon) * gaussian(1 / sigma, -math.log(kept)) if kept > 0 else 0.0
            exact = q * gaussian(1 / sigma, amplified) if removing else adding
            assert curve >= exact * (1 - 1e-12)
            assert places is at or curve <= exact * 1.001 + 1e-7


def test_of_ten_equal_rounds_one_is_computed() -> None:
    one = Exposure(0.5, 0.02, 2.79, 100)
    assert epsilon_upper_bound((one,) * 10, 1e-5) == pytest.approx(0.4227, rel=1e-3)


def test_rounds_of_very_different_noise_are_added_up_closely() -> None:
    """Full batches and a sampled round, against dp-accounting's composition."""
    history = (Exposure(1.0, 1.0, 60.0, 50), Exposure(1.0, 3e-4, 0.55, 800), Exposure(1.0, 0.01, 3.0, 1000))
    proven = accountant("pld").epsilon(history, 1e-6)
    assert epsilon_upper_bound(history, 1e-6) == pytest.approx(proven, rel=2e-3)
