"""Streams of uniform 64-bit words: AES and SHAKE, which are cryptographic, and SFC64, which is not.

A generator is keyed with 32 bytes that nothing else is keyed with (see `source`), so it may begin at its beginning.
Its name is recorded in checkpoints: with another one a resumed step would get other noise. A name stands for the words
and for how noise is made of them, and changes if either does.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from typing import Any, Protocol

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from pdpsgd._typing import WordArray
from pdpsgd.errors import check_one_of, fail

AES = "aes-256-ctr/box-muller"
SHAKE = "shake-256/box-muller"
SFC64 = "sfc64/box-muller"
CRYPTOGRAPHIC = (AES, SHAKE)


class BitGenerator(Protocol):
    """A stream of uniform 64-bit words. Every bit generator of numpy is one."""

    def random_raw(self, size: int) -> WordArray:
        """Return the next `size` words."""
        ...


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
        fail(f"Expected the package 'cryptography', for algorithm={AES!r}: pip install cryptography.")
    return wanted


def has_aes() -> bool:
    """Tell whether anything here can do AES."""
    return importlib.util.find_spec("cryptography") is not None


def generator_of(algorithm: str, seed: bytes) -> BitGenerator:
    """Return the generator of this name, keyed with a seed of 32 bytes, at its beginning."""
    if algorithm == AES:
        return _Aes(seed)
    if algorithm == SHAKE:
        return _Shake(seed)
    state: Any = _State(seed)
    return np.random.SFC64(state)


class _Aes:
    """AES-256 in counter mode, by the package `cryptography`; the counter begins at zero."""

    def __init__(self, seed: bytes) -> None:
        ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
        self._encryptor = ciphers.Cipher(
            ciphers.algorithms.AES(seed), ciphers.modes.CTR(bytes(16))
        ).encryptor()

    def random_raw(self, size: int) -> WordArray:
        return _as_words(self._encryptor.update(bytes(8 * size)))


class _Shake:
    """SHAKE-256 of seed and number, chunk by chunk (hashlib gives a digest only from its beginning)."""

    CHUNK = 8 * 136  # bytes: eight blocks of the hash function

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._chunks = 0
        self._left = b""

    def random_raw(self, size: int) -> WordArray:
        missing = 8 * size - len(self._left)
        count = max(0, -(-missing // self.CHUNK))
        numbers = range(self._chunks, self._chunks + count)
        self._chunks += count
        content = self._left + b"".join(map(self._chunk, numbers))
        self._left = content[8 * size :]
        return _as_words(content[: 8 * size])

    def _chunk(self, number: int) -> bytes:
        return hashlib.shake_256(self._seed + number.to_bytes(8, "little")).digest(self.CHUNK)


class _State(ISeedSequence):
    """A derived seed as the state of a generator of numpy."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.frombuffer(self._seed, dtype=dtype)[:n_words]


def _as_words(content: bytes) -> WordArray:
    return np.frombuffer(content, dtype="<u8").astype(np.uint64, copy=False)
