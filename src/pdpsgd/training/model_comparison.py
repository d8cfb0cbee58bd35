"""Two finished models on the same test people: figures of both, their differences, and how sure these are.

Intervals are by the paired bootstrap: test people (with all their records) are drawn again, with replacement, 2,000
times; both models are looked at on the same draws, and 95 % of the differences lie in the interval. A group's figures
are drawn within the group. The seed is fixed, so a comparison repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.training.probability_figures import as_logits

DRAWS, AT_ONCE, SEED = 2000, 100, 0
METHOD = (
    f"Intervals: 95 %, paired bootstrap over test people ({DRAWS:,} draws; both models on the same draws). They speak "
    "of other people like these, not of other training runs: with other noise, both models would be others."
)
SMALLEST_GROUP = 10
HIGHER_IS_BETTER = {"accuracy": True, "balanced accuracy": True, "AUC": True, "log loss": False}

Weights = FloatArray
Measure = Callable[[FloatArray, IntArray], Callable[[Weights], FloatArray]]


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

    def answer(self) -> str:
        """Say whether the second model is better, by accuracy and by log loss."""
        figures = {figure.name: figure for figure in self.groups[0].figures}
        said = []
        for name in ("accuracy", "log loss"):
            figure = figures[name]
            in_points = 100 if name == "accuracy" else 1
            change = (
                f"{in_points * figure.difference:+.3g}{' points' if name == 'accuracy' else ''} "
                f"(95 % interval {in_points * figure.low:+.3g} to {in_points * figure.high:+.3g})"
            )
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


def compare_models(
    names: tuple[str, str],
    outputs: tuple[FloatArray, FloatArray],
    classes: IntArray,
    *,
    people: Sequence[Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    class_names: Sequence[str] = (),
    notes: Sequence[str] = (),
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
    persons = np.arange(len(classes)) if people is None else np.unique(people, return_inverse=True)[1]
    labels = [str(class_names[c]) if c < len(class_names) else str(c) for c in range(logits[0].shape[1])]
    kinds = {"class": [labels[c] for c in classes], **(groups or {})}
    made = [_group("all", "all", np.arange(len(classes)), logits, classes, persons, MEASURES)]
    for kind, membership in kinds.items():
        measures = OF_ONE_CLASS if kind == "class" else MEASURES
        for name in dict.fromkeys(sorted(map(str, membership))):
            rows = np.flatnonzero(np.asarray([str(each) for each in membership]) == name)
            if len(np.unique(persons[rows])) >= SMALLEST_GROUP:
                made.append(_group(kind, name, rows, logits, classes, persons, measures))
    return ModelComparison(names, tuple(made), tuple(notes))


def _group(
    kind: str,
    name: str,
    rows: IntArray,
    logits: tuple[FloatArray, ...],
    classes: IntArray,
    persons: IntArray,
    measures: Mapping[str, Measure],
) -> Group:
    """Compute the figures on some records."""
    of_row = np.unique(persons[rows], return_inverse=True)[1]
    count = int(of_row.max()) + 1
    made = {key: [measure(each[rows], classes[rows]) for each in logits] for key, measure in measures.items()}
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
        if not np.isnan([one, other]).any():
            low, high = np.nanquantile(np.concatenate(drawn[key]), (0.025, 0.975))
            figures.append(Figure(key, one, other, float(low), float(high)))
    return Group(kind, name, count, tuple(figures))


def _mean_of(values: FloatArray) -> Callable[[Weights], FloatArray]:
    return lambda weights: weights @ values / weights.sum(1)


def _accuracy(logits: FloatArray, classes: IntArray) -> Callable[[Weights], FloatArray]:
    return _mean_of((logits.argmax(1) == classes).astype(np.float64))


def _log_loss(logits: FloatArray, classes: IntArray) -> Callable[[Weights], FloatArray]:
    return _mean_of(-log_softmax(logits, axis=1)[np.arange(len(classes)), classes])


def _balanced(logits: FloatArray, classes: IntArray) -> Callable[[Weights], FloatArray]:
    right = (logits.argmax(1) == classes).astype(np.float64)
    present = [(classes == each).astype(np.float64) for each in np.unique(classes)]

    def of(weights: Weights) -> FloatArray:
        with np.errstate(invalid="ignore"):
            recalls = [(weights @ (right * one)) / (weights @ one) for one in present]
        return np.array([_known_mean(list(each)) for each in zip(*recalls, strict=True)])

    return of


def _auc(logits: FloatArray, classes: IntArray) -> Callable[[Weights], FloatArray]:
    """Area under the ROC curve, for more than two classes the mean of each against all others; ties count half."""
    two = logits.shape[1] == 2
    present = [1] if two else [int(each) for each in np.unique(classes)]
    scores = {each: logits[:, 1] - logits[:, 0] if two else logits[:, each] for each in present}
    places = {each: np.unique(values, return_inverse=True)[1] for each, values in scores.items()}

    def of(weights: Weights) -> FloatArray:
        return np.array([_known_mean([_area(w, places[c], classes == c) for c in present]) for w in weights])

    return of


def _known_mean(values: list[float]) -> float:
    """Return the mean of those values that are known; not a number where none is."""
    known = [value for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else float("nan")


def _area(weights: FloatArray, places: IntArray, positive: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    above = np.bincount(places, weights * positive)
    below = np.bincount(places, weights * ~positive)
    pairs = above.sum() * below.sum()
    return float(above @ (below.cumsum() - below / 2) / pairs) if pairs else float("nan")


MEASURES: dict[str, Measure] = {
    "accuracy": _accuracy,
    "balanced accuracy": _balanced,
    "AUC": _auc,
    "log loss": _log_loss,
}
OF_ONE_CLASS: dict[str, Measure] = {"accuracy": _accuracy, "log loss": _log_loss}
"""Of one class alone, accuracy is its recall."""
