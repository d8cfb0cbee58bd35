"""Calls of the compiled code, which is given each time; whether it is to be trusted is asked in `dispatch`."""

from __future__ import annotations

import ctypes
from typing import Any

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

    def choose_records(
        self, people: IntArray, most: int, *, order: IntArray, starts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Do what `subsets.choose_records` does, with the words of each person's place."""
        held = [np.ascontiguousarray(part, dtype=np.int64) for part in (people, starts, order)]
        records = np.empty(len(people) * max(1, min(most, len(order))), dtype=np.int64)
        begins = np.empty(len(people) + 1, dtype=np.int64)
        self.code.choose_records(
            self.state,
            ctypes.c_int64(len(people)),
            *map(_address, held),
            ctypes.c_int64(most),
            _address(records),
            _address(begins),
        )
        return records[: begins[-1]], begins

    def encrypt(self, block: bytes) -> bytes:
        """Return one encrypted block of 16 bytes, to compare with published answers."""
        result = ctypes.create_string_buffer(16)
        self.code.aes_encrypt(self.state, block, result)
        return result.raw


class _Scale(ctypes.Structure):
    _fields_ = (("deviation", ctypes.c_double), ("shift", ctypes.c_int64), ("step", ctypes.c_double))


def normals_of(words: WordArray, further: AesWords, *, scale: float) -> npt.NDArray[np.float64]:
    """Return as many normal numbers as words, which are a multiple of 16."""
    numbers = np.empty(len(words), dtype=np.float64)
    groups = ctypes.c_int64(len(words) // 16)
    further.code.normals(groups, _address(words), further.state, ctypes.c_double(scale), _address(numbers))
    return numbers


def quantize(code: ctypes.CDLL, sums: Any, multiples: Any, *, unit: float, largest: float) -> bool:
    """Write float32 or float64 numbers in units, a power of two; tells whether all are below the largest.

    Arrays of numpy or of torch, one-dimensional and contiguous; the multiples may be in the memory of float64 sums.
    """
    figures = ctypes.c_double(1 / unit), ctypes.c_double(largest)
    places = _places(sums)
    return bool(code.quantize(ctypes.c_int64(len(sums)), *places, *figures, _address(multiples)))


def add_noise(total: Any, noised: Any, scale: Scale, words: AesWords, further: AesWords) -> None:
    """Do what `grid.add_noise` does, with arrays of numpy or of torch; all are contiguous."""
    by = _Scale(scale.deviation, scale.shift, scale.step)
    count = ctypes.c_int64(len(total))
    words.code.release(words.state, further.state, ctypes.byref(by), count, _address(total), *_places(noised))


def _places(numbers: Any) -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None]:
    """Return the address of single precision, and that of double precision."""
    return (_address(numbers), None) if numbers.itemsize == 4 else (None, _address(numbers))


def _address(array: Any) -> ctypes.c_void_p:
    """Return where an array begins; torch says it many times faster than numpy."""
    return ctypes.c_void_p(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())
