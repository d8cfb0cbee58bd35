"""Uniform words: what all draws and all noise are made of."""

from __future__ import annotations

from typing import Protocol

from pdpsgd._typing import WordArray


class BitGenerator(Protocol):
    """A stream of uniform 64-bit words. Every bit generator of numpy is one."""

    def random_raw(self, size: int) -> WordArray:
        """Return the next `size` words."""
        ...
