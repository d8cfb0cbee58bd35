"""Figures of a model on weighted test records: computed once, then asked for under many weights (paired bootstrap)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import log_softmax

from pdpsgd._typing import FloatArray, IntArray

Weights = FloatArray
Measure = Callable[[FloatArray, Any], Callable[[Weights], FloatArray]]
"""From what a model says of each record, and the truth, to the figure under each row of weights."""


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


def _rmse(answers: FloatArray, truth: FloatArray) -> Callable[[Weights], FloatArray]:
    mean = _mean_of((answers - truth) ** 2)
    return lambda weights: np.sqrt(mean(weights))


def _mae(answers: FloatArray, truth: FloatArray) -> Callable[[Weights], FloatArray]:
    return _mean_of(np.abs(answers - truth))


def _r_squared(answers: FloatArray, truth: FloatArray) -> Callable[[Weights], FloatArray]:
    """One minus the squared error over that of the mean label, on the same records; not a number without spread."""
    error, label, square = _mean_of((answers - truth) ** 2), _mean_of(truth), _mean_of(truth**2)

    def of(weights: Weights) -> FloatArray:
        spread = square(weights) - label(weights) ** 2
        known = spread > 1e-12 * square(weights)
        return np.where(known, 1 - error(weights) / np.where(known, spread, 1), np.nan)

    return of


OF_CLASSES: dict[str, Measure] = {
    "accuracy": _accuracy,
    "balanced accuracy": _balanced,
    "AUC": _auc,
    "log loss": _log_loss,
}
OF_ONE_CLASS: dict[str, Measure] = {"accuracy": _accuracy, "log loss": _log_loss}
"""Of one class alone, accuracy is its recall."""

OF_NUMBERS: dict[str, Measure] = {"RMSE": _rmse, "MAE": _mae, "R^2": _r_squared}
HIGHER_IS_BETTER = {
    "accuracy": True,
    "balanced accuracy": True,
    "AUC": True,
    "log loss": False,
    "RMSE": False,
    "MAE": False,
    "R^2": True,
}
SHARES = ("accuracy", "balanced accuracy")
