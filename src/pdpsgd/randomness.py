"""A secret key and the step's number make every draw and all noise.

Nothing here keeps a position in a stream: what happens at a step is a function of the key and the step's number alone.
A run that is killed and resumed therefore repeats its steps exactly, and two different steps never share their noise.
The same noise must never meet different gradients (their difference would have no noise at all), so the key must be
secret, belongs to one run, and is erased when the run ends.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pdpsgd.errors import check_positive, fail

if TYPE_CHECKING:
    import torch

KEY_BYTES = 32
GUESSABLE = "reproducible, guessable: not for release"

WordArray = npt.NDArray[np.uint64]


class BitGenerator(Protocol):
    """What draws are made of: uniform 64-bit words. Every numpy bit generator is one."""

    def random_raw(self, size: int) -> WordArray:
        """The next `size` words."""
        ...


class RandomSource:
    """A secret key; every draw and all noise of a step come from the key and the step's number, nothing else.

    By default words come from SFC64, a fast generator that is statistically sound but not cryptographic. It gets a
    fresh 256-bit state for every purpose, step and rank from BLAKE2b keyed with the secret key, so nobody can try out
    all states. (A `torch.Generator` would be a hole: on CPUs `manual_seed` uses 32 bits of its seed, few enough to try
    them all against a model that was seen before and after a step. On other devices all 64 bits count; there it is used.)
    With `secure=True` words come from a cryptographic generator, and noise is protected against being reconstructed
    from its last bits: see `pdpsgd.secure_random`.

    Guarantee: draws and noise have the distribution that the plan was proven for, as far as the generator's words are
    uniform and independent for somebody who does not have the key. A key made `from_seed` can be guessed: `guessable`
    says so, and what was trained with it is not for release.
    """

    guessable: bool
    secure: bool

    def __init__(self, key: bytes, *, secure: bool, guessable: bool, algorithm: str | None = None) -> None:
        if len(key) != KEY_BYTES:
            fail(f"Expected a key of {KEY_BYTES} bytes. Got {len(key)} bytes.")
        self._key = bytearray(key)
        self._next_noise_step = 0
        self.secure = secure
        self.guessable = guessable
        self.algorithm = _choose_algorithm(secure, algorithm)

    @classmethod
    def from_operating_system(cls, *, secure: bool = False) -> RandomSource:
        """A fresh secret key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES), secure=secure, guessable=False)

    @classmethod
    def from_seed(cls, seed: int, *, secure: bool = False) -> RandomSource:
        """A key made of a seed: reproducible, guessable, not for release."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            fail(f"Expected seed to be a whole number >= 0. Got seed={seed!r}.")
        return cls(_digest(str(int(seed)).encode(), purpose="seed"), secure=secure, guessable=True)

    @classmethod
    def from_key(
        cls, key: bytes, *, secure: bool = False, guessable: bool = False, algorithm: str | None = None
    ) -> RandomSource:
        """The source that a checkpoint was made with; `algorithm` refuses to go on with another generator."""
        return cls(key, secure=secure, guessable=guessable, algorithm=algorithm)

    def key_bytes(self) -> bytes:
        """The secret key, for checkpoints only."""
        if not any(self._key):
            fail("Expected a random source that is still in use. Its key was erased when the run ended.")
        return bytes(self._key)

    def erase(self) -> None:
        """Forget the key; every later use is refused."""
        self._key[:] = bytes(KEY_BYTES)

    def draw_generator(self, *, step: int, rank: int = 0) -> BitGenerator:
        """Words that decide who is drawn at a step (by this rank)."""
        return self._generator("draw", step=step, rank=rank)

    def round_generator(self, *, round: int, rank: int = 0) -> BitGenerator:
        """Words that decide who takes part in a round (among this rank's people)."""
        return self._generator("round", step=round, rank=rank)

    def noise_(self, tensors: Sequence[torch.Tensor], *, standard_deviation: float, step: int) -> None:
        """Add Gaussian noise to the tensors, in place: the one noise vector of the step.

        A step's noise is given out once. Asking again (or for an earlier step) is refused, because the same noise on
        other gradients would reveal their difference.

        Guarantee: each element gets independent noise of this standard deviation, so a sum whose norm changes by at
        most C with one person's record is released as by a Gaussian mechanism of noise multiplier
        `standard_deviation` / C. Box-Muller from 40-bit uniforms reaches 7.5 standard deviations; what lies beyond has
        probability 1e-13 and is missing.
        """
        check_positive(standard_deviation=standard_deviation)
        for place, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                fail(f"Expected tensors[{place}] to hold floating-point numbers. Got {tensor.dtype}.")
        if step < self._next_noise_step:
            fail(
                f"Expected step >= {self._next_noise_step}: the noise of earlier steps was already given out, and the same "
                f"noise on other gradients would reveal their difference. Got step={step}."
            )
        if self.secure:
            from pdpsgd.secure_random import add_secure_noise_

            add_secure_noise_(tensors, standard_deviation, self._generator("noise", step=step))
        else:
            _add_noise_(tensors, standard_deviation, self._seed("noise", step=step))
        self._next_noise_step = step + 1

    def _generator(self, purpose: str, *, step: int, rank: int = 0) -> BitGenerator:
        seed = self._seed(purpose, step=step, rank=rank)
        if self.secure:
            from pdpsgd.secure_random import SecureWords

            return SecureWords(seed, self.algorithm)
        return _fast_words(seed)

    def _seed(self, purpose: str, *, step: int, rank: int = 0) -> bytes:
        if step < 0 or rank < 0:
            fail(f"Expected step >= 0 and rank >= 0. Got step={step!r}, rank={rank!r}.")
        place = int(step).to_bytes(8, "little") + int(rank).to_bytes(8, "little")
        return _digest(place, purpose=purpose, key=self.key_bytes())

    def __repr__(self) -> str:
        kind = GUESSABLE if self.guessable else "key from the operating system"
        return f"RandomSource({self.algorithm}, {kind})"


def _choose_algorithm(secure: bool, wanted: str | None) -> str:
    if not secure:
        available = "sfc64"
    else:
        from pdpsgd.secure_random import available_algorithm

        available = available_algorithm(wanted)
    if wanted not in (None, available):
        fail(f"Expected the generator {available!r} (secure={secure}). Got algorithm={wanted!r}.")
    return available


def _digest(content: bytes, *, purpose: str, key: bytes = b"") -> bytes:
    # `person` keeps the purposes apart: no two of them can ever hash to the same stream.
    person = f"pdpsgd {purpose}".encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES, key=key, person=person).digest()


def _fast_words(seed: bytes) -> BitGenerator:
    # numpy's own default pool of 128 bits would lose half the seed.
    entropy = np.random.SeedSequence(int.from_bytes(seed, "little"), pool_size=KEY_BYTES // 4)
    return np.random.SFC64(entropy)


# --- noise in the default mode ---------------------------------------------------------------------------------------

_BLOCK = 2**16  # normals made at once: their temporaries stay in the second-level cache


def _add_noise_(tensors: Sequence[torch.Tensor], standard_deviation: float, seed: bytes) -> None:
    import torch

    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    words = _fast_words(seed)
    for block in blocks(on_cpu):
        sizes = [tensor.numel() for tensor in block]
        noise = _normals(words, sum(sizes), standard_deviation)
        for tensor, part in zip(block, noise.split(sizes), strict=True):
            tensor.add_(part.view(tensor.shape))

    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            continue
        if tensor.device not in generators:
            device_seed = _digest(str(tensor.device).encode(), purpose="device", key=seed)
            generators[tensor.device] = torch.Generator(tensor.device)
            generators[tensor.device].manual_seed(int.from_bytes(device_seed[:8], "little", signed=True))
        noise = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.add_(noise.normal_(0.0, standard_deviation, generator=generators[tensor.device]))


def blocks(tensors: Sequence[torch.Tensor], *, size: int = _BLOCK) -> Iterator[list[torch.Tensor]]:
    """The tensors' elements in order, as lists of views of at most `size` elements in all.

    Small tensors share a block (one pass over the noise, not one each); large ones are cut, so that the memory for
    noise is bounded. A large tensor with gaps or permuted dimensions is a block of its own.
    """
    block: list[torch.Tensor] = []
    room = size
    for tensor in tensors:
        pieces = (
            tensor.view(-1).split(size) if tensor.numel() > size and tensor.is_contiguous() else (tensor,)
        )
        for piece in pieces:
            if block and piece.numel() > room:
                yield block
                block, room = [], size
            block.append(piece)
            room -= piece.numel()
    if block:
        yield block


def _normals(words: BitGenerator, count: int, standard_deviation: float) -> torch.Tensor:
    """Independent normal numbers (float32) by Box and Muller: a word gives a radius (40 bits) and an angle (24 bits).

    A small uniform keeps its leading bits as a float, so 40 bits reach sqrt(2 * 41 * ln 2) = 7.5 standard deviations
    (the usual 24 bits end at 5.8, which leaves an event of probability 1e-8 that gives a person away).
    """
    import torch

    raw = words.random_raw((count + 1) // 2)
    low = raw.astype(np.uint32) << np.uint32(8)
    angle = torch.from_numpy(low.view(np.int32)).to(torch.float32).mul_(math.pi / 2**31)
    high = torch.from_numpy((raw >> np.uint64(24)).view(np.int64))
    uniform = high.to(torch.float32).add_(0.5).mul_(2.0**-40)
    radius = uniform.log_().mul_(-2 * standard_deviation**2).sqrt_()
    pairs = torch.empty(2, len(raw))
    torch.cos(angle, out=pairs[0])
    torch.sin(angle, out=pairs[1])
    return pairs.mul_(radius).view(-1)[:count]
