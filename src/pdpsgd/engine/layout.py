"""Where the rows of a step stand, so that nobody's row is rounded otherwise because somebody else was sampled.

Kernels round a row by its place among others and by how many there are: below 16 rows otherwise than above, at the end
of a batch otherwise than inside, and in small layers by the place modulo four. So the rows of a step are filled up with
placeholders of weight 0 to a multiple of some number, and whoever is sampled stands in a lane (the place modulo the
number of lanes) that is drawn for that person alone. `checks.row_rounding` finds the numbers that a model needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdpsgd._typing import IntArray, WordArray

SMALLEST = 16  # rows of a physical batch, unless the limit is below that
FEWEST = 4  # what they are a multiple of at least, unless the limit is below that
NOBODY = -1  # whose a placeholder is, in place of a place on the list


@dataclass(frozen=True)
class Layout:
    """How many rows a physical batch may have, and in which lanes people stand.

    Attributes:
        multiple: What the number of rows of a physical batch is a multiple of.
        lanes: How many lanes there are; 1, or a divisor of `multiple`.
        limit: The largest number of rows in a physical batch.
        powers: Whether the number of rows is a power of two, because the loss divides by it.
    """

    multiple: int = 4
    lanes: int = 1
    limit: int | None = None
    powers: bool = False

    @property
    def at_once(self) -> int | None:
        """How many rows a whole physical batch has, where steps are cut."""
        if self.limit is None:
            return None
        if self.powers:
            return 1 << (self.limit.bit_length() - 1)
        if self.limit < FEWEST:
            return max(1, self.limit // self.lanes * self.lanes)
        multiple = self.multiple if self.limit >= max(SMALLEST, self.multiple) else FEWEST
        return self.limit // multiple * multiple

    def rows(self, rows: int) -> int:
        """Return how many rows a physical batch has that has to hold so many.

        >>> Layout(multiple=4).rows(3), Layout(multiple=4).rows(18), Layout(multiple=4, limit=7).rows(3)
        (16, 20, 4)
        >>> Layout(powers=True).rows(18)
        32
        """
        filled = -(-max(rows, SMALLEST) // self.multiple) * self.multiple
        if self.powers:
            filled = 1 << (filled - 1).bit_length()
        return filled if self.at_once is None else min(filled, self.at_once)

    def rows_of_step(self, rows: int) -> int:
        """Return how many rows a step has, over all its physical batches, that has to hold so many.

        >>> Layout(multiple=4, limit=32).rows_of_step(66)
        80
        """
        if self.at_once is None:
            return self.rows(rows)
        whole, rest = divmod(rows, self.at_once)
        return whole * self.at_once + (self.rows(rest) if rest else 0)

    def places(self, words: WordArray) -> IntArray:
        """Return where people stand, one uniform word each.

        Guarantee: the lanes of others are independent of whether person i is among them. So is who stands where in a
        lane, but for one of them, in whose place person i stands, and who stands at the end of the lane instead.
        (Words are taken to differ: for n people they do but for n^2 2^-61.)
        """
        order = order_of(words)
        if self.lanes == 1:
            places = np.empty(len(words), dtype=np.int64)
            places[order] = np.arange(len(words))
            return places
        lane = (words & np.uint64(self.lanes - 1)).astype(np.int64)
        places = np.empty(len(words), dtype=np.int64)
        for number in range(self.lanes):
            members = order[lane[order] == number]
            places[members] = number + self.lanes * np.arange(len(members))
        return places


def order_of(words: WordArray) -> IntArray:
    """Return people in a uniform order: who is first, who is next; one uniform word each."""
    return np.argsort(words >> np.uint64(3), kind="stable")
