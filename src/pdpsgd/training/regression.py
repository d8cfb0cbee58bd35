"""Labels that are numbers: mapped from their public range to [-1, 1] and back, and errors in their unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd._typing import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

TASKS = ("classification", "regression")
Limits = tuple[float, float]


@dataclass(frozen=True)
class Errors:
    """How far predictions are off, in the unit of the label.

    `rmse` is the root of the mean squared error, `mae` the mean absolute one. `r_squared` is the share of the labels'
    variance that the model explains: 1 is perfect, 0 no better than always answering the mean of these people's labels;
    None where all of them are equal, or a prediction is no number.
    """

    rmse: float
    mae: float
    r_squared: float | None
    people: int


def errors_of(answers: FloatArray, truth: FloatArray, people: int | None = None) -> Errors:
    """Compare answers with the truth.

    >>> errors_of(np.array([1.0, 3.0]), np.array([1.0, 5.0]))
    Errors(rmse=1.4142135623730951, mae=1.0, r_squared=0.5, people=2)
    """
    off = answers - truth
    if not np.isfinite(off).all():  # weights that have run away
        return Errors(math.inf, math.inf, None, len(truth) if people is None else people)
    spread = float(((truth - truth.mean()) ** 2).sum())
    return Errors(
        rmse=math.sqrt(float((off**2).mean())),
        mae=float(np.abs(off).mean()),
        r_squared=None if spread == 0 else 1 - float((off**2).sum()) / spread,
        people=len(truth) if people is None else people,
    )


def in_range(outputs: Tensor, limits: Limits | None) -> Tensor:
    """Turn outputs of a regression, from -1 to 1, into numbers in the public range of the label."""
    if limits is None:
        return outputs
    low, high = limits
    return ((outputs.double().clamp(-1, 1) + 1) * ((high - low) / 2) + low).clamp(low, high)


def scaled(targets: Tensor, limits: Limits) -> Tensor:
    """Map labels from their public range to [-1, 1]; those outside of it count as its nearer end."""
    low, high = limits
    return ((targets.double().clamp(low, high) - low) * (2 / (high - low)) - 1).float()


def error_sentences(evaluation: Mapping[str, Any]) -> list[str]:
    """Say how far predictions are off, in all and by tier, and plainly if they are no better than one number for all.

    Args:
        evaluation: The figures on test people, as plain data.

    Returns:
        Sentences for terminal and page; none where labels are classes.
    """
    found = evaluation.get("errors")
    if found is None:
        return []
    said = [
        f"On {evaluation['people']:,} test people predictions are off by {float(found['rmse']):.4g} (root mean squared "
        f"error), {float(found['mae']):.4g} on average (mean absolute error); {_explained(found)}."
    ]
    if found["r_squared"] is not None and found["r_squared"] <= 0:
        said.append(
            "This is no better than always answering the mean label of these people: the model has learned nothing "
            "that helps. Larger batches, another learning rate or more people may help."
        )
    tiers = evaluation.get("errors_by_tier") or {}
    if tiers:
        named = (f"{float(each['rmse']):.4g} at epsilon {tier}" for tier, each in tiers.items())
        said.append(f"Root mean squared error by tier: {', '.join(named)}.")
    return said


def _explained(found: Mapping[str, Any]) -> str:
    if found["r_squared"] is None:
        return "R^2 is not defined"
    return f"R^2 {found['r_squared']:.3f} (1 is perfect, 0 is always answering the mean)"
