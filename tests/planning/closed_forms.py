"""Plans whose privacy curve is known in closed form, drawn at random over a wide range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from pdpsgd.accounting.history import Exposure, History

Curve = Callable[[float], float]
"""delta at an epsilon >= 0, the worse of adding and removing."""


@dataclass(frozen=True)
class Case:
    """What a person is exposed to, at which delta, and the exact epsilon; None where no closed form is known."""

    kind: str
    history: History
    delta: float
    epsilon: float | None


def gaussian(mu: float, epsilon: float) -> float:
    """d(mu, epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def with_participation(pi: float, curve: Curve, epsilon: float) -> float:
    """The larger of removing and adding, for a mechanism whose curve is the same in both directions."""
    removing = pi * curve(epsilon - math.log(pi) + math.log1p(math.exp(-epsilon) * (pi - 1)))
    kept = 1 + math.expm1(-epsilon) / pi
    adding = pi * kept * math.exp(epsilon) * curve(-math.log(kept)) if kept > 0 else 0.0
    return max(removing, adding)


def exact_epsilon(curve: Curve, delta: float) -> float:
    """The smallest epsilon >= 0 at which the curve is at most delta."""
    if curve(0.0) <= delta:
        return 0.0
    high = 1e-6
    while curve(high) > delta:
        high *= 2
    return float(
        brentq(lambda e: math.log(max(curve(e), 1e-320) / delta), 0.0, high, xtol=1e-300, rtol=1e-12)
    )


def draw(rng: np.random.Generator) -> Case:
    """One case of a random kind; figures spread evenly in their logarithms."""

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    delta = between(1e-9, 1e-2)
    kind = str(
        rng.choice(["full batch", "participation", "one step", "one step, participation", "no closed form"])
    )
    if kind == "full batch":
        rounds = tuple(
            Exposure(1.0, 1.0, between(0.3, 300), int(between(1, 3000))) for _ in range(rng.integers(1, 4))
        )
        mu = math.sqrt(math.fsum(e.steps / e.noise_multiplier**2 for e in rounds))
        return Case(kind, rounds, delta, exact_epsilon(lambda e: gaussian(mu, e), delta))
    if kind == "participation":
        pi = between(1e-4, 0.999)
        steps = int(between(1, 3000))
        sigma = math.sqrt(steps) / between(0.02, 8)
        mu = math.sqrt(steps) / sigma
        curve = lambda e: with_participation(pi, lambda x: gaussian(mu, x), e)  # noqa: E731
        return Case(kind, (Exposure(pi, 1.0, sigma, steps),), delta, exact_epsilon(curve, delta))
    if kind.startswith("one step"):
        q, sigma = between(1e-4, 0.999), between(0.15, 30)
        pi = between(1e-3, 0.999) if "participation" in kind else 1.0
        curve = lambda e: with_participation(pi * q, lambda x: gaussian(1 / sigma, x), e)  # noqa: E731
        return Case(kind, (Exposure(pi, q, sigma, 1),), delta, exact_epsilon(curve, delta))
    rounds = tuple(
        Exposure(
            float(rng.choice([1.0, between(1e-3, 0.999)])),
            between(3e-3, 0.5),
            between(0.7, 10),
            int(between(10, 1000)),
        )
        for _ in range(rng.integers(1, 4))
    )
    return Case(kind, rounds, delta, None)
