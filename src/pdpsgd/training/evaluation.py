"""How good a model is on people who were not trained on: in all, by tier, and by class.

The figures are computed from the test people only. They must not be on the list of those whose privacy the
plan protects; what is computed from training people would be sensitive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import FloatArray
from pdpsgd.engine.batches import PhysicalBatch, call, to_device
from pdpsgd.engine.records import Records, records_of
from pdpsgd.errors import fail
from pdpsgd.training.class_figures import area_under_curve, balanced_accuracy, majority_share
from pdpsgd.training.components import Loss, is_of_logits, loss_of
from pdpsgd.training.probability_figures import Probabilities, probability_figures
from pdpsgd.training.regression import Errors, errors_of, in_range
from pdpsgd.training.temperature import Calibration

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BATCH_SIZE = 1024


@dataclass(frozen=True)
class Share:
    """How many of how many were right."""

    accuracy: float
    people: int


@dataclass(frozen=True)
class Evaluation:
    """A model on test people; `accuracy` is None where outputs are not classes.

    `by_class` holds each class's recall, `balanced_accuracy` their mean, and `auc` the area under the ROC curve (with
    more than two classes, the mean over classes of each against all others).
    Where people have many records, accuracy is per record, and `accuracy_per_person` the mean over people of their own.
    """

    people: int
    loss: float
    accuracy: float | None
    by_tier: dict[str, Share] = field(default_factory=dict)
    by_class: dict[str, Share] = field(default_factory=dict)
    accuracy_per_person: float | None = None
    balanced_accuracy: float | None = None
    auc: float | None = None
    majority: float | None = None
    """The accuracy of always answering the largest class of the test records."""
    probabilities: Probabilities | None = None
    """Whether the model's probabilities mean what they say; None where the loss makes no logits of outputs."""
    errors: Errors | None = None
    """How far predictions of numbers are off, in the label's unit; None where outputs are classes."""
    errors_by_tier: dict[str, Errors] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The first figure in a few words; empty where there is none."""
        if self.errors is not None:
            return f"RMSE {self.errors.rmse:.4g}"
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.1%}"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


def evaluate(
    model: nn.Module,
    data: Any,
    loss: str | Loss = "cross-entropy",
    *,
    tiers: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    calibration: Calibration | None = None,
    batch_size: int = BATCH_SIZE,
    task: str = "classification",
    label_range: tuple[float, float] | None = None,
) -> Evaluation:
    """Run the model over test data, without gradients, and count what it gets right.

    Outputs with one column per class are compared with whole-number targets, and a single logit with targets
    of 0 and 1; for anything else only the loss is given.

    Args:
        model: What `fit` trained, or any other module.
        data: Test people: a pair of tensors (inputs, targets), a dataset, or a data loader.
        loss: The mean loss over examples, by name or as a function of outputs and targets.
        tiers: The tier of each test record, to report accuracy by tier.
        ids: The person of each test record, where people have many.
        calibration: Temperature and biases that outputs go through before anything is computed from them.
        batch_size: Records that go through the model together.
        task: "regression" where outputs are numbers.
        label_range: The public range of the label, where targets were mapped from it to [-1, 1].

    Returns:
        Number of test people, mean loss, accuracy overall, by tier and by class, balanced accuracy and AUC; for numbers
        their errors, overall and by tier.

    Raises:
        PdpsgdError: If there is no test record, or not one tier for each.
    """
    loss = loss_of(loss)
    records = records_of(data)
    if len(records) == 0:
        fail("Expected at least one test record. Got none.")
    names = None if tiers is None else np.asarray(tiers)
    if names is not None and names.shape != (len(records),):
        fail(f"Expected one tier for each of the {len(records)} test records. Got shape {names.shape}.")
    persons = None if ids is None else np.unique(np.asarray(ids), return_inverse=True)[1]
    if persons is not None and persons.shape != (len(records),):
        fail(f"Expected the person of each of the {len(records)} test records. Got shape {persons.shape}.")
    people = len(records) if persons is None else int(persons.max()) + 1
    total, right, classes, scores = 0.0, [], [], []
    numbers: list[Any] = []
    for size, outputs, targets in predictions(model, records, batch_size):
        if calibration is not None:
            outputs = calibration.apply(outputs)
        total += float(loss(outputs, targets)) * size
        if task == "regression":
            numbers.append([in_range(each.reshape(size), label_range).cpu() for each in (outputs, targets)])
            continue
        correct = _correct(outputs, targets)
        if correct is not None:
            right.append(correct.cpu().numpy())
            scores.append(outputs.float().cpu().numpy())
            classes.append(targets.reshape(size).cpu().numpy())
    if numbers:
        answers, truth = (torch.cat(each).double().numpy() for each in zip(*numbers, strict=True))
        return Evaluation(
            people=people,
            loss=total / len(records),
            accuracy=None,
            errors=errors_of(answers, truth, people),
            errors_by_tier={} if names is None else _errors_by_tier(answers, truth, names, persons),
        )
    if not right:
        return Evaluation(people, total / len(records), None)
    correct_all, class_all = np.concatenate(right), np.concatenate(classes).astype(np.int64)
    return Evaluation(
        people=people,
        loss=total / len(records),
        accuracy=float(correct_all.mean()),
        by_tier={} if names is None else _shares(correct_all, names, persons),
        by_class=_shares(correct_all, class_all, persons),
        accuracy_per_person=None if persons is None else _per_person(correct_all, persons),
        balanced_accuracy=balanced_accuracy(correct_all, class_all),
        auc=area_under_curve(np.concatenate(scores), class_all),
        majority=majority_share(class_all),
        probabilities=probability_figures(np.concatenate(scores), class_all) if is_of_logits(loss) else None,
    )


def _errors_by_tier(
    answers: FloatArray, truth: FloatArray, names: np.ndarray[Any, Any], persons: np.ndarray[Any, Any] | None
) -> dict[str, Errors]:
    made = {}
    for value in sorted(np.unique(names), key=_by_number):
        here = names == value
        people = None if persons is None else np.unique(persons[here]).size
        made[_label(value)] = errors_of(answers[here], truth[here], people)
    return made


def _per_person(correct: np.ndarray[Any, Any], persons: np.ndarray[Any, Any]) -> float:
    """Return the mean over people of the share of their records that is right."""
    return float((np.bincount(persons, weights=correct) / np.bincount(persons)).mean())


def predictions(model: nn.Module, records: Records, batch_size: int) -> Iterator[tuple[int, Any, Any]]:
    """Run the model over records, in order and without gradients: their number, outputs and targets."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for chunk, batch in records.batches(_in_order(len(records), batch_size)):
                inputs, targets = (to_device(part, device) for part in batch)
                yield chunk.size, call(model, inputs), targets
    finally:
        model.train(was_training)


def _in_order(records: int, batch_size: int) -> Iterator[PhysicalBatch]:
    for start in range(0, records, batch_size):
        numbers = np.arange(start, min(start + batch_size, records), dtype=np.int64)
        yield PhysicalBatch(step=0, records=numbers, clip_norms=torch.empty(0), first=True, last=True)


def _correct(outputs: Any, targets: Any) -> Tensor | None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.dim() == 2 and outputs.shape[1] > 1 and targets.dim() == 1 and not targets.is_floating_point():
        return outputs.argmax(1) == targets
    binary = outputs.numel() == len(outputs) and targets.numel() == len(outputs)
    if binary and bool(((targets == 0) | (targets == 1)).all()):
        return (outputs.reshape(-1) > 0) == (targets.reshape(-1) == 1)
    return None


def _shares(
    correct: np.ndarray[Any, Any], names: np.ndarray[Any, Any], persons: np.ndarray[Any, Any] | None
) -> dict[str, Share]:
    """Return the share of records that is right by name, and how many people they are of."""
    values, places = np.unique(names, return_inverse=True)
    records = np.bincount(places)
    shares = np.bincount(places, weights=correct) / records
    people = records
    if persons is not None:
        people = np.bincount(np.unique(np.stack([places, persons]), axis=1)[0])
    found = {
        _label(value): Share(float(share), int(n))
        for value, share, n in zip(values, shares, people, strict=True)
    }
    return {name: found[name] for name in sorted(found, key=_by_number)}


def _by_number(name: Any) -> tuple[float, str]:
    """Sort tiers as numbers, also those that are named as ranges ("0.5 to 1")."""
    try:
        return float(str(name).partition(" ")[0]), ""
    except ValueError:
        return math.inf, str(name)


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (float, np.floating)) else str(value)
