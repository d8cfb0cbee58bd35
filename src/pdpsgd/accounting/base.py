"""What every accountant can be asked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdpsgd.accounting.history import EarlierRun, History, Past, simplify, split
from pdpsgd.errors import fail


class Accountant(ABC):
    """What histories cost. `proves` says whether the answer is an upper bound on the truth."""

    name: str
    proves: bool

    @property
    def rough(self) -> Accountant:
        """An accountant that answers about the same, sooner if it can: for guesses, which this one has to prove."""
        return self

    def epsilon(self, history: Past, delta: float) -> float:
        """Return an epsilon such that the history is (epsilon, delta)-DP in both directions (add, remove)."""
        earlier, fixed = split(history)
        fixed = simplify(fixed)
        if not (fixed or earlier):
            return 0.0
        if delta <= 0:
            return math.inf
        return self._epsilon_after(earlier, fixed, delta) if earlier else self._epsilon(fixed, delta)

    def delta(self, history: Past, epsilon: float) -> float:
        """Return a delta such that the history is (epsilon, delta)-DP in both directions (add, remove)."""
        earlier, fixed = split(history)
        if earlier:
            fail(
                "Expected a history without settled runs: these have an epsilon at the delta they were settled for."
            )
        fixed = simplify(fixed)
        return self._delta(fixed, epsilon) if fixed else 0.0

    def epsilons(self, histories: Sequence[Past], deltas: Sequence[float]) -> list[float]:
        """Return the epsilon of many histories, each at its own delta."""
        return [self.epsilon(h, d) for h, d in zip(histories, deltas, strict=True)]

    def _epsilon_after(self, earlier: tuple[EarlierRun, ...], history: History, delta: float) -> float:
        fail(
            "Earlier runs whose results were seen are added up by certificates. Expected the accountant "
            f"'certificate'. Got {self.name!r}."
        )

    @abstractmethod
    def _epsilon(self, history: History, delta: float) -> float: ...

    @abstractmethod
    def _delta(self, history: History, epsilon: float) -> float: ...
