"""Uniform words: what all draws and all noise are made of."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pdpsgd._typing import WordArray

PIECE = 2**13  # words: memory that a process has at hand; for more it would ask the system, every time


class BitGenerator(Protocol):
    """A stream of uniform 64-bit words. Every bit generator of numpy is one."""

    def random_raw(self, size: int) -> WordArray:
        """Return the next `size` words."""
        ...


def read_into(words: WordArray, generator: BitGenerator) -> None:
    """Write the next words over an array: the generator by itself, if it can, or in pieces."""
    write = getattr(generator, "write", None)
    if write is not None:
        write(words)
        return
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        np.copyto(piece, generator.random_raw(len(piece)))
