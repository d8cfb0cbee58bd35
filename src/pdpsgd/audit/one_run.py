"""The one-run audit: many canaries, one training run, a lower bound per tier (Steinke, Nasr, Jagielski 2023).

In every tier the canaries with the highest scores are guessed to have been in, those with the lowest to have
been out, and the rest is left alone. How many are guessed decides how good the bound is; it is either fixed
beforehand, on scores simulated from the (public) plan, or several choices are tried and paid for. Looking at
several tiers is always paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdpsgd._typing import BoolArray, FloatArray
from pdpsgd.accounting.history import History, exposures_of
from pdpsgd.audit.bounds import bonferroni, one_run_epsilon, one_run_gaussian_epsilon
from pdpsgd.audit.canaries import Canaries, Tier
from pdpsgd.audit.scores import simulated_scores

SIGNIFICANCE = 0.05


class Rule(NamedTuple):
    """Which share of a tier's canaries is guessed to be in (the top) and to be out (the bottom)."""

    share_in: float
    share_out: float


RULES = tuple(
    Rule(share, out) for share in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2) for out in (0.0, share)
)


@dataclass(frozen=True)
class OneRunBound:
    """A lower bound from one run: epsilon of a tier is at least `measured`.

    `confidence` is for all tiers together.

    `gaussian` is the higher bound that holds where the tier's mechanism is exactly Gaussian (everybody in
    every batch), else None. `success` is the share of guesses that were right.
    """

    tier: Tier
    canaries: int
    guesses: int
    correct: int
    looks: int
    measured: float
    gaussian: float | None
    confidence: float

    @property
    def success(self) -> float | None:
        """Share of the guesses that were right; None where none was made."""
        return self.correct / self.guesses if self.guesses else None

    @property
    def alarm(self) -> bool:
        """Whether the bound is above what is proven: then the proof does not hold for this code."""
        return self.tier.proven is not None and self.measured > self.tier.proven


def one_run_bounds(
    canaries: Canaries,
    scores: FloatArray,
    *,
    rules: Sequence[Rule] | None = None,
    significance: float = SIGNIFICANCE,
) -> tuple[OneRunBound, ...]:
    """Return a lower bound on epsilon for each tier, from the scores of one run's canaries.

    `rules` has one rule for each tier, fixed before the run (`simulated_rule`); without it all of `RULES` are
    tried and paid for. Scores must not depend on the coins but through the run.

    Guarantee: if training is (epsilon_l, delta_l)-DP towards the canaries of every level l of a tier, the
    probability that any tier's bound is above its largest epsilon is at most `significance` (`one_run_p_value`;
    Bonferroni over tiers and over the rules that were tried).
    """
    # Ties must not be broken by anything that knows the coins: by a fixed shuffle.
    shuffle = np.random.default_rng(0).permutation(len(canaries))
    bounds = []
    for place, tier in enumerate(canaries.tiers):
        members = shuffle[canaries.tier[shuffle] == place]
        ordered = canaries.has_record[members[np.argsort(scores[members], kind="stable")]]
        tried = RULES if rules is None else (rules[place],)
        each = bonferroni(bonferroni(significance, len(canaries.tiers)), len(tried))
        exactly_gaussian = all(
            is_gaussian(exposures_of(canaries.plan.history_of(level))) for level in tier.levels
        )
        found = [_apply(rule, ordered, tier, each, exactly_gaussian) for rule in tried]
        # Where nothing was shown, the rule with most guesses says best how the attack did.
        guesses, correct, measured, gaussian = max(found, key=lambda one: (one[2], one[3] or 0.0, one[0]))
        bounds.append(
            OneRunBound(
                tier=tier,
                canaries=members.size,
                guesses=guesses,
                correct=correct,
                looks=len(tried),
                measured=measured,
                gaussian=gaussian,
                confidence=1 - significance,
            )
        )
    return tuple(bounds)


def simulated_rule(
    history: History,
    canaries: int,
    *,
    delta: float,
    significance: float,
    simulations: int = 10,
    seed: int = 0,
) -> Rule:
    """Return the rule with the best bound on scores simulated from a plan's history; it costs no significance.

    Guarantee: the choice depends on the plan and the seed only, so it is fixed in advance of the run.
    """
    generator = np.random.default_rng(seed)
    coins, scores = simulated_scores(history, canaries * simulations, generator)
    ordered = coins[np.argsort(scores)]

    def typical(rule: Rule) -> float:
        guesses, correct = (round(count / simulations) for count in _count(rule, ordered))
        return one_run_epsilon(
            canaries=canaries,
            guesses=guesses,
            correct=min(guesses, correct),
            delta=delta,
            significance=significance,
        )

    return max(RULES, key=lambda rule: (typical(rule), rule))


def is_gaussian(history: History) -> bool:
    """Return whether a person with this history is in every batch, so that the run is one Gaussian mechanism."""
    return all(e.costs_nothing or (e.participation == 1 and e.sample_rate == 1) for e in history)


def _apply(
    rule: Rule, ordered: BoolArray, tier: Tier, significance: float, exactly_gaussian: bool
) -> tuple[int, int, float, float | None]:
    guesses, correct = _count(rule, ordered)
    counts = {"canaries": ordered.size, "guesses": guesses, "correct": correct}
    measured = one_run_epsilon(**counts, delta=tier.delta, significance=significance)
    gaussian = None
    if exactly_gaussian:
        gaussian = one_run_gaussian_epsilon(**counts, delta=tier.delta, significance=significance)
    return guesses, correct, measured, gaussian


def _count(rule: Rule, ordered: BoolArray) -> tuple[int, int]:
    """Return guesses and right guesses, for coins in rising order of scores."""
    guessed_in, guessed_out = round(rule.share_in * ordered.size), int(rule.share_out * ordered.size)
    correct = int(ordered[ordered.size - guessed_in :].sum()) + int((~ordered[:guessed_out]).sum())
    return guessed_in + guessed_out, correct
