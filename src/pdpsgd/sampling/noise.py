"""Randomness for those who expect an attacker: cryptographic words, and noise not betrayed by its last bits.

Words come from AES-256 in counter mode (the `cryptography` package, installed with `pdpsgd[secure]`) or,
where that is missing, from SHAKE-256 of the standard library, some twelve times slower. To tell either from
uniform words is to break it.

Noise made in floating point has holes: some sums cannot come from some gradients, whatever the noise, so
the last bits of a noised sum can tell gradients apart (Mironov, "On significance of the least significant
bits for differential privacy", CCS 2012). Two things are done about it. Each number is the sum of four
draws, whose possible values are too many and too dense to search (Holohan and Braghin, "Secure random
sampling in differential privacy", arXiv:2107.10138). And the noised sum, worked out in float64, is rounded
to a public grid, a thousand times finer than the noise, which removes the bits in which holes would show.
This is mitigation, not proof: nothing here bounds what the remaining difference from a true Gaussian adds
to delta.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pdpsgd.errors import check_one_of, fail
from pdpsgd.sampling.source import BitGenerator, WordArray, blocks

if TYPE_CHECKING:
    import torch

AES = "aes-256-ctr"
SHAKE = "shake-256"
ALGORITHMS = (AES, SHAKE)

DRAWS = 4
GRID_BITS = 10


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


def add_secure_noise_(
    tensors: Sequence[torch.Tensor], standard_deviation: float, generator: BitGenerator
) -> None:
    """Add Gaussian noise to the tensors, in place, and round the result to the public grid.

    Guarantee: rounding is the same for all data, so it takes nothing from the privacy of the noised sum, and
    each element's noise is Gaussian of this standard deviation, up to the rounding of float64 and of the grid
    (which adds 1e-7 of the variance). See the module for what is and is not proven.
    """
    import torch

    grid = grid_of(standard_deviation)
    for block in blocks(tensors, size=2**14):
        sizes = [tensor.numel() for tensor in block]
        noise = normals(generator, sum(sizes)).mul_(standard_deviation)
        for tensor, part in zip(block, torch.split(noise, sizes), strict=True):
            noised = tensor.to("cpu", torch.float64) + part.view(tensor.shape)
            tensor.copy_(noised.div_(grid).round_().mul_(grid))


def grid_of(standard_deviation: float) -> float:
    """The step of the public grid: the power of two that is 2^-10 to 2^-11 standard deviations.

    Exact in float32 out to 2^13 standard deviations, where float32 itself becomes the coarser grid.

    >>> grid_of(1.0), grid_of(1.5)
    (0.0009765625, 0.0009765625)
    """
    _, exponent = math.frexp(standard_deviation)
    return math.ldexp(1.0, exponent - 1 - GRID_BITS)


def normals(generator: BitGenerator, count: int) -> torch.Tensor:
    """Standard normal numbers: each half the sum of four, by Box and Muller from 53-bit uniforms."""
    import torch

    half = (count + 1) // 2
    words = generator.random_raw(2 * DRAWS * half) >> np.uint64(11)
    uniforms = torch.from_numpy(words.astype(np.float64)).add_(0.5).mul_(2.0**-53)
    uniform, turn = uniforms.view(2, DRAWS, half)
    radius = uniform.log_().mul_(-2.0 / DRAWS).sqrt_()
    angle = turn.mul_(2 * math.pi)
    return torch.cat(((radius * angle.cos()).sum(0), (radius * angle.sin()).sum(0)))[:count]


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
