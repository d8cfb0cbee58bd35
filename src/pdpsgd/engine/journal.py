"""A journal of sums, so that the same noise is never used on different gradients.

A checkpoint names what a run depends on, but code can change under the same name. So for each step the
journal remembers a few secret projections of the sum that the step's noise was added to. If the sum is
another one when the step is repeated, the run stops before any noise is given out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdpsgd.budgets.files import lock
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.sampling.source import RandomSource

PROJECTIONS = 4
# As a share of the clipping norm, the most that one record adds to a sum. Repeated on the same machine, sums
# are equal to the bit; elsewhere they differ by rounding, some 1e-7 of their norm.
TOLERANCE = 1e-3
_ENTRY = struct.Struct(f"<q{PROJECTIONS}d")


class Journal:
    """For each step, secret projections of the sum its noise was added to.

    A sum that differs by a vector of norm x changes each projection by a normal number of deviation x. So one
    record, swapped for another, goes unnoticed with a chance below 1e-12 if that changes the sum by the
    clipping norm, and below 1e-4 if by a hundredth of it.

    What counts is what is in the file when a step is met: two engines may go on from one checkpoint, and each has to
    see what the other has met. Nothing is dropped when a checkpoint is saved (a step takes 40 bytes), because a run may
    be taken up from an older one. A journal is as secret as the key: readable by its owner only, and removed when the
    run ends.
    """

    def __init__(self, path: Path, source: RandomSource, *, max_grad_norm: float) -> None:
        self.path = path
        self._source = source
        self._tolerance = TOLERANCE * max_grad_norm
        self._directions: list[Tensor] = []
        self._met: dict[int, tuple[float, ...]] = {}
        self._size_read = 0
        self._file = _open(path)
        # After an entry that was cut off, further ones would not stand where they are looked for.
        size = os.fstat(self._file).st_size
        if size % _ENTRY.size:
            os.ftruncate(self._file, size - size % _ENTRY.size)
        self._read_on()

    @property
    def entries(self) -> int:
        """How many entries are in the file, on the disk; a checkpoint names it, so that a loss is noticed."""
        try:
            os.fsync(self._file)
        except OSError as error:
            fail(
                f"Expected the journal {str(self.path)!r} to get to the disk, before a checkpoint. Got: "
                f"{error.strerror}. The checkpoint saved before is untouched: make room and resume."
            )
        return os.fstat(self._file).st_size // _ENTRY.size

    def meet(self, step: int, sums: Sequence[Tensor]) -> None:
        """Note that the step's noise is about to be added to these sums; refuse if it was added to others."""
        projections = self._project(sums)
        self._read_on()
        if step in self._met:
            before = self._met[step]
            if not all(abs(p - b) <= self._tolerance for p, b in zip(projections, before, strict=True)):
                fail(
                    f"Expected step {step} to repeat what it did before the run was interrupted. Got other "
                    "gradients (other code, libraries or data?). Going on would use the same noise on different "
                    "gradients. Begin a new run."
                )
        else:
            self._append(_ENTRY.pack(step, *projections))

    def close(self, *, remove: bool) -> None:
        """Stop writing; remove the file if the run has ended."""
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)

    def _append(self, entry: bytes) -> None:
        before = os.fstat(self._file).st_size
        try:
            written, reason = os.write(self._file, entry), "a disk that is full"
        except OSError as error:
            written, reason = 0, str(error.strerror)
        if written < len(entry):
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            fail(
                f"Expected room for {len(entry)} bytes in {self.path}. Got: {reason}. No noise was given out "
                "for this step: make room and resume."
            )
        self._size_read = before + len(entry)

    def _read_on(self) -> None:
        """Note the entries that are in the file and were not read yet."""
        while (missing := os.fstat(self._file).st_size - self._size_read) >= _ENTRY.size:
            os.lseek(self._file, self._size_read, os.SEEK_SET)  # what is written goes to the end all the same
            content = os.read(self._file, missing)
            whole = len(content) - len(content) % _ENTRY.size
            for step, *projections in _ENTRY.iter_unpack(content[:whole]):
                self._met[step] = tuple(projections)
            self._size_read += whole
            if not whole:
                break

    def _project(self, sums: Sequence[Tensor]) -> list[float]:
        if not self._directions:
            seed = hashlib.blake2b(
                digest_size=32, key=self._source.key_bytes(), person=b"pdpsgd journal"
            ).digest()
            generator = np.random.default_rng(np.frombuffer(seed, dtype=np.uint32))
            self._directions = [
                torch.from_numpy(
                    generator.standard_normal((PROJECTIONS, total.numel()), dtype=np.float32)
                ).to(total.device)
                for total in sums
            ]
        pairs = zip(self._directions, sums, strict=True)
        parts = [(d @ total.reshape(-1).to(torch.float32)).double() for d, total in pairs]
        projections: list[float] = torch.stack([part.cpu() for part in parts]).sum(0).tolist()
        return projections


class JournalKeeper(StepObserver):
    """The run's journal on rank 0, once there is one."""

    def __init__(self, execution: Execution, ranks: Ranks) -> None:
        self._execution = execution
        self._ranks = ranks
        self.journal: Journal | None = None

    def keep(self, path: Path) -> None:
        """Write the journal there from now on, after what it says already."""
        if self._ranks.first:
            self.close(remove=False)
            plan = self._execution.plan
            scale = min((max(r.clip_scales) for r in plan.rounds if any(r.clip_scales)), default=1.0)
            self.journal = Journal(path, self._execution.source, max_grad_norm=scale * plan.max_grad_norm)

    def step_releases(self, step: int, sums: Sequence[Tensor]) -> None:
        """Refuse sums that are not those of the step's first time."""
        if self.journal is not None:
            self.journal.meet(step, sums)

    def close(self, *, remove: bool) -> None:
        """Stop writing; remove the file if the run has ended."""
        if self.journal is not None:
            self.journal.close(remove=remove)
            self.journal = None


def _open(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        fail(f"Expected a journal that can be written at {str(path)!r}. Got: {error.strerror}.")
    if not lock(file):
        os.close(file)
        fail(
            f"Expected a run that no other process goes on with. Got one whose journal {str(path)!r} is in use. "
            "Wait until the other process ends, or stop it."
        )
    return file


def count_entries(path: Path) -> int | None:
    """Count the whole entries of a journal; None if there is no such file."""
    try:
        return os.stat(path).st_size // _ENTRY.size
    except (OSError, ValueError):
        return None
