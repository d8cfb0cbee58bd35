"""What the next run may take: a share of what everybody has left, as budgets to plan with."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.accounting import accountant
from pdpsgd.accounting.certificates import KAPPA
from pdpsgd.accounting.gaussian import for_distinct, gaussian_epsilon
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import fail
from pdpsgd.ledger.amounts import UNIT_B, UNIT_D, Amounts
from pdpsgd.planning.plans import Plan

DEFAULT_SPEND = "0.25"
NEARLY_NOTHING = 1e-6
"""Whoever has less than this share of what they allow left is not used."""
LARGEST_D = 0.05


@dataclass(frozen=True)
class Share:
    """How much of an allowance a run takes: `of_left` of what is left, and at most `of_whole` of the whole."""

    of_left: float
    of_whole: float = 1.0

    @classmethod
    def parse(cls, text: str | float) -> Share:
        """Read "0.25" (a share of what is left), "1 of 12" (a twelfth of the whole), or "all".

        >>> Share.parse("1 of 12")
        Share(of_left=1.0, of_whole=0.08333333333333333)
        """
        words = str(text).strip().lower()
        if words == "all":
            return cls(1.0)
        planned = re.fullmatch(r"(\d+)\s+of\s+(\d+)", words)
        if planned and 0 < int(planned[1]) <= int(planned[2]):
            return cls(1.0, int(planned[1]) / int(planned[2]))
        try:
            share = float(words)
        except ValueError:
            share = -1.0
        if planned or not 0 < share <= 1:
            fail(
                'Expected what a run may spend as a share of what is left, up to 1 ("0.25"), as a part of the whole '
                f'("1 of 12"), or "all". Got {text!r}.'
            )
        return cls(share)


@dataclass(frozen=True, eq=False)
class Offer:
    """Budgets for one run: epsilon and delta of each person's share, by certificate with d = KAPPA delta.

    Guarantee: a plan whose levels keep these budgets under the accountant `certificate` takes no more than the share
    of anybody's b and d. Computed from consents and charges only, which are public.
    """

    budgets: Budgets
    share: Share


def shares(
    share: Share, *, allowed: Amounts, spent: Amounts, epsilon: FloatArray, delta: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Turn what is left of everybody's allowance into an epsilon and a delta for one run.

    Args:
        share: how much the run may take.
        allowed: what everybody allows now.
        spent: what all runs so far have been charged.
        epsilon: infinite where no protection is asked; else it does not matter, `allowed` does.
        delta: everybody's delta, for those who ask for no protection.

    Returns:
        Everybody's epsilon and delta for the run.
    """
    left = allowed.left_after(spent)
    b, d = (
        np.minimum(share.of_left * rest.astype(float), share.of_whole * whole.astype(float)).clip(0)
        for rest, whole in ((left.b, allowed.b), (left.d, allowed.d))
    )
    infinite = np.isinf(epsilon)
    used = (b > NEARLY_NOTHING * allowed.b) & (d > NEARLY_NOTHING * allowed.d) & (b > 0) & (d > 0) & ~infinite
    # A little less than the share, so that charges, which are rounded up, stay within it.
    taken_d = np.minimum(np.maximum(np.floor(d[used]) * (1 - 1e-9) - 4, 0) * UNIT_D, LARGEST_D)
    run_delta = taken_d / KAPPA * (1 - 1e-12)
    mu = np.sqrt(np.floor(b[used]) * UNIT_B)
    run_epsilon = for_distinct(gaussian_epsilon, mu, (1 - KAPPA) * run_delta) * (1 - 1e-9)
    epsilons, deltas = np.zeros(b.size), np.where(infinite, delta, 0.0)
    epsilons[infinite] = np.inf
    epsilons[used], deltas[used] = run_epsilon, run_delta
    return epsilons, deltas


def with_cost_of_adaptivity(plan: Plan) -> Plan:
    """Note in a plan by certificates what they cost beside the exact figure, which proves one run alone."""
    exact = accountant("pld")
    costs = [
        level.proven_epsilon / exact.epsilon(plan.history_of(index), level.delta) - 1
        for index, level in enumerate(plan.levels)
        if level.proven_epsilon
    ]
    if not costs:
        return plan
    note = (
        f"By certificates, so that this run may be chosen after results of earlier ones: that costs up to "
        f"{max(costs):.1%} of epsilon, beside this run's exact figure."
    )
    return replace(plan, notes=(*plan.notes, note))
