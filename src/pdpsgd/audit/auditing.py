"""`audit`: all attacks and tests together, with what was measured beside what is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd.accounting.history import exposures_of
from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.bounds import bonferroni
from pdpsgd.audit.canaries import Tier, add_canaries, tiers_of
from pdpsgd.audit.conformance import FALSE_ALARM_RATE, Conformance, ConformanceTest
from pdpsgd.audit.dirac_canaries import dirac_steps, tensor_names
from pdpsgd.audit.example_canaries import attacked_steps, example_steps
from pdpsgd.audit.many_runs import ManyRunsBound, many_run_bounds, many_runs, simulated_threshold
from pdpsgd.audit.membership import MembershipResult, membership_by_tier
from pdpsgd.audit.noise_tests import NoiseSample, noise_checks
from pdpsgd.audit.observed_run import Tamper, observe_run
from pdpsgd.audit.one_run import SIGNIFICANCE, OneRunBound, Rule, one_run_bounds, simulated_rule
from pdpsgd.audit.result import DIRAC, MISLABELED, NETWORK, AuditResult
from pdpsgd.audit.scores import ExampleScores, LikelihoodScores
from pdpsgd.audit.shadow import train_shadow_models
from pdpsgd.errors import check_not_negative, fail
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.plans import Plan

Progress = Callable[[str, int, int], None]
Step = TypeVar("Step")
CONFORMANCE_STEPS = 200
"""Steps of the conformance tests at little noise; what they look for shows in a prefix of the plan."""
CONFORMANCE_CANARIES = 24
NOISE_STEPS = 100
"""Steps of the run without records."""
INPUT_SHAPE = (64,)
SHADOW_MODELS = 16
AFFORDABLE_NUMBERS = 3e10
"""Numbers in all per-example gradients of all shadow models: minutes on two cores."""
LITTLE_NOISE = 0.1
"""Noise of those tests, as a share of the plan's: rates, clipping and each layer's noise then show much more
clearly."""


@dataclass(frozen=True)
class _Audit:
    """What all parts of an audit share."""

    plan: Plan
    tiers: tuple[Tier, ...]
    false_alarm_rate: float
    generator: np.random.Generator
    tell: Progress

    def seed(self) -> int:
        return int(self.generator.integers(2**62))

    def told(self, steps: Iterator[Step], stage: str, total: int) -> Iterator[Step]:
        """Yield the steps, and tell how many there were."""
        for place, seen in enumerate(steps):
            self.tell(stage, place + 1, total)
            yield seen

    def prefix(self, steps: int, *, noise: float = 1.0) -> Plan:
        """Return the plan's first steps at a multiple of its noise: the same code, rates and norms.

        It promises nothing, and says so: no protection for anybody who is sampled.
        """
        prefix = self.plan.prefix(steps)
        rounds = (replace(r, noise_multiplier=noise * r.noise_multiplier) for r in prefix.rounds)
        levels = (replace(x, epsilon=math.inf) if x.epsilon > 0 and x.delta > 0 else x for x in prefix.levels)
        return replace(prefix, rounds=tuple(rounds), levels=tuple(levels))


def audit(
    plan: Plan,
    target: AuditTarget | None = None,
    *,
    canaries: int = 1000,
    example_canaries: int = 100,
    runs: int = 0,
    shadow_models: int | None = None,
    significance: float = SIGNIFICANCE,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    max_tiers: int = 5,
    seed: int | None = None,
    progress: Progress | None = None,
) -> AuditResult:
    """Audit the training that a plan describes, tier by tier.

    Always: one run of the plan through the real engine with Dirac canaries, which gives a lower bound and a
    conformance test; a conformance test at a tenth of the noise; and tests of the noise itself, on a run without
    records. With a `target`, its network too: a run on its data with mislabeled examples, a conformance test of its
    layers, and membership inference.

    Args:
        plan: The plan whose training is audited.
        target: The network and data to audit beside the mechanism.
        canaries: Dirac canaries per tier.
        example_canaries: Mislabeled examples per tier, in one run on the target's data.
        runs: Number of extra runs, with one canary per tier.
        shadow_models: Models for membership inference; by default sixteen where that takes minutes, else none.
        significance: One minus the confidence of all measured bounds together.
        false_alarm_rate: The probability of an alarm of each conformance test if training follows the plan.
        max_tiers: Maximum number of groups of levels.
        seed: A seed for a repeatable audit.
        progress: Called with a stage, and how many steps of how many are done.

    Returns:
        What was measured beside what is proven, and whether an alarm went off.

    Guarantee: see `AuditResult`. The significance is shared evenly among the attacks that are made, and
    within each among tiers and choices.
    """
    began = time.monotonic()
    if plan.filtered_round is not None:
        fail(
            "Expected a plan whose people give to every step alike, to compare canaries with it. Got one with a "
            "filter, under which they leave when their own gradients have spent their budget: for that there is no "
            "attack here yet."
        )
    if seed is not None:
        check_not_negative(seed=seed)
    if shadow_models is None:
        shadow_models = affordable_shadow_models(plan, target)
    attacks = 1 + (runs > 0) + (target is not None and example_canaries > 0)
    each = bonferroni(significance, attacks)
    work = _Audit(
        plan=plan,
        tiers=tiers_of(plan, at_most=max_tiers),
        false_alarm_rate=false_alarm_rate,
        generator=np.random.default_rng(seed),
        tell=progress or (lambda stage, done, total: None),
    )
    one_run, conformance = _dirac(work, canaries, each)
    bounds = {DIRAC: one_run}
    tests = {"mechanism": conformance, "mechanism, little noise": _little_noise(work, canaries)}
    membership: tuple[MembershipResult, ...] = ()
    if target is not None:
        if example_canaries:
            bounds[MISLABELED] = _examples(work, target, example_canaries, each)
        if all(share in (0.0, 1.0) for r in plan.rounds for share in r.participation):
            tests[NETWORK] = _network_conformance(work, target)
        if shadow_models:
            membership = _membership(work, target, shadow_models)
    many = _many(work, runs, each) if runs else ()
    tests["noise"] = noise_conformance(
        work.prefix(NOISE_STEPS),
        make_model=_small_network if target is None else target.make_model,
        input_shape=INPUT_SHAPE if target is None else tuple(target.inputs.shape[1:]),
        false_alarm_rate=false_alarm_rate,
        seed=work.seed(),
        each_step=lambda done: work.tell("noise", done, min(NOISE_STEPS, plan.steps)),
    )
    return AuditResult(
        plan_digest=plan.digest,
        mechanism=plan.mechanism,
        tiers=work.tiers,
        confidence=1 - significance,
        one_run=bounds,
        many_runs=many,
        conformance=tests,
        membership=membership,
        settings={
            "canaries": canaries,
            "example_canaries": example_canaries if target is not None else 0,
            "runs": runs,
            "shadow_models": shadow_models if target is not None else 0,
            "significance": significance,
            "false_alarm_rate": false_alarm_rate,
            "seed": seed,
        },
        seconds=time.monotonic() - began,
    )


def noise_conformance(
    plan: Plan,
    *,
    make_model: Callable[[], nn.Module],
    input_shape: tuple[int, ...],
    false_alarm_rate: float = FALSE_ALARM_RATE,
    seed: int | None = None,
    tamper: Tamper | None = None,
    each_step: Callable[[int], None] = lambda done: None,
) -> Conformance:
    """Run the plan through the real engine with nobody's record, and test that what is left is Gaussian noise.

    Args:
        plan: The steps to run.
        make_model: Makes the network that gets the noise; its outputs are of no interest.
        input_shape: The shape of one input.
        false_alarm_rate: The probability of an alarm if the noise is as planned.
        seed: A seed for a repeatable test.
        tamper: Changes the engine once it is set up: tests plant faults with it.
        each_step: Called with the number of steps done.

    Returns:
        The outcome of fourteen checks, without canaries.
    """
    level = np.repeat(np.arange(len(plan.levels)), [level.people for level in plan.levels])
    plan = replace(plan, roster=Roster(np.arange(plan.people), level))
    module = make_model()
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    sample = NoiseSample(tuple(trained))
    steps = observe_run(
        module=module,
        criterion=_sum_of_outputs,
        records=(torch.zeros(0, *input_shape), torch.zeros(0)),
        record_of_person=np.full(plan.people, -1),
        plan=plan,
        learning_rate=0.0,
        seed=seed,
        tamper=tamper,
    )
    for done, step in enumerate(steps, start=1):
        planned = plan.rounds[step.round]
        sample.add(step.noisy_sums, standard_deviation=planned.noise_multiplier * plan.max_grad_norm)
        each_step(done)
    return Conformance(noise_checks(sample), false_alarm_rate, steps=plan.steps, canaries=0)


def affordable_shadow_models(plan: Plan, target: AuditTarget | None) -> int:
    """Return sixteen models for membership inference where that takes minutes, none where it takes hours."""
    if target is None or target.shadow_rate is None:
        return 0
    parameters = sum(parameter.numel() for parameter in target.make_model().parameters())
    numbers = parameters * sum(r.steps * r.expected_batch_size for r in plan.rounds)
    return SHADOW_MODELS if SHADOW_MODELS * numbers <= AFFORDABLE_NUMBERS else 0


def _dirac(work: _Audit, count: int, significance: float) -> tuple[tuple[OneRunBound, ...], Conformance]:
    plan, tiers = work.plan, work.tiers
    rules = _rules(work, count, significance)
    listed = add_canaries(plan, count, work.generator, tiers=tiers)
    scores = LikelihoodScores(listed)
    test = ConformanceTest(listed, tensor_names(), orthogonal=True, false_alarm_rate=work.false_alarm_rate)
    steps = dirac_steps(listed, seed=work.seed())
    for seen in work.told(steps, "Dirac canaries", plan.steps):
        scores.observe(seen)
        test.observe(seen)
    return one_run_bounds(listed, scores.scores(), rules=rules, significance=significance), test.result()


def _rules(work: _Audit, count: int, significance: float) -> list[Rule]:
    """Decide for each tier whom to guess, on scores simulated from the plan: in advance of the run."""
    plan, tiers = work.plan, work.tiers
    each = bonferroni(significance, len(tiers))
    rules = []
    for place, tier in enumerate(tiers):
        work.tell("simulating", place, len(tiers))
        history = exposures_of(plan.history_of(tier.levels[-1]))
        simulations = max(1, min(10, 10_000_000 // max(1, count * plan.steps)))
        rules.append(
            simulated_rule(history, count, delta=tier.delta, significance=each, simulations=simulations)
        )
    work.tell("simulating", len(tiers), len(tiers))
    return rules


def _examples(work: _Audit, target: AuditTarget, count: int, significance: float) -> tuple[OneRunBound, ...]:
    plan = work.plan
    rules = _rules(work, count, significance)
    listed = add_canaries(
        plan, count, work.generator, tiers=work.tiers, level_of_person=target.level_of_person
    )
    scores = ExampleScores(listed)
    steps = attacked_steps(
        listed,
        module=target.make_model(),
        criterion=target.criterion,
        examples=target.canary_examples(len(listed), work.generator),
        others=target.others,
        learning_rate=target.learning_rate,
        seed=work.seed(),
    )
    for seen in work.told(steps, "mislabeled canaries", plan.steps):
        scores.observe(seen)
    return one_run_bounds(listed, scores.scores(), rules=rules, significance=significance)


def _little_noise(work: _Audit, count: int) -> Conformance:
    quiet = work.prefix(CONFORMANCE_STEPS, noise=LITTLE_NOISE)
    listed = add_canaries(quiet, count, work.generator, tiers=work.tiers)
    test = ConformanceTest(listed, tensor_names(), orthogonal=True, false_alarm_rate=work.false_alarm_rate)
    steps = dirac_steps(listed, seed=work.seed())
    for seen in work.told(steps, "conformance of the mechanism", quiet.steps):
        test.observe(seen)
    return test.result()


def _network_conformance(work: _Audit, target: AuditTarget) -> Conformance:
    quiet = work.prefix(CONFORMANCE_STEPS, noise=LITTLE_NOISE)
    listed = add_canaries(quiet, CONFORMANCE_CANARIES, work.generator, tiers=work.tiers)
    module = target.make_model()
    names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    test = ConformanceTest(listed, names, orthogonal=False, false_alarm_rate=work.false_alarm_rate)
    steps = example_steps(
        listed,
        module=module,
        criterion=target.criterion,
        examples=target.canary_examples(len(listed), work.generator),
        learning_rate=target.learning_rate,
        seed=work.seed(),
    )
    for seen in work.told(steps, "conformance of the network", quiet.steps):
        test.observe(seen)
    return test.result()


def _membership(work: _Audit, target: AuditTarget, models: int) -> tuple[MembershipResult, ...]:
    rate = target.shadow_rate
    if rate is None:
        fail(
            "Expected people with one record each, trained by plain SGD, for shadow models. Got others: leave "
            "membership inference out (--shadow-models 0)."
        )
    people = len(target.inputs)
    level = target.level_of_person[:people]
    shadows = train_shadow_models(
        target.make_model,
        target.criterion,
        target.inputs,
        target.targets,
        plan=work.plan,
        level_of_person=level,
        models=models,
        learning_rate=rate,
        seed=work.seed(),
        each_step=lambda step: work.tell("shadow models", step, work.plan.steps),
    )
    return membership_by_tier(shadows, target.inputs, target.targets, level, work.tiers)


def _many(work: _Audit, runs: int, significance: float) -> tuple[ManyRunsBound, ...]:
    plan, tiers = work.plan, work.tiers
    each = bonferroni(significance, 2 * len(tiers))
    thresholds, balanced = (
        [
            simulated_threshold(
                exposures_of(plan.history_of(tier.levels[-1])),
                runs,
                delta=tier.delta,
                significance=each,
                balanced=evenly,
            )
            for tier in tiers
        ]
        for evenly in (False, True)
    )
    coins, scores = [], []
    for place, (listed, found) in enumerate(many_runs(plan, runs=runs, tiers=tiers, seed=work.seed())):
        coins.append(listed.has_record)
        scores.append(found)
        work.tell("many runs", place + 1, runs)
    return many_run_bounds(
        plan,
        np.array(coins),
        np.array(scores),
        tiers=tiers,
        thresholds=thresholds,
        balanced_thresholds=balanced,
        significance=significance,
    )


def _small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def _sum_of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that any network has: nobody's gradient depends on it."""
    return outputs.flatten(1).sum(1).mean()
