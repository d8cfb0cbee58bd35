"""Tests of the noise itself, on a run without records: distribution, tails, and independence everywhere.

Noise of the right variance can still be wrong: used for two steps, canceling between steps, shared between
layers, or not Gaussian. Without records a noisy sum is noise alone, so everything about it can be tested:
Z has a row of T standardized values per step, of d numbers, and should be independent standard normal.

Every p-value is exact or an upper bound at every size. Where the worst of many is taken, all are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, ndtri
from scipy.stats import beta, binom, chi2, kstwo, norm
from torch import Tensor

from pdpsgd._typing import FloatArray
from pdpsgd.audit.conformance import Check

KEPT = 4096
"""Numbers of a step that are kept for tests of independence: the first ones of every tensor."""
TAILS = (2.0, 3.0, 4.0, 5.0)
LARGEST = 6.0
"""Values beyond count as this in the fourth moment, so that its deviation has a bound."""
PAIRS_AT_ONCE = 512


@dataclass
class NoiseSample:
    """The standardized noise of a run, step by step: energies of whole tensors, and the first numbers of each."""

    tensors: tuple[str, ...]
    _energies: list[list[float]] = field(default_factory=list, init=False)
    _values: list[FloatArray] = field(default_factory=list, init=False)
    _sizes: list[int] = field(default_factory=list, init=False)
    _kept: list[int] = field(default_factory=list, init=False)

    def add(self, noisy_sums: Sequence[Tensor], *, standard_deviation: float) -> None:
        """Take in one step without records."""
        flat = [
            tensor.detach().flatten().double().cpu().numpy() / standard_deviation for tensor in noisy_sums
        ]
        if not self._sizes:
            self._sizes = [values.size for values in flat]
            self._kept = _shares(self._sizes, KEPT)
        self._energies.append([float(values @ values) for values in flat])
        self._values.append(np.concatenate([v[:kept] for v, kept in zip(flat, self._kept, strict=True)]))

    @property
    def energies(self) -> FloatArray:
        """Squared lengths, steps x tensors."""
        return np.array(self._energies)

    @property
    def sizes(self) -> FloatArray:
        """The number of values in each tensor."""
        return np.array(self._sizes, dtype=np.float64)

    @property
    def values(self) -> FloatArray:
        """The kept values, steps x numbers."""
        return np.stack(self._values)

    @property
    def parts(self) -> list[tuple[str, slice]]:
        """The tensors and where their kept values are."""
        ends = np.cumsum(self._kept)
        return [
            (name, slice(int(end) - kept, int(end)))
            for name, end, kept in zip(self.tensors, ends, self._kept, strict=True)
        ]


def noise_checks(sample: NoiseSample) -> tuple[Check, ...]:
    """Return thirteen checks of the noise of a run without records.

    Guarantee: if the values are independent and standard normal, each p-value is at most a with probability
    at most a.
    """
    values = sample.values
    return (
        *_variances(sample),
        *_variances_of_steps(sample),
        _pairs_of_steps(values),
        _all_steps(values),
        _sums_of_steps(values),
        _pairs_of_numbers(values),
        _windows(sample),
        *_distribution(values.ravel()),
    )


def _variances(sample: NoiseSample) -> Iterator[Check]:
    """Compare variances of all noise, of tensors, of tensors at single steps, and of single numbers."""
    energies, sizes, steps = sample.energies, sample.sizes, len(sample.energies)
    yield _check(
        "variance", energies.sum() / (steps * sizes.sum()), _chi2(energies.sum(), steps * sizes.sum())
    )
    each = _chi2(energies.sum(axis=0), steps * sizes)
    worst = int(each.argmin())
    ratio = energies[:, worst].sum() / (steps * sizes[worst])
    yield _check("variance of a tensor", ratio, each, tensor=sample.tensors[worst])
    single = _chi2(energies, sizes)
    step, tensor = np.unravel_index(int(single.argmin()), single.shape)
    ratio = energies[step, tensor] / sizes[tensor]
    yield _check("variance of a tensor at one step", ratio, single, tensor=sample.tensors[tensor])
    numbers = np.square(sample.values).sum(axis=0)
    each = _chi2(numbers, steps)
    yield _check("variance of one number", numbers[each.argmin()] / steps, each)


def _variances_of_steps(sample: NoiseSample) -> Iterator[Check]:
    """Compare the variances of steps with each other: their spread, and even against odd steps."""
    total, size = sample.energies.sum(axis=1), sample.sizes.sum()
    low, high = chi2.logcdf(total, size), chi2.logsf(total, size)
    scores = np.where(low < high, ndtri(np.exp(low)), -ndtri(np.exp(high)))  # exact in both tails
    scores = np.clip(scores, -38, 38)
    square = float(scores @ scores)
    yield _check("spread of the variances of steps", square / scores.size, _chi2(square, scores.size))
    signs = np.where(np.arange(scores.size) % 2 == 0, 1.0, -1.0)
    alternating = float(scores @ signs) / math.sqrt(scores.size)
    yield _check(
        "variance of even against odd steps", alternating, 2 * norm.sf(abs(alternating)), expected=0.0
    )


def _pairs_of_steps(values: FloatArray) -> Check:
    """Look for two steps whose noise is correlated; the squared cosine is Beta(1/2, (d-1)/2)."""
    cosines = _cosines(values)
    return _worst_cosine(
        "correlation of two steps", cosines[np.triu_indices(len(cosines), 1)], values.shape[1]
    )


def _all_steps(values: FloatArray) -> Check:
    """Look for steps that are together less than independent.

    The determinant of the cosines of T independent directions in d dimensions is a product of independent
    Beta((d-k)/2, k/2), k = 1 ... T-1. Its logarithm is bounded by Chernoff in both directions.
    """
    dimension = values.shape[1]
    rows = values[: max(1, dimension // 2)]
    if len(rows) < 2:
        return _check("determinant of all steps", 0.0, 1.0, expected=0.0)
    seen = float(np.linalg.slogdet(_cosines(rows))[1])
    k = np.arange(1, len(rows))
    a, b = (dimension - k) / 2, k / 2

    def log_moment(s: float) -> float:
        return float((gammaln(a + s) - gammaln(a) + gammaln(a + b) - gammaln(a + b + s)).sum())

    expected = (log_moment(1e-4) - log_moment(-1e-4)) / 2e-4
    if not math.isfinite(seen):
        return _check("determinant of all steps", seen, 0.0, expected=expected)
    bounds = (0.0, 1e5) if seen > expected else (-0.999 * float(a.min()), 0.0)
    found = minimize_scalar(lambda s: log_moment(s) - s * seen, bounds=bounds, method="bounded")
    return _check(
        "determinant of all steps", seen, 2 * math.exp(min(0.0, float(found.fun))), expected=expected
    )


def _sums_of_steps(values: FloatArray) -> Check:
    """Compare variances of sums over 2, 4, 8 ... steps: noise that cancels between steps has less."""
    p_values, ratios = [1.0], [1.0]
    length = 2
    while length <= len(values):
        blocks = len(values) // length
        sums = values[: blocks * length].reshape(blocks, length, -1).sum(axis=1) / math.sqrt(length)
        ratios.append(float(np.square(sums).mean()))
        p_values.append(float(_chi2(np.square(sums).sum(), sums.size)))
        length *= 2
    return _check("variance of sums over steps", ratios[int(np.argmin(p_values))], np.array(p_values))


def _pairs_of_numbers(values: FloatArray) -> Check:
    """Look for two numbers of a step, or of a step and the next, that go together over the steps."""
    name = "correlation of two numbers"
    if len(values) < 3:
        return _check(name, 0.0, 1.0, expected=0.0)
    worst, count = 0.0, 0
    numbers = values.shape[1]
    for ahead in (0, 1):
        now, later = (_unit_columns(part) for part in (values[: len(values) - ahead], values[ahead:]))
        for first in range(0, numbers, PAIRS_AT_ONCE):
            cosines = now[:, first : first + PAIRS_AT_ONCE].T @ later
            for row in range(len(cosines)):  # a number with itself says nothing new
                cosines[row, first + row] = 0.0
            worst = max(worst, float(np.abs(cosines).max()))
        # The shorter vectors have the heavier tail; within a step every pair is met twice.
        count += numbers * (numbers - 1) // (2 - ahead)
    p_value = count * float(beta.sf(worst**2, 0.5, (len(values) - 2) / 2))
    return _check(name, worst, p_value, expected=0.0)


def _windows(sample: NoiseSample) -> Check:
    """Look for the noise of a tensor anywhere else in its step or the next, at all offsets.

    Given the tensor, its product with values elsewhere, over its own length, is standard normal.
    """
    name = "a tensor's noise found elsewhere"
    values = sample.values
    ahead = np.concatenate([values[1:], np.zeros_like(values[:1])])
    both = np.concatenate([values, ahead], axis=1)
    worst, count, tensor = 0.0, 0, None
    length = 2 ** math.ceil(math.log2(both.shape[1]))
    spectrum = np.fft.rfft(both, length, axis=1)
    for part, place in sample.parts:
        own = values[:, place]
        size = place.stop - place.start
        if size == 0:
            continue
        products = np.fft.irfft(spectrum * np.conj(np.fft.rfft(own, length, axis=1)), length, axis=1)
        scores = products[:, : both.shape[1] - size + 1] / np.sqrt(np.square(own).sum(axis=1, keepdims=True))
        elsewhere = np.ones(scores.shape[1], dtype=bool)
        elsewhere[max(0, place.start - size + 1) : place.stop] = False
        scores = scores[:, elsewhere]
        count += scores.size
        if scores.size and float(np.abs(scores).max()) > worst:
            worst, tensor = float(np.abs(scores).max()), part
    return _check(name, worst, 2 * count * float(norm.sf(worst)), expected=0.0, tensor=tensor)


def _distribution(values: FloatArray) -> Iterator[Check]:
    """Compare the distribution of all values with the normal: everywhere, in the tails, and its fourth moment."""
    count = values.size
    uniform = norm.cdf(np.sort(values))
    steps = np.arange(1, count + 1) / count
    distance = float(max((steps - uniform).max(), (uniform - steps + 1 / count).max()))
    yield _check(
        "distance from the normal distribution", distance, float(kstwo.sf(distance, count)), expected=0.0
    )
    absolute = np.abs(values)
    beyond = np.array([(absolute > tail).sum() for tail in TAILS])
    chances = 2 * norm.sf(np.array(TAILS))
    sides = 2 * np.minimum(binom.cdf(beyond, count, chances), binom.sf(beyond - 1, count, chances))
    worst = int(sides.argmin())
    yield _check(
        f"values beyond {TAILS[worst]:g} deviations", beyond[worst], sides, expected=count * chances[worst]
    )
    moment = float(np.minimum(absolute, LARGEST) ** 4 @ np.ones(count))
    # Winsorizing takes less than 1e-5 from the mean, 3, and makes the variance, 96, smaller.
    deviation = max(0.0, abs(moment - 3 * count) - 1e-5 * count)
    p_value = 2 * math.exp(-_bennett(deviation, variance=96.0 * count, largest=LARGEST**4))
    yield _check("fourth moment", moment / count, p_value, expected=3.0)


def _bennett(deviation: float, *, variance: float, largest: float) -> float:
    """Return Bennett's exponent for a sum of bounded variables to be this far from its mean."""
    u = largest * deviation / variance
    return variance / largest**2 * ((1 + u) * math.log1p(u) - u)


def _chi2(energy: FloatArray | float, dimensions: FloatArray | float) -> FloatArray:
    """Return two-sided p-values of sums of squares."""
    return np.asarray(
        np.minimum(1.0, 2 * np.minimum(chi2.cdf(energy, dimensions), chi2.sf(energy, dimensions)))
    )


def _cosines(rows: FloatArray) -> FloatArray:
    units = _unit_columns(rows.T)
    return np.asarray(units.T @ units)


def _unit_columns(values: FloatArray) -> FloatArray:
    return np.asarray(values / np.maximum(np.linalg.norm(values, axis=0), 1e-300))


def _worst_cosine(kind: str, cosines: FloatArray, dimension: int) -> Check:
    if cosines.size == 0:
        return _check(kind, 0.0, 1.0, expected=0.0)
    worst = min(1.0, float(np.abs(cosines).max()))
    p_value = cosines.size * float(beta.sf(worst**2, 0.5, (dimension - 1) / 2))
    return _check(kind, worst, p_value, expected=0.0)


def _check(
    kind: str,
    observed: float,
    p_values: FloatArray | float,
    *,
    expected: float = 1.0,
    tensor: str | None = None,
) -> Check:
    """Return a check with the smallest of several p-values, times their number."""
    each = np.atleast_1d(p_values)
    return Check(
        kind, None, tensor, float(expected), float(observed), min(1.0, float(each.min()) * each.size)
    )


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split a total among tensors evenly, as far as they go; small ones leave the rest to others."""
    kept = [0] * len(sizes)
    left = total
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        kept[index] = min(sizes[index], left // (len(sizes) - place))
        left -= kept[index]
    return kept
