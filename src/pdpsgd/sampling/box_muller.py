"""Normal numbers from uniform words by the method of Box and Muller, the same bits on every machine.

Everything is done with additions, products, quotients and square roots of float64, which IEEE 754 defines to the last
bit; logarithm, sine and cosine are polynomials. So this file, which needs nothing but numpy, and the compiled code
(`native/kernels.c`, several times faster) give equal bits, and a run can go on where another machine left it.

Of sixteen numbers that belong together, eight pairs, the pairs' radii come from the first eight words and their angles
from the next eight. The first number of each pair comes first, then the second of each.

The radius is sqrt(-2 ln u) for u uniform in (0, 1). Both small u (the tails) and u near 1 (the center) have 53
significant bits, of u and of 1 - u: a word of which fewer than 53 bits are left is continued with words of a second
generator, once in 1,024 pairs. So u is never 0, and numbers reach 35 standard deviations. The angle has 61 bits
within an eighth of a turn; which eighth, three bits say.

Guarantee: take uniform words as the leading bits of u and of the angle. Then a number x computed here differs from the
exact normal number z that belongs to them by at most 2^-53 (10 |z| + 2^-8 (|z| + |z'|)), where z' is the other number
of the pair, as long as u and 1 - u are above 2^-843. Proof: "Noise in finite precision" in `docs/theory.md`.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.sampling.words import BitGenerator, read_into

PAIRS = 8
GROUP = 2 * PAIRS  # numbers, and words, that belong together
MOST_WORDS = 14  # for one radius: 896 bits, 35.2 standard deviations

# Found by Remez's algorithm, lowest power first. With f in [sqrt(1/2) - 1, sqrt(2) - 1] and s = f / (2 + f),
# ln(1 + f) = f - s * (f - s^2 LOG(s^2)) to 2^-57; for f in [0, 1], sin(f pi / 4) = f * (pi / 4 + f^2 SIN(f^2)) to
# 2^-56 and cos(f pi / 4) = 1 + f^2 COS(f^2) to 2^-55 (all relative).
LOG = (
    0.666666666666667,
    0.3999999999989851,
    0.2857142862637019,
    0.2222221107751543,
    0.18182892881223728,
    0.15331608113624687,
    0.14617735358744183,
)
SIN = (
    -0.08074551218828077,
    0.002490394570192008,
    -3.657620417386549e-05,
    3.1336165355571974e-07,
    -1.7571791896413924e-09,
    6.887487884376266e-12,
)
COS = (
    -0.30842513753404244,
    0.015854344243815488,
    -0.0003259918869271997,
    3.590860447449052e-06,
    -2.4611366239158276e-08,
    1.1500679776350424e-10,
    -3.863159461753804e-13,
)
QUARTER_PI = math.pi / 4
LN2_HIGH = float.fromhex("0x1.62e42fefa38p-1")  # 42 bits: exact times any exponent there is
LN2_LOW = float.fromhex("0x1.ef35793c7673p-45")
NEAR_ONE = 0.2928932188134524  # 1 - sqrt(1/2): above, 1 - u is taken as u / 2^-1 - 1
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


def normals(words: BitGenerator, further: BitGenerator, count: int, *, scale: float = 1.0) -> _Floats:
    """Return independent normal numbers of standard deviation `scale`.

    Args:
        words: Where the words of radii and angles come from, as many as numbers.
        further: Where the rare words come from that continue a radius.
        count: How many; up to a multiple of 16, further numbers are made and thrown away.
        scale: The standard deviation.
    """
    numbers = np.empty(-(-count // GROUP) * GROUP)
    fill(numbers, words, further, scale=scale)
    return numbers[:count]


def fill(numbers: _Floats, words: BitGenerator, further: BitGenerator, *, scale: float) -> None:
    """Write normal numbers, a multiple of 16 of them; their words come into the same memory first."""
    own = numbers.view(np.uint64)
    read_into(own, words)
    normals_of(own, further, scale=scale, out=numbers)


class _Workspace(threading.local):
    """Memory for the pairs of a block, kept: asking the system for it anew takes longer than the arithmetic."""

    def __init__(self) -> None:
        self._floats, self._flags = np.empty(0), np.empty(0, dtype=np.bool_)

    def take(self, pairs: int) -> tuple[_Floats, _Flags]:
        """Return seven rows of numbers, one after the other, and one of flags."""
        if len(self._flags) < pairs:
            self._floats, self._flags = np.empty(7 * pairs), np.empty(pairs, dtype=np.bool_)
        return self._floats[: 7 * pairs].reshape(7, pairs), self._flags[:pairs]


workspace = _Workspace()


def normals_of(
    words: WordArray, further: BitGenerator, *, scale: float, out: _Floats | None = None
) -> _Floats:
    """Return as many normal numbers as words, which are a multiple of 16; `out` may be the memory of the words."""
    numbers = np.empty(len(words)) if out is None else out
    rows, flags = workspace.take(len(words) // 2)
    kept, radius, *work = rows
    own = kept.view(np.uint64)
    _eights(own)[:] = _eights(words)[::2]
    _radii(own, radius, further, work, flags)
    np.multiply(radius, scale, radius)
    _eights(own)[:] = _eights(words)[1::2]
    for place, coordinate in enumerate(_turned(radius, own, rows[2:])):
        _eights(numbers)[place::2] = _eights(coordinate)
    return numbers


def _eights(values: WordArray | _Floats) -> npt.NDArray[np.void]:
    """Return the array as pieces of eight numbers, which are copied as a whole: several times faster."""
    return values.view(f"V{PAIRS * values.itemsize}")


def _constant(value: float) -> npt.NDArray[Any]:
    """Return a number as an array, as numpy would make it of a number of Python's in every call."""
    return np.array(value)


_TWO_POWERS = {power: _constant(2.0**power) for power in (-64, -61)}
_ONE, _TWO, _HIGH, _LOW = map(_constant, (1.0, 2.0, LN2_HIGH, LN2_LOW))
_NEAR_ONE, _FEW, _PLACES, _ALL_BUT_SIGN, _TO_SWAP = map(_constant, (NEAR_ONE, 2**53, 52, 63, 2))
_POWERS_FROM, _IN_EIGHTH, _SIGN = map(_constant, (_SQRT_HALF_BITS + 2**52 - 1, 2**61 - 1, -(2**63)))
_LOG = tuple(map(_constant, LOG))
_COS_AND_SIN = tuple(np.array(pair)[:, None] for pair in zip(COS, (*SIN, 0.0), strict=True))
_ONE_AND_QUARTER_PI, _TO_SIGNS = np.array([[1.0], [QUARTER_PI]]), np.array([[0], [1]])


def _radii(
    words: WordArray, exponent: _Floats, further: BitGenerator, work: list[_Floats], flags: _Flags
) -> None:
    """Write sqrt(-2 ln u)."""
    nearness, fraction, far, more, spare = work
    signed, distance, is_upper = words.view(np.int64), far.view(np.int64), spare.view(np.int64)
    # The distance of u from 0 or, if that is nearer, from 1, in units of 2^-64.
    np.right_shift(signed, _ALL_BUT_SIGN, is_upper)
    np.bitwise_xor(signed, is_upper, distance)
    np.copyto(nearness, distance)
    np.multiply(nearness, _TWO_POWERS[-64], nearness)
    places = np.flatnonzero(np.less(distance, _FEW, flags))
    nearness[places] = _all_continued(distance[places].tolist(), further)
    _split(nearness, exponent, fraction, more)
    # u = 1 - nearness = 2^-far (1 + f): f is exact.
    np.copyto(far, np.greater_equal(nearness, _NEAR_ONE, flags))
    _replace(exponent, far, is_upper, more)
    np.add(nearness, np.multiply(nearness, far, more), nearness)
    np.subtract(far, nearness, far)
    _replace(fraction, far, is_upper, more)
    half = _minus_log(exponent, fraction, [nearness, far, more])
    np.add(half, half, half)
    np.sqrt(half, half)


def _replace(values: _Floats, by: _Floats, where: IntArray, work: _Floats) -> None:
    """Write one over the other where all bits are set, not where none is: many times faster than by a flag."""
    bits, others, change = (some.view(np.int64) for some in (values, by, work))
    np.bitwise_xor(bits, others, change)
    np.bitwise_and(change, where, change)
    np.bitwise_xor(bits, change, bits)


def _all_continued(distances: list[int], further: BitGenerator) -> list[float]:
    """Return `continued` of each, in order; nearly always one word each is enough, and all are read at once."""
    if not all(distances):
        return [continued(distance, further) for distance in distances]
    words = further.random_raw(len(distances)).tolist()
    return [math.ldexp(float(some << 64 | word), -128) for some, word in zip(distances, words, strict=True)]


def continued(distance: int, further: BitGenerator) -> float:
    """Return a number of 64 bits, in units of 2^-64, with further words until it has 53 significant bits."""
    bits = 64
    while distance < 2**53 and bits < 64 * MOST_WORDS:
        distance = distance << 64 | int(further.random_raw(1)[0])
        bits += 64
    return math.ldexp(float(max(distance, 1)), -bits)


def _split(number: _Floats, exponent: _Floats, fraction: _Floats, work: _Floats) -> None:
    """Write e and f with number = 2^-e (1 + f), and 1 + f between the square roots of 1/2 and 2; it is at most 1/2."""
    bits, powers, mantissa = (some.view(np.int64) for some in (number, work, fraction))
    np.subtract(_POWERS_FROM, bits, powers)
    np.right_shift(powers, _PLACES, powers)
    np.copyto(exponent, powers)
    np.add(bits, np.left_shift(powers, _PLACES, mantissa), mantissa)
    np.subtract(fraction, _ONE, fraction)


def _minus_log(exponent: _Floats, fraction: _Floats, work: list[_Floats]) -> _Floats:
    """Return -ln(2^-e (1 + f)), in place of e."""
    s, square, correction = work
    np.divide(fraction, np.add(fraction, _TWO, s), s)
    np.multiply(s, s, square)
    _polynomial(_LOG, square, correction)
    np.multiply(correction, square, correction)
    np.subtract(fraction, correction, correction)
    np.multiply(correction, s, correction)
    np.add(correction, np.multiply(exponent, _LOW, s), correction)
    np.subtract(correction, fraction, correction)
    np.multiply(exponent, _HIGH, exponent)
    return np.add(exponent, correction, exponent)


def _turned(radius: _Floats, words: WordArray, work: _Floats) -> _Floats:
    """Return the two coordinates of a point at the radius, turned by the angle that the word says."""
    numbers, part, square, signs = work[:2], work[2], work[3], work[3:5].view(np.int64)
    turn, bits = words.view(np.int64), square.view(np.int64)
    np.copyto(part, np.bitwise_and(turn, _IN_EIGHTH, bits))
    np.multiply(part, _TWO_POWERS[-61], part)
    np.multiply(part, part, square)
    # Cosine and sine in one: what the sine's polynomial has one power less for begins with a 0.
    _polynomial(_COS_AND_SIN, square, numbers)
    np.multiply(numbers, square, numbers)
    np.add(numbers, _ONE_AND_QUARTER_PI, numbers)
    np.multiply(numbers[1], part, numbers[1])
    np.multiply(numbers, radius, numbers)
    # The third bit says whether they change places: all bits of that are set, or none.
    swapped, change, both = part.view(np.int64), square.view(np.int64), numbers.view(np.int64)
    np.left_shift(turn, _TO_SWAP, swapped)
    np.right_shift(swapped, _ALL_BUT_SIGN, swapped)
    np.bitwise_xor(both[0], both[1], change)
    np.bitwise_and(change, swapped, change)
    np.bitwise_xor(both, change, both)
    np.bitwise_and(np.left_shift(turn, _TO_SIGNS, signs), _SIGN, signs)
    np.bitwise_xor(both, signs, both)
    return numbers


def _polynomial(coefficients: tuple[npt.NDArray[Any], ...], x: _Floats, value: _Floats) -> None:
    """Write the polynomial's values at x."""
    np.multiply(x, coefficients[-1], value)
    for coefficient in coefficients[-2:0:-1]:
        np.add(value, coefficient, value)
        np.multiply(value, x, value)
    np.add(value, coefficients[0], value)
