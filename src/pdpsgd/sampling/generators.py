"""Streams of uniform 64-bit words: AES and SHAKE, which are cryptographic, and SFC64, which is not.

A generator is keyed with 32 bytes that nothing else is keyed with (see `source`), so it may begin at its beginning.
Its name is recorded in checkpoints: with another one a resumed step would get other noise. A name stands for the words
and for how noise is made of them, and changes if either does.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.errors import check_one_of, fail
from pdpsgd.sampling.native import dispatch
from pdpsgd.sampling.native.calls import AesWords
from pdpsgd.sampling.words import PIECE, BitGenerator

AES = "aes-256-ctr/box-muller"
SHAKE = "shake-256/box-muller"
SFC64 = "sfc64/box-muller"
CRYPTOGRAPHIC = (AES, SHAKE)


def choose_algorithm(*, secure: bool, wanted: str | None = None) -> str:
    """Return the wanted generator's name, or the default's: AES, and SHAKE where nothing here can do AES.

    Args:
        secure: Whether the generator has to be cryptographic.
        wanted: The name that a checkpoint recorded, to go on with the same generator.

    Raises:
        PdpsgdError: If the wanted generator is unknown, not here, or not of the kind that `secure` says.
    """
    if not secure:
        if wanted not in (None, SFC64):
            fail(f"Expected algorithm={SFC64!r} for a source that is not secure. Got algorithm={wanted!r}.")
        return SFC64
    if wanted is None:
        return AES if has_aes() else SHAKE
    check_one_of(CRYPTOGRAPHIC, algorithm=wanted)
    if wanted == AES and not has_aes():
        fail(
            f"Expected a C compiler and a processor that does AES, or the package 'cryptography', for "
            f"algorithm={AES!r}. Got none of them: pip install cryptography."
        )
    return wanted


def has_aes() -> bool:
    """Tell whether anything here can do AES."""
    return dispatch.library() is not None or importlib.util.find_spec("cryptography") is not None


def generator_of(algorithm: str, seed: bytes) -> BitGenerator:
    """Return the generator of this name, keyed with a seed of 32 bytes, at its beginning."""
    if algorithm == AES:
        return compiled_words(algorithm, seed) or _Aes(seed)
    if algorithm == SHAKE:
        return _Buffered(_shake(seed))
    state: Any = _State(seed)
    return np.random.SFC64(state)


def compiled_words(algorithm: str, seed: bytes) -> AesWords | None:
    """Return the generator of this name, keyed with a seed of 32 bytes, if there is compiled code for it."""
    code = dispatch.library() if algorithm == AES else None
    return None if code is None else AesWords(code, seed)


def words_at(algorithm: str, seed: bytes, places: IntArray, count: int) -> WordArray:
    """Return `count` words for each place, which depend on the seed and that place alone: (places, count).

    AES: the blocks whose counters begin at place * 2^24, of a key that is used for nothing else. Otherwise SHAKE-256
    of seed and place.
    """
    blocks = -(-count // 2)
    if algorithm != AES:
        size = 8 * count
        content = b"".join(
            hashlib.shake_256(seed + place.to_bytes(8, "little")).digest(size) for place in places.tolist()
        )
        return np.frombuffer(content, dtype="<u8").astype(np.uint64, copy=False).reshape(-1, count)
    compiled = compiled_words(algorithm, seed)
    if compiled is not None:
        return compiled.words_at(np.ascontiguousarray(places), blocks)[:, :count]
    counters = np.zeros(
        (len(places), blocks, 2), dtype=">u8"
    )  # numbers of 16 bytes, the most significant first
    counters[:, :, 1] = (places[:, None] << 24) + np.arange(blocks)
    ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
    encryptor = ciphers.Cipher(ciphers.algorithms.AES(seed), ciphers.modes.ECB()).encryptor()
    words = np.frombuffer(encryptor.update(counters.tobytes()), dtype="<u8").astype(np.uint64, copy=False)
    return words.reshape(len(places), -1)[:, :count]


_SHAKE_CHUNK = 8 * 136  # bytes: eight blocks of the hash function


def _shake(seed: bytes) -> Callable[[int], bytes]:
    """Return what reads on, in whole chunks: SHAKE-256 of seed and number (a digest begins at its beginning)."""
    numbers = itertools.count()

    def read(size: int) -> bytes:
        places = (next(numbers).to_bytes(8, "little") for _ in range(-(-size // _SHAKE_CHUNK)))
        return b"".join(hashlib.shake_256(seed + place).digest(_SHAKE_CHUNK) for place in places)

    return read


_ZEROS = memoryview(bytes(8 * PIECE))


class _Buffered:
    """Words of a stream of bytes; of what is read beyond them, the next ones come first."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read, self._left = read, b""

    def random_raw(self, size: int) -> WordArray:
        missing = 8 * size - len(self._left)
        content = self._left + self._read(missing) if missing > 0 else self._left
        self._left = content[8 * size :]
        return np.frombuffer(content, dtype="<u8", count=size).astype(np.uint64, copy=False)


class _Aes(_Buffered):
    """AES-256 in counter mode, by the package `cryptography`: encrypted zeros."""

    def __init__(self, seed: bytes) -> None:
        ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
        self._cipher = ciphers.Cipher(ciphers.algorithms.AES(seed), ciphers.modes.CTR(bytes(16))).encryptor()
        super().__init__(lambda size: self._cipher.update(bytes(max(size, 512))))

    def write(self, words: WordArray) -> None:
        """Write the next words over an array, nearly all of them without memory of their own."""
        read = min(len(self._left) // 8, len(words))
        words[:read] = self.random_raw(read)
        # Some releases of the package want room for 15 bytes more, which they leave alone: two words.
        begin, end = read, max(read, len(words) - 2)
        memory = words.view(np.uint8).data
        for place in range(begin, end, PIECE):
            size = min(PIECE, end - place)
            self._cipher.update_into(_ZEROS[: 8 * size], memory[8 * place : 8 * (place + size + 2)])
        if sys.byteorder != "little":
            words[begin:end].byteswap(inplace=True)
        words[end:] = self.random_raw(len(words) - end)


class _State(ISeedSequence):
    """A derived seed as the state of a generator of numpy."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.frombuffer(self._seed, dtype=dtype)[:n_words]
