"""Many processes, one run: each rank samples its own people, and noise enters once, on rank 0.

Rank 0 gathers the clipped sums, adds the step's one noise vector, and sends the result to all: noise enters
exactly once by construction, and replicas hold the same bits by construction, whatever devices they run on.
(Noise added by rank 0 before an all-reduce would undo the rounding that secure mode relies on; noise added by
every rank after it would hang on all devices producing the same bits.)
"""

from __future__ import annotations

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
        """Join the process group if there is one; under torchrun, made first; else a run of one process."""
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
                return cls()
            backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which adds the noise and writes the files."""
        return self.rank == 0

    def gather_sums(self, tensors: Sequence[Tensor]) -> None:
        """Add up everybody's tensors on rank 0, in place."""
        if self.world_size > 1:
            with _or_stop("adding up the clipped sums"), _flat(tensors) as flat:
                dist.reduce(flat, dst=0)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give everybody rank 0's tensors, in place."""
        if self.world_size > 1:
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

    def share_key(self, source: RandomSource) -> RandomSource:
        """Give all ranks one secret key: rank 0's."""
        if self.world_size == 1:
            return source
        key = self.broadcast_object(source.key_bytes() if self.first else None)
        return RandomSource.from_key(
            key, secure=source.secure, seeded=source.seeded, algorithm=source.algorithm
        )

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
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


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
