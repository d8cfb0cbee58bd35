"""An accountant that shares no code with those that compute plans, to check what plans claim.

Everything is a distribution of the privacy loss under the upper distribution of a pair: with the record for
removing, without it for adding. The divergence is the mean of a function that grows with the loss, so that losses
may be rounded up, and mass may be moved up, never down (docs/theory.md, "The verifier"). One step is
discretized by the exact probabilities of each cell, split between its two ends so that both distributions keep
their mass (connect the dots). Steps compose by Fourier transforms. What rounding may hide in a transform is
bounded and charged to delta; nothing is rescaled, and mass that is not 1 is an error. For participation below 1
the lower distribution is composed by itself. numpy and scipy only; nothing from `pdpsgd.accounting` but the
description of a history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import ndtr, ndtri

from pdpsgd._typing import FloatArray
from pdpsgd.accounting.history import EarlierRun, Exposure, History, simplify, split
from pdpsgd.errors import PdpsgdError, PromiseBroken, fail
from pdpsgd.planning import certificate_check
from pdpsgd.planning.rounds import Level, Round

GRID_POINTS = (16, 64)
"""Per standard deviation of a step's loss: first try, and second try before a plan is called wrong."""
AGREEMENT = 2e-3
"""How far a plan's proven epsilon may lie below this accountant's before it is called a false claim."""
FAR = 2.0
"""Beyond so many times what is promised or claimed, a finer grid cannot bring the answer back."""
MOST_POINTS = 1 << 16
"""Per grid point of a standard deviation; a grid with more is made coarser instead, which only ever overstates."""
CUT_OFF = 1e-7
"""The share of delta that all truncations together may take; what is cut off above counts as infinite loss."""
NEGLIGIBLE = 1e-6
"""Rounds whose total variation distance is below this share of delta are charged to delta and left out."""
SMALLEST_NOISE = 1e-3
"""With a smaller noise multiplier a step counts as telling whom it sampled, which is nearly true."""
FEW_POINTS = 1 << 14
"""Enough for Chernoff's bound, which decides about windows only."""
HIDDEN = 1e-5
"""What rounding may hide, as a share of delta, before the sum is computed a second time, tilted."""
SMALLEST_TAIL = 1e-290
UNIT = 2.0**-53
"""The relative error of one operation in double precision."""


@dataclass(frozen=True)
class Verification:
    """What the independent accountant finds for each level of a plan, at the level's delta."""

    epsilon: tuple[float, ...]
    promised: tuple[float, ...]

    @property
    def kept(self) -> bool:
        """Whether every level stays within its promise; levels that the plan does not sample may not."""
        return all(e <= p for e, p in zip(self.epsilon, self.promised, strict=True))


def verify(levels: Sequence[Level], rounds: Sequence[Round]) -> Verification:
    """Recompute what every level of a plan spends, and refuse a promise or a claim that does not hold.

    Guarantee: if this returns, each level's people have (epsilon, delta)-DP as promised, whatever the
    accountant that computed the plan did wrong.

    Raises:
        PromiseBroken: the rounds cost a level more than it is promised, or than the plan claims, as far as
            double precision can tell.
    """
    found = []
    known: dict[tuple[tuple[EarlierRun, ...], History, float], float] = {}
    for index, level in enumerate(levels):
        earlier, before = split(level.history)
        history = simplify(before + tuple(r.exposure(index) for r in rounds))
        exposed = history != simplify(before)
        key = (earlier, history, level.delta)
        for finer in range(len(GRID_POINTS)):
            epsilon = known[key] if key in known else _total(earlier, history, level.delta, finer)
            claim = math.inf if level.proven_epsilon is None else level.proven_epsilon
            broken = exposed and not epsilon <= level.epsilon
            false = claim < epsilon * (1 - AGREEMENT) - 1e-6
            if not (broken or false) or epsilon > FAR * (min(claim, level.epsilon) + AGREEMENT):
                break
        if broken:
            raise PromiseBroken(
                f"Level {index} is promised epsilon={level.epsilon:g} at delta={level.delta:g}; the plan's rounds cost "
                f"{epsilon:.6g}. Do not train with this plan."
            )
        if false:
            raise PromiseBroken(
                f"levels[{index}].proven_epsilon={level.proven_epsilon!r} is below the truth: the plan's rounds cost "
                f"{epsilon:.6g} at delta={level.delta:g}."
            )
        known[key] = epsilon
        found.append(epsilon)
    return Verification(tuple(found), tuple(level.epsilon for level in levels))


def _total(earlier: tuple[EarlierRun, ...], history: History, delta: float, finer: int) -> float:
    """What runs that were chosen after results cost together, or, if there is one or all were fixed, exactly."""
    if earlier and (history or len(earlier) > 1):
        fineness = certificate_check.FINENESS[finer]
        return certificate_check.epsilon_after(earlier, history, delta, fineness=fineness)
    alone = earlier[0].exposures if earlier else history
    return epsilon_upper_bound(alone, delta, points=GRID_POINTS[finer])


def epsilon_upper_bound(history: History, delta: float, *, points: int = GRID_POINTS[0]) -> float:
    """Compute the epsilon of a history at delta, for the worse of adding and removing.

    Guarantee: an upper bound, too high by about 0.03 % at the default number of grid points; infinite where
    double precision does not suffice for any.

    Args:
        history: what a person is exposed to.
        delta: at which delta.
        points: grid points per standard deviation of a step's loss.

    Returns:
        An upper bound on epsilon.

    Raises:
        PdpsgdError: the computation contradicts itself, so that there is no answer.

    >>> round(epsilon_upper_bound((Exposure(1.0, 64 / 60_000, 1.3, 20_000),), 1e-5), 3)
    0.482
    """
    counted, left = _without_negligible(simplify(history), delta)
    if not counted:
        return 0.0
    if left <= 0:
        return math.inf
    try:
        with np.errstate(all="ignore"):
            found = [_epsilon_in_direction(counted, left, points, removing) for removing in (True, False)]
    except PdpsgdError:
        raise
    except (
        ArithmeticError,
        MemoryError,
        TypeError,
        ValueError,
    ) as error:  # the latter two of grids beyond int64
        raise PdpsgdError(
            f"Expected rounds that double precision can verify. Got {_shown(counted)} at delta={delta:g}: "
            f"{type(error).__name__}."
        ) from error
    return max(math.inf if math.isnan(epsilon) else epsilon for epsilon in found)


def _without_negligible(history: History, delta: float) -> tuple[History, float]:
    """The rounds that matter, and the delta that is left for them.

    Replacing a round by one that does not depend on the person adds at most its total variation distance to delta:
    pi times the steps' sum of q (2 Phi(1/(2 sigma)) - 1).
    """
    counted, left = [], delta
    for exposure in sorted(history, key=_total_variation):
        distance = _total_variation(exposure)
        if distance <= NEGLIGIBLE * delta / len(history):
            left -= distance
        else:
            counted.append(exposure)
    if math.fsum(map(_total_variation, counted)) <= left:
        return (), left
    return tuple(counted), left


def _total_variation(e: Exposure) -> float:
    shift = math.inf if e.noise_multiplier == 0 else 0.5 / e.noise_multiplier
    per_step = e.sample_rate * math.erf(shift / math.sqrt(2))
    return e.participation * min(1.0, e.steps * per_step) * (1 + 1e-9)


def _shown(history: History) -> str:
    return "; ".join(
        f"participation {e.participation:g}, sample rate {e.sample_rate:g}, "
        f"noise multiplier {e.noise_multiplier:g}, {e.steps:g} steps"
        for e in history[:3]
    )


@dataclass(frozen=True)
class _Losses:
    """Losses of an upper distribution: `mass[i]` at (`first` + i) * interval, `infinite` at infinity."""

    first: int
    mass: FloatArray
    infinite: float
    interval: float

    @property
    def losses(self) -> FloatArray:
        return (self.first + np.arange(self.mass.size)) * self.interval


@dataclass(frozen=True)
class _Points:
    """Losses of an upper distribution at any places."""

    losses: FloatArray
    mass: FloatArray
    infinite: float


def _epsilon_in_direction(history: History, delta: float, points: int, removing: bool) -> float:
    tail, most = max(CUT_OFF * delta / (4 * len(history)), SMALLEST_TAIL), MOST_POINTS * points
    drawn = [(_mixed(e, points, tail, removing), 1) for e in history if e.participation < 1]
    plain = [e for e in history if e.participation == 1]
    interval = _common_interval(plain, [part for part, _ in drawn], points, tail, removing)
    while True:
        steps = [
            (_one_step(e.sample_rate, e.noise_multiplier, interval, tail / e.steps, removing)[0], e.steps)
            for e in plain
        ]
        parts = [*steps, *((_on_grid(part, interval), times) for part, times in drawn)]
        total = _Sum(parts, most=most, tail=tail)
        if total.size <= most:
            break
        interval *= 1.1 * total.size / most
    found = total.epsilon(delta)
    if total.error < HIDDEN * delta:
        return found
    tilted = _Sum(parts, most=4 * most, tail=tail, tilt_for=delta)
    return found if tilted.size > 4 * most else min(found, tilted.epsilon(delta))


def _common_interval(
    plain: Sequence[Exposure], drawn: Sequence[_Points], points: int, tail: float, removing: bool
) -> float:
    """Fine enough for every round that matters, and coarse enough for memory."""
    found = [(_step_deviation(e), e.steps, _step_range(e, tail / e.steps, removing)) for e in plain]
    found += [(_deviation(p.losses, p.mass), 1, float(np.ptp(p.losses))) for p in drawn]
    largest = max(deviation**2 * times for deviation, times, _ in found)
    matter = [deviation for deviation, times, _ in found if deviation**2 * times >= 1e-6 * largest]
    return max(min(matter) / points, *(reach / (MOST_POINTS * points) for *_, reach in found), 1e-300)


def _step_deviation(e: Exposure) -> float:
    """About the standard deviation of one step's privacy loss."""
    inverse_variance = min(max(e.noise_multiplier, 1e-150) ** -2, 40.0)
    return min(e.sample_rate * math.sqrt(math.expm1(inverse_variance)), math.sqrt(inverse_variance))


def _deviation(losses: FloatArray, mass: FloatArray) -> float:
    mean = float(mass @ losses)
    return math.sqrt(max(float(mass @ (losses - mean) ** 2), 0.0))


def _step_range(e: Exposure, tail: float, removing: bool) -> float:
    low, high = _ends(e.sample_rate, max(e.noise_multiplier, SMALLEST_NOISE), tail, removing)
    return high - low


def _ends(q: float, sigma: float, tail: float, removing: bool) -> tuple[float, float]:
    """The losses between which a step's loss lies but for `tail` on either side."""
    reach = -float(ndtri(max(tail, SMALLEST_TAIL))) * sigma
    if removing:
        return _loss(-reach, q, sigma), _loss(1 + reach, q, sigma)
    return -_loss(reach, q, sigma), -_loss(-reach, q, sigma)


def _loss(x: float, q: float, sigma: float) -> float:
    """The loss of removing at outcome x: ln(1 - q + q e^((2x - 1)/(2 sigma^2))), which grows with x."""
    stays = math.log1p(-q) if q < 1 else -math.inf
    return float(np.logaddexp(stays, math.log(q) + (x - 0.5) / sigma**2))


def _one_step(
    q: float, sigma: float, interval: float, tail: float, removing: bool
) -> tuple[_Losses, _Losses]:
    """Discretize one Poisson-subsampled Gaussian step: its losses under the upper and the lower distribution.

    Removing: upper (1-q) N(0) + q N(1), lower N(0). Adding: the two exchanged, the loss negated. Lower masses
    at a loss of minus infinity are left out of the second, whose `infinite` is not used.
    """
    if sigma < SMALLEST_NOISE:
        return _telling_step(q, interval, removing)
    low, high = _ends(q, sigma, tail, removing)
    first = math.floor(low / interval)
    edges = np.arange(first, max(math.ceil(high / interval), first + 1) + 1) * interval
    rising = edges if removing else -edges[::-1]
    # e^((x - 1/2)/sigma^2) at the outcomes x of the edges; below 0 where no outcome has so small a loss.
    growth = 1 + np.expm1(rising) / q
    log_growth = np.log1p(np.maximum(np.expm1(rising) / q, -1.0))
    x = 0.5 + sigma**2 * np.where(rising < 700, log_growth, rising - math.log(q))
    zero, one = _cells(x / sigma), _cells((x - 1) / sigma)
    together = (1 - q) * zero + q * one
    # What goes to a cell's right end: upper - lower e^(left end), over 1 - e^-interval. Written so that the part
    # with which both distributions agree, 1 - q, drops out before it can cancel.
    if removing:
        upper, lower = together, zero
        excess = q * (one[1:-1] - zero[1:-1] * growth[:-1])
        noise = q * (_error(x - 1, sigma) + np.abs(growth[:-1]) * _error(x, sigma))
    else:
        upper, lower = zero[::-1], together[::-1]
        excess = np.exp(edges[:-1]) * q * (zero[1:-1] * growth[1:] - one[1:-1])[::-1]
        noise = np.exp(edges[:-1]) * q * (_error(x - 1, sigma) + np.abs(growth[1:]) * _error(x, sigma))[::-1]
    to_right = (excess + noise) / -math.expm1(-interval)
    to_right = np.clip(np.where(np.isfinite(to_right), to_right, np.inf), 0.0, upper[1:-1])
    mass, lower_mass = np.zeros(edges.size), np.zeros(edges.size)
    mass[:-1] += upper[1:-1] - to_right
    mass[1:] += to_right
    mass[0] += upper[0]
    # The lower masses that belong to these; what is left of the lower distribution has a loss of minus infinity.
    right = np.fmin(to_right * np.exp(-edges[1:]), lower[1:-1])
    lower_mass[:-1] += np.fmin((upper[1:-1] - to_right) * np.exp(-edges[:-1]), lower[1:-1] - right)
    lower_mass[1:] += right
    lower_mass[0] += np.fmin(upper[0] * np.exp(-edges[0]), lower[0])
    return _Losses(first, mass, float(upper[-1]), interval), _Losses(first, lower_mass, 0.0, interval)


def _telling_step(q: float, interval: float, removing: bool) -> tuple[_Losses, _Losses]:
    """A step that tells whom it sampled: at least as bad as any noise."""
    if q == 1:
        nothing = _Losses(0, np.zeros(1), 1.0, interval)
        return nothing, nothing
    loss, mass, infinite = (math.log1p(-q), 1 - q, q) if removing else (-math.log1p(-q), 1.0, 0.0)
    upper = _on_grid(_Points(np.array([loss]), np.array([mass]), infinite), interval)
    return upper, _Losses(upper.first, upper.mass * np.exp(-upper.losses), 0.0, interval)


def _cells(z: FloatArray) -> FloatArray:
    """Standard normal mass of (-inf, z0], (z0, z1], ..., (zn, inf), each from the more precise side."""
    below, above = ndtr(z), ndtr(-z)
    inner = np.where(z[1:] + z[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], np.maximum(inner, 0.0), above[-1:]])


def _error(x: FloatArray, sigma: float) -> FloatArray:
    """A bound on the rounding error of the mass between neighboring outcomes."""
    side = ndtr(-np.abs(x / sigma))
    return 4 * UNIT * np.maximum(side[1:], side[:-1])


def _mixed(e: Exposure, points: int, tail: float, removing: bool) -> _Points:
    """The losses of a round that a person is in with probability pi only (docs/theory.md, "The verifier").

    Adding: the upper distribution stays, the loss becomes -ln(1-pi+pi e^-loss). Removing: the loss becomes
    ln(1-pi+pi e^loss), the upper distribution (1-pi) lower + pi upper. Of the two, each is composed by itself,
    and the one that is larger is used: the upper where the loss is positive, the lower where it is negative, so that
    rounding is multiplied by numbers below 1 only.
    """
    pi, q, sigma, steps = e
    most = MOST_POINTS * points
    interval = max(_step_deviation(e) / points, _step_range(e, tail / steps, removing) / most)
    while True:
        upper_step, lower_step = _one_step(q, sigma, interval, tail / steps, removing)
        upper = _Sum([(upper_step, steps)], most=most, tail=tail)
        lower = _Sum([(lower_step, steps)], most=most, tail=tail) if removing else upper
        size = max(upper.size, lower.size)
        if size <= most:
            break
        interval *= 1.1 * size / most
    never = math.log1p(-pi)
    inside, infinite = upper.losses(), upper.infinite
    if not removing:
        moved = -np.logaddexp(never, math.log(pi) - inside.losses)
        losses = np.append(moved, -never)
        return _checked(
            _Points(losses, np.append(inside.mass, infinite + upper.error), 0.0), upper.error + tail
        )
    positive, negative = inside.losses >= 0, lower.losses().losses < 0
    above, below = inside.losses[positive], lower.losses().losses[negative]
    weight = pi + (1 - pi) * np.exp(-above)
    # The error of the sum of masses above a loss, times a weight that falls with the loss, is at most its bound times
    # the weight there: as mass, what the weight falls by, and the rest at infinity.
    falls = -np.diff(np.append(weight, pi))
    over = inside.mass[positive] * weight + upper.error * falls
    under = lower.losses().mass[negative] * (pi * np.exp(below) + (1 - pi))
    absent = (1 - pi) * (-math.expm1(steps * math.log1p(-min(lower.missing, 1 - UNIT))) + lower.error + tail)
    losses = np.concatenate(
        [np.logaddexp(never, math.log(pi) + np.concatenate([above, below])), [0.0, never]]
    )
    mass = np.concatenate([over, under, [2 * lower.error, absent]])
    found = _Points(losses, mass, pi * (infinite + upper.error))
    return _checked(found, 2 * upper.error + 4 * lower.error + 4 * tail)


def _checked(found: _Points, slack: float) -> _Points:
    """Refuse a distribution whose mass is not 1, up to what was added on purpose."""
    total = math.fsum(found.mass) + found.infinite
    if not abs(total - 1) <= 2 * slack + 1e-9:
        fail(
            f"Expected probabilities that sum to 1. Got {total!r}: double precision does not suffice to verify a round "
            "with this participation and noise."
        )
    return found


def _on_grid(found: _Points, interval: float) -> _Losses:
    """Move each mass to the grid points beside it, so that both distributions keep theirs."""
    place = np.floor(found.losses / interval)
    to_right = found.mass * np.expm1(place * interval - found.losses) / math.expm1(-interval)
    to_right = np.clip(np.where(np.isnan(to_right), np.inf, to_right), 0.0, found.mass)
    first = int(place.min())
    index = (place - first).astype(np.int64)
    size = int(index.max()) + 2
    mass = np.zeros(size)
    mass += np.bincount(index, weights=found.mass - to_right, minlength=size)
    mass += np.bincount(index + 1, weights=to_right, minlength=size)
    return _Losses(first, mass, found.infinite, interval)


class _Sum:
    """The sum of independent losses, each part taken `times` times, by one Fourier transform.

    Mass above the window (by Chernoff's bound at most `tail`) counts as infinite. With `tilt_for` = delta the
    transform is taken of the distribution tilted by e^(tilt * loss), with Chernoff's exponent at that delta, which
    keeps relative precision where epsilon is read off, however small delta is. `error` bounds what rounding may
    hide in the (tilted) mass above any loss. If more than `most` points would be needed, `size` says so and nothing
    is computed.
    """

    def __init__(
        self, parts: Sequence[tuple[_Losses, int]], *, most: int, tail: float, tilt_for: float | None = None
    ) -> None:
        self.parts = parts
        self.interval = parts[0][0].interval
        self.missing = 1 - math.fsum(parts[0][0].mass)
        self._first, self.size, self.tilt, self.norm, self.error = 0, 1, 0.0, 0.0, 0.0
        self._mass: FloatArray = np.zeros(1)
        self.infinite = 1.0
        if not all(part.mass.any() and np.isfinite(part.mass.sum()) for part, _ in parts):
            return  # nothing is left at a finite loss
        exponents = self._exponents()
        up = self._cumulants([part.mass for part, _ in parts], exponents)
        self.tilt = (
            0.0 if tilt_for is None else float(exponents[np.argmin((up - math.log(tilt_for)) / exponents)])
        )
        tilted = [_tilted(part, self.tilt) for part, _ in parts]
        self.norm = math.fsum(times * norm for (_, times), (_, norm) in zip(parts, tilted, strict=True))
        self._weights = [weights for weights, _ in tilted]
        if not math.isfinite(self.norm):
            return
        above = self._cumulants(self._weights, exponents)
        below = self._cumulants(self._weights, -exponents)
        high = float(np.min((up - math.log(tail)) / exponents))
        high = max(high, float(np.min((above + 40) / exponents)))
        low = -float(np.min((below + 40) / exponents))
        if not -math.inf < low <= high < math.inf:
            return  # double precision does not tell where the sum lies
        survived = math.fsum(times * math.log1p(-min(part.infinite, 1 - UNIT)) for part, times in parts)
        self.infinite = -math.expm1(survived) + tail
        self._first = math.floor(low / self.interval) - 1
        self.size = math.ceil(high / self.interval) + 2 - self._first
        if self.size <= most:
            self.size = next_fast_len(self.size, real=True)
            self._mass, self.error = self._transform()

    def _exponents(self) -> FloatArray:
        """From far below to far above one over the width of the sum."""
        variance = math.fsum(times * _deviation(part.losses, part.mass) ** 2 for part, times in self.parts)
        furthest = max(float(np.abs(part.losses).max()) for part, _ in self.parts)
        width = max(math.sqrt(variance), self.interval)
        low, high = 1e-2 / max(width, furthest), 1e3 / width
        return np.geomspace(low, high, 8 * max(5, math.ceil(math.log10(high / low))))

    def _cumulants(self, masses: Iterable[FloatArray], exponents: FloatArray) -> FloatArray:
        """An upper bound on ln of the mean of e^(exponent * sum), for exponents of the same sign."""
        total = np.zeros(exponents.size)
        for (part, times), mass in zip(self.parts, masses, strict=True):
            losses, few = _coarser(part.losses, mass, up=exponents[0] > 0)
            log_mass = np.log(few)
            for index, exponent in enumerate(exponents):
                peaks = log_mass + exponent * losses
                top = float(peaks.max())
                total[index] += times * (top + math.log(float(np.exp(peaks - top).sum())))
        return total

    def _transform(self) -> tuple[FloatArray, float]:
        """The tilted masses of the sum on its window, and a bound on their rounding errors.

        A spectrum is wrong by at most 8 UNIT (times + log2 size) of itself by powers and transforms, and, by those of
        the parts, by 8 UNIT log2 size times each part's norm, times the spectrum of all others. Parseval's identity and
        Cauchy and Schwarz's inequality make of it a bound on any sum of absolute errors.
        """
        if len(self.parts) == 1 and self.parts[0][1] == 1:
            part, mass = self.parts[0][0], np.zeros(self.size)
            at = part.first - self._first + np.arange(part.mass.size)
            kept = (at >= 0) & (at < self.size)
            mass[at[kept]] = self._weights[0][kept]
            return mass, 8 * UNIT
        spectrum = np.ones(self.size // 2 + 1, dtype=complex)
        log_spectrum = np.zeros(self.size // 2 + 1)
        logs, offset = [], 0
        for (part, times), weights in zip(self.parts, self._weights, strict=True):
            wrapped = np.bincount(np.arange(weights.size) % self.size, weights=weights, minlength=self.size)
            one = rfft(wrapped)
            spectrum *= one**times
            logs.append(np.log(np.maximum(np.abs(one), 1e-300)))
            log_spectrum += times * logs[-1]
            offset += part.first * times
        steps = sum(times for _, times in self.parts)
        digits = math.log2(self.size)
        error = (steps + digits) * _norm(log_spectrum)
        for (_, times), log_one, weights in zip(self.parts, logs, self._weights, strict=True):
            error += times * digits * float(np.linalg.norm(weights)) * _norm(log_spectrum - log_one)
        mass = np.roll(irfft(spectrum, n=self.size), (offset - self._first) % self.size)
        bound = 8 * UNIT * error
        total = float(mass.sum())
        if not abs(total - 1) <= 4 * bound + 1e-9:
            fail(
                f"Expected probabilities that sum to 1. Got {total!r}: double precision does not suffice to verify "
                f"{steps:g} steps."
            )
        return np.maximum(mass, 0.0), bound

    def losses(self) -> _Losses:
        """Return the losses of a sum that was not tilted, without what rounding may hide."""
        return _Losses(self._first, self._mass * math.exp(self.norm), self.infinite, self.interval)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 at which the hockey-stick divergence is at most delta."""
        if self.infinite > delta:
            return math.inf
        losses = (self._first + np.arange(self.size)) * self.interval
        mass = np.exp(np.minimum(np.log(self._mass) + self.norm - self.tilt * losses, 0.0))
        hidden = self.error * np.exp(np.minimum(self.norm - self.tilt * (losses - self.interval), 600.0))
        upper = np.cumsum(mass[::-1])[::-1] + self.infinite + hidden
        # lower[j] = sum over i >= j of mass[i] * e^(loss[j] - loss[i]), as a recursion that cannot overflow.
        lower = lfilter([1.0], [1.0, -math.exp(-self.interval)], mass[::-1])[::-1]
        enough = np.flatnonzero((losses >= 0) & (upper - lower <= delta))
        if not enough.size:
            return math.inf
        place = enough[0]
        # Between this loss and the one before, the divergence is upper - e^(epsilon - loss) * lower.
        before = float(losses[place]) - self.interval
        if upper[place] <= delta:
            return max(0.0, before)
        return max(0.0, before, float(losses[place]) + math.log((upper[place] - delta) / lower[place]))


def _coarser(losses: FloatArray, mass: FloatArray, *, up: bool) -> tuple[FloatArray, FloatArray]:
    """Neighboring masses together, all at the highest of their losses, or all at the lowest."""
    group = -(-mass.size // FEW_POINTS)
    padded = np.append(mass, np.zeros(-mass.size % group)).reshape(-1, group).sum(axis=1)
    at = np.minimum(np.arange(padded.size) * group + (group - 1 if up else 0), mass.size - 1)
    return losses[at][padded > 0], padded[padded > 0]


def _tilted(part: _Losses, tilt: float) -> tuple[FloatArray, float]:
    """The masses times e^(tilt * loss), over their sum, and the logarithm of the sum."""
    logs = np.log(part.mass) + tilt * part.losses
    top = float(np.max(logs, initial=-math.inf, where=part.mass > 0))
    weights = np.exp(logs - top)
    return weights / weights.sum(), top + math.log(float(weights.sum()))


def _norm(log_spectrum: FloatArray) -> float:
    """The Euclidean norm of a whole spectrum, of which a half is given by its logarithms."""
    return math.sqrt(2 * float(np.exp(np.minimum(2 * log_spectrum, 0.0)).sum()))
