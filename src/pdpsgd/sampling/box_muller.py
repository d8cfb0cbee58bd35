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

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.sampling.words import BitGenerator

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
_SIGN = np.uint64(1 << 63)

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
    groups = -(-count // GROUP)
    return normals_of(words.random_raw(GROUP * groups), further, scale=scale)[:count]


class _Workspace(threading.local):
    """Memory for the pairs of a block, kept: asking the system for it anew takes longer than the arithmetic."""

    def __init__(self) -> None:
        self._floats, self._flags = np.empty((7, 0)), np.empty(0, dtype=np.bool_)

    def take(self, pairs: int) -> tuple[list[_Floats], _Flags]:
        """Return seven arrays of numbers and one of flags."""
        if len(self._flags) < pairs:
            self._floats, self._flags = np.empty((7, pairs)), np.empty(pairs, dtype=np.bool_)
        return [row[:pairs] for row in self._floats], self._flags[:pairs]


_workspace = _Workspace()


def normals_of(words: WordArray, further: BitGenerator, *, scale: float) -> _Floats:
    """Return as many normal numbers as words, which are a multiple of 16."""
    in_groups = words.reshape(-1, 2, PAIRS)
    (kept, *work), flags = _workspace.take(len(words) // 2)
    own = kept.view(np.uint64)
    np.copyto(own.reshape(-1, PAIRS), in_groups[:, 0])
    radius = _radii(own, further, work, flags)
    radius *= scale
    np.copyto(own.reshape(-1, PAIRS), in_groups[:, 1])
    numbers = np.empty((len(in_groups), 2, PAIRS))
    coordinates = _turned(radius, own, [some for some in work if some is not radius])
    for place, coordinate in enumerate(coordinates):
        np.copyto(numbers[:, place], coordinate.reshape(-1, PAIRS))
    return numbers.reshape(-1)


def _radii(words: WordArray, further: BitGenerator, work: list[_Floats], flags: _Flags) -> _Floats:
    """Return sqrt(-2 ln u), in one of the arrays to work in."""
    nearness, exponent, fraction, far, more, spare = work
    signed, distance, is_upper = words.view(np.int64), far.view(np.int64), spare.view(np.int64)
    # The distance of u from 0 or, if that is nearer, from 1, in units of 2^-64.
    np.right_shift(signed, 63, out=is_upper)
    np.bitwise_xor(signed, is_upper, out=distance)
    np.copyto(nearness, distance)
    nearness *= 2.0**-64
    places = np.flatnonzero(np.less(distance, 2**53, out=flags))
    nearness[places] = _all_continued(distance[places].tolist(), further)
    _split(nearness, exponent, fraction, more)
    # u = 1 - nearness = 2^-far (1 + f): f is exact.
    np.copyto(far, np.greater_equal(nearness, NEAR_ONE, out=flags))
    _replace(exponent, far, is_upper, more)
    nearness += np.multiply(nearness, far, out=more)
    np.subtract(far, nearness, out=far)
    _replace(fraction, far, is_upper, more)
    half = _minus_log(exponent, fraction, [nearness, far, more])
    half += half
    return np.sqrt(half, out=half)


def _replace(values: _Floats, by: _Floats, where: IntArray, work: _Floats) -> None:
    """Write one over the other where all bits are set, not where none is: many times faster than by a flag."""
    bits, others, change = (some.view(np.int64) for some in (values, by, work))
    np.bitwise_xor(bits, others, out=change)
    change &= where
    bits ^= change


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
    """Write e and f with number = 2^-e (1 + f), and 1 + f between the square roots of 1/2 and 2."""
    bits, powers, mantissa = (some.view(np.int64) for some in (number, work, fraction))
    np.subtract(bits, _SQRT_HALF_BITS, out=powers)
    powers >>= 52
    np.subtract(bits, np.left_shift(powers, 52, out=mantissa), out=mantissa)
    fraction -= 1.0
    np.copyto(exponent, np.negative(powers, out=powers))


def _minus_log(exponent: _Floats, fraction: _Floats, work: list[_Floats]) -> _Floats:
    """Return -ln(2^-e (1 + f)), in place of e."""
    s, square, correction = work
    np.divide(fraction, np.add(fraction, 2.0, out=s), out=s)
    np.multiply(s, s, out=square)
    _polynomial(LOG, square, correction)
    correction *= square
    np.subtract(fraction, correction, out=correction)
    correction *= s
    correction += np.multiply(exponent, LN2_LOW, out=s)
    correction -= fraction
    exponent *= LN2_HIGH
    exponent += correction
    return exponent


def _turned(radius: _Floats, words: WordArray, work: list[_Floats]) -> tuple[_Floats, _Floats]:
    """Return the two coordinates of a point at the radius, turned by the angle that the word says."""
    part, square, sine, cosine, more = work
    bits = more.view(np.uint64)
    np.copyto(part, np.bitwise_and(words, np.uint64(2**61 - 1), out=bits).view(np.int64))
    part *= 2.0**-61
    np.multiply(part, part, out=square)
    _polynomial(SIN, square, sine)
    sine *= square
    sine += QUARTER_PI
    sine *= part
    sine *= radius
    _polynomial(COS, square, cosine)
    cosine *= square
    cosine += 1.0
    cosine *= radius
    # The third bit says whether they change places: all bits of that are set, or none.
    swapped, change = part.view(np.int64), square.view(np.int64)
    np.left_shift(words.view(np.int64), 2, out=swapped)
    swapped >>= 63
    np.bitwise_xor(cosine.view(np.int64), sine.view(np.int64), out=change)
    change &= swapped
    for one in (cosine.view(np.int64), sine.view(np.int64)):
        one ^= change
    np.bitwise_xor(first := cosine.view(np.uint64), np.bitwise_and(words, _SIGN, out=bits), out=first)
    np.left_shift(words, np.uint64(1), out=bits)
    np.bitwise_xor(second := sine.view(np.uint64), np.bitwise_and(bits, _SIGN, out=bits), out=second)
    return cosine, sine


def _polynomial(coefficients: tuple[float, ...], x: _Floats, value: _Floats) -> None:
    """Write the polynomial's values at x."""
    np.multiply(x, coefficients[-1], out=value)
    for coefficient in reversed(coefficients[1:-1]):
        value += coefficient
        value *= x
    value += coefficients[0]
