"""Many processes, one run: each rank samples its own people, and noise enters once, on rank 0.

Rank 0 adds up the clipped sums, which are integers, adds the step's one noise vector, and sends the result to
all: noise enters exactly once by construction, and replicas hold the same bits by construction, whatever devices
they run on. (Noise added by rank 0 before an all-reduce would undo its rounding to a public grid; noise added by
every rank after it would depend on all devices producing the same bits.)
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.sampling.source import RandomSource

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of the run."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def join(cls, *, device: torch.device | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
        """Join the process group if there is one; under torchrun, made first; else a run of one process.

        Raises:
            PdpsgdError: there are to be several processes, and nobody says where they meet.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) < 2:
                return cls()
            if "MASTER_ADDR" not in os.environ:
                fail(
                    "Expected the environment variable MASTER_ADDR beside WORLD_SIZE = "
                    f"{os.environ['WORLD_SIZE']}: without it each process would train, and release, by itself. Got "
                    "none. Start the processes with torchrun, or unset WORLD_SIZE to train in one."
                )
            backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
            # Whichever way the process ends: a group that is still there then aborts it, now and again.
            atexit.register(_leave_group)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which adds the noise and writes the files."""
        return self.rank == 0

    def gather_sums(self, totals: Sequence[Tensor], *, step: int, unseen: int = 0) -> int:
        """Add up everybody's integers on rank 0, in place; rank 0 refuses ranks that are at different steps.

        Args:
            totals: This rank's sums.
            step: The step they are of.
            unseen: How much code this rank's guards could not see through.

        Returns:
            On rank 0, how much code no rank's guards could see through, in all.

        Guarantee: the total is of people who were all sampled for the same step, so at one round's rates.
        """
        if self.world_size == 1:
            return unseen
        steps = torch.tensor([step, step * step, unseen], device=totals[0].device)
        with _or_stop("adding up the clipped sums"), _flat([*totals, steps]) as flat:
            dist.reduce(flat, dst=0)
        # Numbers are all the same if, and only if, the mean of their squares is the square of their mean.
        if self.first and steps.tolist()[:2] != [step * self.world_size, step * step * self.world_size]:
            fail(
                f"Expected all ranks to be at step {step}, as rank 0 is. Got another one on some rank: was "
                "forfeit_step() called on some ranks only? The run stops here; resume it from its last checkpoint."
            )
        return int(steps[2])

    @contextmanager
    def result_of_first(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Give everybody what rank 0 leaves in the tensors, or stop everybody where rank 0 refuses."""
        if self.world_size == 1:
            yield
            return
        refused = torch.zeros(1, device=tensors[0].device, dtype=tensors[0].dtype)
        try:
            yield
        except PdpsgdError:
            if self.first:
                self._broadcast([*tensors, refused + 1])
            raise
        self._broadcast([*tensors, refused])
        if refused.item():
            fail(
                "Expected rank 0 to release the step. It refused: its own message says why. The run stops here."
            )

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with _or_stop("sending out the noisy sum"), _flat(tensors) as flat:
            dist.broadcast(flat, src=0)

    def broadcast_module(self, module: nn.Module) -> None:
        """Start all replicas from rank 0's parameters and buffers."""
        if self.world_size > 1:
            with torch.no_grad(), _or_stop("sending out the model"):
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.data, src=0)

    def broadcast_object(self, value: Any) -> Any:
        """Give everybody rank 0's value (plain data)."""
        if self.world_size == 1:
            return value
        box = [value]
        with _or_stop("sending out settings"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of all ranks' values, place by place."""
        found = values.clone()
        if self.world_size > 1:
            with _or_stop("gathering what people have spent"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found

    def all_values(self, value: Any) -> list[Any]:
        """Return everybody's value (plain data), by rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with _or_stop("gathering what is known of the model"):
                dist.all_gather_object(values, value)
        return values

    def share_key(self, source: RandomSource) -> RandomSource:
        """Give all ranks rank 0's secret key and generator, and what is known of them."""
        if self.world_size == 1:
            return source
        key, described = self.broadcast_object(
            (source.key_bytes(), source.description) if self.first else None
        )
        return RandomSource.of_run(key, **described)

    def check_same(self, **values: Any) -> None:
        """Refuse to go on where ranks disagree about something they must share."""
        if self.world_size == 1:
            return
        for name, value in values.items():
            digest = hashlib.sha256(repr(value).encode()).hexdigest()
            digests: list[Any] = [None] * self.world_size
            with _or_stop(f"comparing {name}"):
                dist.all_gather_object(digests, digest)
            odd = [rank for rank in range(self.world_size) if digests[rank] != digests[0]]
            if odd:
                what = name.replace("_", " ")
                fail(f"Expected the same {what} on all ranks. Got others on rank {odd[0]} than on rank 0.")

    def wait(self) -> None:
        """Wait until everybody is here."""
        if self.world_size > 1:
            with _or_stop("waiting for the other ranks"):
                dist.barrier()

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if self.world_size > 1:
            _leave_group()


def _leave_group() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # others are gone already
            dist.destroy_process_group()


def is_first_rank() -> bool:
    """Tell, also before the processes have found each other, whether this one is rank 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0" or int(os.environ.get("WORLD_SIZE", "1")) < 2


@contextmanager
def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Join all tensors, so that there is one message a step; written back afterwards."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


@contextmanager
def _or_stop(doing: str) -> Iterator[None]:
    """Turn a lost or late rank into the project's error: going on without it would be another mechanism."""
    try:
        yield
    except PdpsgdError:
        raise
    except RuntimeError as error:  # torch's distributed errors are RuntimeErrors
        raise PdpsgdError(
            f"Expected every rank to answer while {doing}. Got: {str(error).splitlines()[0]} The run stops "
            "here; resume it from its last checkpoint."
        ) from error
