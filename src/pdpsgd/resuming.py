"""Stopping and going on: what a checkpoint must agree with, and a journal of what noise has met.

The danger is the same noise meeting different gradients: the difference of the two results has no noise at
all. Draws and noise come from the key and the step's number, so a run that is killed and resumed repeats its
steps exactly, as long as everything else is the same. Two things see to that. The checkpoint names what the
run depends on, and a resume refuses anything else. And the journal remembers, for each step since the
checkpoint, a secret projection of the sum that the step's noise was added to; if the sum is another one when
the step is repeated (other code, say), the run stops before any noise.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.randomness import RandomSource

# Rounding may differ between machines (1e-6 or so); other data, code or settings differ by far more.
TOLERANCE = 1e-3
_ENTRY = struct.Struct("<qdd")


def describe_model(module: nn.Module) -> str:
    """A digest of the model's structure: its modules, and its parameters' names, shapes and types."""
    lines = [f"{name}: {type(part).__name__}" for name, part in module.named_modules()]
    lines += [
        f"{name}: {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters()
    ]
    lines += [f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's kind and settings, without what schedules change."""
    changing = ("params", "lr", "initial_lr")
    groups = [
        {key: repr(value) for key, value in group.items() if key not in changing}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__qualname__,
        "options": {key: repr(value) for key, value in optimizer.defaults.items()},
        "options of groups": groups,
    }


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], *, place: str) -> None:
    """Refuse to resume a run with anything but what it was begun with."""
    for name in sorted({*saved, *now}):
        before, after = saved.get(name), now.get(name)
        if before != after:
            what, before, after = _narrow(name, before, after)
            fail(
                f"Expected the {what} that the checkpoint {place!r} was made with: {before!r}. Got "
                f"{after!r}. Resuming would let the same noise meet different gradients. Resume with what "
                "the run was begun with, or begin a new run."
            )


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


def _narrow(name: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """Name the one setting that differs inside a group of settings."""
    while isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in sorted({*before, *after}) if before.get(key) != after.get(key))
        name, before, after = f"{name} {key}", before.get(key), after.get(key)
    return name, before, after
