"""How much a plan makes of what people allow: its signal, and that signal as a share of the most that any plan gets.

For person i let mu_i be the mu of the Gaussian mechanism that costs exactly what they allow. Over a run, a plan moves
the mean of the noised sums by steps * q_i * c_i / sigma for person i, in units of the noise; over people and rounds,
and divided by sqrt(T), that is the plan's signal. It is at most the sum of all mu_i (docs/choosing.md says why), and
their ratio is the signal efficiency. All of it is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.planning.rounds import Level, Round


def signal(levels: Sequence[Level], rounds: Sequence[Round]) -> float:
    """Sum steps * q * c / sigma over rounds and people, divided by the square root of all steps.

    Args:
        levels: the levels of a plan.
        rounds: its rounds.

    Returns:
        The signal; with one round and no clip scales it is sqrt(steps) * batch size / noise multiplier.
    """
    steps = sum(r.steps for r in rounds)
    people = np.array([level.people for level in levels], dtype=float)
    total = math.fsum(float(people @ _of_person(r)) for r in rounds)
    return total / math.sqrt(steps) if steps else 0.0


def _of_person(r: Round) -> FloatArray:
    """Compute steps * q * c / sigma for a person of each level; with a filter, the most that it lets through."""
    moved = r.steps / r.noise_multiplier * np.array(r.clip_scales)
    if r.spending_limits is not None:
        moved = np.minimum(moved, np.sqrt(r.steps * np.array(r.spending_limits)))
    shares: FloatArray = np.array(r.participation) * r.sample_rates * moved
    return shares


def mus(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """Compute mu of each budget; whoever asks for no protection counts like the largest finite budget."""
    found = gaussian_mu(epsilon, delta)
    finite = found[np.isfinite(found)]
    return np.where(np.isfinite(found), found, finite.max() if finite.size else 0.0)


def most_signal(levels: Sequence[Level]) -> float:
    """Sum mu over people: the most signal that any plan gets from these budgets."""
    of_level = mus(np.array([x.epsilon for x in levels]), np.array([x.delta for x in levels]))
    return float(of_level @ np.array([level.people for level in levels], dtype=float))


def signal_efficiency(levels: Sequence[Level], rounds: Sequence[Round]) -> float | None:
    """Compute the share of the most signal that a plan reaches; None if nobody allows anything.

    Args:
        levels: the levels of a plan.
        rounds: its rounds.

    Returns:
        A share of 1, which full batches reach with clipping norms in proportion to mu.
    """
    most = most_signal(levels)
    return signal(levels, rounds) / most if most > 0 else None
