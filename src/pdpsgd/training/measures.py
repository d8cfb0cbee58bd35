"""The figure by which models are put side by side: accuracy for classes, the error for numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdpsgd.training.evaluation import Evaluation


@dataclass(frozen=True)
class Measure:
    """A figure on test people: its name, that of several, and whether it is a share and more of it is better.

    >>> ACCURACY.text(0.912, 0.004), RMSE.text(54.77)
    ('91.2 ± 0.4 %', '54.77')
    """

    name: str
    plural: str
    title: str
    is_share: bool
    more_is_better: bool

    def text(self, value: float, error: float | None = None) -> str:
        """Write a value, with the standard error of a mean if there is one."""
        if not self.is_share:
            return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
        return f"{value:.1%}" if error is None else f"{100 * value:.1f} ± {100 * error:.1f} %"

    def change(self, value: float, base: float) -> str:
        """Write the change from another value: in points, or in the label's unit."""
        return f"{100 * (value - base):+.1f}" if self.is_share else f"{value - base:+.3g}"

    def of(self, found: Evaluation) -> float | None:
        """Take the figure from an evaluation."""
        if self.is_share:
            return found.accuracy
        return None if found.errors is None else found.errors.rmse

    def by_tier(self, found: Evaluation) -> Mapping[str, tuple[float, int]]:
        """Take the figure of each tier, and the number of test people in it."""
        if self.is_share:
            return {name: (share.accuracy, share.people) for name, share in found.by_tier.items()}
        return {name: (errors.rmse, errors.people) for name, errors in found.errors_by_tier.items()}

    def in_history(self, record: Mapping[str, Any]) -> Any:
        """Take the figure from a record of the history."""
        return record[f"test_{self.name}"]

    @property
    def chart_format(self) -> str:
        """The format of the figure on a chart's axis and in its tooltips."""
        return ".1%" if self.is_share else ".4~g"


ACCURACY = Measure("accuracy", "accuracies", "accuracy", is_share=True, more_is_better=True)
RMSE = Measure("rmse", "rmses", "root mean squared error", is_share=False, more_is_better=False)
