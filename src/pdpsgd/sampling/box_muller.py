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
from collections.abc import Sequence
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
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
Further = Sequence[tuple[int, BitGenerator]]  # up to which pair further words come from which generator


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
        """Return six rows of numbers, one after the other, and one of flags."""
        if len(self._flags) < pairs:
            self._floats, self._flags = np.empty(6 * pairs), np.empty(pairs, dtype=np.bool_)
        return self._floats[: 6 * pairs].reshape(6, pairs), self._flags[:pairs]


_workspace = _Workspace()


def normals_of(
    words: WordArray, further: BitGenerator | Further, *, scale: float, out: _Floats | None = None
) -> _Floats:
    """Return as many normal numbers as words, which are a multiple of 16; `out` may be the memory of the words."""
    if not isinstance(further, Sequence):
        further = [(len(words) // 2, further)]
    numbers = np.empty(len(words)) if out is None else out
    rows, flags = _workspace.take(len(words) // 2)
    own, radius = rows[0].view(np.uint64), rows[1]
    _eights(own)[:] = _eights(words)[::2]
    _radii(own.view(np.int64), radius, further, rows[2:], flags)
    np.multiply(radius, scale, radius)
    _eights(own)[:] = _eights(words)[1::2]
    for place, coordinate in enumerate(_turned(radius, own.view(np.int64), rows[2:4], rows[4:])):
        _eights(numbers)[place::2] = _eights(coordinate)
    return numbers


def _eights(values: WordArray | _Floats) -> npt.NDArray[np.void]:
    """Return the array as pieces of eight numbers, which are copied as a whole: several times faster."""
    return values.view(f"V{PAIRS * values.itemsize}")


def _constant(value: float) -> npt.NDArray[Any]:
    """Return a number as an array, as numpy would make it of a number of Python's in every call."""
    return np.array(value)


def _bits(value: float) -> npt.NDArray[Any]:
    return np.array(value, dtype=np.float64).view(np.int64)


# Powers of two that take a word to a fraction are in the constants, where they cost nothing and round nothing.
_WORD, _EIGHTH = 2.0**64, 2.0**61
_ZERO, _TWO, _HIGH, _LOW = map(_constant, (0.0, 2.0, LN2_HIGH, LN2_LOW))
_FEW, _PLACES, _TO_SIGN, _ALL_BUT_SIGN = map(_constant, (2.0**53, 52, 63, 2**63 - 1))
_TO_SWAP, _ONE_PLACE = map(_constant, (2, 1))
_POWERS_FROM, _IN_EIGHTH, _SIGN = map(_constant, (_SQRT_HALF_BITS + 2**52 - 1, 2**61 - 1, -(2**63)))
_WORD_BITS, _WHOLE = _bits(_WORD), _constant(1.5 * 2.0**52)
_WHOLE_BITS = (
    _bits(1.5 * 2.0**52) + 64
)  # whole numbers up to 2^51 added to these bits are floats, off by _WHOLE
_LOG = tuple(map(_constant, LOG))
_COS = tuple(_constant(some / _EIGHTH ** (2 * power + 2)) for power, some in enumerate(COS))
_SIN = tuple(_constant(some / _EIGHTH ** (2 * power + 3)) for power, some in enumerate(SIN))
_BOTH = tuple(np.array([pair]).T for pair in zip(_COS, _SIN, strict=False))
_BEGINS = np.array([[1.0], [QUARTER_PI / _EIGHTH]])


def _radii(words: IntArray, exponent: _Floats, further: Further, work: _Floats, flags: _Flags) -> None:
    """Write sqrt(-2 ln u); the words are used up.

    With n the distance of u from 0 or, if that is nearer, from 1, u is 2^-e (1 + f), and 1 + f is between the square
    roots of 1/2 and 2: f = 2^e n - 1 below 1/2, and e - 2^e n above, where e is 0 or 1. Both are exact.
    """
    fraction, upper, powers, spare = work
    is_upper, power, bits = (some.view(np.int64) for some in (upper, powers, fraction))
    np.right_shift(words, _TO_SIGN, is_upper)
    np.bitwise_xor(words, is_upper, words)
    nearness = fraction  # in units of 2^-64
    np.copyto(nearness, words)
    places = np.flatnonzero(np.less(nearness, _FEW, flags))
    begins = np.searchsorted(places, [0, *(end for end, _ in further)]).tolist()
    for (_, generator), begin, end in zip(further, begins[:-1], begins[1:], strict=True):
        some = places[begin:end]
        nearness[some] = np.multiply(_all_continued(words[some].tolist(), generator), _WORD)
    np.bitwise_and(is_upper, _WORD_BITS, power)
    np.subtract(nearness, powers, powers)
    # u, rounded: for its exponent. (At sqrt(1/2) 0 and 1 give equal bits.)
    np.bitwise_and(power, _ALL_BUT_SIGN, power)
    np.subtract(_POWERS_FROM, power, power)
    np.right_shift(power, _PLACES, power)  # e - 64
    np.add(power, _WHOLE_BITS, exponent.view(np.int64))
    np.subtract(exponent, _WHOLE, exponent)
    np.left_shift(power, _PLACES, power)
    np.add(bits, power, bits)  # 2^e n
    np.copyto(spare, np.greater(exponent, _ZERO, flags))
    np.subtract(fraction, spare, fraction)
    np.bitwise_and(is_upper, _SIGN, is_upper)
    np.bitwise_xor(bits, is_upper, bits)
    half = _minus_log(exponent, fraction, [upper, powers, spare])
    np.add(half, half, half)
    np.sqrt(half, half)


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


def _turned(radius: _Floats, turn: IntArray, numbers: _Floats, work: _Floats) -> _Floats:
    """Write the two coordinates of a point at the radius, turned by the angle that the word says."""
    (cosine, sine), (part, square) = numbers, work
    bits, swapped = square.view(np.int64), part.view(np.int64)
    np.copyto(part, np.bitwise_and(turn, _IN_EIGHTH, bits))
    np.multiply(part, part, square)
    # Cosine and sine in one, but for the power that the cosine's polynomial has alone.
    np.multiply(square, _COS[-1], cosine)
    np.add(cosine, _COS[-2], cosine)
    np.multiply(cosine, square, cosine)
    np.multiply(square, _SIN[-1], sine)
    for coefficient in _BOTH[-2::-1]:
        np.add(numbers, coefficient, numbers)
        np.multiply(numbers, square, numbers)
    np.add(numbers, _BEGINS, numbers)
    np.multiply(sine, part, sine)
    np.multiply(numbers, radius, numbers)
    # The third bit says whether they change places: all bits of that are set, or none.
    both = numbers.view(np.int64)
    np.left_shift(turn, _TO_SWAP, swapped)
    np.right_shift(swapped, _TO_SIGN, swapped)
    np.bitwise_xor(both[0], both[1], bits)
    np.bitwise_and(bits, swapped, bits)
    np.bitwise_xor(both, bits, both)
    for coordinate in both:
        np.bitwise_and(turn, _SIGN, bits)
        np.bitwise_xor(coordinate, bits, coordinate)
        np.left_shift(turn, _ONE_PLACE, turn)
    return numbers


def _polynomial(coefficients: tuple[npt.NDArray[Any], ...], x: _Floats, value: _Floats) -> None:
    """Write the polynomial's values at x."""
    np.multiply(x, coefficients[-1], value)
    for coefficient in coefficients[-2:0:-1]:
        np.add(value, coefficient, value)
        np.multiply(value, x, value)
    np.add(value, coefficients[0], value)
