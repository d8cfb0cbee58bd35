"""What every accountant can be asked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdpsgd.accounting.history import History, simplify


class Accountant(ABC):
    """What histories cost. `proves` says whether the answer is an upper bound on the truth."""

    name: str
    proves: bool

    def epsilon(self, history: History, delta: float) -> float:
        """Return an epsilon such that the history is (epsilon, delta)-DP in both directions (add, remove)."""
        history = simplify(history)
        if not history:
            return 0.0
        return self._epsilon(history, delta) if delta > 0 else math.inf

    def delta(self, history: History, epsilon: float) -> float:
        """Return a delta such that the history is (epsilon, delta)-DP in both directions (add, remove)."""
        history = simplify(history)
        return self._delta(history, epsilon) if history else 0.0

    def epsilons(self, histories: Sequence[History], deltas: Sequence[float]) -> list[float]:
        """Return the epsilon of many histories, each at its own delta."""
        return [self.epsilon(h, d) for h, d in zip(histories, deltas, strict=True)]

    @abstractmethod
    def _epsilon(self, history: History, delta: float) -> float: ...

    @abstractmethod
    def _delta(self, history: History, epsilon: float) -> float: ...
