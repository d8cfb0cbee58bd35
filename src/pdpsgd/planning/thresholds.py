"""Thresholds: how much of people's budgets a round should ask for (paper, section 4.1, "Thresholding").

All functions work on levels: the distinct budgets (or what is left of them) and how many people have each.
Budgets of 0 and infinity stay out: they say nothing about a good threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.theorems import participation_for
from pdpsgd.errors import check_one_of, fail

Loss = Callable[[FloatArray, FloatArray, float], float]
"""loss(budgets, people, tau)"""


def waste_unsampled(budgets: FloatArray, people: FloatArray, tau: float) -> float:
    """Return waste_u, what people below tau lose: sum of epsilon * (1 - (e^epsilon - 1)/(e^tau - 1))."""
    below = budgets < tau
    if not below.any():
        return 0.0
    unused = 1 - participation_for(budgets[below], tau)
    return float(people[below] @ (budgets[below] * unused))


def waste_sampled(budgets: FloatArray, people: FloatArray, tau: float) -> float:
    """Return waste_s, what people above tau lose: sum of epsilon - tau."""
    above = budgets > tau
    return float(people[above] @ (budgets[above] - tau))


def fixed_loss(unsampled_weight: float, sampled_weight: float) -> Loss:
    """Make loss_f = w1 * waste_u + w2 * waste_s (paper, eq. loss_f)."""

    def loss(budgets: FloatArray, people: FloatArray, tau: float) -> float:
        return unsampled_weight * waste_unsampled(budgets, people, tau) + sampled_weight * waste_sampled(
            budgets, people, tau
        )

    return loss


def adaptive_loss(budgets: FloatArray, people: FloatArray, tau: float) -> float:
    """Return loss_a with the weights as the paper's text states them: (u^2 + s^2)/(u + s); 0/0 is 0."""
    u, s = waste_unsampled(budgets, people, tau), waste_sampled(budgets, people, tau)
    return (u * u + s * s) / (u + s) if u + s > 0 else 0.0


def printed_adaptive_loss(budgets: FloatArray, people: FloatArray, tau: float) -> float:
    """Return loss_a as printed: 2us/(u + s).

    Degenerate: zero at both ends of [min Phi, max Phi] and positive in between, so its minimum is always an
    end; on a tie the smaller one is taken. Kept for comparison.
    """
    u, s = waste_unsampled(budgets, people, tau), waste_sampled(budgets, people, tau)
    return 2 * u * s / (u + s) if u + s > 0 else 0.0


LOSSES: dict[str, Loss] = {"adaptive": adaptive_loss, "adaptive-as-printed": printed_adaptive_loss}


def best_threshold(budgets: npt.ArrayLike, people: npt.ArrayLike, loss: Loss) -> float:
    """Find the exact minimizer of the loss over [min Phi, max Phi]; on a tie the smallest.

    Between adjacent levels both wastes are smooth, so each of these segments is minimized by itself and
    compared with its ends. (loss_f is concave there: its minimizer is always a level.)

    >>> twenty = np.linspace(0.5, 1, 20)
    >>> [round(best_threshold(twenty, np.ones(20), fixed_loss(w, 1 - w)), 6) for w in (0.2, 0.5, 0.7)]
    [0.921053, 0.763158, 0.631579]
    >>> round(best_threshold(twenty, np.ones(20), adaptive_loss), 6)
    0.752812
    >>> best_threshold(twenty, np.ones(20), printed_adaptive_loss)
    0.5
    """
    values, counts = _positive_finite(budgets, people)
    candidates = [(loss(values, counts, tau), float(tau)) for tau in values]
    best = min(candidates)[0]
    for low, high in pairwise(values):
        found = minimize_scalar(
            lambda tau: loss(values, counts, tau),
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-9},
        )
        # Strictly better only: rounding must not move the answer off a level.
        if found.fun < best * (1 - 1e-9):
            candidates.append((float(found.fun), float(found.x)))
    return min(candidates)[1]


def _positive_finite(budgets: npt.ArrayLike, people: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    values, counts = np.asarray(budgets, dtype=float), np.asarray(people, dtype=float)
    kept = (values > 0) & np.isfinite(values) & (counts > 0)
    if not kept.any():
        fail(
            "Expected at least one person with a positive, finite budget to choose a threshold for. Got none."
        )
    distinct, place = np.unique(values[kept], return_inverse=True)
    return distinct, np.bincount(place, weights=counts[kept]).astype(float)


def threshold_loss(weights: tuple[float, float] | None, loss: str | None) -> Loss | None:
    """Return the loss that a user chose for thresholds, or None for the mechanism's own."""
    if weights is not None and loss is not None:
        fail(f"Expected `weights` or `loss`, not both. Got weights={weights!r} and loss={loss!r}.")
    if weights is not None:
        first, second = weights
        if min(first, second) < 0 or first + second <= 0:
            fail(f"Expected weights (w1, w2) >= 0, not both 0. Got {weights!r}.")
        return fixed_loss(first, second)
    if loss is not None:
        check_one_of(tuple(LOSSES), loss=loss)
        return LOSSES[loss]
    return None
