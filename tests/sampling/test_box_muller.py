"""Normal numbers are as exact as they claim, at both ends too; words are fixed, the reference is mpmath.

Statistical tests say what they compare and fail below p = 1e-8, a false-alarm rate below 1e-6 also where a statistic
has its distribution only in the limit. Seeds are fixed so that failures can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import stats

from pdpsgd.sampling import box_muller
from pdpsgd.sampling.box_muller import normals

FALSE_ALARM = 1e-8
LAST = 2**64 - 1
mp: Any = mpmath.mp.clone()
mp.prec = 200


class Fixed:
    """A generator of given words."""

    def __init__(self, words: Iterable[int]) -> None:
        self.words = list(words)

    def random_raw(self, size: int) -> np.ndarray:
        taken, self.words = self.words[:size], self.words[size:]
        assert len(taken) == size
        return np.array(taken, dtype=np.uint64)


def pairs_of(
    radii: Sequence[int], angles: Sequence[int], further: Sequence[int] = (), *, exactly: bool = True
) -> np.ndarray:
    """The pairs that the words give, in the order of the words; the rest of a group has words of no interest."""
    size = -(-len(radii) // 8) * 8
    words = np.full((2, size), 2**63, dtype=np.uint64)
    words[0, : len(radii)], words[1, : len(angles)] = radii, angles
    main = words.reshape(2, -1, 8).swapaxes(0, 1).ravel().tolist()
    rest = Fixed(further)
    made = normals(Fixed(main), rest, 2 * size).reshape(-1, 2, 8).swapaxes(0, 1).reshape(2, -1).T
    if exactly:
        assert not rest.words
    return made[: len(radii)]


def exact_pair(radius: int, angle: int, further: Iterable[int] = ()) -> tuple[Any, Any, Any]:
    """The exact numbers in the middle of what the words stand for, and the radius."""
    upper, rest = radius >> 63, iter(further)
    distance, bits = (LAST - radius if upper else radius), 64
    while distance < 2**53 and bits < 64 * box_muller.MOST_WORDS:
        distance, bits = distance << 64 | next(rest), bits + 64
    distance = max(distance, 1)
    nearness = (mp.mpf(distance) + 0.5) / mp.mpf(2) ** bits
    length = mp.sqrt(-2 * (mp.log1p(-nearness) if upper else mp.log(nearness)))
    turn = mp.pi / 4 * (mp.mpf(angle % 2**61) + 0.5) / 2**61
    cosine, sine = mp.cos(turn), mp.sin(turn)
    if angle >> 61 & 1:
        cosine, sine = sine, cosine
    return length * cosine * (-1) ** (angle >> 63), length * sine * (-1) ** (angle >> 62 & 1), length


def errors(radii: Sequence[int], angles: Sequence[int], further: Sequence[int] = ()) -> list[float]:
    """How far each number is off, relative to itself, beyond what the last half of a word leaves open."""
    found, rest, off = pairs_of(radii, angles, further, exactly=False), iter(further), []
    for pair, radius, angle in zip(found, radii, angles, strict=True):
        *exact, length = exact_pair(radius, angle, rest)
        for number, z in zip(pair, exact, strict=True):
            off.append(float((abs(mp.mpf(float(number)) - z) - length * mp.mpf(2) ** -61) / abs(z)))
    return off


def test_numbers_are_exact_to_the_claimed_error() -> None:
    words = np.random.default_rng(1).integers(0, 2**64, (4, 400), dtype=np.uint64)
    shifts = np.random.default_rng(2).integers(0, 64, 400).astype(np.uint64)
    further = np.random.default_rng(3).integers(0, 2**64, 2000, dtype=np.uint64).tolist()
    radii, angles = words[:2].tolist(), words[2:].tolist()
    cases = (
        (radii[0], angles[0]),
        ((words[0] >> shifts).tolist(), angles[1]),  # tails: u of all sizes
        ((~(words[1] >> shifts)).tolist(), angles[1]),  # the center: 1 - u of all sizes
        (radii[1], (words[2] >> shifts).tolist()),  # angles of all sizes
    )
    for some, turns in cases:
        assert max(errors(some, turns, further)) < 2.0**-50


@pytest.mark.parametrize("angle", [0, 1, 2**61 - 1, 2**61, 2**62, 2**63, LAST])
@pytest.mark.parametrize(
    ("radius", "further"),
    [
        (0, [1, 2**63]),
        (0, [0] * 13),
        (0, [0] * 12 + [1]),
        (0, [0, 0, 0, 5, 7]),
        (1, [0]),
        (2**53 - 1, [LAST]),
        (2**53, []),
        (2**62, []),
        (2**63 - 1, []),
        (2**63, []),
        (LAST - 2**53, []),
        (LAST - 2**53 + 1, [0]),
        (LAST - 1, [0]),
        (LAST, [0] * 12 + [1]),
        (LAST, [0] * 13),
        (LAST, [LAST]),
    ],
)
def test_both_ends_of_a_word_are_continued_and_never_zero(
    radius: int, further: list[int], angle: int
) -> None:
    ((one, other),) = pairs_of([radius], [angle], further)
    exact_one, exact_other, length = exact_pair(radius, angle, further)
    assert np.isfinite(one)
    assert np.isfinite(other)
    # With fewer than 53 significant bits, at 896 bits, what is left open is half of the last bit.
    left_open = 0.5 if radius in (0, LAST) and sum(further) <= 1 else 2.0**-50
    largest = max(abs(one), abs(other))
    assert largest == pytest.approx(float(max(abs(exact_one), abs(exact_other))), rel=left_open, abs=0)
    assert np.signbit(one) == (exact_one < 0)
    assert float(length) > 0


def test_the_largest_number_is_beyond_35_and_the_smallest_radius_above_0() -> None:
    ((largest, _),) = pairs_of([0], [0], [0] * 13)
    assert largest == pytest.approx(float(mp.sqrt(2 * 896 * mp.log(2))), rel=1e-15)
    assert largest > 35
    ((smallest, _),) = pairs_of([LAST], [0], [0] * 13)
    assert smallest == pytest.approx(2.0**-447.5, rel=1e-15)


def test_a_word_before_the_53_bits_end_needs_no_other() -> None:
    assert pairs_of([2**53, LAST - 2**53], [5, 5]).shape == (2, 2)  # the generator of further words is empty


SIZE = 400_000


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    return normals(np.random.SFC64(7), np.random.SFC64(8), SIZE)


def test_numbers_are_gaussian(numbers: np.ndarray) -> None:
    # Kolmogorov and Smirnov, against the exact distribution function.
    assert stats.kstest(numbers, "norm").pvalue > FALSE_ALARM


def test_every_cell_of_a_pair_has_its_probability(numbers: np.ndarray) -> None:
    # Chi-square over 64 equally likely cells of each number, two of a pair together: 4,096 cells.
    cells = np.minimum((stats.norm.cdf(numbers) * 64).astype(int), 63).reshape(-1, 2, 8)
    counts = np.bincount((cells[:, 0] * 64 + cells[:, 1]).ravel(), minlength=4096)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_a_sum_of_squares_is_chi_square(numbers: np.ndarray) -> None:
    statistic = (numbers**2).sum()
    assert FALSE_ALARM < stats.chi2.cdf(statistic, SIZE) < 1 - FALSE_ALARM


@pytest.mark.parametrize("far", [2.0, 3.0, 4.0, 4.5])
def test_the_tails_are_as_heavy_as_a_gaussians(numbers: np.ndarray, far: float) -> None:
    found = int((np.abs(numbers) > far).sum())
    assert stats.binomtest(found, SIZE, 2 * stats.norm.sf(far)).pvalue > FALSE_ALARM


def test_the_far_tail_has_its_probability_given_that_it_is_reached() -> None:
    # A first word 0 means u < 2^-64. Then -ln u - 64 ln 2 is exponential: Kolmogorov and Smirnov.
    words = np.random.SFC64(9)
    radius = [box_muller.continued(0, words) for _ in range(20_000)]
    assert stats.kstest(-np.log(radius) - 64 * np.log(2), "expon").pvalue > FALSE_ALARM


def test_numbers_are_independent_of_one_another(numbers: np.ndarray) -> None:
    # Correlations of values and of squares, at distances at which the two numbers of a pair lie apart, and others.
    for distance in (1, 2, 7, 8, 9, 16):
        one, other = numbers[:-distance], numbers[distance:]
        for function in (np.asarray, np.square):
            assert stats.pearsonr(function(one), function(other)).pvalue > FALSE_ALARM


def test_a_scale_multiplies_and_a_count_cuts() -> None:
    def made(count: int, scale: float) -> np.ndarray:
        return normals(np.random.SFC64(1), np.random.SFC64(2), count, scale=scale)

    assert np.array_equal(made(21, 4.0), 4.0 * made(32, 1.0)[:21])
    assert made(0, 1.0).shape == (0,)
