"""One-run and many-run audits on the real engine: right on correct training, loud where the noise is gone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, ks_2samp

from pdpsgd.accounting.registry import accountant
from pdpsgd.audit.bounds import many_runs_epsilon
from pdpsgd.audit.canaries import add_canaries, tiers_of
from pdpsgd.audit.dirac_canaries import dirac_steps
from pdpsgd.audit.many_runs import family_epsilon, many_run_bounds, many_runs, simulated_threshold
from pdpsgd.audit.one_run import one_run_bounds, simulated_rule
from pdpsgd.audit.scores import LikelihoodScores, simulated_scores
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling.source import RandomSource

sys.path.insert(0, str(Path(__file__).parent))
import faults

DELTA = 1e-5


def plan_of(
    *,
    noise: float = 1.0,
    rates: tuple[float, ...] = (0.1, 0.5),
    steps: int = 10,
    people: int = 5,
    participation: tuple[float, ...] | None = None,
    clip_scales: tuple[float, ...] | None = None,
) -> Plan:
    pis = participation or (1.0,) * len(rates)
    scales = clip_scales or (1.0,) * len(rates)
    drawn = sum(people * pi * q for pi, q in zip(pis, rates, strict=True))
    one = Round(steps, noise, drawn, pis, rates, scales)
    levels = tuple(Level(float("inf"), DELTA, people) for _ in rates)
    plan = Plan("by-hand", levels, (one,))
    spent = [accountant("pld").epsilon(plan.history_of(index), DELTA) for index in range(len(rates))]
    return replace(
        plan, levels=tuple(Level(e, DELTA, people, proven_epsilon=e) for e in spent)
    ).remember_proof()


def one_run(plan: Plan, per_tier: int, seed: int, *, source=RandomSource, **options):
    canaries = add_canaries(plan, per_tier, np.random.default_rng(seed))
    scores = LikelihoodScores(canaries)
    for seen in dirac_steps(canaries, layers=1, source=source.from_seed(seed)):
        scores.observe(seen)
    return canaries, scores.scores(), one_run_bounds(canaries, scores.scores(), **options)


class HardlyAnyNoise(RandomSource):
    def release(self, quantized, *, noise_multiplier, **options):
        return super().release(quantized, noise_multiplier=noise_multiplier / 20, **options)


def test_the_bound_of_one_run_is_too_high_no_more_often_than_stated():
    """60 audits of two tiers at significance 0.2; more alarms than the limit have a chance below 1e-6."""
    plan = plan_of(steps=3)
    alarms = sum(any(b.alarm for b in one_run(plan, 100, seed, significance=0.2)[2]) for seed in range(60))
    assert alarms <= binom.isf(1e-6, 60, 0.2)


def test_training_with_hardly_any_noise_is_caught_by_one_run():
    bounds = one_run(plan_of(noise=6.0), 500, 1, source=HardlyAnyNoise, significance=0.01)[2]
    assert bounds[1].alarm
    assert bounds[1].success > 0.95


def test_a_rehearsed_rule_is_better_on_average_than_paying_for_all():
    """On forty simulated audits; the difference is about five times its standard error."""
    plan = plan_of(noise=1.0, rates=(0.5,))
    rule = simulated_rule(plan.history_of(0), 1000, delta=DELTA, significance=0.05)
    listed = add_canaries(plan, 1000, np.random.default_rng(0))
    gains = []
    for seed in range(40):
        coins, scores = simulated_scores(plan.history_of(0), 1000, np.random.default_rng(seed))
        (paid,) = one_run_bounds(replace(listed, has_record=coins), scores)
        (rehearsed,) = one_run_bounds(replace(listed, has_record=coins), scores, rules=[rule])
        assert (paid.looks, rehearsed.looks) == (12, 1)
        gains.append(rehearsed.measured - paid.measured)
    assert np.mean(gains) > 0


def test_scores_that_say_nothing_give_nothing_however_ties_fall():
    canaries = add_canaries(plan_of(), 400, np.random.default_rng(0))
    for bound in one_run_bounds(canaries, np.zeros(len(canaries)), significance=1e-6):
        assert bound.measured == 0


@pytest.mark.parametrize(
    "options",
    [
        {"rates": (0.3,)},
        {"rates": (1.0,)},
        {"rates": (0.5,), "participation": (0.4,)},
        {"rates": (0.3,), "clip_scales": (0.5,)},
    ],
    ids=["subsampled", "full batch", "drawn once a round", "clip scale"],
)
def test_scores_of_real_training_are_distributed_as_simulated_ones(options):
    """Kolmogorov-Smirnov, with and without a record; each false alarm has a chance of 1e-7."""
    plan = plan_of(**options)
    canaries, scores, _ = one_run(plan, 1500, 5, significance=0.05)
    coins, simulated = simulated_scores(plan.history_of(0), 20_000, np.random.default_rng(6))
    for side in (True, False):
        found = ks_2samp(scores[canaries.has_record == side], simulated[coins == side])
        assert found.pvalue > 1e-7


def test_the_gaussian_bound_is_given_only_where_everybody_is_in_every_batch():
    bounds = one_run(plan_of(rates=(0.5, 1.0)), 50, 0)[2]
    gaussian = {bound.tier.levels[0]: bound.gaussian for bound in bounds}
    assert gaussian[0] is None
    assert gaussian[1] is not None


def test_bounds_of_many_runs_stay_below_what_is_proven_and_come_close_within_the_family():
    """On simulated runs, at significance 1e-6 for a false alarm."""
    plan = plan_of(rates=(0.3,), noise=1.5, steps=20)
    (tier,) = tiers_of(plan)
    history = plan.history_of(0)
    coins, scores = simulated_scores(history, 200_000, np.random.default_rng(1))
    (bound,) = many_run_bounds(
        plan,
        coins[:, None],
        scores[:, None],
        thresholds=[simulated_threshold(history, 200_000, delta=DELTA, significance=0.05)],
        balanced_thresholds=[
            simulated_threshold(history, 200_000, delta=DELTA, significance=0.05, balanced=True)
        ],
        significance=1e-6,
    )
    assert 0.3 * tier.proven < bound.measured < bound.within_family <= tier.proven
    assert bound.within_family > 0.9 * tier.proven


def test_many_real_runs_stay_below_what_is_proven():
    plan = plan_of(rates=(1.0,), noise=0.7, steps=2)
    found = list(many_runs(plan, runs=150, seed=1))
    history = plan.history_of(0)
    (bound,) = many_run_bounds(
        plan,
        np.array([canaries.has_record for canaries, _ in found]),
        np.array([scores for _, scores in found]),
        thresholds=[simulated_threshold(history, 150, delta=DELTA, significance=0.05)],
        balanced_thresholds=[
            simulated_threshold(history, 150, delta=DELTA, significance=0.05, balanced=True)
        ],
        significance=1e-6,
    )
    assert 0 < bound.gaussian <= plan.levels[0].proven_epsilon
    assert bound.measured <= plan.levels[0].proven_epsilon
    assert bound.success > 0.7


def test_the_family_bound_follows_the_noise_that_is_there():
    """Half the noise: the bound passes the plan's own epsilon (2.3 and more where 1 was meant)."""
    planned = plan_of(rates=(0.3,), noise=3.0, steps=20).history_of(0)
    actual = tuple(e._replace(noise_multiplier=e.noise_multiplier / 2) for e in planned)
    coins, scores = simulated_scores(actual, 50_000, np.random.default_rng(2))
    says_in = scores >= np.median(scores)
    bound = family_epsilon(
        planned,
        true_positives=int((says_in & coins).sum()),
        positives=int(coins.sum()),
        false_positives=int((says_in & ~coins).sum()),
        negatives=int((~coins).sum()),
        delta=DELTA,
        significance=1e-6,
    )
    meant, true = (accountant("pld").epsilon(history, DELTA) for history in (planned, actual))
    assert meant < 0.75 * true < bound <= true


def noise_scale_attack(plan: Plan, runs: int, tamper) -> tuple[float, float]:
    """Many short runs with one other person and one canary; the attack looks at the size of the noise
    alone."""
    generator = np.random.default_rng(9)
    coins, energies = [], []
    for run in range(runs):
        canaries = add_canaries(plan, 2, generator)
        coin = bool(generator.random() < 0.5)
        canaries = replace(canaries, has_record=np.array([True, coin]))
        steps = dirac_steps(canaries, layers=2, width=8, seed=run, tamper=tamper)
        energies.append(sum(float(seen.noise_energy.sum()) for seen in steps))
        coins.append(coin)
    was_in, energy = np.array(coins), np.array(energies)
    # The threshold is fixed in advance: between the noise of one drawn record and that of two.
    dimensions = 2 * 2 * 8 * plan.steps
    expected = (plan.rounds[0].noise_multiplier * plan.max_grad_norm) ** 2 * dimensions
    divisor = add_canaries(plan, 2, generator).plan.rounds[0].expected_batch_size
    says_in = energy < 0.5 * expected * divisor**2
    return many_runs_epsilon(
        true_positives=int((says_in & was_in).sum()),
        positives=int(was_in.sum()),
        false_positives=int((says_in & ~was_in).sum()),
        negatives=int((~was_in).sum()),
        delta=DELTA,
        significance=1e-6,
    ), float((says_in == was_in).mean())


def test_normalising_by_the_drawn_batch_breaks_the_promise_in_many_short_runs_with_few_people():
    """The size of the noise tells how many were drawn, and so whether the canary was there."""
    plan = plan_of(rates=(1.0,), noise=6.0, steps=2, people=1)
    bound, right = noise_scale_attack(plan, 200, faults.divided_by_the_drawn_batch)
    assert right > 0.95
    assert bound > plan.levels[0].proven_epsilon
    honest, _ = noise_scale_attack(plan, 200, None)
    assert honest == 0
