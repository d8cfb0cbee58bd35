"""Temperature and a bias per class, after the network: probabilities that mean what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.errors import fail
from pdpsgd.training.probability_figures import as_logits

if TYPE_CHECKING:
    from torch import Tensor

Outputs = TypeVar("Outputs", "FloatArray", "Tensor")


@dataclass(frozen=True)
class Calibration:
    """Logits become logits / temperature + bias; `fitted_on` says by whom that was found."""

    temperature: float
    bias: tuple[float, ...]
    fitted_on: str

    def apply(self, outputs: Outputs) -> Outputs:
        """Return calibrated outputs in the form they came in: a column per class, or one logit for the second of two.

        Args:
            outputs: Logits, as an array or a tensor.

        Returns:
            Logits.

        Raises:
            PdpsgdError: If they are of another number of classes.
        """
        single = outputs.ndim < 2 or outputs.shape[1] == 1
        classes = 2 if single else outputs.shape[1]
        if classes != len(self.bias):
            fail(f"Expected outputs of {len(self.bias)} classes, as the model was calibrated. Got {classes}.")
        scaled = outputs / self.temperature
        if single:
            return scaled + (self.bias[1] - self.bias[0])
        shift: Any = np.asarray(self.bias, dtype=np.float32)
        return scaled + (shift if isinstance(outputs, np.ndarray) else outputs.new_tensor(shift))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"temperature": self.temperature, "bias": list(self.bias), "fitted_on": self.fitted_on}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Calibration:
        """Read what `to_dict` wrote."""
        return cls(content["temperature"], tuple(content["bias"]), content["fitted_on"])


def fit_calibration(outputs: FloatArray, classes: IntArray, *, fitted_on: str) -> Calibration:
    """Find the temperature and biases with the smallest log loss.

    A prior that is worth about one record (ln temperature and biases around 0, with standard deviation 1) keeps them
    finite where the classes are apart.

    Args:
        outputs: What the network says of people who were not trained on: logits.
        classes: The class of each.
        fitted_on: Who these people are.

    Returns:
        The calibration; it never has a larger log loss on these people than none, but for the prior.

    Raises:
        PdpsgdError: If there is nobody, or an output is not finite.
    """
    logits = as_logits(outputs).astype(np.float64)
    if not len(logits) or not np.isfinite(logits).all():
        fail(f"Expected finite outputs of at least one person, to calibrate. Got {len(logits)} rows.")
    true = np.eye(logits.shape[1])[classes]

    def penalized(free: FloatArray) -> tuple[float, FloatArray]:
        scale = np.exp(-free[0])
        logs = log_softmax(logits * scale + free[1:], axis=1)
        residual = np.exp(logs) - true
        loss = -(logs * true).sum() + 0.5 * (free**2).sum()
        slope = np.concatenate([[-(residual * logits).sum() * scale], residual.sum(0)]) + free
        return float(loss) / len(logits), slope / len(logits)

    found = minimize(
        penalized,
        np.zeros(logits.shape[1] + 1),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-7, 7)] + [(-20, 20)] * logits.shape[1],
    )
    bias = found.x[1:] - found.x[1:].mean()
    return Calibration(float(np.exp(found.x[0])), tuple(map(float, bias)), fitted_on)
