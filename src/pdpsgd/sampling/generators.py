"""Streams of random 64-bit words: AES, SHAKE, SFC64."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from pdpsgd._typing import WordArray
from pdpsgd.errors import check_one_of, fail

if TYPE_CHECKING:
    pass


FAST = "sfc64"


class BitGenerator(Protocol):
    """What draws and noise are made of: uniform 64-bit words. Every bit generator of numpy is one."""

    def random_raw(self, size: int) -> WordArray:
        """The next `size` words."""
        ...


def _choose_algorithm(*, secure: bool, wanted: str | None) -> str:
    if secure:
        return choose_algorithm(wanted)
    if wanted not in (None, FAST):
        fail(f"Expected algorithm={FAST!r} for a source that is not secure. Got algorithm={wanted!r}.")
    return FAST


def _fast_words(seed: bytes) -> BitGenerator:
    state: Any = _State(seed)
    return np.random.SFC64(state)


class _State(ISeedSequence):
    """Hands a derived seed to a generator of numpy as its state."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.frombuffer(self._seed, dtype=dtype)[:n_words]


AES = "aes-256-ctr"


SHAKE = "shake-256"


ALGORITHMS = (AES, SHAKE)


def choose_algorithm(wanted: str | None = None) -> str:
    """The wanted generator, or the fastest that is there; a run is resumed with the one it began with."""
    fastest = SHAKE if importlib.util.find_spec("cryptography") is None else AES
    if wanted is None:
        return fastest
    check_one_of(ALGORITHMS, algorithm=wanted)
    if wanted == AES != fastest:
        fail(f"Expected the package 'cryptography', for algorithm={AES!r}: pip install 'pdpsgd[secure]'.")
    return wanted


class SecureWords:
    """Words of a cryptographic generator, keyed with a seed of 32 bytes that nothing else is keyed with."""

    def __init__(self, seed: bytes, *, algorithm: str) -> None:
        self._stream: _Stream = _AesStream(seed) if algorithm == AES else _ShakeStream(seed)

    def random_raw(self, size: int) -> WordArray:
        """The next `size` words."""
        return np.frombuffer(self._stream.read(8 * size), dtype="<u8").astype(np.uint64, copy=False)


class _Stream(Protocol):
    def read(self, size: int) -> bytes | bytearray: ...


class _AesStream:
    def __init__(self, seed: bytes) -> None:
        ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
        # The counter may start at zero: every seed is used for one stream only.
        mode = ciphers.modes.CTR(bytes(16))
        self._encryptor = ciphers.Cipher(ciphers.algorithms.AES(seed), mode).encryptor()

    def read(self, size: int) -> bytes:
        stream: bytes = self._encryptor.update(bytes(size))
        return stream


class _ShakeStream:
    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._reads = 0

    def read(self, size: int) -> bytes:
        # Every read is a stream of its own, because hashlib gives a digest only from its beginning.
        place = self._reads.to_bytes(8, "little")
        self._reads += 1
        return hashlib.shake_256(self._seed + place).digest(size)
