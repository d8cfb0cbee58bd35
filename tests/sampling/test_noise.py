"""Sums are released with the noise that the plan was proven for, exactly, on a public grid.

Each statistical test says what it compares; all of them fail below p = 1e-8, a false-alarm rate below 1e-6
also where the statistic has its distribution only in the limit. Seeds are fixed so that failures can be
repeated.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.box_muller import normals
from pdpsgd.sampling.grid import LARGEST_NOISE_MULTIPLIER, Scale, unit_of
from pdpsgd.sampling.noise import LARGEST_SUM, quantize, rounding_charge
from pdpsgd.sampling.source import RandomSource

FALSE_ALARM = 1e-8
SIZE = 400_000
NORM, MULTIPLIER = 1.7, 3.0
DEVIATION = NORM * MULTIPLIER
KEY = bytes(range(32))


def release(
    quantized: list[torch.Tensor], *, secure: bool = True, seed: int = 11, step: int = 0, **options: object
) -> list[torch.Tensor]:
    source = RandomSource.from_seed(seed, secure=secure)
    figures = {"clipping_norm": NORM, "noise_multiplier": MULTIPLIER, **options}
    return source.release(quantized, step=step, **figures)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["cryptographic", "sfc64"])
def secure(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def noise(secure: bool) -> np.ndarray:
    (noised,) = release([torch.zeros(SIZE, dtype=torch.int64)], secure=secure)
    return noised.double().numpy()


def test_noise_is_gaussian(noise: np.ndarray) -> None:
    # Kolmogorov and Smirnov, against the exact distribution function. The grid is 2^-11 to 2^-10 of a deviation wide,
    # which the statistic would see (0.0002); uniform numbers within the grid's cells undo it.
    step = Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER).step
    spread = noise + np.random.default_rng(0).uniform(-0.5, 0.5, SIZE) * step
    assert stats.kstest(spread / DEVIATION, "norm").pvalue > FALSE_ALARM


def test_every_grid_point_has_its_probability(noise: np.ndarray) -> None:
    # Chi-square over the grid's points near the center, against the exact probability of each cell.
    step = Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER).step
    point = (noise / step).astype(int)
    edges = (np.arange(-500, 502) - 0.5) * step / DEVIATION
    near = np.abs(point) <= 500
    counts = np.append(np.bincount(point[near] + 500, minlength=1001), (~near).sum())
    expected = np.diff(stats.norm.cdf(edges))
    assert stats.chisquare(counts, SIZE * np.append(expected, 1 - expected.sum())).pvalue > FALSE_ALARM


def test_noise_is_as_strong_as_asked_for(noise: np.ndarray) -> None:
    # A sum of squares of normals is exactly chi-square; the grid adds 1e-7 of it.
    statistic = (noise**2).sum() / DEVIATION**2
    assert FALSE_ALARM < stats.chi2.cdf(statistic, SIZE) < 1 - FALSE_ALARM


def test_the_tails_are_as_heavy_as_a_gaussians(noise: np.ndarray) -> None:
    for far in (3.0, 4.0):
        found, chance = int((np.abs(noise) / DEVIATION > far).sum()), 2 * stats.norm.sf(far)
        assert stats.binomtest(found, SIZE, chance).pvalue > FALSE_ALARM


def test_elements_left_without_noise_are_detected(noise: np.ndarray) -> None:
    # A fault planted for the tests above: one element in fifty.
    noise[::50] = 0.0
    assert stats.chi2.cdf((noise**2).sum() / DEVIATION**2, SIZE) < FALSE_ALARM


# --- exactness --------------------------------------------------------------------------------------------


def test_a_release_is_total_plus_rounded_noise_on_the_grid_in_whole_numbers() -> None:
    # The definition, number by number, in Python's integers.
    totals = torch.randint(-(2**50), 2**50, (1000,), generator=torch.Generator().manual_seed(3))
    (noised,) = release([totals], out=[torch.empty(1000, dtype=torch.float64)])
    source, scale = RandomSource.from_seed(11), Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER)
    noise = normals(*source._noise_generators(0), 1000, scale=scale.deviation)
    size = 2**scale.shift
    for total, x, found in zip(totals.tolist(), noise.tolist(), noised.tolist(), strict=True):
        assert found == (2 * (total + round(x)) + size) // (2 * size) * scale.step


def test_shifting_a_total_by_grid_steps_shifts_what_is_released_and_nothing_else() -> None:
    # So the noise has no holes that depend on the sum: any two totals that differ by a step have the same cells.
    size = 2 ** Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER).shift
    zeros = torch.zeros(5000, dtype=torch.int64)
    outs = [[torch.empty(5000, dtype=torch.float64)] for _ in range(2)]
    (plain,), (shifted,) = release([zeros], out=outs[0]), release([zeros + 12_345 * size], out=outs[1])
    step = Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER).step
    assert torch.equal(shifted - plain, torch.full_like(plain, 12_345 * step))


def test_results_lie_on_a_public_grid_well_below_the_noise() -> None:
    (noised,) = release(quantize([torch.rand(10_000) * 100], clipping_norm=NORM))
    step = Scale.of(clipping_norm=NORM, noise_multiplier=MULTIPLIER).step
    assert DEVIATION / 2**11 < step <= DEVIATION / 2**10
    assert math.log2(step) == int(math.log2(step))
    assert noised.dtype == torch.float32
    assert torch.equal(noised.double() / step, (noised.double() / step).round())


@given(
    norm=st.floats(1e-6, 1e6),
    multiplier=st.floats(1e-3, 1e4),
    numbers=st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_a_sum_moves_by_half_a_unit_and_then_by_noise_and_half_a_step(
    norm: float, multiplier: float, numbers: list[float]
) -> None:
    sums, unit = torch.tensor(numbers, dtype=torch.float64) * norm, unit_of(norm)
    scale = Scale.of(clipping_norm=norm, noise_multiplier=multiplier)
    (quantized,) = quantize([sums], clipping_norm=norm)
    assert norm * 2.0**-33 < unit <= norm * 2.0**-32
    assert float((quantized.double() * unit - sums).abs().max()) <= unit / 2
    assert unit * scale.deviation >= norm * multiplier
    assert unit * scale.deviation <= norm * multiplier * (1 + 2.0**-51)
    out = torch.empty(len(sums), dtype=torch.float64)
    source = RandomSource.from_seed(0)
    source.release([quantized], clipping_norm=norm, noise_multiplier=multiplier, step=3, out=[out])
    noise = normals(*RandomSource.from_seed(0)._noise_generators(3), len(sums), scale=scale.deviation)
    off = out - quantized.double() * unit - torch.from_numpy(noise) * unit
    assert float(off.abs().max()) <= (scale.step + unit) / 2 * (1 + 1e-9)


def test_neighboring_sums_stay_neighbors_up_to_the_charge() -> None:
    # Two sums at distance C, 200 times: rounded, they are at most the charge further apart.
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        one = torch.randn(1000, generator=generator, dtype=torch.float64) * 10
        step = torch.randn(1000, generator=generator, dtype=torch.float64)
        pair = quantize([one, one + NORM * step / step.norm()], clipping_norm=NORM)
        apart = float((pair[0] - pair[1]).double().norm()) * unit_of(NORM)
        assert apart <= NORM * (1 + rounding_charge(1000)) * (1 + 1e-12)


def test_ranks_add_integers_in_any_order_to_the_same_total() -> None:
    sums = torch.randn(8, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e3
    parts = quantize(list(sums), clipping_norm=NORM)
    forwards, backwards = sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    assert torch.equal(forwards, backwards)


def test_results_have_the_tensors_precision_and_place() -> None:
    totals = quantize([torch.randn(100) * 50], clipping_norm=NORM)
    outs = [torch.empty(100, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    for out in outs:
        (same,) = release(totals, out=[out])
        assert same is out
        assert torch.equal(out, outs[0].to(out.dtype))


def test_tensors_of_any_shape_and_layout_get_the_noise_of_their_elements() -> None:
    shapes = [(8, 3, 5, 5), (), (0,), (70_001,), (30, 31)]
    totals = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    expected = release(totals)
    totals[0] = totals[0].to(memory_format=torch.channels_last)
    totals[4] = torch.zeros(31, 30, dtype=torch.int64).t()
    found = release(totals, out=[torch.empty_like(total, dtype=torch.float32) for total in totals])
    assert all(map(torch.equal, found, expected))
    everything = torch.cat([part.reshape(-1) for part in found]).double().numpy()
    assert len(np.unique(everything[everything != 0])) > 3000
    # All tensors together: a sum of squares is chi-square.
    statistic = (everything**2).sum() / DEVIATION**2
    assert FALSE_ALARM < stats.chi2.cdf(statistic, len(everything)) < 1 - FALSE_ALARM


def test_parameters_that_need_a_gradient_can_be_written_to() -> None:
    out = torch.nn.Parameter(torch.zeros(5))
    release([torch.zeros(5, dtype=torch.int64)], out=[out])
    assert bool((out != 0).all())


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), LARGEST_SUM * NORM, -1e300])
def test_a_sum_that_no_clipped_gradients_have_is_refused_without_being_shown(wrong: float) -> None:
    sums = [torch.zeros(3), torch.tensor([0.0, wrong], dtype=torch.float64)]
    with pytest.raises(
        PdpsgdError, match=r"every element of sums\[1\] to be finite and below 4,194,304"
    ) as error:
        quantize(sums, clipping_norm=NORM)
    assert str(wrong) not in str(error.value)


def test_noise_beyond_what_the_grid_was_laid_out_for_is_refused() -> None:
    assert Scale.of(clipping_norm=NORM, noise_multiplier=LARGEST_NOISE_MULTIPLIER).step > 0
    with pytest.raises(
        PdpsgdError, match=r"Expected noise_multiplier <= 4,194,304\. Got noise_multiplier=4194305"
    ):
        Scale.of(clipping_norm=NORM, noise_multiplier=LARGEST_NOISE_MULTIPLIER + 1)


def test_the_largest_sums_of_256_ranks_are_accepted_and_do_not_overflow() -> None:
    sums = torch.tensor([1.0, -1.0], dtype=torch.float64) * math.nextafter(LARGEST_SUM, 0) * 1.999
    (quantized,) = quantize([sums], clipping_norm=1.999)
    total = quantized * 256
    assert total.tolist() == [256 * number for number in quantized.tolist()]
    largest_noise = {"clipping_norm": 1.999, "noise_multiplier": 1e6}
    (noised,) = release([total], **largest_noise)
    assert noised.double().tolist() == pytest.approx((sums * 256).tolist(), rel=1e-1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["clipping_norm", "noise_multiplier"])
def test_noise_of_no_size_is_refused(name: str, value: float) -> None:
    with pytest.raises(PdpsgdError, match=f"{name} > 0 and finite"):
        release([torch.zeros(1, dtype=torch.int64)], **{name: value})


def test_wrong_tensors_are_refused_before_any_noise_is_spent() -> None:
    source, figures = RandomSource.from_seed(0), {"clipping_norm": 1.0, "noise_multiplier": 1.0, "step": 0}
    good = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(PdpsgdError, match=r"quantized\[1\] to hold torch.int64.*Got torch.float32"):
        source.release([good, torch.zeros(3)], **figures)
    with pytest.raises(PdpsgdError, match=r"out\[0\] to hold floating-point numbers in the shape \(3,\)"):
        source.release([good], out=[torch.zeros(4)], **figures)
    with pytest.raises(PdpsgdError, match=r"out\[0\] to hold floating-point numbers"):
        source.release([good], out=[good], **figures)
    with pytest.raises(PdpsgdError, match=r"one tensor in out for each of 1 totals\. Got 2"):
        source.release([good], out=[torch.zeros(3)] * 2, **figures)
    with pytest.raises(PdpsgdError, match=r"sums\[0\] to hold floating-point numbers. Got torch.int64"):
        quantize([good], clipping_norm=1.0)
    source.release([good], **figures)  # step 0 is still there
