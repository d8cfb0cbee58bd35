"""Faults planted at one point of the real training path, each as a test double of the part that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource

Tamper = Callable[[PrivacyEngine], None]


class HalfTheNoise(RandomSource):
    def release(self, quantized, *, noise_multiplier, **options):
        return super().release(quantized, noise_multiplier=noise_multiplier / 2, **options)


def no_noise_on_the_last_tensor(engine: PrivacyEngine) -> None:
    honest = engine.source.release

    def release(quantized, *, out, **options):
        last = list(engine.gradients.sums.values())[-1]
        honest(quantized, out=out, **options)
        out[-1][-last.numel() :] = last.reshape(-1)

    engine.source.release = release


def no_clipping_on_the_first_tensor(engine: PrivacyEngine) -> None:
    honest = engine.gradients.clipped_sum

    def clipped_sum(clip_norms, **options):
        parameter = next(iter(engine.gradients.sums))
        whole = engine.gradients.per_example_gradients()[parameter].sum(0)
        before = engine.gradients.sums[parameter].clone()
        count = honest(clip_norms, **options)
        engine.gradients.sums[parameter].copy_(before + whole)
        return count

    engine.gradients.clipped_sum = clipped_sum


def sampled_by(change: Callable[[Plan], Plan]) -> Tamper:
    """The sampler draws by another plan than the one that the run is accounted by."""

    def tamper(engine: PrivacyEngine) -> None:
        engine.execution.sampler = PoissonSampler(change(engine.plan), engine.level_of_person, engine.source)

    return tamper


def with_rates(plan: Plan, rates: Callable[[tuple[float, ...]], tuple[float, ...]], **other: object) -> Plan:
    rounds = []
    for r in plan.rounds:
        changed = replace(r, sample_rates=rates(r.sample_rates), **other)
        drawn = sum(
            level.people * pi * q
            for level, pi, q in zip(plan.levels, changed.participation, changed.sample_rates, strict=True)
        )
        object.__setattr__(changed, "expected_batch_size", drawn)
        rounds.append(changed)
    return replace(plan, rounds=tuple(rounds))


def first_tier_at_twice_its_rate(plan: Plan) -> Plan:
    return with_rates(plan, lambda rates: (2 * rates[0], *rates[1:]))


def first_level_at_the_rate_of_the_last(plan: Plan) -> Plan:
    return with_rates(plan, lambda rates: (rates[-1], *rates[1:]))


def drawn_once_and_kept(plan: Plan) -> Plan:
    """The same people at every step: their chance per step is as planned, but the steps are not drawn
    afresh."""
    return with_rates(
        plan,
        lambda rates: tuple(1.0 for _ in rates),
        participation=plan.rounds[0].sample_rates,
    )


def twice_the_norm_at_half_the_rate(engine: PrivacyEngine) -> None:
    """What people contribute on average is as planned; how much they can contribute is not."""
    sampled_by(lambda plan: with_rates(plan, lambda rates: tuple(q / 2 for q in rates)))(engine)
    honest = engine.gradients.clipped_sum

    def clipped_sum(norms, *, largest_clip_norm, **options):
        return honest(2 * norms, largest_clip_norm=2 * largest_clip_norm, **options)

    engine.gradients.clipped_sum = clipped_sum


def divided_by_the_drawn_batch(engine: PrivacyEngine) -> None:
    """Noisy sum over drawn size, as if the expected size had been meant."""

    def divide(step, total, drawn, expected):
        return total * (expected / max(drawn, 1))

    _after_noise(engine, divide)


def _after_noise(engine: PrivacyEngine, change) -> None:
    optimizer = engine.optimizer
    honest = optimizer._release_step

    def release(step: int) -> None:
        honest(step)
        drawn = int((engine.execution.current.records >= 0).sum())
        expected = engine.execution.round_of(step).expected_batch_size
        for parameter in engine.gradients.sums:
            parameter.grad = change(step, parameter.grad, drawn, expected)

    optimizer._release_step = release


def sum_divided_by_the_drawn_batch(engine: PrivacyEngine) -> None:
    """The clipped sum becomes a mean over the drawn before noise of the planned size is added."""
    source = engine.source
    honest = source.release

    def release(quantized, *, step, **options):
        drawn = int((engine.execution.current.records >= 0).sum())
        expected = engine.execution.round_of(step).expected_batch_size
        scaled = [total.double().mul(expected / max(drawn, 1)).to(torch.int64) for total in quantized]
        honest(scaled, step=step, **options)

    source.release = release
