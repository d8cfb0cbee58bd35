"""The smallest noise multiplier for a target, given a history (the paper's extended getNoiseMultiplier)."""

from __future__ import annotations

import math

from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure, Past
from pdpsgd.accounting.registry import accountant
from pdpsgd.errors import check_positive, check_probability, fail

LARGEST_NOISE = 1e7


def smallest_noise_multiplier(
    target_epsilon: float,
    delta: float,
    *,
    sample_rate: float,
    steps: int,
    history: Past = (),
    participation: float = 1.0,
    accounting: Accountant | str = "pld",
    tolerance: float = 1e-4,
) -> float:
    """Find the smallest noise multiplier whose total with the history stays within the target.

    A trial is the history with one candidate, so the history does not grow with the trials, and the branch
    is inside the bisection (the paper prints it behind the loop).

    Guarantee: the returned noise costs at most `target_epsilon` at `delta` together with the history, by the
    given accountant; it is at most 1 + `tolerance` times the smallest such noise.

    Args:
        target_epsilon: what history and candidate may cost together.
        delta: at which delta.
        sample_rate: sampling rate of the candidate.
        steps: steps of the candidate.
        history: exposures before it.
        participation: probability of being in the candidate's round at all.
        accounting: an accountant, or its name.
        tolerance: relative precision of the noise multiplier.

    Returns:
        The noise multiplier.

    Raises:
        PdpsgdError: the history alone costs more than the target, or no noise is large enough.

    >>> round(smallest_noise_multiplier(0.5, 1e-5, sample_rate=1024 / 60_000, steps=1000), 2)
    3.91
    """
    check_positive(target_epsilon=target_epsilon, delta=delta, steps=steps, tolerance=tolerance)
    check_probability(sample_rate=sample_rate, participation=participation)
    by = accountant(accounting) if isinstance(accounting, str) else accounting

    def total(sigma: float) -> float:
        return by.epsilon((*history, Exposure(participation, sample_rate, sigma, steps)), delta)

    spent = by.epsilon(history, delta)
    if spent > target_epsilon:
        fail(
            f"No noise can keep a total of epsilon={target_epsilon:g} at delta={delta:g}: {spent:g} is spent already."
        )
    low, high = 0.0, 1.0
    while total(high) > target_epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            fail(
                f"No noise up to {LARGEST_NOISE:g} keeps a total of epsilon={target_epsilon:g} at delta={delta:g}: "
                f"{spent:g} is spent already, and {steps} steps at rate {sample_rate:g} cost more than the rest."
            )
    while high - low > tolerance * high:
        sigma = math.sqrt(low * high) if low > 0 else high / 2
        if total(sigma) <= target_epsilon:
            high = sigma
        else:
            low = sigma
        if high < 1e-3:
            break  # nothing is gained below: everything is within the target
    return high
