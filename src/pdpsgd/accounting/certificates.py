"""Certificates: a run as one Gaussian, in both directions, so that runs may be chosen after looking at results.

Inside a run everything is fixed beforehand and privacy loss distributions compose exactly. The next run is chosen
after looking at what was released, and then only curves that are ordered and closed under composition may be added
up: those of N(mu, 1) against N(0, 1). A certificate (mu, d) says that a run is no worse than that, but for d. The
theorem and its proof stand in `docs/theory.md`, "Runs that are chosen after results".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri, ndtri_exp

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting import pld
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.gaussian import for_distinct, gaussian_delta, gaussian_epsilon, gaussian_mu
from pdpsgd.accounting.history import EarlierRun, Exposure, History, simplify
from pdpsgd.accounting.rdp import RdpAccountant
from pdpsgd.errors import check_not_negative, check_positive, check_probability, fail, shown

KAPPA = 0.1
"""The share of delta that is set aside for what Gaussians do not cover, the d of certificates."""
MARGIN = 1e-11
"""By how much corners and mu are moved to the safe side; more where sums have many terms."""
SHARE_OF_D = 0.25
"""The share of what is left of KAPPA delta that a run takes as its d, where nothing else was fixed before it."""
RATE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Certificate:
    """A bound on a whole run: delta_run(epsilon) <= delta_mu(epsilon) + d for every real epsilon, both directions."""

    mu: float
    d: float

    def delta(self, epsilon: npt.ArrayLike) -> FloatArray:
        """Compute the bound on delta at these epsilons."""
        return np.minimum(gaussian_delta(self.mu, epsilon) + self.d, 1.0)

    def epsilon(self, delta: float) -> float:
        """Compute the epsilon that the bound gives at delta; infinite if delta is not above d."""
        return float(gaussian_epsilon(self.mu, max(delta - self.d, 0.0)))


@dataclass(frozen=True)
class Allowance:
    """What a promise (epsilon, delta) allows over all runs: at most `b` of mu^2, `d` of d, `e` of pure epsilon."""

    b: FloatArray
    d: FloatArray
    e: FloatArray


def allowance(
    epsilon: npt.ArrayLike,
    delta: npt.ArrayLike,
    *,
    kappa: npt.ArrayLike = KAPPA,
    set_aside: npt.ArrayLike = 0.0,
) -> Allowance:
    """Compute what certificates may add up to under a promise.

    d = kappa delta; e = min(set_aside, epsilon); b is the largest with delta_sqrt(b)(epsilon - e) <= (1 - kappa)
    delta. An epsilon or a delta of 0 allows nothing; an infinite epsilon allows any b.

    Args:
        epsilon: what each person allows.
        delta: what each person allows.
        kappa: the share of delta for the d of certificates, fixed before the person's first charge.
        set_aside: the part of epsilon for charges that are only known to be (e, d)-DP, fixed before the first charge.

    Returns:
        The allowances, rounded down.

    Guarantee: if on every path the mu^2 of all runs sum to at most b, their d to at most d and their e to at most e,
    all outputs together are (epsilon, delta)-DP, also if each run was chosen by what was released before it
    (docs/theory.md, "Runs that are chosen after results").

    >>> np.sqrt(allowance([0.5, 1.0, 2.0], 1e-5).b).round(4).tolist()
    [0.1412, 0.2664, 0.4987]
    """
    columns = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (epsilon, delta, kappa, set_aside)))
    epsilons, deltas, kappas, aside = columns
    if not ((kappas > 0) & (kappas < 1)).all():
        fail(f"Expected 0 < kappa < 1. Got {float(kappas[~((kappas > 0) & (kappas < 1))][0])!r}.")
    if not (aside >= 0).all():
        fail(f"Expected set_aside >= 0. Got {float(aside.min())!r}.")
    pure = np.minimum(aside, epsilons)
    # What is infinite has room for everything that is set aside.
    rest = np.where(np.isinf(epsilons), np.inf, epsilons - np.where(np.isinf(epsilons), 0.0, pure))
    used = (epsilons > 0) & (deltas > 0)
    mu = for_distinct(gaussian_mu, rest, (1 - kappas) * deltas)
    b = np.where(used & (rest > 0), mu * mu * (1 - MARGIN), 0.0)
    return Allowance(b, np.where(used, kappas * deltas * (1 - 1e-15), 0.0), np.where(used, pure, 0.0))


def certificate(history: History, *, d: float) -> Certificate:
    """Compute the smallest mu that dominates the history with this d.

    Guarantee: delta(epsilon) <= delta_mu(epsilon) + d for every real epsilon and both directions. The bound is exact
    for the accountant's discrete pair, which dominates the run: the pair's trade-off is linear between corners, that
    of the Gaussian concave, so that it is enough to look at the corners. mu is infinite where d is too small to hold
    what double precision may lose.

    >>> run = (Exposure(1.0, 1024 / 60_000, 2.77, 1000),)
    >>> round(certificate(run, d=2.5e-7).mu, 3)
    0.205
    """
    check_probability(d=d)
    history = simplify(history)
    mu = _exact_mu(history)
    if mu is None:
        try:
            mu = max((smallest_mu(corners, d) for corners in _both_directions(history)), default=0.0)
        except pld._GridTooFineError:
            mu = _renyi_mu(history, d)
    return Certificate(mu, d)


def certificate_within(history: History, *, mu: float) -> Certificate:
    """Compute the smallest d with which the history is dominated by this mu.

    Guarantee: as for `certificate`.
    """
    history = simplify(history)
    exact = _exact_mu(history)
    if exact is not None and exact <= mu:
        return Certificate(mu, 0.0)
    if mu < 0 or math.isnan(mu):
        fail(f"Expected mu >= 0. Got {mu!r}.")
    if math.isinf(mu):
        return Certificate(mu, 0.0)
    try:
        return Certificate(mu, max(smallest_d(corners, mu) for corners in _both_directions(history)))
    except pld._GridTooFineError:
        return Certificate(mu, 1.0)  # true of any run, and nobody allows it


def compose(certificates: Iterable[Certificate]) -> Certificate:
    """Add certificates up: squares of mu, and d.

    Guarantee: for runs of which each may be chosen by what the earlier ones released, if these sums are bounds on
    every path (docs/theory.md, "Runs that are chosen after results").

    >>> compose([Certificate(0.3, 1e-7), Certificate(0.4, 1e-7)])
    Certificate(mu=0.5, d=2e-07)
    """
    given = list(certificates)
    return Certificate(math.sqrt(math.fsum(c.mu**2 for c in given)), math.fsum(c.d for c in given))


def certificate_of_declared(epsilon: float, delta: float) -> Certificate:
    """Compute the certificate of a run of which only (epsilon, delta)-DP is known: mu = -2 Phi^-1(1/(1 + e^epsilon)).

    Guarantee: every (epsilon, delta)-DP run is dominated by randomized response but for delta, and that by the
    Gaussian whose trade-off passes through its corner.

    >>> round(certificate_of_declared(1.0, 0.0).mu, 3)
    1.232
    """
    if epsilon != math.inf:
        check_not_negative(epsilon=epsilon)
    check_probability(delta=delta)
    mu = -2 * float(ndtri(1 / (1 + math.exp(epsilon)))) if epsilon < 700 else math.inf
    return Certificate(mu * (1 + MARGIN), delta)


def certificate_of_two_ids(first: Certificate, second: Certificate) -> Certificate:
    """Compute what a run cost somebody who was in it under two ids.

    Guarantee: both ids' records change together. The trade-off of the second step is put into that of the first:
    R(s) <= R_2(R_1(s)), which gives (mu_1 + mu_2, d_1 + Phi(Phi^-1(d_2) + mu_1)); the smaller d of the two orders.
    """

    def in_order(a: Certificate, b: Certificate) -> float:
        return a.d + (float(ndtr(ndtri(b.d) + a.mu)) if b.d > 0 else 0.0)

    d = min(in_order(first, second), in_order(second, first))
    return Certificate(first.mu + second.mu, min(d * (1 + MARGIN), 1.0))


def rate_within(
    target: Certificate, *, noise_multiplier: float, steps: int, participation: float = 1.0
) -> float:
    """Find the largest sampling rate, to 0.1 %, whose certificate stays within the target.

    Args:
        target: the mu and d that the run may have.
        noise_multiplier: noise over the clipping norm, for this person.
        steps: the number of steps.
        participation: the probability to be in the run at all.

    Returns:
        The rate; 0 if there is none.

    Guarantee: the certificate was computed at the very rate that is returned.

    >>> round(rate_within(Certificate(0.2, 2.5e-7), noise_multiplier=2.77, steps=1000), 4)
    0.0166
    """
    check_positive(noise_multiplier=noise_multiplier, steps=steps)
    check_probability(participation=participation)

    def mu_at(rate: float) -> float:
        return certificate((Exposure(participation, rate, noise_multiplier, steps),), d=target.d).mu

    if target.mu <= 0 or math.isnan(target.mu):
        return 0.0
    limit = participation * math.sqrt(steps * math.expm1(min(noise_multiplier**-2, 700.0)))
    low, high = _Point(0.0, 0.0), None
    rate = min(target.mu / limit, 1.0) if limit > 0 else 1.0
    for _ in range(60):
        point = _Point(rate, mu_at(rate))
        if point.mu <= target.mu:
            low = point
        else:
            high = point
        near = high is not None and high.rate <= low.rate * (1 + RATE_TOLERANCE / 10)
        if low.rate == 1 or low.mu >= target.mu * (1 - RATE_TOLERANCE) or near:
            break
        rate = _next_rate(low, high, target.mu * (1 - RATE_TOLERANCE / 2))
        if rate < 1e-12:
            break
    return low.rate


@dataclass(frozen=True)
class _Point:
    rate: float
    mu: float


def _next_rate(low: _Point, high: _Point | None, aim: float) -> float:
    """Where a power law reaches the aim, kept off the ends; log mu is nearly linear in log rate."""
    if high is None:
        grown = low.rate * min(aim / low.mu, 10.0) if low.mu > 0 else low.rate * 10
        return min(1.0, max(grown, low.rate * (1 + RATE_TOLERANCE)))
    if low.rate == 0:
        shrunk = high.rate * aim / high.mu if math.isfinite(high.mu) else 0.0
        return min(max(shrunk, high.rate / 100), high.rate * 0.999)
    share = 0.5
    if 0 < low.mu < high.mu < math.inf:
        share = math.log(aim / low.mu) / math.log(high.mu / low.mu)
    return low.rate * (high.rate / low.rate) ** min(max(share, 0.02), 0.98)


def next_d(earlier: Sequence[EarlierRun], delta: float) -> float:
    """Return the d of the run after these: a share of what they have left of KAPPA delta, fixed before its output."""
    return max(SHARE_OF_D * (KAPPA * delta - math.fsum(run.d for run in earlier)), 0.0)


@lru_cache(maxsize=1 << 12)
def settle(exposures: History, d: float) -> EarlierRun:
    """Compute what a run counts for once its results may have been seen: the smallest mu with this d.

    Guarantee: as for `certificate`. Whoever is in every step has an exact mu, and needs no d.
    """
    exact = _exact_mu(simplify(exposures)) is not None
    found = certificate(exposures, d=0.0 if exact else d)
    return EarlierRun(found.mu, found.d, exposures)


class CertificateAccountant(Accountant):
    """Plans a run within its share of a ledger, or after earlier runs whose results may have been seen.

    Guarantee: epsilon and delta are upper bounds, for adding and for removing a record. Without earlier runs, of this
    run alone, by a certificate with d = KAPPA delta: a level whose epsilon stays within a budget has the mu that
    belongs to that budget, which is what a ledger adds up. After earlier runs, of all of them together, however each
    was chosen: squares of mu add up to what has this epsilon at (1 - KAPPA) delta, and d to at most KAPPA delta
    (docs/theory.md, "Runs that are chosen after results").
    """

    name = "certificate"
    proves = True

    def _epsilon_after(self, earlier: tuple[EarlierRun, ...], history: History, delta: float) -> float:
        now = settle(history, next_d(earlier, delta)) if history else EarlierRun(0.0, 0.0, ())
        total = compose(Certificate(run.mu, run.d) for run in (*earlier, now))
        if not math.isfinite(total.mu) or total.d > KAPPA * delta:
            return math.inf
        return float(gaussian_epsilon(total.mu * (1 + MARGIN), (1 - KAPPA) * delta))

    def _epsilon(self, history: History, delta: float) -> float:
        return certificate(history, d=KAPPA * delta).epsilon(delta)

    def _delta(self, history: History, epsilon: float) -> float:
        some = np.geomspace(1e-10, 0.1, 28)
        return min(float(certificate(history, d=float(d)).delta(epsilon)) for d in some)


def _exact_mu(history: History) -> float | None:
    """The mu of a run in which the person is in every step: one Gaussian, d = 0; None for any other run."""
    if any(e.participation < 1 or e.sample_rate < 1 for e in history):
        return None
    return math.sqrt(math.fsum(e.steps / e.noise_multiplier**2 for e in history)) * (1 + MARGIN)


# The corners of a pair's trade-off.


@dataclass(frozen=True, eq=False)
class Corners:
    """Corners (s, a) of R(s) = sup P(O) over Q(O) <= s, from the top, on the safe side; `infinite` lies at s = 0.

    Those with a loss below 0 are left out: they are implied by the other direction's (docs/theory.md).
    """

    log_s: FloatArray
    a: FloatArray
    infinite: float


def corners_of(first: int, interval: float, mass: FloatArray, infinite: float) -> Corners:
    """Compute the corners of a discrete pair: P-mass `mass[j]` at loss (first + j) * interval, `infinite` at infinity.

    a_k is the mass from k on, s_k the sum of p_j e^-l_j from k on, by the recursion w_k = p_k + e^-h w_(k+1) with s_k =
    w_k e^-l_k: sums of positive terms, from the top. What rounding may lose in them is added (a) or taken off (s).
    """
    margin = MARGIN + 4 * np.finfo(float).eps * mass.size
    start = max(0, -first)
    top_down = mass[start:][::-1]
    losses = (first + np.arange(start, mass.size)[::-1]) * interval
    a = (np.cumsum(top_down) + infinite) * (1 + margin)
    weights = pld.decaying_sums(top_down, interval)
    kept = weights > 0
    a, losses, weights = a[kept], losses[kept], weights[kept]
    log_s = np.log(weights) - losses - margin
    whole = np.flatnonzero(a >= 1)
    if whole.size:
        # Nothing is above 1: where the line to this corner reaches 1, the trade-off ends.
        k = int(whole[0])
        beyond = (a[k] - 1) * math.exp(-losses[k])
        s = math.exp(log_s[k]) - beyond
        a, log_s = a[: k + 1].copy(), log_s[: k + 1].copy()
        a[k], log_s[k] = 1.0, math.log(s) if s > 0 else -np.inf
    return Corners(log_s, a, infinite)


def smallest_mu(corners: Corners, d: float) -> float:
    """Compute the largest of Phi^-1(a - d) - Phi^-1(s) over the corners; infinite if d does not hold what is lost.

    Guarantee: with this mu, every corner lies on or below R_mu + d.
    """
    if corners.infinite > 0 and d < 10 * corners.infinite:
        return math.inf
    above = corners.a > d
    if not above.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        gap = ndtri(np.minimum(corners.a[above] - d, 1.0)) - ndtri_exp(np.minimum(corners.log_s[above], 0.0))
    largest = float(np.max(np.where(np.isnan(gap), np.inf, gap)))
    return max(0.0, largest + MARGIN * (1 + abs(largest)))


def smallest_d(corners: Corners, mu: float) -> float:
    """Compute the largest of a - Phi(Phi^-1(s) + mu) over the corners, at least the infinite mass.

    Guarantee: with this d, every corner lies on or below R_mu + d.
    """
    reached = ndtr(ndtri_exp(np.minimum(corners.log_s, 0.0)) + mu) * (1 - MARGIN)
    excess = float(np.max(corners.a - reached, initial=0.0))
    return min(1.0, max(corners.infinite, excess))


def _both_directions(history: History) -> list[Corners]:
    if not history:
        return []
    return [
        corners_of(losses.first, losses.interval, losses.mass, losses.infinite)
        for losses in pld._distribution(history)
    ]


# Where only Renyi divergences are known.


def certificate_of_renyi(orders: npt.ArrayLike, rho: npt.ArrayLike, *, d: float) -> Certificate:
    """Compute the smallest mu, on a grid, for a run of which only Renyi divergences are known.

    Args:
        orders: the orders alpha > 1 that are stated.
        rho: the divergence at each of them, a bound for both directions.
        d: what mu need not cover.

    Returns:
        The certificate.

    Guarantee: as for `certificate`. The trade-off at s is at most the largest a whose two-point distributions
    (a, 1 - a) and (s, 1 - s) keep the divergence at every stated order, both ways. Between two points of s, a of the
    right one is held against s of the left one.
    """
    check_probability(d=d)
    try:
        alphas, rhos = (np.atleast_1d(np.asarray(stated, dtype=float)) for stated in (orders, rho))
    except (TypeError, ValueError):
        fail(f"Expected Renyi orders and divergences to be numbers. Got {shown(orders)} and {shown(rho)}.")
    if alphas.ndim != 1 or alphas.shape != rhos.shape or not alphas.size:
        fail(
            "Expected at least one Renyi order, and a divergence for each. Got "
            f"{alphas.size} orders and {rhos.size} divergences."
        )
    if not (alphas > 1).all() or np.isinf(alphas).any():
        fail(
            f"Expected finite Renyi orders above 1. Got {float(alphas[~(alphas > 1) | np.isinf(alphas)][0])!r}."
        )
    if not (rhos >= 0).all():
        fail(f"Expected Renyi divergences of at least 0. Got {float(rhos[~(rhos >= 0)][0])!r}.")
    if not rhos.any():
        return Certificate(0.0, d)
    if d <= 0:
        return Certificate(math.inf, d)
    bound = _RenyiTradeoff(alphas[:, None], rhos[:, None])
    # Left of the first point R is below d; right of the last one even 1 - d is below s.
    points = np.linspace(-38.0, float(-ndtri(d)), 129)
    upper = bound.largest(points)
    if ndtr(upper[0]) > d:
        return Certificate(math.inf, d)
    for _ in range(RENYI_REFINEMENTS):
        reached = float(np.max(_excess(upper, d) - points))
        between = _excess(upper[1:], d) - points[:-1]
        loose = np.flatnonzero(between > max(reached, 0.0) * (1 + RENYI_TOLERANCE))
        if not loose.size:
            break
        middle = (points[loose] + points[loose + 1]) / 2
        points = np.insert(points, loose + 1, middle)
        upper = np.insert(upper, loose + 1, bound.largest(middle))
    mu = float(np.max(_excess(upper[1:], d) - points[:-1]))
    return Certificate(max(0.0, mu + MARGIN * (1 + abs(mu))), d)


RENYI_TOLERANCE = 2e-3
RENYI_REFINEMENTS = 12


def _excess(z: FloatArray, d: float) -> FloatArray:
    """Phi^-1(Phi(z) - d), minus infinity where nothing is left."""
    rest = ndtr(z) * (1 + MARGIN) - d
    return np.where(rest > 0, ndtri(np.clip(rest, 1e-300, 1.0)), -np.inf)


@dataclass(frozen=True, eq=False)
class _RenyiTradeoff:
    """The largest a for an s, both as normal quantiles; columns of orders and divergences."""

    alphas: FloatArray
    rhos: FloatArray

    def largest(self, z: FloatArray) -> FloatArray:
        """Bisect for the quantile of a, and return the bracket's upper end."""
        low, high = z.copy(), np.full_like(z, 39.0)
        log_s, log_rest_s = log_ndtr(z), log_ndtr(-z)
        for _ in range(60):
            middle = (low + high) / 2
            log_a, log_rest_a = log_ndtr(middle), log_ndtr(-middle)
            fits = self._fits(log_a, log_rest_a, log_s, log_rest_s) & self._fits(
                log_s, log_rest_s, log_a, log_rest_a
            )
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return high

    def _fits(self, a: FloatArray, rest_a: FloatArray, b: FloatArray, rest_b: FloatArray) -> BoolArray:
        """Whether the divergence of (a, 1 - a) from (b, 1 - b), given in logarithms, is as stated at every order."""
        moment = np.logaddexp(
            self.alphas * a + (1 - self.alphas) * b, self.alphas * rest_a + (1 - self.alphas) * rest_b
        )
        return np.all(moment <= (self.alphas - 1) * self.rhos, axis=0)


def _renyi_mu(history: History, d: float) -> float:
    accountant = RdpAccountant()
    return certificate_of_renyi(accountant.orders, accountant.renyi(history), d=d).mu
