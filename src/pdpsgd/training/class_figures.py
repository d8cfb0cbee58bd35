"""Figures beside accuracy, for classes of unequal size: balanced accuracy, AUC, and the share of the largest class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata

from pdpsgd._typing import BoolArray, FloatArray, IntArray


def balanced_accuracy(correct: BoolArray, classes: IntArray) -> float:
    """Return the mean over classes of the share of each that is right (its recall).

    >>> balanced_accuracy(np.array([True, True, True, False]), np.array([0, 0, 0, 1]))
    0.5
    """
    _, places = np.unique(classes, return_inverse=True)
    return float((np.bincount(places, weights=correct) / np.bincount(places)).mean())


def majority_share(classes: IntArray) -> float:
    """Return the accuracy of always answering the largest class."""
    return float(np.unique(classes, return_counts=True)[1].max() / len(classes))


def area_under_curve(scores: FloatArray, classes: IntArray) -> float | None:
    """Return the probability that a random example of a class scores higher for it than one of another class.

    With more than two classes, it is the mean over the classes, each against all others; ties count half.

    Args:
        scores: One column per class, or one score for the second of two classes.
        classes: The class of each example.

    Returns:
        The area; None where all examples are of one class, or a score is not finite.
    """
    present = np.unique(classes)
    if len(present) < 2 or not np.isfinite(scores).all():
        return None
    if scores.ndim == 1 or scores.shape[1] == 1:
        return _area(scores.reshape(-1), classes == 1)
    if scores.shape[1] == 2:
        return _area(scores[:, 1] - scores[:, 0], classes == 1)
    return float(np.mean([_area(scores[:, each], classes == each) for each in present]))


def _area(scores: FloatArray, positive: BoolArray) -> float:
    """Compute the statistic of Mann and Whitney, as a share of all pairs."""
    ranks, count = rankdata(scores), int(positive.sum())
    pairs = count * (len(scores) - count)
    return float((ranks[positive].sum() - count * (count + 1) / 2) / pairs)


def class_sentences(evaluation: Mapping[str, Any], classes: Sequence[str] = ()) -> list[str]:
    """Say how good a model is by class, and plainly if it is no better than always answering the largest class.

    Args:
        evaluation: The figures on test people, as plain data.
        classes: The names of the classes.

    Returns:
        Sentences for terminal and page; none where nothing is known by class.
    """
    accuracy, majority = evaluation.get("accuracy"), evaluation.get("majority")
    if accuracy is None or majority is None:
        return []
    said = []
    if accuracy <= majority:
        said.append(
            f"This is no better than always answering the largest class, which is right for {majority:.1%}: the model "
            "has not learned to tell the classes apart. Larger batches, another learning rate or more people may help."
        )
    figures = [f"Balanced accuracy (mean of the classes' recalls) {evaluation['balanced_accuracy']:.1%}"]
    if evaluation.get("auc") is not None:
        figures.append(f"AUC {evaluation['auc']:.3f}")
    figures.append(f"always the largest class {majority:.1%}")
    said.append("; ".join(figures) + ".")
    recalls = evaluation.get("by_class") or {}
    if 1 < len(recalls) <= 6:
        named = (f"{_name(key, classes)} {share['accuracy']:.1%}" for key, share in recalls.items())
        said.append(f"Recall by class: {', '.join(named)}.")
    return said


def _name(key: str, classes: Sequence[str]) -> str:
    return classes[int(key)] if key.isdigit() and int(key) < len(classes) else key
