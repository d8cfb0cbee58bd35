"""Two finished models on the same test people: figures of both, their differences, and how sure these are.

Intervals are by the paired bootstrap: test people (with all their records) are drawn again, with replacement, 2,000
times; both models are looked at on the same draws, and 95 % of the differences lie in the interval. A group's figures
are drawn within the group. The seed is fixed, so a comparison repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.training.paired_measures import (
    HIGHER_IS_BETTER,
    OF_CLASSES,
    OF_NUMBERS,
    OF_ONE_CLASS,
    SHARES,
    Measure,
)
from pdpsgd.training.probability_figures import as_logits

DRAWS, AT_ONCE, SEED = 2000, 100, 0
METHOD = (
    f"Intervals: 95 %, paired bootstrap over test people ({DRAWS:,} draws; both models on the same draws). They speak "
    "of other people like these, not of other training runs: with other noise, both models would be others."
)
SMALLEST_GROUP = 10


@dataclass(frozen=True)
class Figure:
    """One figure of both models, and the second's less the first's, with its interval."""

    name: str
    first: float
    second: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """The second model's figure less the first's."""
        return self.second - self.first

    def text(self, value: float) -> str:
        """Write a value of this figure."""
        return f"{value:.1%}" if self.name in SHARES else f"{value:,.{self._decimals}f}"

    def change(self, value: float) -> str:
        """Write a difference, with its sign; of shares in points."""
        return f"{100 * value:+.1f} points" if self.name in SHARES else f"{value:+,.{self._decimals}f}"

    @property
    def _decimals(self) -> int:
        """Decimals of all that is written of this figure: of an error, so that the larger has four digits."""
        larger = max(self.first, self.second)
        if self.name not in ("RMSE", "MAE") or larger <= 0:
            return 3
        return max(0, 3 - math.floor(math.log10(larger)))

    @property
    def interval(self) -> str:
        """The interval of the difference, in words."""
        low, high = self.change(self.low).removesuffix(" points"), self.change(self.high)
        return f"{low} to {high}"

    @property
    def verdict(self) -> str:
        """Which model is better by this figure, if the interval says so."""
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return (
            "second is better" if (self.difference > 0) == HIGHER_IS_BETTER[self.name] else "first is better"
        )


@dataclass(frozen=True)
class Group:
    """Figures on some of the test people: all, or those of a tier, class or subgroup."""

    kind: str
    name: str
    people: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class ModelComparison:
    """Two models side by side on the same test people."""

    names: tuple[str, str]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    on_lists: bool = False
    """Whether some test people are on a run's list, whose records these figures would give away."""

    @property
    def main(self) -> tuple[Figure, Figure]:
        """The figures that decide: accuracy and log loss, or the two errors."""
        known = {figure.name: figure for figure in self.groups[0].figures}
        one, other = ("accuracy", "log loss") if "accuracy" in known else ("RMSE", "MAE")
        return known[one], known[other]

    def answer(self) -> str:
        """Say whether the second model is better, by accuracy and log loss, or by both errors."""
        said = []
        for figure in self.main:
            name = figure.name
            change = f"{figure.change(figure.difference)} (95 % interval {figure.interval})"
            better = {"second is better": self.names[1], "first is better": self.names[0]}.get(figure.verdict)
            shown = "no difference is shown" if better is None else f"{better} is better"
            said.append(f"By {name} {shown}: {change}.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "runs": list(self.names),
            "method": METHOD,
            "notes": list(self.notes),
            "groups": [
                {
                    **asdict(group),
                    "figures": [{**asdict(each), "difference": each.difference} for each in group.figures],
                }
                for group in self.groups
            ],
        }


def compare_numbers(
    names: tuple[str, str],
    answers: tuple[FloatArray, FloatArray],
    truth: FloatArray,
    *,
    people: Sequence[Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    notes: Sequence[str] = (),
    on_lists: bool = False,
) -> ModelComparison:
    """Compare two models that predict numbers; for the arguments see `compare_models`."""
    for each in answers:
        if len(each) != len(truth) or not np.isfinite(each).all():
            fail(
                f"Expected finite predictions for all {len(truth):,} test records. Got {len(each):,} or others."
            )
    kinds = {kind: (of, OF_NUMBERS) for kind, of in (groups or {}).items()}
    made = _all_groups(answers, truth, people, OF_NUMBERS, kinds)
    return ModelComparison(names, made, tuple(notes), on_lists)


def compare_models(
    names: tuple[str, str],
    outputs: tuple[FloatArray, FloatArray],
    classes: IntArray,
    *,
    people: Sequence[Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    class_names: Sequence[str] = (),
    notes: Sequence[str] = (),
    on_lists: bool = False,
) -> ModelComparison:
    """Compare two models by what they say of the same test records.

    Args:
        names: What the models are called.
        outputs: Logits of both, in the same order of records and classes.
        classes: The true class of each record.
        people: The person of each record, where people have many.
        groups: For each kind of group (tier, sex), the group of each record.
        class_names: Names of the classes.
        notes: What a reader must be told.
        on_lists: Whether some test people are on a run's list.

    Returns:
        Figures for all, by class, and by each kind of group.

    Raises:
        PdpsgdError: If the numbers of records differ, or an output is not finite.
    """
    logits = tuple(as_logits(each).astype(np.float64) for each in outputs)
    for each in logits:
        if len(each) != len(classes) or not np.isfinite(each).all():
            fail(
                f"Expected finite outputs for all {len(classes):,} test records. Got {len(each):,} or others."
            )
    labels = [str(class_names[c]) if c < len(class_names) else str(c) for c in range(logits[0].shape[1])]
    kinds = {"class": ([labels[c] for c in classes], OF_ONE_CLASS)}
    kinds |= {kind: (list(of), OF_CLASSES) for kind, of in (groups or {}).items()}
    made = _all_groups(logits, classes, people, OF_CLASSES, kinds)
    return ModelComparison(names, made, tuple(notes), on_lists)


def _all_groups(
    outputs: tuple[FloatArray, ...],
    truth: Any,
    people: Sequence[Any] | None,
    measures: Mapping[str, Measure],
    kinds: Mapping[str, tuple[Sequence[str], Mapping[str, Measure]]],
) -> tuple[Group, ...]:
    """Compute the figures on all, and on each group of each kind that is large enough."""
    persons = np.arange(len(truth)) if people is None else np.unique(people, return_inverse=True)[1]
    made = [_group("all", "all", np.arange(len(truth)), outputs, truth, persons, measures)]
    for kind, (membership, own) in kinds.items():
        named = np.asarray([str(each) for each in membership])
        for name in sorted(set(named.tolist())):
            rows = np.flatnonzero(named == name)
            if len(np.unique(persons[rows])) >= SMALLEST_GROUP:
                made.append(_group(kind, name, rows, outputs, truth, persons, own))
    return tuple(made)


def _group(
    kind: str,
    name: str,
    rows: IntArray,
    outputs: tuple[FloatArray, ...],
    truth: Any,
    persons: IntArray,
    measures: Mapping[str, Measure],
) -> Group:
    """Compute the figures on some records."""
    of_row = np.unique(persons[rows], return_inverse=True)[1]
    count = int(of_row.max()) + 1
    made = {key: [measure(each[rows], truth[rows]) for each in outputs] for key, measure in measures.items()}
    once = np.ones((1, len(rows)))
    values = {key: [float(each(once)[0]) for each in pair] for key, pair in made.items()}
    random = np.random.default_rng(SEED)
    drawn: dict[str, list[FloatArray]] = {key: [] for key in made}
    for _ in range(DRAWS // AT_ONCE):
        weights = random.multinomial(count, np.full(count, 1 / count), AT_ONCE)[:, of_row].astype(np.float64)
        for key, (first, second) in made.items():
            drawn[key].append(second(weights) - first(weights))
    figures = []
    for key, (one, other) in values.items():
        differences = np.concatenate(drawn[key])
        if not np.isnan([one, other]).any() and not np.isnan(differences).all():
            low, high = np.nanquantile(differences, (0.025, 0.975))
            figures.append(Figure(key, one, other, float(low), float(high)))
    return Group(kind, name, count, tuple(figures))
