"""The one place where sums become noised sums: `Release`; and doubles for tests, which mark a run not for release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from pdpsgd.errors import fail
from pdpsgd.sampling.grid import unit_of

if TYPE_CHECKING:
    from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True)
class Noise:
    """The public figures of a step's noise."""

    step: int
    clipping_norm: float
    noise_multiplier: float


class Release(Protocol):
    """Sums in, noised sums out."""

    is_double: bool

    def __call__(
        self, quantized: Sequence[Tensor], noise: Noise, *, source: RandomSource, out: Sequence[Tensor]
    ) -> None:
        """Write the noised totals of all ranks, given as `quantize` makes them, to floating-point tensors."""
        ...


class WithNoise(Release):
    """The release of every run: Gaussian noise from the run's source.

    Guarantee: that of `RandomSource.release`.
    """

    is_double = False

    def __call__(
        self, quantized: Sequence[Tensor], noise: Noise, *, source: RandomSource, out: Sequence[Tensor]
    ) -> None:
        """Add the step's one noise vector."""
        source.release(
            quantized,
            clipping_norm=noise.clipping_norm,
            noise_multiplier=noise.noise_multiplier,
            step=noise.step,
            out=out,
        )


class WithoutNoise(Release):
    """A double that leaves noise out."""

    is_double = True

    def __call__(
        self, quantized: Sequence[Tensor], noise: Noise, *, source: RandomSource, out: Sequence[Tensor]
    ) -> None:
        """Write the totals as they are."""
        for result, total in zip(out, dequantized(quantized, noise.clipping_norm), strict=True):
            result.copy_(total)


@dataclass
class Recording(Release):
    """A double that keeps, for every step, the totals before noise and the noised ones."""

    inner: Release = field(default_factory=WithNoise)
    totals: dict[int, list[Tensor]] = field(default_factory=dict)
    noised: dict[int, list[Tensor]] = field(default_factory=dict)
    is_double = True

    def __call__(
        self, quantized: Sequence[Tensor], noise: Noise, *, source: RandomSource, out: Sequence[Tensor]
    ) -> None:
        """Release by `inner`, and keep what went in and came out."""
        self.totals[noise.step] = dequantized(quantized, noise.clipping_norm)
        self.inner(quantized, noise, source=source, out=out)
        self.noised[noise.step] = [result.clone() for result in out]


@dataclass
class Injecting(Release):
    """A double that releases noised sums which were recorded before, whatever the totals are."""

    noised: dict[int, list[Tensor]]
    is_double = True

    def __call__(
        self, quantized: Sequence[Tensor], noise: Noise, *, source: RandomSource, out: Sequence[Tensor]
    ) -> None:
        """Write the recorded sums of the step."""
        if noise.step not in self.noised:
            fail(f"Expected recorded sums for step {noise.step}. Got those of {sorted(self.noised)}.")
        for result, recorded in zip(out, self.noised[noise.step], strict=True):
            result.copy_(recorded)


class NoisedSums:
    """Where noised sums go: one flat tensor per device, and views of it in the shapes of the parameters.

    `totals` is where sums are rounded to: their own memory, in which nothing reads them any more.
    """

    def __init__(self, sums: Mapping[nn.Parameter, Tensor], flat_sums: Sequence[Tensor]) -> None:
        self.totals = [flat.view(torch.int64) for flat in flat_sums]
        self.flat: list[Tensor] = []
        self.of_parameter: dict[nn.Parameter, Tensor] = {}
        for flat in flat_sums:
            here = {parameter: total for parameter, total in sums.items() if total.device == flat.device}
            fine = any(parameter.dtype == torch.float64 for parameter in here)
            noised = torch.zeros_like(flat, dtype=torch.float64 if fine else torch.float32)
            self.flat.append(noised)
            for parameter, total in here.items():
                begin = total.storage_offset()
                self.of_parameter[parameter] = noised[begin : begin + total.numel()].view(total.shape)

    def put_into_gradients(self) -> None:
        """Make them the gradients of the parameters that are trained."""
        for parameter, noised in self.of_parameter.items():
            if parameter.requires_grad:
                parameter.grad = noised if noised.dtype == parameter.dtype else noised.to(parameter.dtype)


def dequantized(quantized: Sequence[Tensor], clipping_norm: float) -> list[Tensor]:
    """Turn integer sums back into numbers."""
    unit = unit_of(clipping_norm)
    return [total.to(torch.float64).mul_(unit) for total in quantized]


_double: ContextVar[Release | None] = ContextVar("pdpsgd release double", default=None)


@contextmanager
def released_by(double: Release) -> Iterator[None]:
    """Let runs that are made private inside release through a double; their results are not for release."""
    token = _double.set(double)
    try:
        yield
    finally:
        _double.reset(token)


def current_release() -> Release:
    """Return the release of a run that is made private now."""
    return _double.get() or WithNoise()
