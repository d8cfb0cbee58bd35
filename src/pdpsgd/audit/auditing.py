"""`audit`: all attacks and tests together, with what was measured beside what is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd.audit.bounds import bonferroni
from pdpsgd.audit.canaries import Canaries, Tier, add_canaries, tiers_of
from pdpsgd.audit.conformance import FALSE_ALARM_RATE, Conformance, ConformanceTest, Observation
from pdpsgd.audit.dirac_canaries import dirac_steps, tensor_names
from pdpsgd.audit.example_canaries import example_steps, losses, mislabeled
from pdpsgd.audit.many_runs import ManyRunsBound, many_run_bounds, many_runs, simulated_threshold
from pdpsgd.audit.membership import MembershipResult, membership_by_tier
from pdpsgd.audit.observed_run import Criterion
from pdpsgd.audit.one_run import SIGNIFICANCE, OneRunBound, one_run_bounds, simulated_rule
from pdpsgd.audit.result import DIRAC, AuditResult
from pdpsgd.audit.scores import LikelihoodScores, ProjectionScores
from pdpsgd.audit.shadow import train_shadow_models
from pdpsgd.errors import fail
from pdpsgd.planning.plans import Plan

Progress = Callable[[str, int, int], None]
CONFORMANCE_STEPS = 200
"""Steps of the conformance tests at little noise; what they look for shows in a prefix of the plan."""
CONFORMANCE_CANARIES = 24
SHADOW_MODELS = 16
AFFORDABLE_NUMBERS = 3e10
"""Numbers in all per-example gradients of all shadow models: minutes on two cores."""
LITTLE_NOISE = 0.1
"""Noise of those tests, as a share of the plan's: rates, clipping and each layer's noise then show much more
clearly."""


@dataclass(frozen=True, eq=False)
class AuditTarget:
    """The training to audit: a network, its loss, people's records, and spare records for canaries.

    `spare_inputs` and `spare_targets` are records of people who are not on the list (test people); canaries
    get them with a wrong label.
    """

    make_model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    level_of_person: npt.NDArray[np.int64]
    spare_inputs: Tensor
    spare_targets: Tensor
    classes: int
    criterion: Criterion = functional.cross_entropy
    learning_rate: float = 1.0


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

    Always: one run of the plan through the real engine with `canaries` Dirac canaries a tier, which gives a
    lower bound and a conformance test, and a conformance test at a tenth of the noise. With a `target`, its
    network too: a run on its data with `example_canaries` mislabeled examples a tier (white box and black
    box), a conformance test of its layers, and membership inference with so many `shadow_models`. With
    `runs`, the plan again and again with one canary a tier.

    Guarantee: see `AuditResult`. The significance is shared evenly among the attacks that are made, and
    within each among tiers and choices.
    """
    began = time.monotonic()
    if shadow_models is None:
        shadow_models = affordable_shadow_models(plan, target)
    tell = progress or (lambda stage, done, total: None)
    tiers = tiers_of(plan, at_most=max_tiers)
    attacks = 1 + (runs > 0) + 2 * (target is not None and example_canaries > 0)
    each = bonferroni(significance, attacks)
    generator = np.random.default_rng(seed)
    one_run, conformance = _dirac(plan, tiers, canaries, each, false_alarm_rate, generator, tell)
    bounds = {DIRAC: one_run}
    tests = {
        "mechanism": conformance,
        "mechanism, little noise": _little_noise(plan, tiers, canaries, false_alarm_rate, generator, tell),
    }
    membership: tuple[MembershipResult, ...] = ()
    if target is not None:
        if example_canaries:
            white, black = _examples(plan, tiers, target, example_canaries, each, generator, tell)
            bounds |= {"mislabeled, white box": white, "mislabeled, black box": black}
        if all(share in (0.0, 1.0) for r in plan.rounds for share in r.participation):
            tests["network, little noise"] = _network_conformance(
                plan, tiers, target, false_alarm_rate, generator, tell
            )
        if shadow_models:
            membership = _membership(plan, tiers, target, shadow_models, generator, tell)
    return AuditResult(
        plan_digest=plan.digest,
        mechanism=plan.mechanism,
        tiers=tiers,
        confidence=1 - significance,
        one_run=bounds,
        many_runs=_many(plan, tiers, runs, each, generator, tell) if runs else (),
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


def affordable_shadow_models(plan: Plan, target: AuditTarget | None) -> int:
    """Return sixteen models for membership inference where that takes minutes, none where it takes hours."""
    if target is None:
        return 0
    parameters = sum(parameter.numel() for parameter in target.make_model().parameters())
    numbers = parameters * sum(r.steps * r.expected_batch_size for r in plan.rounds)
    return SHADOW_MODELS if SHADOW_MODELS * numbers <= AFFORDABLE_NUMBERS else 0


def _dirac(
    plan: Plan,
    tiers: tuple[Tier, ...],
    count: int,
    significance: float,
    false_alarm_rate: float,
    generator: np.random.Generator,
    tell: Progress,
) -> tuple[tuple[OneRunBound, ...], Conformance]:
    each = bonferroni(significance, len(tiers))
    rules = []
    for place, tier in enumerate(tiers):
        tell("simulating", place, len(tiers))
        history = plan.history_of(tier.levels[-1])
        simulations = max(1, min(10, 10_000_000 // max(1, count * plan.steps)))
        rules.append(
            simulated_rule(history, count, delta=tier.delta, significance=each, simulations=simulations)
        )
    tell("simulating", len(tiers), len(tiers))
    listed = add_canaries(plan, count, generator, tiers=tiers)
    scores = LikelihoodScores(listed)
    test = ConformanceTest(listed, tensor_names(), orthogonal=True, false_alarm_rate=false_alarm_rate)
    steps = dirac_steps(listed, seed=_seed(generator))
    for seen in _told(steps, "Dirac canaries", plan.steps, tell):
        scores.observe(seen)
        test.observe(seen)
    return one_run_bounds(listed, scores.scores(), rules=rules, significance=significance), test.result()


def _examples(
    plan: Plan,
    tiers: tuple[Tier, ...],
    target: AuditTarget,
    count: int,
    significance: float,
    generator: np.random.Generator,
    tell: Progress,
) -> tuple[tuple[OneRunBound, ...], tuple[OneRunBound, ...]]:
    listed = add_canaries(plan, count, generator, tiers=tiers, level_of_person=target.level_of_person)
    examples = _canary_examples(target, listed, generator)
    module = target.make_model()
    scores = ProjectionScores(listed)
    steps = example_steps(
        listed,
        module=module,
        criterion=target.criterion,
        examples=examples,
        others=(target.inputs, target.targets),
        record_of_other=_records_of_others(plan, target),
        learning_rate=target.learning_rate,
        seed=_seed(generator),
    )
    for seen in _told(steps, "mislabeled canaries", plan.steps, tell):
        scores.observe(seen)
    black = -losses(module, target.criterion, examples)
    return (
        one_run_bounds(listed, scores.scores(), significance=significance),
        one_run_bounds(listed, black, significance=significance),
    )


def _little_noise(
    plan: Plan,
    tiers: tuple[Tier, ...],
    count: int,
    false_alarm_rate: float,
    generator: np.random.Generator,
    tell: Progress,
) -> Conformance:
    quiet = _quiet_prefix(plan)
    listed = add_canaries(quiet, count, generator, tiers=tiers)
    test = ConformanceTest(listed, tensor_names(), orthogonal=True, false_alarm_rate=false_alarm_rate)
    for seen in _told(
        dirac_steps(listed, seed=_seed(generator)), "conformance of the mechanism", quiet.steps, tell
    ):
        test.observe(seen)
    return test.result()


def _network_conformance(
    plan: Plan,
    tiers: tuple[Tier, ...],
    target: AuditTarget,
    false_alarm_rate: float,
    generator: np.random.Generator,
    tell: Progress,
) -> Conformance:
    quiet = _quiet_prefix(plan)
    listed = add_canaries(quiet, CONFORMANCE_CANARIES, generator, tiers=tiers)
    module = target.make_model()
    names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    test = ConformanceTest(listed, names, orthogonal=False, false_alarm_rate=false_alarm_rate)
    steps = example_steps(
        listed,
        module=module,
        criterion=target.criterion,
        examples=_canary_examples(target, listed, generator),
        learning_rate=target.learning_rate,
        seed=_seed(generator),
    )
    for seen in _told(steps, "conformance of the network", quiet.steps, tell):
        test.observe(seen)
    return test.result()


def _membership(
    plan: Plan,
    tiers: tuple[Tier, ...],
    target: AuditTarget,
    models: int,
    generator: np.random.Generator,
    tell: Progress,
) -> tuple[MembershipResult, ...]:
    people = len(target.inputs)
    level = target.level_of_person[:people]
    shadows = train_shadow_models(
        target.make_model,
        target.criterion,
        target.inputs,
        target.targets,
        plan=plan,
        level_of_person=level,
        models=models,
        learning_rate=target.learning_rate,
        seed=_seed(generator),
        each_step=lambda step: tell("shadow models", step, plan.steps),
    )
    return membership_by_tier(shadows, target.inputs, target.targets, level, tiers)


def _many(
    plan: Plan,
    tiers: tuple[Tier, ...],
    runs: int,
    significance: float,
    generator: np.random.Generator,
    tell: Progress,
) -> tuple[ManyRunsBound, ...]:
    each = bonferroni(significance, 2 * len(tiers))
    thresholds, balanced = (
        [
            simulated_threshold(
                plan.history_of(tier.levels[-1]),
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
    for place, (listed, found) in enumerate(many_runs(plan, runs=runs, tiers=tiers, seed=_seed(generator))):
        coins.append(listed.has_record)
        scores.append(found)
        tell("many runs", place + 1, runs)
    return many_run_bounds(
        plan,
        np.array(coins),
        np.array(scores),
        tiers=tiers,
        thresholds=thresholds,
        balanced_thresholds=balanced,
        significance=significance,
    )


def _canary_examples(
    target: AuditTarget, listed: Canaries, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return spare records with a wrong label, one for each canary."""
    if len(target.spare_inputs) < len(listed):
        fail(
            f"Expected at least {len(listed)} spare records, one for each example canary. "
            f"Got {len(target.spare_inputs)}. Ask for fewer example canaries."
        )
    chosen = generator.permutation(len(target.spare_inputs))[: len(listed)]
    return mislabeled(
        target.spare_inputs[chosen],
        target.spare_targets[chosen],
        classes=target.classes,
        generator=generator,
    )


def _records_of_others(plan: Plan, target: AuditTarget) -> npt.NDArray[np.int64]:
    """Return the record of each person: person i has record i; people past the last record supplied none."""
    records = np.arange(plan.people)
    return np.where(records < len(target.inputs), records, -1)


def _told(steps: Iterator[Observation], stage: str, total: int, tell: Progress) -> Iterator[Observation]:
    for place, seen in enumerate(steps):
        tell(stage, place + 1, total)
        yield seen


def _quiet_prefix(plan: Plan) -> Plan:
    """Return the plan's first steps with a tenth of the noise: same code, rates and norms, seen more clearly.

    A rehearsal that promises nothing, and says so: no protection for anybody who is drawn.
    """
    prefix = plan.prefix(CONFORMANCE_STEPS)
    rounds = (replace(r, noise_multiplier=LITTLE_NOISE * r.noise_multiplier) for r in prefix.rounds)
    levels = (replace(x, epsilon=math.inf) if x.epsilon > 0 and x.delta > 0 else x for x in prefix.levels)
    return replace(prefix, rounds=tuple(rounds), levels=tuple(levels))


def _seed(generator: np.random.Generator) -> int:
    return int(generator.integers(2**62))
