"""Noise has the distribution that the plan was proven for.

Each statistical test says what it compares; all of them fail below p = 1e-8, a false-alarm rate below 1e-6
also where the statistic has its distribution only in the limit. Seeds are fixed so that failures can be
repeated.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.generators import AES, SHAKE, SecureWords
from pdpsgd.sampling.noise import _NoiseBlock, grid_of
from pdpsgd.sampling.source import RandomSource

FALSE_ALARM = 1e-8
SIZE = 400_000
DEVIATION = 3.0


@pytest.fixture(params=[False, True], ids=["default", "secure"])
def secure(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def noise(secure: bool, size: int = SIZE, *, seed: int = 11) -> np.ndarray:
    tensor = torch.zeros(size)
    RandomSource.from_seed(seed, secure=secure).noise_([tensor], standard_deviation=DEVIATION, step=0)
    return tensor.double().numpy()


def test_noise_is_gaussian(secure: bool) -> None:
    # Kolmogorov and Smirnov, against the exact distribution function. The secure mode's grid is 2^-11 of a
    # deviation wide, which the statistic would see (0.0002); uniform numbers within the grid's cells undo it.
    values = noise(secure)
    if secure:
        values = values + np.random.default_rng(0).uniform(-0.5, 0.5, SIZE) * grid_of(DEVIATION)
    assert stats.kstest(values / DEVIATION, "norm").pvalue > FALSE_ALARM


def test_noise_is_as_strong_as_asked_for(secure: bool) -> None:
    # A sum of squares of normals is exactly chi-square.
    statistic = (noise(secure) ** 2).sum() / DEVIATION**2
    assert stats.chi2.cdf(statistic, SIZE) > FALSE_ALARM
    assert stats.chi2.sf(statistic, SIZE) > FALSE_ALARM


def test_the_tails_are_as_heavy_as_a_gaussians(secure: bool) -> None:
    # Numbers beyond 3 and 4 deviations, exactly binomial.
    values = np.abs(noise(secure)) / DEVIATION
    for far in (3.0, 4.0):
        found, chance = int((values > far).sum()), 2 * stats.norm.sf(far)
        assert stats.binomtest(found, SIZE, chance).pvalue > FALSE_ALARM


def test_elements_are_independent_of_one_another(secure: bool) -> None:
    # Correlations of values and of squares, at distances at which one word's two numbers lie apart, and near.
    values = noise(secure, 2**14) / DEVIATION
    for distance in (1, 2, 2**12, 2**13):
        one, other = values[:-distance], values[distance:]
        for function in (np.asarray, np.square):
            assert stats.pearsonr(function(one), function(other)).pvalue > FALSE_ALARM


def test_elements_left_without_noise_are_detected(secure: bool) -> None:
    # A fault planted for the tests above: one element in fifty.
    values = noise(secure)
    values[::50] = 0.0
    statistic = (values**2).sum() / DEVIATION**2
    assert stats.chi2.cdf(statistic, SIZE) < FALSE_ALARM
    assert stats.kstest(values / DEVIATION, "norm").pvalue < FALSE_ALARM


def test_noise_is_added_to_what_is_there_in_any_layout_and_precision(secure: bool) -> None:
    shapes = [(8, 3, 5, 5), (), (0,), (70_001,), (300, 301)]
    tensors = [torch.ones(shape) for shape in shapes]
    tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    tensors[4] = torch.ones(301, 300).t()
    tensors.append(torch.ones(50, dtype=torch.float64))
    RandomSource.from_seed(0, secure=secure).noise_(tensors, standard_deviation=0.5, step=0)
    everything = torch.cat([(tensor - 1).double().reshape(-1) for tensor in tensors]).numpy()
    assert len(np.unique(everything)) > 0.01 * len(everything)
    assert (everything == 0).sum() < 0.01 * len(everything)
    statistic = (everything**2).sum() / 0.25
    assert stats.chi2.cdf(statistic, len(everything)) > FALSE_ALARM
    assert stats.chi2.sf(statistic, len(everything)) > FALSE_ALARM


def test_the_noise_of_float64_fills_its_last_bits() -> None:
    # Noise made in float32 would leave the exact sum in the last bits. Of 1000 numbers of float64 hardly any
    # is one of float32: each has a chance of 2^-29 or so.
    tensor = torch.zeros(1000, dtype=torch.float64)
    RandomSource.from_seed(0).noise_([tensor], standard_deviation=1.0, step=0)
    assert (tensor.float().double() == tensor).sum() <= 1


def test_noise_does_not_depend_on_memory_layout(secure: bool) -> None:
    plain = torch.zeros(8, 3, 5, 5)
    permuted = plain.clone().to(memory_format=torch.channels_last)
    for tensor in (plain, permuted):
        RandomSource.from_seed(0, secure=secure).noise_([tensor], standard_deviation=1.0, step=0)
    assert torch.equal(plain, permuted)


def test_a_steps_noise_is_right_when_its_tensors_change_between_steps() -> None:
    # The default mode keeps memory between steps; what it kept must not leak into another step's noise.
    source = RandomSource.from_seed(0)
    for step, size in enumerate([100, 7, 100, 3, *range(20, 60), 100]):
        tensor, fresh = torch.zeros(size), torch.zeros(size)
        source.noise_([tensor], standard_deviation=1.0, step=step)
        RandomSource.from_seed(0).noise_([fresh], standard_deviation=1.0, step=step)
        assert torch.equal(tensor, fresh)


class SameWord:
    """A generator whose every word is the same."""

    def __init__(self, word: int) -> None:
        self.word = word

    def random_raw(self, size: int) -> np.ndarray:
        return np.full(size, self.word, dtype=np.uint64)


@pytest.mark.parametrize("word", [0, 2**64 - 1, 2**63, 2**32 - 1, 0xFF, 2**31 - 1])
def test_no_word_makes_noise_that_is_not_finite(word: int) -> None:
    ((made,),) = _NoiseBlock([torch.empty(10)], steps=1).make([SameWord(word)])
    assert made.isfinite().all()


def test_the_largest_noise_is_beyond_seven_deviations() -> None:
    ((made,),) = _NoiseBlock([torch.empty(10)], steps=1).make([SameWord(0)])
    assert float(made.abs().max()) == pytest.approx(math.sqrt(2 * 40 * math.log(2)), rel=1e-5)


def test_noise_made_ahead_is_the_noise_of_its_step() -> None:
    key, shapes = bytes(range(32)), [(7, 3), (2,)]

    def noise(source: RandomSource, step: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        tensors = [torch.zeros(shape) for shape in shapes]
        source.noise_(tensors, standard_deviation=2.0, step=step)
        return tensors

    running = RandomSource.from_key(key)
    for step in (0, 1, 2, 5, 11, 12):  # in order, with gaps, and beyond what is made at once
        fresh = noise(RandomSource.from_key(key), step, shapes)
        assert all(map(torch.equal, noise(running, step, shapes), fresh))
    fresh = noise(RandomSource.from_key(key), 13, [(4,)])  # other shapes than those made ahead
    assert torch.equal(noise(running, 13, [(4,)])[0], fresh[0])
    running.erase()
    with pytest.raises(PdpsgdError, match="erased"):
        noise(running, 14, [(4,)])


# --- the secure mode --------------------------------------------------------------------------------------


def test_secure_sums_lie_on_a_public_grid_well_below_the_noise() -> None:
    sums = torch.rand(10_000) * 100
    RandomSource.from_seed(1, secure=True).noise_([sums], standard_deviation=0.7, step=0)
    grid = grid_of(0.7)
    assert 0.7 / 2**11 < grid <= 0.7 / 2**10
    assert math.log2(grid) == int(math.log2(grid))
    assert torch.equal(sums.double() / grid, (sums.double() / grid).round())


@pytest.mark.parametrize("algorithm", [AES, SHAKE])
def test_secure_words_are_uniform_in_every_byte(algorithm: str) -> None:
    # Chi-square over the 256 values of each of the 8 bytes of a word.
    if algorithm == AES:
        pytest.importorskip("cryptography", reason="AES comes with pdpsgd[secure]")
    words = SecureWords(bytes(32), algorithm=algorithm).random_raw(100_000)
    for byte in words.view(np.uint8).reshape(-1, 8).T:
        assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > FALSE_ALARM / 8


def test_aes_words_are_those_of_the_standard() -> None:
    # The published answer for a key and a block of zeros; counter mode encrypts its counter, zero at first.
    pytest.importorskip("cryptography", reason="AES comes with pdpsgd[secure]")
    words = SecureWords(bytes(32), algorithm=AES).random_raw(2)
    assert words.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_a_missing_package_falls_back_to_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = RandomSource.from_seed(0, secure=True)
    assert source.algorithm == SHAKE
    with pytest.raises(
        ValueError, match=r"package 'cryptography', for algorithm='aes-256-ctr'.*pdpsgd\[secure\]"
    ):
        RandomSource.from_key(bytes(32), secure=True, algorithm=AES)
