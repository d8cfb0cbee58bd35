"""Compares the compiled code with published answers and with numpy, to the bit, before it is used."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.sampling import box_muller, grid
from pdpsgd.sampling.native import calls
from pdpsgd.sampling.native.calls import AesWords
from pdpsgd.sampling.subsets import choose_records

# AES-256, key, block and result: FIPS 197 (appendix C.3), SP 800-38A (appendices F.1.5 and F.5.5), and zeros.
KNOWN_ANSWERS = (
    (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        "00112233445566778899aabbccddeeff",
        "8ea2b7ca516745bfeafc49904b496089",
    ),
    (
        "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        "6bc1bee22e409f96e93d7e117393172a",
        "f3eed1bdb5d2a03c064b5a7e3db181f8",
    ),
    (
        "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        "0bdf7df1591716335e9a8b15c860c502",
    ),
    ("00" * 32, "00" * 16, "dc95c078a2408989ad48a21492842087"),
)
# Words at which the ways through the code part.
_NEAR_ONE = round((1 - math.sqrt(0.5)) * 2.0**64)  # of 1 - u: where the exponent of u changes
_EDGES = (
    *(0, 1, 2**53 - 1, 2**53, 2**61 - 1, 2**61, 2**62, 2**63 - 1),
    *(_NEAR_ONE - 2**11, _NEAR_ONE - 1, _NEAR_ONE, _NEAR_ONE + 2**11),
)
_SCALES = (
    grid.Scale(2.0**32, 22, 2.0**-10),
    grid.Scale(3.3 * 2.0**31, 21, 2.0**-9),
    grid.Scale(700.5, 0, 2.0**-40),
    grid.Scale(1.7 * 2.0**46, 36, 1.0),
)


def agrees_with_numpy(code: ctypes.CDLL) -> bool:
    """Compare the compiled code with what it stands for."""
    return (
        bool(code.supported())
        and all(_encrypts(code, *map(bytes.fromhex, answer)) for answer in KNOWN_ANSWERS)
        and _same_words(code)
        and _same_words_of_places(code)
        and _same_records(code)
        and _same_normals(code)
        and all(_same_release(code, scale, kind) for scale in _SCALES for kind in (np.float32, np.float64))
        and all(_same_integers(code, kind) for kind in (np.float32, np.float64))
    )


def _encrypts(code: ctypes.CDLL, key: bytes, block: bytes, result: bytes) -> bool:
    return AesWords(code, key).encrypt(block) == result


def _same_words(code: ctypes.CDLL) -> bool:
    """Words in parts of all sizes, against the counter's blocks one by one."""
    key, block = bytes(range(7, 39)), AesWords(code, bytes(range(7, 39)))
    wanted = b"".join(block.encrypt(number.to_bytes(16, "big")) for number in range(300))
    words = AesWords(code, key)
    found = np.concatenate([words.random_raw(size) for size in (1, 0, 2, 3, 64, 129, 66, 1, 334)])
    return found.astype("<u8").tobytes() == wanted


def _same_words_of_places(code: ctypes.CDLL) -> bool:
    """Words of places, out of order, against blocks one by one."""
    words, places = AesWords(code, bytes(range(3, 35))), np.array([5, 0, 2**39, 7], dtype=np.int64)
    wanted = [
        words.encrypt(((place << 24) + block).to_bytes(16, "big"))
        for place in places.tolist()
        for block in range(3)
    ]
    return words.words_at(places, 3).astype("<u8").tobytes() == b"".join(wanted)


def _same_records(code: ctypes.CDLL) -> bool:
    """Records of people who have none, some, as many as take part, one more, and many more."""
    words = AesWords(code, bytes(range(9, 41)))
    counts = np.r_[0, 1, np.arange(40) % 9, 0, 20, 5000]
    starts = np.concatenate(([0], np.cumsum(counts)))
    order, people = np.arange(starts[-1])[::-1].copy(), np.r_[44, 0, np.arange(1, 44)]
    for most in (1, 2, 5, 6):

        def words_of(some: IntArray, most: int = most) -> WordArray:
            return words.words_at(some, -(-most // 2))[:, :most]

        found = words.choose_records(people, most, order=order, starts=starts)
        wanted = choose_records(people, most, order=order, starts=starts, words_of=words_of)
        if not all(map(np.array_equal, found, wanted)):
            return False
    return True


def _same_normals(code: ctypes.CDLL) -> bool:
    """Normal numbers of edges, and of words so many that some are continued."""
    edges = np.array([*_EDGES, *(2**64 - 1 - edge for edge in _EDGES)], dtype=np.uint64)
    angles = np.repeat(edges, len(edges)).reshape(-1, 8)
    words = np.stack([np.tile(edges, len(edges)).reshape(-1, 8), angles], axis=1).ravel()
    words = np.concatenate([words, AesWords(code, bytes(range(32))).random_raw(2**14)])
    further = [AesWords(code, bytes(range(1, 33))) for _ in range(2)]
    found = calls.normals_of(words, further[0], scale=1.1)
    wanted = box_muller.normals_of(words, further[1], scale=1.1)
    went_as_far = further[0].random_raw(1) == further[1].random_raw(1)
    return np.array_equal(found.view(np.uint64), wanted.view(np.uint64)) and bool(went_as_far)


def _same_release(code: ctypes.CDLL, scale: grid.Scale, kind: type[np.floating]) -> bool:
    results = []
    for add_noise in (calls.add_noise, grid.add_noise):
        words, further = (AesWords(code, bytes([place] * 32)) for place in (5, 6))
        total = np.arange(-1200, 1203, dtype=np.int64) * 0x0000_1234_5678_9ABD
        noised = np.empty(len(total), dtype=kind)
        add_noise(total, noised, scale, words, further)
        results.append((noised, words.random_raw(1), further.random_raw(1)))
    return all(map(np.array_equal, *results))


def _same_integers(code: ctypes.CDLL, kind: type[np.floating]) -> bool:
    """Halves, small and large numbers; and each way of being too large, at each place of a vector."""
    halves = np.arange(-40, 41) / 2.0
    sums = np.concatenate([halves, halves * 2.0**18 + 0.5, halves * 2.0**50, halves / 3, [0.0, -0.0]]).astype(
        kind
    )
    wanted = np.rint(sums.astype(np.float64) * 8.0).astype(np.int64)
    found = np.empty(len(sums), dtype=np.int64)
    if not calls.quantize(code, sums, found, unit=0.125, largest=2.0**60) or not np.array_equal(
        found, wanted
    ):
        return False
    for place, wrong in enumerate([np.nan, np.inf, -np.inf, 2.0**57, -(2.0**57)] * 4):
        for where in (place, len(sums) - 1 - place):
            changed = sums.copy()
            changed[where] = wrong
            if calls.quantize(code, changed, found, unit=0.125, largest=2.0**60):
                return False
    return True
