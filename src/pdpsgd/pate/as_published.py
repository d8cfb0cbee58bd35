"""Votes by the published accounting, for comparison only: it depends on the votes, and charges levels by rank.

Not for release. Each answer costs what Theorem 6 of Papernot et al. (2018, arXiv:1802.08908) says of its votes, so that
both the costs and the number of answers follow from people's records, and nobody is charged for telling. And the public
code of Individualized PATE sorts the weights and the budgets apart and pairs them by rank: where more people of a level
make its weight larger than that of a more generous one, a level is charged for another's weight (docs/pate.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, logsumexp
from torch import Tensor

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.gaussian import gaussian_epsilon
from pdpsgd.accounting.theorems import epsilon_from_renyi_as_published
from pdpsgd.errors import check_one_of, fail
from pdpsgd.pate.plans import VoteSettings

ORDERS: FloatArray = np.arange(2.0, 51.0)
CHARGES = ("by-rank", "own")
"""Which weight a level is charged for: that of its budget's rank, as the public code does it, or its own."""
WHY_NOT = (
    "By the published accounting the number of labels and their cost depend on the votes, which nobody is charged for, "
    "and levels may be charged for others' weights: it keeps no promise."
)


@dataclass(frozen=True, eq=False)
class PublishedVote:
    """What came out of a vote that ends when a level's charge reaches its budget. Not for release."""

    examples: IntArray
    labels: IntArray
    asked: int
    charged: FloatArray
    """What each level was charged, by the order of charges that ended the vote."""
    own: FloatArray
    """The same for the level's own weight."""
    exact: FloatArray
    """What so many questions and answers cost each level, whatever the votes are: the sound figure."""
    not_for_release: str = WHY_NOT


def vote_as_published(
    counts: Tensor,
    weights: Sequence[float],
    epsilons: Sequence[float],
    *,
    delta: float = 1e-5,
    settings: VoteSettings | None = None,
    charge: str = "by-rank",
    seed: int = 0,
) -> PublishedVote:
    """Ask about examples in their order until the next one would bring a level's charge above its budget.

    Args:
        counts: the teachers' weighted votes, (examples, classes).
        weights: by how much the votes of each level's teachers count.
        epsilons: each level's budget.
        delta: of all budgets.
        settings: of the vote.
        charge: `by-rank`, as the public code pairs weights and budgets, or `own`.
        seed: of the noise.

    Returns:
        The answers and what they cost; not for release.
    """
    settings = settings or VoteSettings()
    paid, own = charged_weights(weights, epsilons, charge), np.array(weights, dtype=float)
    budgets, rng = np.array(epsilons, dtype=float), np.random.default_rng(seed)
    spent, rightly = np.zeros((2, len(paid), ORDERS.size))
    examples, labels, asked = [], [], 0
    for example, votes in enumerate(counts.double().numpy()):
        checked = votes.max() + rng.normal(0, settings.check_noise)
        noised = votes + rng.normal(0, settings.answer_noise, votes.size)
        answered = bool(checked >= settings.threshold)
        more = _cost(votes, paid, settings, answered=answered)
        if (_epsilons(spent + more, delta) > budgets).any():
            break
        spent, asked = spent + more, asked + 1
        rightly = rightly + _cost(votes, own, settings, answered=answered)
        if answered:
            examples.append(example)
            labels.append(int(noised.argmax()))
    mu = own * math.sqrt(asked / settings.check_noise**2 + 2 * len(labels) / settings.answer_noise**2)
    return PublishedVote(
        np.array(examples, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        asked,
        _epsilons(spent, delta),
        _epsilons(rightly, delta),
        gaussian_epsilon(mu, np.full(mu.size, delta)),
    )


def charged_weights(weights: Sequence[float], epsilons: Sequence[float], charge: str) -> FloatArray:
    """Return the weight that each level is charged for.

    By rank, the level of the k-th smallest budget is charged for the k-th smallest weight, whoever's that is. Levels of
    equal weights stay apart, and the order in which levels are listed makes no difference.

    >>> charged_weights([0.53, 1.33, 1.08], [1, 2, 3], "by-rank").tolist()
    [0.53, 1.08, 1.33]
    """
    check_one_of(CHARGES, charge=charge)
    if len(weights) != len(epsilons) or len(set(epsilons)) != len(epsilons):
        fail(f"Expected a weight and a budget of its own for each level. Got {weights!r} and {epsilons!r}.")
    own = np.array(weights, dtype=float)
    if charge == "own":
        return own
    paid = np.empty_like(own)
    paid[np.argsort(epsilons, kind="stable")] = np.sort(own)
    return paid


def renyi_of_answer(log_q: float, deviation: float, orders: FloatArray = ORDERS) -> FloatArray:
    """Compute rho of a noisy arg max that misses its likeliest label with probability at most q (Theorem 6).

    Guarantee: none for anybody: q follows from the votes. As a statement on a fixed pair of neighbors it is an upper
    bound, and never above order / deviation^2, which holds whatever the votes are.

    Args:
        log_q: ln q.
        deviation: of the noise on each count, as a multiple of the weight by which one person may change the votes.
        orders: Renyi orders.
    """
    whatever: FloatArray = orders / deviation**2
    second = deviation * math.sqrt(-log_q)  # Proposition 10
    first = second + 1
    if second <= 1:
        return whatever
    of_first, of_second = first / deviation**2, second / deviation**2
    limit = (second - 1) * of_second - second * (
        math.log(first / (first - 1)) + math.log(second / (second - 1))
    )
    if log_q > limit or -log_q <= of_second:
        return whatever
    right = math.log(-math.expm1(log_q))
    a = right - math.log(-math.expm1((log_q + of_second) * (second - 1) / second))
    b = of_first - log_q / (first - 1)
    dependent = np.logaddexp(right + (orders - 1) * a, log_q + (orders - 1) * b) / (orders - 1)
    return np.where(orders < first, np.minimum(whatever, dependent), whatever)


def log_chance_of_another(votes: FloatArray, deviation: float) -> float:
    """Bound ln of the chance that another label than the likeliest comes out (Proposition 7).

    >>> round(math.exp(log_chance_of_another(np.array([5.0, 5.0]), 1.0)), 3)
    0.5
    """
    behind = votes.max() - np.delete(votes, votes.argmax())
    found = float(logsumexp(log_ndtr(-behind / (math.sqrt(2) * deviation))))
    return min(found, math.log(1 - 1 / votes.size))


def _cost(votes: FloatArray, weights: FloatArray, settings: VoteSettings, *, answered: bool) -> FloatArray:
    """Rho of one question at each order: (levels, orders). The check is charged in full, as the public code does."""
    check = np.outer((weights / settings.check_noise) ** 2 / 2, ORDERS)
    if not answered:
        return check
    log_q = log_chance_of_another(votes, settings.answer_noise)
    return check + [renyi_of_answer(log_q, settings.answer_noise / weight) for weight in weights.tolist()]


def _epsilons(rho: FloatArray, delta: float) -> FloatArray:
    return np.min(epsilon_from_renyi_as_published(ORDERS, rho, delta), axis=1)
