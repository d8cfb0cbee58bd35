"""Calls of the compiled code, which is given each time; whether it is to be trusted is asked in `dispatch`."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.sampling.grid import Scale

STREAM_BYTES = 248  # fifteen round keys of 16 bytes, and a position


class AesWords:
    """Words of AES-256 in counter mode, keyed with 32 bytes; the counter begins at zero."""

    def __init__(self, code: ctypes.CDLL, seed: bytes) -> None:
        self.code = code
        self.state = ctypes.create_string_buffer(STREAM_BYTES)
        code.aes_begin(self.state, seed)

    def random_raw(self, size: int) -> WordArray:
        """Return the next `size` words."""
        words = np.empty(size, dtype=np.uint64)
        self.code.aes_words(self.state, ctypes.c_int64(size), _address(words))
        return words

    def words_at(self, places: IntArray, blocks: int) -> WordArray:
        """Return, for each place, the words of so many blocks, whose counters begin at place * 2^24."""
        words = np.empty((len(places), 2 * blocks), dtype=np.uint64)
        counts = ctypes.c_int64(len(places)), ctypes.c_int64(blocks)
        self.code.aes_words_at(self.state, counts[0], _address(places), counts[1], _address(words))
        return words

    def encrypt(self, block: bytes) -> bytes:
        """Return one encrypted block of 16 bytes, to compare with published answers."""
        result = ctypes.create_string_buffer(16)
        self.code.aes_encrypt(self.state, block, result)
        return result.raw


def subsets(code: ctypes.CDLL, words: WordArray, limits: IntArray) -> IntArray:
    """Do what `record_choice` does with words (people, most), for as many limits."""
    words, limits = np.ascontiguousarray(words), np.ascontiguousarray(limits)
    chosen = np.empty(words.shape, dtype=np.int64)
    code.subsets(*map(ctypes.c_int64, words.shape), *map(_address, (words, limits, chosen)))
    return chosen


class _Scale(ctypes.Structure):
    _fields_ = (("deviation", ctypes.c_double), ("shift", ctypes.c_int64), ("step", ctypes.c_double))


def normals_of(words: WordArray, further: AesWords, *, scale: float) -> npt.NDArray[np.float64]:
    """Return as many normal numbers as words, which are a multiple of 16."""
    numbers = np.empty(len(words), dtype=np.float64)
    groups = ctypes.c_int64(len(words) // 16)
    further.code.normals(groups, _address(words), further.state, ctypes.c_double(scale), _address(numbers))
    return numbers


def quantize(
    code: ctypes.CDLL, sums: npt.NDArray[np.floating], *, unit: float, largest: float
) -> IntArray | None:
    """Return contiguous float32 or float64 numbers in units, a power of two; None if one is not below the largest."""
    multiples = np.empty(len(sums), dtype=np.int64)
    places = (_address(sums), None) if sums.dtype == np.float32 else (None, _address(sums))
    figures = ctypes.c_double(1 / unit), ctypes.c_double(largest)
    good = code.quantize(ctypes.c_int64(len(sums)), *places, *figures, _address(multiples))
    return multiples if good else None


def add_noise(
    total: IntArray, noised: npt.NDArray[np.floating], scale: Scale, words: AesWords, further: AesWords
) -> None:
    """Do what `grid.add_noise` does; all arrays are contiguous."""
    by = _Scale(scale.deviation, scale.shift, scale.step)
    places = (_address(noised), None) if noised.dtype == np.float32 else (None, _address(noised))
    count = ctypes.c_int64(len(total))
    words.code.release(words.state, further.state, ctypes.byref(by), count, _address(total), *places)


def _address(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
