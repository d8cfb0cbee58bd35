"""A journal of what noise has met, so that it never meets anything else.

A checkpoint names what a run depends on, but code can change under the same name. So for each step since
the last checkpoint the journal remembers a secret projection of the sum that the step's noise was added to.
If the sum is another one when the step is repeated, the run stops before any noise is given out.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.randomness import RandomSource

# Rounding may differ between machines (1e-6 or so); other data, code or settings differ by far more.
TOLERANCE = 1e-3
_ENTRY = struct.Struct("<qdd")


class Journal:
    """For each step since the last checkpoint, a secret projection of the sum its noise was added to.

    It is as secret as the key: readable by its owner only, and removed when the run ends.
    """

    def __init__(self, path: Path, source: RandomSource) -> None:
        self.path = path
        self._source = source
        self._directions: list[Tensor] = []
        self._met = _read(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def meet(self, step: int, sums: Sequence[Tensor]) -> None:
        """Note that the step's noise is about to meet these sums; refuse if it has met others."""
        projection, norm = self._project(sums)
        if step in self._met:
            before, size = self._met[step]
            if not abs(projection - before) <= TOLERANCE * max(size, norm):
                fail(
                    f"Expected step {step} to repeat what it did before the run was interrupted. Got other "
                    "gradients (other code, libraries or data?). Going on would let the same noise meet "
                    "different gradients. Begin a new run."
                )
        else:
            os.write(self._file, _ENTRY.pack(step, projection, norm))

    def begin_anew(self) -> None:
        """A checkpoint was saved: what came before is not going to be repeated."""
        self._met = {}
        os.ftruncate(self._file, 0)

    def close(self, *, remove: bool) -> None:
        """Stop writing; remove the file if the run has ended."""
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)

    def _project(self, sums: Sequence[Tensor]) -> tuple[float, float]:
        if not self._directions:
            seed = hashlib.blake2b(
                digest_size=32, key=self._source.key_bytes(), person=b"pdpsgd journal"
            ).digest()
            generator = np.random.default_rng(np.frombuffer(seed, dtype=np.uint32))
            self._directions = [
                torch.from_numpy(generator.standard_normal(total.numel(), dtype=np.float32)).to(total)
                for total in sums
            ]
        flat = [total.reshape(-1) for total in sums]
        projection = sum(float(d @ f) for d, f in zip(self._directions, flat, strict=True))
        return projection, sum(float(f @ f) for f in flat) ** 0.5


def _read(path: Path) -> dict[int, tuple[float, float]]:
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = len(content) - len(content) % _ENTRY.size  # the last entry may have been cut off
    return {step: (projection, norm) for step, projection, norm in _ENTRY.iter_unpack(content[:whole])}
