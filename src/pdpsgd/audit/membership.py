"""Membership inference by tier: how often the model alone tells whether a person's record was used.

The likelihood-ratio attack of Carlini et al. 2022 (arXiv 2112.03570) on a stack of shadow models: each model
in turn is the target, the others show how confident models are about a person's record with and without it.
What comes out is the success of one strong attack on ordinary records. It is not a bound: better attacks and
unluckier records exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from torch import Tensor

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.audit.canaries import Tier
from pdpsgd.audit.shadow import ShadowModels
from pdpsgd.errors import fail

FALSE_POSITIVE_RATES = (0.001, 0.01)
ROC_POINTS = 60


@dataclass(frozen=True)
class MembershipResult:
    """The attack's success on one tier.

    `true_positive_rates` at 0.1 % and 1 % false positives; `limits` are the most that the proven (epsilon,
    delta) allows any attack there (None where nothing is proven). `roc` has (false, true) positive rates,
    evenly on a log scale.
    """

    tier: Tier
    people: int
    trials: int
    auc: float
    true_positive_rates: dict[float, float]
    limits: dict[float, float | None]
    roc: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and for the report."""
        return {
            "tier": self.tier.name,
            "people": self.people,
            "trials": self.trials,
            "auc": self.auc,
            "true_positive_rate_at": {f"{rate:g}": value for rate, value in self.true_positive_rates.items()},
            "proven_limit_at": {f"{rate:g}": value for rate, value in self.limits.items()},
            "roc": [list(point) for point in self.roc],
        }


def membership_by_tier(
    shadows: ShadowModels,
    inputs: Tensor,
    targets: Tensor,
    level_of_person: npt.ArrayLike,
    tiers: tuple[Tier, ...],
) -> tuple[MembershipResult, ...]:
    """Attack every shadow model with the help of the others, and report by tier."""
    scores = likelihood_ratio_scores(confidences(shadows.outputs(inputs), targets), shadows.members)
    level = np.asarray(level_of_person)
    results = []
    for tier in tiers:
        people = np.flatnonzero(np.isin(level, tier.levels))
        if people.size == 0:
            continue
        inside, own = shadows.members[:, people].ravel(), scores[:, people].ravel()
        results.append(_result(tier, people.size, own[inside], own[~inside]))
    return tuple(results)


def confidences(outputs: Tensor, targets: Tensor) -> FloatArray:
    """Return log(p / (1 - p)) of the right class, models x people: nearly normal, unlike losses.

    Of a single output it is that logit, with the sign of the class; of labels that are numbers, the negative error.
    """
    logits = outputs.to(torch.float64)
    if targets.is_floating_point():
        return np.asarray(-(logits.reshape(len(logits), -1) - targets).abs().numpy())
    if logits.shape[-1] == 1:
        return np.asarray((logits[..., 0] * (2 * targets - 1)).numpy())
    right = logits.gather(-1, targets.expand(logits.shape[0], -1)[..., None])[..., 0]
    others = logits.scatter(-1, targets.expand(logits.shape[0], -1)[..., None], -math.inf)
    return np.asarray((right - others.logsumexp(-1)).numpy())


def likelihood_ratio_scores(values: FloatArray, members: BoolArray) -> FloatArray:
    """Return each model's log-likelihood ratio for each person, with normal fits on all other models.

    One variance for everybody with, and one for everybody without a record: with few models a variance per
    person is noise.
    """
    models = values.shape[0]
    if models < 4:
        fail(f"Expected at least 4 shadow models, to compare one with others. Got {models}.")
    fits = []
    for inside in (members, ~members):
        # Mean over the other models only: the target's own value must not tell on itself.
        count = inside.sum(axis=0)[None, :] - inside
        total = np.where(inside, values, 0.0).sum(axis=0)[None, :] - np.where(inside, values, 0.0)
        everybody = values[inside].mean()
        mean = (total + everybody) / (count + 1)
        residual = (values - mean)[inside]
        fits.append((mean, max(float(residual.var()), 1e-12)))
    (mean_in, variance_in), (mean_out, variance_out) = fits
    return np.asarray(
        -((values - mean_in) ** 2) / (2 * variance_in)
        + (values - mean_out) ** 2 / (2 * variance_out)
        - 0.5 * math.log(variance_in / variance_out)
    )


def roc_curve(inside: FloatArray, outside: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return false and true positive rates over all thresholds, rising."""
    thresholds = np.sort(np.concatenate([inside, outside]))[::-1]
    alarms = 1 - np.searchsorted(np.sort(outside), thresholds) / outside.size
    hits = 1 - np.searchsorted(np.sort(inside), thresholds) / inside.size
    return alarms, hits


def true_positive_rate_at(inside: FloatArray, outside: FloatArray, false_positive_rate: float) -> float:
    """Return the share of members found at a threshold that at most this share of non-members passes."""
    alarms, hits = roc_curve(inside, outside)
    allowed = alarms <= false_positive_rate
    return float(hits[allowed].max(initial=0.0))


def area_under_curve(inside: FloatArray, outside: FloatArray) -> float:
    """Return the probability that a member scores above a non-member (half for ties).

    >>> area_under_curve(np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    0.875
    """
    ranks = rankdata(np.concatenate([inside, outside]))[: inside.size]
    return float((ranks.sum() - inside.size * (inside.size + 1) / 2) / (inside.size * outside.size))


def proven_limit(epsilon: float | None, delta: float, false_positive_rate: float) -> float | None:
    """Return the most true positives that (epsilon, delta)-DP allows at this false positive rate, both directions."""
    if epsilon is None:
        return None
    adding = math.exp(min(epsilon, 700.0)) * false_positive_rate + delta
    removing = 1 - math.exp(-epsilon) * (1 - false_positive_rate - delta)
    return min(1.0, adding, removing)


def _result(tier: Tier, people: int, inside: FloatArray, outside: FloatArray) -> MembershipResult:
    alarms, hits = roc_curve(inside, outside)
    lowest = 1 / max(outside.size, 1)
    grid = np.geomspace(min(lowest, 0.5), 1.0, ROC_POINTS)
    return MembershipResult(
        tier=tier,
        people=people,
        trials=inside.size + outside.size,
        auc=area_under_curve(inside, outside),
        true_positive_rates={
            rate: true_positive_rate_at(inside, outside, rate) for rate in FALSE_POSITIVE_RATES
        },
        limits={rate: proven_limit(tier.proven, tier.delta, rate) for rate in FALSE_POSITIVE_RATES},
        roc=tuple((float(x), float(hits[alarms <= x].max(initial=0.0))) for x in grid),
    )
