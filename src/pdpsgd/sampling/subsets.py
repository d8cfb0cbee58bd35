"""Random subsets: distinct numbers below a limit, every set of them equally likely (Floyd's way)."""

from __future__ import annotations

import numpy as np

from pdpsgd._typing import IntArray, WordArray


def subsets_of(words: WordArray, limits: IntArray) -> IntArray:
    """Return, for each limit, as many distinct numbers below it as there are words: (people, K) in and out.

    The t-th number is uniform below limit - K + t + 1; if it is there already, the largest of that range, which cannot
    be, takes its place.

    >>> subsets_of(np.array([[5, 5, 7]], dtype=np.uint64), np.array([4])).tolist()
    [[1, 2, 3]]
    """
    people, most = words.shape
    chosen = np.empty((people, most), dtype=np.int64)
    for place in range(most):
        end = limits - most + place + 1
        number = (words[:, place] % end.astype(np.uint64)).view(np.int64)
        again = (chosen[:, :place] == number[:, None]).any(axis=1)
        chosen[:, place] = np.where(again, end - 1, number)
    return chosen
