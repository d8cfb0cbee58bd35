"""The noise of every step; without compiled code, that of several steps is made together.

A step's noise depends on key, step and public figures alone, so it may be made before the step comes. Between two steps
the processor's caches are full of other things: there, what numpy does for one step takes twice as long as for one of
several that are made in a row. Noise of steps to come is as secret as the key, lies where the key lies, and is
overwritten with what is released, or with zeros when the key is erased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pdpsgd.sampling import grid
from pdpsgd.sampling.box_muller import GROUP, normals_of
from pdpsgd.sampling.grid import BLOCK, Scale
from pdpsgd.sampling.native.calls import AesWords
from pdpsgd.sampling.noise import add_noise
from pdpsgd.sampling.words import BitGenerator, read_into

if TYPE_CHECKING:
    import torch

AHEAD = 16  # steps whose generators are keyed together, and the most whose noise is made together
TOGETHER = 2**19  # numbers that are made together, at most: 4 MB

Generators = tuple[BitGenerator, BitGenerator]  # the words of all pairs, and those that continue a radius
_Floats = npt.NDArray[np.float64]


class OneStep(Protocol):
    """The noise of one step, which its totals get one after the other."""

    def add(self, total: torch.Tensor, noised: torch.Tensor) -> None:
        """Do what `grid.add_noise` does; both are flat, and in this memory."""
        ...


@dataclass
class ToBeMade:
    """Noise that is made while it is added, in memory for a block."""

    generators: Generators
    scale: Scale

    def add(self, total: torch.Tensor, noised: torch.Tensor) -> None:
        """Make and add the next numbers."""
        add_noise(total, noised, self.scale, *self.generators)


@dataclass
class Made:
    """Noise that was made before; its memory is used up."""

    rest: _Floats
    scale: Scale

    def add(self, total: torch.Tensor, noised: torch.Tensor) -> None:
        """Add the next numbers."""
        count = len(total)
        grid.add(total.numpy(), noised.numpy(), self.scale, self.rest[:count])
        self.rest = self.rest[_padded(count) :]


class StepNoise:
    """Makes the noise of steps from their generators.

    How many steps are made together doubles each time all of them were used, and begins again at one when they were
    not: when figures change with every step, nothing is made for nothing.
    """

    def __init__(self) -> None:
        self._keyed: dict[int, Generators] = {}
        self._made: dict[int, _Floats] = {}
        self._made_for: tuple[int, Scale] | None = None
        self._together = 0
        self._memory = np.empty(0)

    def of_step(
        self, step: int, sizes: Iterable[int], scale: Scale, *, keyed: Callable[[int], Generators]
    ) -> OneStep:
        """Return the noise of a step.

        Args:
            step: The step's number. That its noise is given out once is for the caller to see to.
            sizes: How many numbers each total has, in the order in which they will get noise.
            scale: Noise and grid.
            keyed: Makes the generators of a step, at their beginning.
        """
        numbers = sum(map(_padded, sizes))
        if self._made_for is not None and self._made_for != (numbers, scale):
            self._discard()
        if step in self._made:
            return Made(self._made.pop(step), scale)
        generators = self._generators(step, keyed)
        if isinstance(generators[0], AesWords) or not 0 < 2 * numbers <= TOGETHER:
            return ToBeMade(generators, scale)
        together = 1 if self._made else max(1, 2 * self._together)
        self._together = min(together, AHEAD, TOGETHER // numbers)
        self._made_for = numbers, scale
        later = range(step + 1, step + self._together)
        self._make(step, [generators, *(self._generators(n, keyed) for n in later)], numbers, scale)
        return Made(self._made.pop(step), scale)

    def forget(self) -> None:
        """Leave nothing of the noise of later steps."""
        self._keyed.clear()
        self._discard()

    def _generators(self, step: int, keyed: Callable[[int], Generators]) -> Generators:
        if step not in self._keyed:
            # One after the other: keyed once a step, between other work, ciphers take ten times as long.
            self._keyed = {n: keyed(n) for n in range(step, step + AHEAD)}
        return self._keyed.pop(step)

    def _discard(self) -> None:
        self._made.clear()
        self._made_for, self._together = None, 0
        self._memory[:] = 0

    def _make(self, step: int, generators: Sequence[Generators], numbers: int, scale: Scale) -> None:
        """Make the noise of these steps, as one piece of memory."""
        count = numbers * len(generators)
        if len(self._memory) < count:
            self._memory = np.empty(count)
        for start in range(0, count, BLOCK):
            block = self._memory[start : min(start + BLOCK, count)].view(np.uint64)
            further = []
            for place in range(start // numbers, -(-(start + len(block)) // numbers)):
                begin, end = (min(max(0, n * numbers - start), len(block)) for n in (place, place + 1))
                words, continuing = generators[place]
                read_into(block[begin:end], words)
                further.append((end // 2, continuing))
            normals_of(block, further, scale=scale.deviation, out=block.view(np.float64))
        self._made = {
            step + place: self._memory[place * numbers : (place + 1) * numbers]
            for place in range(len(generators))
        }


def _padded(count: int) -> int:
    """Return how many numbers are made for so many: whole groups."""
    return -(-count // GROUP) * GROUP
