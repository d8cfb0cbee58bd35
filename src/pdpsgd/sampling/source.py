"""A secret key and the step's number make every draw and all noise.

Nothing here keeps a position in a stream: what happens at a step is a function of the key and the step's
number alone. A run that is killed and resumed therefore repeats its steps exactly, and two different steps
never share their noise. The same noise must never be used on different gradients (their difference would have
no noise at all), so a key is secret, belongs to one run, and is erased when the run ends.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pdpsgd._typing import IntArray, WordArray
from pdpsgd.errors import fail
from pdpsgd.sampling.generators import (
    CRYPTOGRAPHIC,
    choose_algorithm,
    compiled_words,
    generator_of,
    words_at,
)
from pdpsgd.sampling.grid import Scale
from pdpsgd.sampling.noise import has_plain_numbers
from pdpsgd.sampling.step_noise import StepNoise
from pdpsgd.sampling.words import BitGenerator

if TYPE_CHECKING:
    import torch

    from pdpsgd.sampling.native.calls import AesWords

KEY_BYTES = 32


class RandomSource:
    """A secret key; every draw and all noise of a step come from the key and the step's number, nothing else.

    For every purpose, step and rank there is a generator with a key of its own, derived by keyed BLAKE2b. By default it
    is AES-256 in counter mode (SHAKE-256 where nothing here can do AES): to tell its words from uniform ones, or to
    find noise from other noise, is to break it.

    With `secure=False` words come from SFC64, a generator that is statistically sound but not cryptographic: from the
    parameters before and after a step its state can be solved for, and all noise of the step subtracted. It is for
    experiments on public data only.

    Guarantee: draws and noise have the distribution that the plan was proven for, as far as words look uniform and
    independent to somebody without the key. That holds if `cryptographic` (AES or SHAKE is not broken) and not `seeded`
    (a key made of a seed can be guessed, and one that was given is known). Otherwise, what was trained is not for
    release.

    Attributes:
        seeded: Whether somebody may know the key: it was made of a seed, or given.
        algorithm: The generator's name, as checkpoints record it.
        name: The key's name, which tells it from other keys, and nothing else.
    """

    seeded: bool
    algorithm: str
    name: str

    def __init__(self, key: bytes, *, secure: bool, seeded: bool, algorithm: str | None = None) -> None:
        if len(key) != KEY_BYTES:
            fail(f"Expected a key of {KEY_BYTES} bytes. Got {len(key)} bytes.")
        self._key = bytearray(key)
        self._erased = False
        self._taken = False
        self._next_noise_step = 0
        self._process = os.getpid()
        self._noise = StepNoise()
        self.name = name_of_key(key)
        self.seeded = seeded
        self.algorithm = choose_algorithm(secure=secure, wanted=algorithm)

    @classmethod
    def from_operating_system(cls, *, secure: bool = True) -> RandomSource:
        """Make a source with a fresh secret key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES), secure=secure, seeded=False)

    @classmethod
    def from_seed(cls, seed: int, *, secure: bool = True) -> RandomSource:
        """Make a source whose key is made of a seed: reproducible, so not for release."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            fail(f"Expected seed to be a whole number >= 0. Got seed={seed!r}.")
        return cls(_derive(b"", str(int(seed)).encode(), purpose="seed"), secure=secure, seeded=True)

    @classmethod
    def from_key(cls, key: bytes, *, secure: bool = True, algorithm: str | None = None) -> RandomSource:
        """Make a source with a key that the caller knows: reproducible, so not for release."""
        return cls(key, secure=secure, seeded=True, algorithm=algorithm)

    @classmethod
    def of_run(
        cls,
        key: bytes | None,
        *,
        secure: bool,
        seeded: bool,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> RandomSource:
        """Make the source of a run again: from its own checkpoint, or on another rank.

        Args:
            key: The run's key; None if it was erased.
            secure: Whether the generator is cryptographic.
            seeded: Whether somebody may know the key, as was recorded with it.
            algorithm: The recorded generator; going on with another one is refused.
            name: The name of a key that was erased.
        """
        source = cls(key or bytes(KEY_BYTES), secure=secure, seeded=seeded, algorithm=algorithm)
        if key is None:
            source.erase()
            source.name = name or ""
        return source

    @property
    def description(self) -> dict[str, Any]:
        """What may be known of the source, and suffices, with the key, for `of_run`."""
        return {
            "secure": self.secure,
            "seeded": self.seeded,
            "algorithm": self.algorithm,
            "name": self.name,
        }

    @property
    def cryptographic(self) -> bool:
        """Whether words come from a cryptographic generator; if not, results are not for release."""
        return self.algorithm in CRYPTOGRAPHIC

    @property
    def secure(self) -> bool:
        """The same, by the name of the option that chooses it."""
        return self.cryptographic

    def key_bytes(self) -> bytes:
        """Return the secret key, for checkpoints only."""
        if self._erased:
            fail("Expected a random source that is still in use. Its key was erased when its run ended.")
        return bytes(self._key)

    def take(self) -> RandomSource:
        """Give the source to a run, once: in a second run the same noise would be used on other gradients."""
        if self._taken:
            fail("Expected a new random source for every run. Got one that a run has taken before.")
        self._taken = True
        return self

    def __reduce__(self) -> NoReturn:
        fail("Expected one random source per run, with a key of its own. Got a request for a copy.")

    def erase(self) -> None:
        """Forget the key; every later use is refused."""
        self._key[:] = bytes(KEY_BYTES)
        self._noise.forget()
        self._erased = True

    def draw_generator(self, *, step: int, rank: int = 0) -> BitGenerator:
        """Return words that decide who is drawn at a step, by this rank."""
        return self._generator("draw", number=step, rank=rank)

    def round_generator(self, *, round: int, rank: int = 0) -> BitGenerator:
        """Return words that decide who takes part in a round, among this rank's people."""
        return self._generator("round", number=round, rank=rank)

    def place_words(self, *, step: int, count: int, rank: int = 0) -> WordArray:
        """Return words that decide where in the batch those stand who are sampled at a step, by this rank."""
        return self._generator("places", number=step, rank=rank).random_raw(count)

    def record_words(self, *, step: int, people: IntArray, count: int) -> WordArray:
        """Return words that decide which records of these people take part in a step: (people, count).

        A person's words depend on the key, the step and their place on the list alone: not on who else takes part,
        nor on how many records anybody has.

        Args:
            step: The step's number, counted from 0 over the whole plan.
            people: Places on the list, below 2^39.
            count: How many words each of them gets.
        """
        return words_at(self.algorithm, self._record_seed(step), people, count)

    def record_stream(self, *, step: int) -> AesWords | None:
        """Return the compiled code that makes these words, to be used with it; None where they are made otherwise."""
        return compiled_words(self.algorithm, self._record_seed(step))

    def _record_seed(self, step: int) -> bytes:
        if step < 0:
            fail(f"Expected step >= 0. Got step={step!r}.")
        return _derive(self.key_bytes(), int(step).to_bytes(8, "little"), purpose="records")

    def release(
        self,
        quantized: Sequence[torch.Tensor],
        *,
        clipping_norm: float,
        noise_multiplier: float,
        step: int,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Add the one noise vector of the step to integer sums, and give the results as floating-point numbers.

        The noise of a step is given out once. Asking again, or for an earlier step, or in a copy of the process (a
        fork), is refused: the same noise on other gradients would reveal their difference.

        Args:
            quantized: The totals over all ranks, as `pdpsgd.sampling.noise.quantize` makes them: int64, any shapes.
            clipping_norm: The plan's clipping norm C, the same that `quantize` was given.
            noise_multiplier: The noise's standard deviation, in clipping norms.
            step: The step's number, counted from 0 over the whole plan.
            out: Where to write the results: floating-point tensors of the same shapes, of any precision, on any device.
                By default new tensors of float32 where the totals are.

        Returns:
            `out`, or the new tensors. All numbers are multiples of a public grid's step (a power of two between 2^-11
            and 2^-10 standard deviations), rounded to the tensor's precision.

        Raises:
            PdpsgdError: If the step's noise was given out before, or tensors are of other types or shapes.

        Guarantee: the result is post-processing, the same for all data, of total * unit + N, where each number of N is
        independently Gaussian of standard deviation noise_multiplier * C, or up to 2^-51 of it more: the
        Gaussian mechanism for totals that one person changes by at most C. What the finite precision of N adds is
        bounded in "Noise in finite precision" in `docs/theory.md`. This takes the words of the generator to be uniform.
        """
        import torch

        scale = Scale.of(clipping_norm=clipping_norm, noise_multiplier=noise_multiplier)
        if out is None:
            out = [torch.empty(total.shape, dtype=torch.float32, device=total.device) for total in quantized]
        _check_release(quantized, out)
        self._give_out_noise(step)
        sizes = (total.numel() for total in quantized)
        noise = self._noise.of_step(step, sizes, scale, keyed=self._noise_generators)
        for total, result in zip(quantized, out, strict=True):
            numbers = total.detach().to("cpu").contiguous().view(-1)
            in_place = has_plain_numbers(result)
            noised = result.detach() if in_place else torch.empty(total.shape, dtype=torch.float64)
            noise.add(numbers, noised.view(-1))
            if not in_place:
                with torch.no_grad():
                    result.copy_(noised)
        return list(out)

    def _give_out_noise(self, step: int) -> None:
        """Note that a step's noise is given out: once, and in this process."""
        if os.getpid() != self._process:
            fail(
                "Expected noise to be given out by the process that made the run private. Got another one, a copy of "
                "it (a fork): both would use the same noise, on gradients that may differ. Call make_private in the "
                "process that trains."
            )
        if step < self._next_noise_step:
            fail(
                f"Expected step >= {self._next_noise_step}: earlier noise was given out; on other gradients "
                f"it would reveal their difference. Got step={step!r}."
            )
        self._next_noise_step = step + 1

    def _noise_generators(self, step: int) -> tuple[BitGenerator, BitGenerator]:
        """Return the words of a step's noise: those of all pairs, and those that continue a radius."""
        return self._generator("noise", number=step), self._generator("tails", number=step)

    def _generator(self, purpose: str, *, number: int, rank: int = 0) -> BitGenerator:
        if number < 0 or rank < 0:
            fail(f"Expected the {purpose}'s number and rank to be >= 0. Got {number!r} and {rank!r}.")
        place = int(number).to_bytes(8, "little") + int(rank).to_bytes(8, "little")
        return generator_of(self.algorithm, _derive(self.key_bytes(), place, purpose=purpose))

    def __repr__(self) -> str:
        return (
            f"RandomSource({self.algorithm}, {'known key: not for release' if self.seeded else 'secret key'})"
        )


def name_of_key(key: bytes) -> str:
    """Return a name for a key, from which nothing can be told about it."""
    return _derive(key, b"", purpose="name").hex()[:32]


def _check_release(quantized: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    import torch

    if len(quantized) != len(out):
        fail(f"Expected one tensor in out for each of {len(quantized)} totals. Got {len(out)}.")
    for place, (total, result) in enumerate(zip(quantized, out, strict=True)):
        if total.dtype != torch.int64:
            fail(
                f"Expected quantized[{place}] to hold torch.int64, as quantize() makes them. Got {total.dtype}."
            )
        if not result.is_floating_point() or result.shape != total.shape:
            fail(
                f"Expected out[{place}] to hold floating-point numbers in the shape {tuple(total.shape)}. "
                f"Got {result.dtype} in the shape {tuple(result.shape)}."
            )


def _derive(key: bytes, content: bytes, *, purpose: str) -> bytes:
    # `person` keeps the purposes apart: the noise of step 3 has nothing to do with the draw of step 3.
    person = f"pdpsgd {purpose}".encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES, key=key, person=person).digest()
