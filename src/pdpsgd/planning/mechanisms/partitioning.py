"""Partitioning (Li, Xiong, Ji and Jiang 2017): a sum for each group, with the group's own noise, put together."""

from __future__ import annotations

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.one_rate import at_one_rate
from pdpsgd.planning.rounds import Round


def _rounds(request: Request) -> list[Round]:
    """One sum for each group g, with noise sigma_g; the step uses their sum, weighted by n_g / sigma_g^2.

    Groups are disjoint, so each sum keeps its own group's budgets, and the weighted sum is post-processing. As one
    sum it has noise sqrt(sum of (a_g sigma_g)^2) where a person of group g is clipped to a_g C: the plan's round.
    """
    found = at_one_rate(request, "partitioning")
    group = best_groups(found.inverse_noise, found.people)
    strictest = np.array([found.inverse_noise[group == g].min() for g in range(group.max() + 1)])
    people = np.bincount(group, weights=found.people)
    weights = np.where(strictest > 0, people * strictest**2, 0.0)
    weights /= weights.max()
    kept = strictest > 0
    noise = float(np.sqrt(np.sum((weights[kept] / strictest[kept]) ** 2)))
    return [found.round(noise, weights[group])]


def best_groups(inverse_noise: FloatArray, people: FloatArray) -> IntArray:
    """Put levels into the groups with the most signal: the largest sum of (n_g / sigma_g)^2, sigma_g the strictest's.

    Groups are intervals of the sorted levels; the best of all is found by dynamic programming, from public things only.

    >>> best_groups(np.array([0.2681, 0.5016, 0.7191]), np.array([34.0, 43.0, 23.0])).tolist()
    [0, 1, 1]
    """
    order = np.argsort(inverse_noise, kind="stable")
    strict, count = inverse_noise[order], np.append(0.0, np.cumsum(people[order]))
    best, start = np.zeros(order.size + 1), np.zeros(order.size + 1, dtype=np.int64)
    for end in range(1, order.size + 1):
        signal = best[:end] + ((count[end] - count[:end]) * strict[:end]) ** 2
        start[end] = int(np.argmax(signal))
        best[end] = signal[start[end]]
    edges, end = [], order.size
    while end > 0:
        edges.append(end := int(start[end]))
    group = np.empty(order.size, dtype=np.int64)
    group[order] = np.searchsorted(edges[::-1], np.arange(order.size), side="right") - 1
    return group


MECHANISM = Mechanism(
    _rounds, "disjoint groups at their strictest budget, each with its own noise, put together"
)
