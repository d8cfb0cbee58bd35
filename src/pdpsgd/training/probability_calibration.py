"""The calibration of a run: asked for, checked beforehand, and fitted when the model is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pdpsgd.engine.batches import call
from pdpsgd.engine.records import records_of
from pdpsgd.errors import fail
from pdpsgd.training.components import is_of_logits
from pdpsgd.training.evaluation import BATCH_SIZE, predictions
from pdpsgd.training.temperature import Calibration, fit_calibration

if TYPE_CHECKING:
    from pdpsgd.training.inputs import TrainingInputs
    from pdpsgd.training.options import TrainingOptions
    from pdpsgd.training.temperature_by_steps import PrivateCalibration

BY_STEPS = "steps"


def check_calibration(options: TrainingOptions, inputs: TrainingInputs) -> None:
    """Refuse a calibration that cannot be fitted, before anything is charged or written.

    Args:
        options: The options of the run.
        inputs: Its records and the people to calibrate on.

    Raises:
        PdpsgdError: If outputs are no logits, or there is nobody to calibrate on.
    """
    if options.calibrate is None:
        return
    if not is_of_logits(options.loss):
        fail(
            "Expected a loss whose outputs are logits (cross-entropy, binary-cross-entropy), to calibrate "
            f"probabilities. Got loss={options.loss!r}."
        )
    if options.calibrate == BY_STEPS:
        if options.loss == "binary-cross-entropy":
            fail(
                "Expected cross-entropy, with one output per class, to calibrate by the plan's last steps. Got "
                "binary-cross-entropy: calibrate on people outside the list, or train with two outputs."
            )
        return
    if inputs.calibration_data is None:
        fail(
            f"Expected calibrate to be {BY_STEPS!r}, or (inputs, targets) of people outside the list. Got "
            f"{options.calibrate!r}."
        )
    if len(records_of(inputs.calibration_data)) == 0:
        fail("Expected at least one person to calibrate on. Got none.")


def outputs_of(model: nn.Module, inputs: TrainingInputs) -> int:
    """Count the outputs of a network, on a made-up record of zeros."""
    if inputs.classes:
        return len(inputs.classes)
    records = inputs.records
    if not (isinstance(records, tuple) and isinstance(records[0], torch.Tensor)):
        fail(
            "Expected records as (inputs, targets), to know what a network of them has for outputs, with "
            f"calibrate={BY_STEPS!r}. Got {type(records).__name__}: calibrate on people outside the list."
        )
    parameter = next(model.parameters(), None)
    device = None if parameter is None else parameter.device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            made_up = torch.zeros((1, *records[0].shape[1:]), dtype=records[0].dtype, device=device)
            outputs: Any = call(model, made_up)
    finally:
        model.train(was_training)
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        fail(
            "Expected one output per class, to calibrate by the plan's last steps. Got another form of outputs."
        )
    return int(outputs.shape[1])


def calibration_of(
    by_steps: PrivateCalibration | None, model: nn.Module, inputs: TrainingInputs
) -> Calibration | None:
    """Return the calibration of a trained model: as the last steps found it, or fitted on other people.

    Args:
        by_steps: What the plan's last steps fitted, if they did.
        model: The trained model.
        inputs: With the people to calibrate on.

    Returns:
        The calibration; None where none was asked for.
    """
    if by_steps is not None:
        return by_steps.result()
    if inputs.calibration_data is None:
        return None
    records = records_of(inputs.calibration_data)
    parts = [(outputs, targets) for _, outputs, targets in predictions(model, records, BATCH_SIZE)]
    outputs = np.concatenate([each.float().cpu().numpy() for each, _ in parts])
    classes = np.concatenate([each.reshape(len(each)).cpu().numpy() for _, each in parts])
    return fit_calibration(
        outputs, classes.astype(np.int64), fitted_on=f"{len(records):,} people outside the list"
    )
