"""Memory that lasts from step to step, or from the norms to the weighted sum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Numbers that are kept from the norms to the weighted sum; what does not fit is computed again.
ROOM = 1 << 24


class Workspace:
    """Memory that is used again at every step: fresh memory is cleared first, which takes as long as using it."""

    def __init__(self) -> None:
        self._memory: dict[Any, Tensor] = {}
        self._kept: list[int] = []

    def take(self, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory that is valid until the same key is asked for again."""
        name, size = (key, like.dtype, like.device), math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return memory[:size].view(shape)

    def has_room(self, shape: tuple[int, ...], instead_of: int = 0) -> bool:
        """Whether so many numbers more can be kept; `instead_of` are numbers that are let go of for them."""
        size = math.prod(shape)
        return size <= instead_of or sum(self._kept) + size <= ROOM

    def keep(self, shape: tuple[int, ...], like: Tensor, instead_of: int = 0) -> Tensor | None:
        """Return memory that is valid until `release`, or None if there is no room."""
        size = math.prod(shape)
        if size <= instead_of:  # what is let go of is used again
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        if not self.has_room(shape):
            return None
        self._kept.append(size)
        # Layers ask in the same order at every step, so each finds memory of its own size again.
        return self.take(f"kept {len(self._kept)}", shape, like)

    def release(self) -> None:
        """Let what was kept be overwritten."""
        self._kept.clear()
