"""Randomness for those who expect an attacker: cryptographic words, and noise that tells nothing by its last bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.errors import check_one_of
from pdpsgd.randomness import BitGenerator, WordArray, blocks

if TYPE_CHECKING:
    import torch

SHAKE = "shake-256"
ALGORITHMS = (SHAKE,)


def available_algorithm(wanted: str | None = None) -> str:
    """The generator to use."""
    if wanted is not None:
        check_one_of(ALGORITHMS, algorithm=wanted)
    return SHAKE


class SecureWords:
    """Words of a cryptographic generator, keyed with `seed`: to tell them from uniform ones is to break it."""

    def __init__(self, seed: bytes, algorithm: str) -> None:
        self._seed = seed
        self._block = 0

    def random_raw(self, size: int) -> WordArray:
        """The next `size` words; each call is a block of its own."""
        block = hashlib.shake_256(self._seed + self._block.to_bytes(8, "little"))
        self._block += 1
        return np.frombuffer(block.digest(8 * size), dtype="<u8").astype(np.uint64)


DRAWS = 4
GRID_BITS = 10


def add_secure_noise_(
    tensors: Sequence[torch.Tensor], standard_deviation: float, words: BitGenerator
) -> None:
    """Add Gaussian noise to the tensors, in place, and round the result to a public grid."""
    import torch

    grid = 2.0 ** (math.floor(math.log2(standard_deviation)) - GRID_BITS)
    for block in blocks(tensors):
        sizes = [tensor.numel() for tensor in block]
        noise = sum(_exact_normals(words, sum(sizes)) for _ in range(DRAWS)) * (
            standard_deviation / math.sqrt(DRAWS)
        )
        for tensor, part in zip(block, torch.split(noise, sizes), strict=True):
            noised = tensor.to("cpu", torch.float64) + part.view(tensor.shape)
            tensor.copy_((noised / grid).round_().mul_(grid))


def _exact_normals(words: BitGenerator, count: int) -> torch.Tensor:
    import torch

    half = (count + 1) // 2
    raw = torch.from_numpy((words.random_raw(2 * half) >> np.uint64(11)).astype(np.float64))
    uniform, angle = raw.add_(0.5).mul_(2.0**-53).view(2, half)
    radius = uniform.log().mul_(-2).sqrt_()
    angle = angle * (2 * math.pi)
    return torch.cat((radius * angle.cos(), radius * angle.sin()))[:count]
