"""Privacy loss distributions, on Google's dp-accounting, with a grid that fits the level."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure, History

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

FINENESS = 10
"""Grid points per standard deviation of one step's loss; the answer is too high by about 8 % / FINENESS^2."""


class PldAccountant(Accountant):
    """Numerical composition of privacy loss distributions (Doroshenko et al. 2022, arXiv:2207.04380).

    Guarantee: epsilon and delta are upper bounds for adding and for removing a record. Losses are discretised
    pessimistically (connect the dots) and truncated mass counts as infinite loss. Numerical error: the discretisation
    overstates epsilon by about 0.1 % (`FINENESS`); convolution in double precision is exact to about 1e-12 in delta, so
    deltas below `SMALLEST_DELTA` are answered by the RDP accountant, which has no such floor.
    """

    name = "pld"
    proves = True

    def _epsilon(self, history: History, delta: float) -> float:
        if delta < SMALLEST_DELTA:
            return _rdp().epsilon(history, delta)
        return max(0.0, float(_distribution(history).get_epsilon_for_delta(delta)))

    def _delta(self, history: History, epsilon: float) -> float:
        delta = float(_distribution(history).get_delta_for_epsilon(epsilon))
        return delta if delta >= SMALLEST_DELTA else min(SMALLEST_DELTA, _rdp().delta(history, epsilon))


SMALLEST_DELTA = 1e-10


def _rdp() -> Accountant:
    from pdpsgd.accounting import accountant

    return accountant("rdp")


@lru_cache(maxsize=512)
def _distribution(history: History) -> PrivacyLossDistribution:
    interval = grid_interval(history)
    total, *others = [_round(exposure, interval) for exposure in history]
    for other in others:
        total = total.compose(other)
    return total


def grid_interval(history: History) -> float:
    """The smallest standard deviation of a step's loss in the history, over `FINENESS`.

    A step's loss has a standard deviation of about q * sqrt(exp(1/sigma^2) - 1) (small q) and of about 1/sigma (q
    near 1). Rounds that hardly count next to the rest do not refine the grid.
    """
    spread = [min(e.sample_rate * math.sqrt(math.expm1(min(e.noise_multiplier**-2, 50.0))), 1 / e.noise_multiplier) for e in history]
    variance = [s * s * e.steps for s, e in zip(spread, history, strict=True)]
    counted = [s for s, v in zip(spread, variance, strict=True) if v > 1e-6 * max(variance)]
    return min(counted) / FINENESS


@lru_cache(maxsize=1024)
def _round(exposure: Exposure, interval: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution

    steps = privacy_loss_distribution.from_gaussian_mechanism(
        exposure.noise_multiplier,
        sampling_prob=exposure.sample_rate,
        value_discretization_interval=interval,
    ).self_compose(exposure.steps)
    return steps if exposure.participation == 1 else _drawn_once(steps, exposure.participation, interval)


def _drawn_once(inside: PrivacyLossDistribution, participation: float, interval: float) -> PrivacyLossDistribution:
    """The same rounds, for somebody who is in them with chance `participation` and otherwise not there at all.

    Exact (docs/theory.md, "Drawn once a round"), evaluated on the grid and connected by dots again, which only ever
    overstates. The two orders are kept apart: they are amplified differently.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    # dp-accounting has no public way to the two orders of a distribution.
    removing, adding = inside._pmf_remove.to_dense_pmf(), inside._pmf_add.to_dense_pmf()
    return PrivacyLossDistribution(
        _on_grid(removing, participation, interval, amplified_removing),
        _on_grid(adding, participation, interval, amplified_adding),
    )


def amplified_removing(curve: Any, participation: float, epsilon: Any) -> Any:
    """delta'(epsilon') of the mixture when the record is removed: delta' = pi * delta(ln(1 + (e^epsilon' - 1)/pi))."""
    inner = np.expm1(epsilon) / participation
    reachable = inner > -1
    inside = np.log1p(np.where(reachable, inner, 0.0))
    return np.where(reachable, participation * curve(inside), -np.expm1(epsilon))


def amplified_adding(curve: Any, participation: float, epsilon: Any) -> Any:
    """delta'(epsilon') when it is added: delta' = pi * e^(epsilon' - epsilon) * delta(epsilon), 0 from -ln(1-pi) on."""
    shrunk = 1 + np.expm1(-epsilon) / participation
    reachable = shrunk > 0
    inside = -np.log(np.where(reachable, shrunk, 1.0))
    return np.where(reachable, participation * np.exp(epsilon) * np.where(reachable, shrunk, 0.0) * curve(inside), 0.0)


def _on_grid(pmf: Any, participation: float, interval: float, amplified: Any) -> Any:
    from dp_accounting.pld import pld_pmf

    lowest, highest = pmf._lower_loss * interval, (pmf._lower_loss + pmf.size - 1) * interval
    if amplified is amplified_removing:
        low, high = (math.log1p(participation * math.expm1(loss)) for loss in (lowest, highest))
    else:
        low, high = (-math.log1p(participation * math.expm1(-loss)) for loss in (lowest, highest))
    first, last = math.floor(low / interval), math.ceil(high / interval)
    grid = np.arange(first, last + 1) * interval
    deltas = np.clip(amplified(_delta_curve(pmf, interval), participation, grid), 0.0, 1.0)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, first, last, np.minimum.accumulate(deltas)
    ).to_dense_pmf()


def _delta_curve(pmf: Any, interval: float) -> Any:
    """delta(epsilon) of a dense distribution for arrays of epsilon (dp-accounting's own loops over both in Python)."""
    losses = (pmf._lower_loss + np.arange(pmf.size)) * interval
    above = np.append(np.cumsum(pmf._probs[::-1])[::-1], 0.0)
    weighted = np.append(np.cumsum((pmf._probs * np.exp(-losses))[::-1])[::-1], 0.0)

    def curve(epsilon: Any) -> Any:
        first = np.searchsorted(losses, epsilon, side="right")
        return pmf._infinity_mass + np.maximum(above[first] - np.exp(epsilon) * weighted[first], 0.0)

    return curve
