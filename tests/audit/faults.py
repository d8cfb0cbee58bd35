"""Faults planted at one point of the real training path, each as a test double of the part that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pdpsgd.engine.noising import dequantized
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
        last = list(engine.gradients.sums.values())[-1].numel()
        exact = dequantized(quantized, options["clipping_norm"])
        honest(quantized, out=out, **options)
        out[-1][-last:] = exact[-1][-last:]

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


def noise_changed(change: Callable[[int, np.ndarray], np.ndarray]) -> Tamper:
    """The noise of a step, all tensors in a row and in standard deviations, is changed before it is released."""

    def tamper(engine: PrivacyEngine) -> None:
        honest = engine.source.release

        def release(quantized, *, clipping_norm, noise_multiplier, step, out):
            honest(
                quantized, clipping_norm=clipping_norm, noise_multiplier=noise_multiplier, step=step, out=out
            )
            scale = clipping_norm * noise_multiplier
            flat = torch.cat([tensor.flatten() for tensor in out]).double().numpy() / scale
            changed = torch.from_numpy(np.ascontiguousarray(change(step, flat))) * scale
            for tensor, part in zip(out, changed.split([tensor.numel() for tensor in out]), strict=True):
                tensor.copy_(part.view_as(tensor))

        engine.source.release = release

    return tamper


class Remembering:
    """Noise that is made of this step's and an earlier one's."""

    def __init__(self, back: int, mix: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> None:
        self.back, self.mix, self.earlier = back, mix, {}

    def __call__(self, step: int, noise: np.ndarray) -> np.ndarray:
        self.earlier[step] = noise.copy()
        return self.mix(step, noise, self.earlier.get(step - self.back, noise))


def used_for_two_steps() -> Remembering:
    return Remembering(1, lambda step, now, before: before if step % 2 else now)


def used_again_once() -> Remembering:
    return Remembering(37, lambda step, now, before: before if step == 50 else now)


def telescoping() -> Remembering:
    return Remembering(1, lambda step, now, before: (now - before) / np.sqrt(2) if step else now)


def ten_numbers_of_the_last_step() -> Remembering:
    return Remembering(1, lambda step, now, before: np.concatenate([now[:-10], before[:10]]))


def shared_between_layers(step: int, noise: np.ndarray) -> np.ndarray:
    """Ten numbers of the first weights come again among the first biases."""
    changed = noise.copy()
    changed[2048:2058] = noise[100:110]
    return changed


def a_layer_copied_from_anywhere(step: int, noise: np.ndarray) -> np.ndarray:
    """The second weights are copied from a place among the first that changes from step to step."""
    changed = noise.copy()
    place = 13 * step % 1500
    changed[2080:2400] = noise[place : place + 320]
    return changed


def alternating_variance(step: int, noise: np.ndarray) -> np.ndarray:
    return noise * np.sqrt(1.05 if step % 2 else 0.95)


def unsteady_variance(step: int, noise: np.ndarray) -> np.ndarray:
    return noise * np.sqrt(1 + 0.1 * np.random.default_rng(step).choice([-1, 1]))


def uneven_layers(step: int, noise: np.ndarray) -> np.ndarray:
    """The biases have less, the weights slightly more: as much in all."""
    changed = noise * np.sqrt(2410 / (2410 - 42 * 0.5))
    for place in (slice(2048, 2080), slice(2400, 2410)):
        changed[place] *= np.sqrt(0.5)
    return changed


def few_directions(step: int, noise: np.ndarray) -> np.ndarray:
    """A hundred steps of noise out of sixty directions."""
    basis = np.random.default_rng(0).standard_normal((60, noise.size))
    return np.random.default_rng(step + 1).standard_normal(60) @ basis / np.sqrt(60)


def student_10(step: int, noise: np.ndarray) -> np.ndarray:
    return np.random.default_rng(step).standard_t(10, noise.size) * np.sqrt(0.8)


def tails_cut_at_4(step: int, noise: np.ndarray) -> np.ndarray:
    return np.where(np.abs(noise) > 4, noise / 2, noise)


def rounded_to_halves(step: int, noise: np.ndarray) -> np.ndarray:
    return np.round(2 * noise) / 2
