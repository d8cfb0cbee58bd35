"""Whether probabilities mean what they say: log loss, expected calibration error, reliability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from pdpsgd._typing import BoolArray, FloatArray, IntArray

BINS = 10
"""Groups of a reliability chart, of as many records each: with rare classes, equal widths would leave most empty."""


LEAST_IN_A_BIN = 20
"""Records of which a share says something: of one or two, what is found is all or nothing."""


@dataclass(frozen=True)
class ReliabilityBin:
    """Records with like probabilities: what the model says of them on average, and what is so."""

    said: float
    found: float
    records: int


@dataclass(frozen=True)
class Probabilities:
    """How good probabilities are, on test people.

    With two classes they are those of the second class; with more, those of the class that the model answers.
    `log_loss` is the mean of -ln(probability of the true class), and `calibration_error` the mean over the bins,
    weighted by their records, of the difference between what is said and what is found.
    """

    log_loss: float
    calibration_error: float
    bins: tuple[ReliabilityBin, ...]


def as_logits(outputs: FloatArray) -> FloatArray:
    """Return one column per class: a single logit, of the second of two classes, gets a first column of zeros."""
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return outputs
    second = outputs.reshape(-1)
    return np.stack([np.zeros_like(second), second], axis=1)


def probability_figures(outputs: FloatArray, classes: IntArray) -> Probabilities | None:
    """Compare probabilities with what is so.

    Args:
        outputs: Logits, one column per class, or one logit for the second of two classes.
        classes: The class of each record.

    Returns:
        The figures; None where an output is not finite.
    """
    logits = as_logits(outputs).astype(np.float64)
    if not np.isfinite(logits).all():
        return None
    logs = log_softmax(logits, axis=1)
    said, right = stated(np.exp(logs), classes)
    bins = reliability(said, right)
    error = sum(each.records * abs(each.said - each.found) for each in bins) / len(classes)
    loss = -logs[np.arange(len(classes)), classes].mean()
    return Probabilities(float(loss), float(error), bins)


def stated(probabilities: FloatArray, classes: IntArray) -> tuple[FloatArray, BoolArray]:
    """Return the probability that is looked at for each record, and whether what it speaks of is so."""
    if probabilities.shape[1] == 2:
        return probabilities[:, 1], classes == 1
    answers = probabilities.argmax(1)
    return probabilities[np.arange(len(classes)), answers], answers == classes


def reliability(said: FloatArray, right: BoolArray, bins: int | None = None) -> tuple[ReliabilityBin, ...]:
    """Put records with like probabilities together, about as many into each bin; equal ones stay together.

    There are ten bins, or fewer where there would be less than twenty records in each.

    >>> reliability(np.array([0.1, 0.1, 0.9, 0.9]), np.array([False, True, True, True]), bins=2)
    (ReliabilityBin(said=0.1, found=0.5, records=2), ReliabilityBin(said=0.9, found=1.0, records=2))
    """
    bins = max(1, min(BINS, len(said) // LEAST_IN_A_BIN)) if bins is None else bins
    edges = np.unique(np.quantile(said, np.linspace(0, 1, bins + 1)[1:-1], method="higher"))
    places = np.searchsorted(edges, said, side="right")
    counts = np.bincount(places)
    means = np.bincount(places, weights=said), np.bincount(places, weights=right)
    return tuple(
        ReliabilityBin(float(means[0][i] / n), float(means[1][i] / n), int(n))
        for i, n in enumerate(counts)
        if n
    )


def probability_sentences(evaluation: Mapping[str, Any], *, calibrated: bool = False) -> list[str]:
    """Say how far probabilities can be relied on, and what would help; nothing where there are none."""
    found = evaluation.get("probabilities")
    if not found:
        return []
    off, loss = found["calibration_error"], f"Probabilities: log loss {found['log_loss']:.3f}"
    told = [each for each in found["bins"] if each["records"] >= LEAST_IN_A_BIN]
    if not told:
        return [f"{loss}; test people are too few to say whether probabilities mean what they say."]
    sure = sum(each["records"] * (each["said"] - each["found"]) for each in found["bins"]) / max(
        1, sum(each["records"] for each in found["bins"])
    )
    figures = f"{loss}, expected calibration error {off:.1%}."
    worst = max(told, key=lambda each: abs(each["said"] - each["found"]))
    if off < 0.03:
        return [figures]
    said = (
        f"Where the model says {worst['said']:.1%} on average, it is so for {worst['found']:.1%} of "
        f"{worst['records']:,} records."
    )
    direction = " It is too sure on the whole." if sure > 0.02 else ""
    remedy = "" if calibrated else " --calibrate brings them closer to the truth."
    return [figures, f"{said}{direction}{remedy}"]
