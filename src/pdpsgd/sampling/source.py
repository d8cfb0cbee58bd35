"""A secret key and the step's number make every draw and all noise.

Nothing here keeps a position in a stream: what happens at a step is a function of the key and the step's
number alone. A run that is killed and resumed therefore repeats its steps exactly, and two different steps
never share their noise. The same noise must never meet different gradients (their difference would have no
noise at all), so a key is secret, belongs to one run, and is erased when the run ends.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.errors import check_positive, fail
from pdpsgd.planning.verdict import GUESSABLE
from pdpsgd.sampling.generators import BitGenerator, _choose_algorithm, _fast_words
from pdpsgd.sampling.noise import (
    _AHEAD,
    _KEPT_BLOCKS,
    _add_fine_noise_,
    _add_noise_on_device_,
    _is_small,
    _NoiseBlock,
    blocks,
)

if TYPE_CHECKING:
    import torch

KEY_BYTES = 32


class RandomSource:
    """A secret key; every draw and all noise of a step come from the key and the step's number, nothing else.

    By default words come from SFC64, a fast generator that is statistically sound but not cryptographic. For
    every purpose, step and rank it gets a fresh state of 192 bits, derived by BLAKE2b from the secret key, so
    there are far too many states to try. (A `torch.Generator` would be a hole here: on CPUs, `manual_seed`
    uses 32 bits of its seed, few enough to try them all on a model seen before and after a step. On other
    devices it uses all 64; there it makes the noise of the default mode.)

    With `secure=True` words come from a cryptographic generator, and noise is protected against being
    reconstructed from its last bits: see `pdpsgd.sampling.noise`.

    Guarantee: draws and noise have the distribution that the plan was proven for, as far as words look
    uniform and independent to somebody without the key. A key made `from_seed` can be guessed: `guessable`
    says so, and what was trained with it is not for release.
    """

    guessable: bool
    secure: bool
    algorithm: str

    def __init__(self, key: bytes, *, secure: bool, guessable: bool, algorithm: str | None = None) -> None:
        if len(key) != KEY_BYTES:
            fail(f"Expected a key of {KEY_BYTES} bytes. Got {len(key)} bytes.")
        self._key = bytearray(key)
        self._erased = False
        self._next_noise_step = 0
        self._noise_blocks: dict[tuple[Any, ...], _NoiseBlock] = {}
        self._noise_ahead: dict[int, list[torch.Tensor]] = {}
        self.guessable = guessable
        self.secure = secure
        self.algorithm = _choose_algorithm(secure=secure, wanted=algorithm)

    @classmethod
    def from_operating_system(cls, *, secure: bool = False) -> RandomSource:
        """A fresh secret key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES), secure=secure, guessable=False)

    @classmethod
    def from_seed(cls, seed: int, *, secure: bool = False) -> RandomSource:
        """A key made of a seed: reproducible, guessable, not for release."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            fail(f"Expected seed to be a whole number >= 0. Got seed={seed!r}.")
        return cls(_derive(b"", str(int(seed)).encode(), purpose="seed"), secure=secure, guessable=True)

    @classmethod
    def from_key(
        cls, key: bytes, *, secure: bool = False, guessable: bool = False, algorithm: str | None = None
    ) -> RandomSource:
        """The source a checkpoint was made with; `algorithm` refuses to go on with another generator."""
        return cls(key, secure=secure, guessable=guessable, algorithm=algorithm)

    def key_bytes(self) -> bytes:
        """The secret key, for checkpoints only."""
        if self._erased:
            fail("Expected a random source that is still in use. Its key was erased when its run ended.")
        return bytes(self._key)

    def erase(self) -> None:
        """Forget the key; every later use is refused."""
        self._key[:] = bytes(KEY_BYTES)
        self._erased = True
        self._noise_ahead.clear()
        self._noise_blocks.clear()

    def draw_generator(self, *, step: int, rank: int = 0) -> BitGenerator:
        """Words that decide who is drawn at a step, by this rank."""
        return self._generator("draw", number=step, rank=rank)

    def round_generator(self, *, round: int, rank: int = 0) -> BitGenerator:
        """Words that decide who takes part in a round, among this rank's people."""
        return self._generator("round", number=round, rank=rank)

    def noise_(self, tensors: Sequence[torch.Tensor], *, standard_deviation: float, step: int) -> None:
        """Add Gaussian noise to the tensors, in place: the one noise vector of the step.

        The noise of a step is given out once. Asking again, or for an earlier step, is refused: the same
        noise on other gradients would reveal their difference.

        Guarantee: each element gets independent Gaussian noise of this standard deviation, so that sums
        which one person's record changes by a norm of at most C are released as by a Gaussian mechanism
        with noise multiplier `standard_deviation` / C. (Noise of float32 ends at 7.4 standard deviations
        on CPUs. The chance of more would be 1e-13.)

        Known limit of the default mode: noise is a floating-point number of the tensor's own precision, and
        so is the noised sum, as anywhere else. Not every number can be had in this way (float32 on CPUs: 2^24
        angles), so somebody who guesses the exact sum of all people may be able to confirm the guess from the
        last bits of what is released. `secure=True` mitigates that.
        """
        check_positive(standard_deviation=standard_deviation)
        for place, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                fail(f"Expected tensors[{place}] to hold floating-point numbers. Got {tensor.dtype}.")
        if step < self._next_noise_step:
            fail(
                f"Expected step >= {self._next_noise_step}: earlier noise was given out; on other gradients "
                f"it would reveal their difference. Got step={step!r}."
            )
        if self.secure:
            from pdpsgd.sampling.noise import add_secure_noise_

            add_secure_noise_(tensors, standard_deviation, self._generator("noise", number=step))
        elif _is_small(tensors):
            self._add_noise_made_ahead_(tensors, standard_deviation, step)
        else:
            self._add_noise_(tensors, standard_deviation, self._generator("noise", number=step))
        self._next_noise_step = step + 1

    def _add_noise_(
        self, tensors: Sequence[torch.Tensor], standard_deviation: float, generator: BitGenerator
    ) -> None:
        import torch

        here = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        for tensor in here:
            if tensor.dtype == torch.float64:
                _add_fine_noise_(tensor, standard_deviation, generator)
        for block in blocks([tensor for tensor in here if tensor.dtype != torch.float64]):
            (noises,) = self._noise_block(block, steps=1).make([generator])
            for tensor, noise in zip(block, noises, strict=True):
                tensor.add_(noise, alpha=standard_deviation)
        elsewhere = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        _add_noise_on_device_(elsewhere, standard_deviation, generator)

    def _add_noise_made_ahead_(
        self, tensors: Sequence[torch.Tensor], standard_deviation: float, step: int
    ) -> None:
        """The same noise, made for some steps at once: between training steps, everything is out of the cache."""
        noises = self._noise_ahead.pop(step, None)
        if noises is None or [noise.shape for noise in noises] != [tensor.shape for tensor in tensors]:
            self._noise_ahead = {}  # their memory is about to be used again
            steps = range(step, step + _AHEAD)
            generators = [self._generator("noise", number=number) for number in steps]
            made = self._noise_block(tensors, steps=_AHEAD).make(generators)
            self._noise_ahead = dict(zip(steps, made, strict=True))
            noises = self._noise_ahead.pop(step)
        for tensor, noise in zip(tensors, noises, strict=True):
            tensor.add_(noise, alpha=standard_deviation)

    def _noise_block(self, tensors: Sequence[torch.Tensor], *, steps: int) -> _NoiseBlock:
        shapes = (steps, *(tensor.shape for tensor in tensors))
        if shapes not in self._noise_blocks:
            if len(self._noise_blocks) >= _KEPT_BLOCKS:
                self._noise_blocks.clear()
            self._noise_blocks[shapes] = _NoiseBlock(tensors, steps=steps)
        return self._noise_blocks[shapes]

    def _generator(self, purpose: str, *, number: int, rank: int = 0) -> BitGenerator:
        if number < 0 or rank < 0:
            fail(f"Expected the {purpose}'s number and rank to be >= 0. Got {number!r} and {rank!r}.")
        place = int(number).to_bytes(8, "little") + int(rank).to_bytes(8, "little")
        seed = _derive(self.key_bytes(), place, purpose=purpose)
        if self.secure:
            from pdpsgd.sampling.generators import SecureWords

            return SecureWords(seed, algorithm=self.algorithm)
        return _fast_words(seed)

    def __repr__(self) -> str:
        return f"RandomSource({self.algorithm}, {GUESSABLE if self.guessable else 'secret key'})"


def _derive(key: bytes, content: bytes, *, purpose: str) -> bytes:
    # `person` keeps the purposes apart: the noise of step 3 has nothing to do with the draw of step 3.
    person = f"pdpsgd {purpose}".encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES, key=key, person=person).digest()
