"""The many-run audit: small models trained repeatedly, with and without a canary.

Three bounds come out of the same error rates. The first assumes nothing (Clopper-Pearson). The other two
assume that the mechanism is what the code says and only how much noise there really is stands in doubt: a
Gaussian mechanism where everybody is in every batch, and otherwise the plan's own subsampled mechanism at
some noise. They use the whole trade-off curve, so they come close to the truth with a few thousand runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting.history import History, exposures_of
from pdpsgd.accounting.registry import accountant
from pdpsgd.audit.bounds import (
    bonferroni,
    clopper_pearson_upper,
    epsilon_of_gaussian,
    gaussian_mu,
    many_runs_epsilon,
)
from pdpsgd.audit.canaries import Canaries, Tier, add_canaries, tiers_of
from pdpsgd.audit.dirac_canaries import dirac_steps
from pdpsgd.audit.observed_run import Tamper
from pdpsgd.audit.one_run import SIGNIFICANCE, is_gaussian
from pdpsgd.audit.scores import LikelihoodScores, simulated_scores
from pdpsgd.errors import fail
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True)
class ManyRunsBound:
    """A lower bound from many runs: epsilon of a tier is at least `measured`.

    `confidence` is for all tiers together.

    `gaussian` and `within_family` hold under the assumption that is named in the module's docstring; None
    where it does not apply.
    """

    tier: Tier
    runs: int
    true_positives: int
    positives: int
    false_positives: int
    negatives: int
    measured: float
    gaussian: float | None
    within_family: float | None
    confidence: float

    @property
    def success(self) -> float:
        """Share of the runs in which the attack said what was true."""
        return (self.true_positives + self.negatives - self.false_positives) / self.runs

    @property
    def alarm(self) -> bool:
        """Whether the bound that assumes nothing is above what is proven."""
        return self.tier.proven is not None and self.measured > self.tier.proven


def many_runs(
    plan: Plan,
    *,
    runs: int,
    tiers: Sequence[Tier] | None = None,
    seed: int | None = None,
    source: Callable[[int], RandomSource] | None = None,
    tamper: Tamper | None = None,
) -> Iterator[tuple[Canaries, FloatArray]]:
    """Train repeatedly with one Dirac canary per tier; yield the canaries and their scores, run by run.

    Guarantee: coins, draws and noise of the runs are independent, given a good random source.
    """
    generator = np.random.default_rng(seed)
    chosen = tiers_of(plan) if tiers is None else tiers
    for _ in range(runs):
        canaries = add_canaries(plan, 1, generator, tiers=chosen)
        run_seed = int(generator.integers(2**62))
        own = RandomSource.from_seed(run_seed) if source is None else source(run_seed)
        scores = LikelihoodScores(canaries)
        for seen in dirac_steps(canaries, layers=1, source=own, tamper=tamper):
            scores.observe(seen)
        yield canaries, scores.scores()


def many_run_bounds(
    plan: Plan,
    coins: BoolArray,
    scores: FloatArray,
    *,
    thresholds: npt.ArrayLike,
    balanced_thresholds: npt.ArrayLike | None = None,
    tiers: Sequence[Tier] | None = None,
    significance: float = SIGNIFICANCE,
) -> tuple[ManyRunsBound, ...]:
    """Return a lower bound on epsilon per tier, from coins and scores (runs x tiers) and a threshold for each.

    With `balanced_thresholds` the bounds that assume a family are given too, at these thresholds.

    Guarantee: with thresholds fixed before the runs (`simulated_threshold`, or chosen on other runs), the
    probability that any tier's bound is above its epsilon is at most `significance`; Bonferroni over the tiers and
    over the two thresholds.
    """
    tiers = tiers_of(plan) if tiers is None else tiers
    if coins.shape != scores.shape or coins.ndim != 2 or coins.shape[1] != len(tiers):
        fail(
            f"Expected coins and scores of shape (runs, {len(tiers)}). Got {coins.shape} and {scores.shape}."
        )
    each = bonferroni(significance, len(tiers) * (1 if balanced_thresholds is None else 2))
    bounds = []
    for place, tier in enumerate(tiers):
        own = coins[:, place], scores[:, place]
        counts = _counts(*own, float(np.asarray(thresholds)[place]))
        gaussian = within = None
        if balanced_thresholds is not None:
            balanced = _counts(*own, float(np.asarray(balanced_thresholds)[place]))
            if all(is_gaussian(exposures_of(plan.history_of(level))) for level in tier.levels):
                gaussian = epsilon_of_gaussian(gaussian_mu(**balanced, significance=each), tier.delta)
            elif len(tier.levels) == 1:
                history = exposures_of(plan.history_of(tier.levels[0]))
                within = family_epsilon(history, **balanced, delta=tier.delta, significance=each)
        bounds.append(
            ManyRunsBound(
                tier=tier,
                runs=coins.shape[0],
                **counts,
                measured=many_runs_epsilon(**counts, delta=tier.delta, significance=each),
                gaussian=gaussian,
                within_family=within,
                confidence=1 - significance,
            )
        )
    return tuple(bounds)


def simulated_threshold(
    history: History, runs: int, *, delta: float, significance: float, balanced: bool = False, seed: int = 0
) -> float:
    """Return the threshold with the best bound on scores simulated from a plan's history, before any run.

    The bound that assumes nothing is best at a threshold that is seldom passed; the bounds that assume a
    family where both kinds of error are about as frequent (`balanced`).
    """
    coins, scores = simulated_scores(history, max(runs, 20_000), np.random.default_rng(seed))
    inside, outside = np.sort(scores[coins]), np.sort(scores[~coins])
    candidates = np.quantile(scores, np.linspace(0.002, 0.998, 250))
    share_in = 1 - np.searchsorted(inside, candidates) / inside.size
    share_out = 1 - np.searchsorted(outside, candidates) / outside.size
    if balanced:
        return float(candidates[np.argmin(np.abs(share_out - (1 - share_in)))])
    half = runs // 2
    found = [
        many_runs_epsilon(
            true_positives=round(hits * half),
            positives=half,
            false_positives=round(alarms * half),
            negatives=half,
            delta=delta,
            significance=significance,
        )
        for hits, alarms in zip(share_in, share_out, strict=True)
    ]
    return float(candidates[int(np.argmax(found))])


def family_epsilon(
    history: History,
    *,
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    delta: float,
    significance: float,
) -> float:
    """Return the lower bound on epsilon if the mechanism is the plan's, at an unknown multiple of its noise.

    Every multiple whose trade-off between the two error rates is better than what was seen is refuted; the
    answer is epsilon at the largest multiple that is not.

    Guarantee: as `many_runs_epsilon`, for mechanisms of this family only: same rates, participation and
    steps, noise multiplied by any one number.
    """
    half = bonferroni(significance, 2)
    false_positive_rate = clopper_pearson_upper(false_positives, negatives, half)
    false_negative_rate = clopper_pearson_upper(positives - true_positives, positives, half)
    account = accountant("pld")
    epsilons = np.linspace(0.0, 12.0, 49)

    def refuted(multiple: float) -> bool:
        scaled = _with_noise(history, multiple)
        for epsilon in epsilons:
            allowed = account.delta(scaled, float(epsilon))
            grown = math.exp(epsilon)
            if 1 - false_negative_rate > grown * false_positive_rate + allowed:
                return True
            if 1 - false_positive_rate > grown * false_negative_rate + allowed:
                return True
        return False

    low, high = 0.25, 16.0
    if not refuted(high):
        return 0.0
    if refuted(low):
        return account.epsilon(_with_noise(history, low), delta)
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return account.epsilon(_with_noise(history, high), delta)


def _with_noise(history: History, multiple: float) -> History:
    return tuple(e._replace(noise_multiplier=e.noise_multiplier * multiple) for e in history)


def _counts(coins: BoolArray, scores: FloatArray, threshold: float) -> dict[str, int]:
    says_in = scores >= threshold
    return {
        "true_positives": int((says_in & coins).sum()),
        "positives": int(coins.sum()),
        "false_positives": int((says_in & ~coins).sum()),
        "negatives": int((~coins).sum()),
    }
