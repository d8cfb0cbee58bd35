"""Losses of one Poisson-subsampled Gaussian step for the verifier: cell by cell, between any outcomes.

Between two outcomes lie masses of N(0) and of N(1). Put at the two likelihood ratios so that both are kept (connect the
dots) they make a pair that dominates (N(0), N(1)), hence also their mixtures at any sampling rate, in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import Exposure
from pdpsgd.errors import fail
from pdpsgd.planning.contour import UNIT, Part

SMALLEST_NOISE = 1e-3
"""With a smaller noise multiplier a step counts as telling whom it sampled, which is nearly true."""
SMALLEST_TAIL = 1e-290
LARGEST_LOG_RATIO = 690.0
"""Outcomes with a larger one, whose exponential is no double, count as certain."""
OFF = 1e-9
"""By how much masses may differ from 1 before that is an error."""


def outcomes(sigma: float, tail: float, number: int) -> FloatArray:
    """Outcomes at even distances, between which N(0) and N(1) lie but for `tail` on either side."""
    reach = -float(ndtri(max(tail, SMALLEST_TAIL))) * sigma
    return np.linspace(-reach, min(1 + reach, 0.5 + LARGEST_LOG_RATIO * sigma**2), number)


def losses_at(x: FloatArray, e: Exposure, removing: bool) -> FloatArray:
    """The losses of the outcomes x."""
    ratios = np.exp((x - 0.5) / e.noise_multiplier**2)
    found = np.log1p(e.sample_rate * (ratios - 1))
    return np.asarray(found if removing else -found)


def step(e: Exposure, x: FloatArray, removing: bool) -> Part:
    """Discretize the losses of a round's steps, with cells between the outcomes x; in the order of x.

    Guarantee: composed, they are never below those of the steps, for this direction.
    """
    q, sigma = e.sample_rate, e.noise_multiplier
    pair = _pair(x, sigma)
    losses = np.append(-math.log1p(-q), losses_at(x, e, False))
    mass = np.zeros(losses.size)
    if removing:
        losses = -losses
        mass[1:] += pair.upward + pair.rounding
        mass[:-1] += pair.without - pair.upward
        mass[-1] += pair.rest
        mass *= 1 + q * (pair.ratios - 1)
        infinite = q * pair.rest_shifted
    else:
        mass[:-1] += pair.downward + pair.rounding
        mass[1:] += pair.without - pair.downward
        mass[-1] += pair.rest
        infinite = 0.0
    return checked(Part(losses, mass, infinite, e.steps))


def has_closed_form(e: Exposure) -> bool:
    """Return whether a round is one step at a rate below 1, with noise."""
    return (
        e.participation == 1 and e.steps == 1 and e.sample_rate < 1 and e.noise_multiplier >= SMALLEST_NOISE
    )


def epsilon_of_one_step(e: Exposure, delta: float) -> float:
    """Return epsilon at delta of one step at a rate below 1, by its closed form.

    Guarantee: an upper bound for adding and for removing; too high by what rounding may hide.
    """
    low, high = 0.0, 1.0
    if delta_of_one_step(e, 0.0) <= delta:
        return 0.0
    while not delta_of_one_step(e, high) <= delta:
        low, high = high, 2 * high
        if high > LARGEST_LOG_RATIO:
            return math.inf
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of_one_step(e, middle) <= delta else (middle, high)
    return high


def delta_of_one_step(e: Exposure, epsilon: float) -> float:
    """Return delta at epsilon of one step at rate q, the worse of adding and removing (docs/theory.md, "Drawn once").

    Removing is q d(mu, ln(1 + (e^epsilon - 1)/q)), adding q x e^epsilon d(mu, -ln x) with x = 1 - (1 - e^-epsilon)/q.
    """
    q, mu = e.sample_rate, 1 / e.noise_multiplier
    removing = q * _gaussian_delta(
        mu, float(np.logaddexp(0.0, math.log(math.expm1(epsilon) / q)) if epsilon else 0.0)
    )
    kept = 1 + math.expm1(-epsilon) / q + 8 * UNIT
    adding = q * kept * math.exp(epsilon) * _gaussian_delta(mu, -math.log(kept)) if kept > 0 else 0.0
    return max(removing, adding) * (1 + 16 * UNIT)


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """delta at epsilon of N(mu, 1) against N(0, 1), with what rounding may hide."""
    above, below = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    first = math.exp(log_ndtr(above))
    ratio = epsilon + log_ndtr(below) - log_ndtr(above)
    rounding = 8 * UNIT * (8 + abs(epsilon) + above**2 + below**2 + mu * abs(below))
    return float(first * (max(-math.expm1(min(ratio, 0.0)), 0.0) + rounding))


def telling(e: Exposure, removing: bool) -> Part:
    """Steps that tell whom they sampled: at least as bad as any noise."""
    loss, mass, infinite = (
        (math.log1p(-e.sample_rate), 1 - e.sample_rate, e.sample_rate)
        if removing
        else (-math.log1p(-e.sample_rate), 1.0, 0.0)
    )
    return Part(np.array([loss]), np.array([mass]), infinite, e.steps)


def checked(part: Part) -> Part:
    """Refuse losses whose mass is not 1."""
    total = math.fsum(part.mass) + part.infinite
    if not abs(total - 1) <= OFF:
        fail(
            f"Expected probabilities that sum to 1. Got {total!r}: double precision does not suffice to verify steps "
            "with this sampling rate and noise."
        )
    return part


@dataclass(frozen=True)
class _Pair:
    """(N(0), N(1)) as likelihood ratios, from 0.

    Of the mass `without` of N(0) between two of them at least `upward` has to be at the larger one for removing, and
    `downward` at the smaller one for adding. Beyond the last ratio lie `rest`, and `rest_shifted` of N(1) at a ratio of
    infinity. Nobody's mass is off by more than `rounding`.
    """

    ratios: FloatArray
    without: FloatArray
    upward: FloatArray
    downward: FloatArray
    rounding: FloatArray
    rest: float
    rest_shifted: float


def _pair(x: FloatArray, sigma: float) -> _Pair:
    log_ratios = (x - 0.5) / sigma**2
    ratios = np.append(0.0, np.exp(log_ratios))
    without, side = _cells(x / sigma)
    shifted, shifted_side = _cells((x - 1) / sigma)
    low, high = ratios[:-1], ratios[1:]
    wide = np.maximum(high - low, np.finfo(float).tiny)
    inner, inner_shifted = without[:-1], shifted[:-1]
    # Rounding of distribution functions (4 units), of edges and of ratios (as many units as their logarithm's size).
    off = UNIT * (4 + 2 * np.abs(log_ratios)) * (shifted_side[:-1] + high * side[:-1]) / wide
    upward = np.clip((inner_shifted - inner * low) / wide + off, 0.0, inner)
    downward = np.clip((inner * high - inner_shifted) / wide + off, 0.0, inner)
    rest, rest_shifted = float(without[-1]), float(shifted[-1])
    beyond = max(rest_shifted - rest * float(ratios[-1]), 0.0) + 8 * UNIT * rest_shifted
    return _Pair(ratios, inner, upward, downward, 4 * UNIT * side[:-1], rest, beyond)


def _cells(z: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Normal mass of (-inf, z0], (z0, z1], ..., (zn, inf), from the more precise side; and that side's whole mass."""
    below, above = ndtr(z), ndtr(-z)
    right = z[1:] + z[:-1] > 0
    inner = np.where(right, above[:-1] - above[1:], below[1:] - below[:-1])
    side = np.where(right, above[:-1], below[1:])
    masses = np.concatenate([below[:1], np.maximum(inner, 0.0), above[-1:]])
    return masses, np.concatenate([below[:1], side, above[-1:]])
