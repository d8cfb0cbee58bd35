"""What a run predicts: classes, or numbers in a public range; and the loss that goes with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pdpsgd.errors import check_one_of, fail, shown
from pdpsgd.training.inputs import TrainingInputs
from pdpsgd.training.options import TrainingOptions
from pdpsgd.training.regression import TASKS, Limits, in_range, scaled


def with_task(inputs: TrainingInputs, options: TrainingOptions) -> tuple[TrainingInputs, TrainingOptions]:
    """Find what is predicted, classes or numbers, and the loss that goes with it.

    Args:
        inputs: The records; those read with a schema know what is predicted.
        options: What is asked for.

    Returns:
        Inputs whose targets are from -1 to 1 where a label range is given, and options with the loss of the task.

    Raises:
        PdpsgdError: If data, task, loss and label range do not go together.
    """
    if options.task is not None:
        check_one_of(TASKS, task=options.task)
    by_loss = "regression" if options.loss == "squared-error" else "classification"
    known = inputs.known_task
    task = options.task or known or by_loss
    if known not in (None, task):
        fail(f"Expected task={known!r}: so the label was read. Got task={task!r}.")
    if options.said("loss") and isinstance(options.loss, str) and by_loss != task:
        others = "'squared-error'" if task == "regression" else "'cross-entropy'"
        fail(
            f"Expected a loss for {task}: {others}, or a function of your own. Got loss={options.loss!r}. To predict a "
            "number, say task='regression' (--task regression)."
        )
    if task == "classification":
        if options.label_range is not None:
            fail("Expected label_range with task='regression'. Got it with classes.")
        return inputs, options
    made = options.with_defaults(loss="squared-error")
    if options.label_range is None:
        return replace(inputs, task=task), made
    return _scaled_inputs(replace(inputs, task=task), _checked(options.label_range)), made


def _checked(limits: Any) -> Limits:
    try:
        low, high = (float(each) for each in limits)
    except (TypeError, ValueError):
        fail(f"Expected label_range=(low, high), two numbers. Got {shown(limits)}.")
    if not (low < high and math.isfinite(high - low)):
        fail(f"Expected finite low < high in label_range. Got {shown(limits)}.")
    return low, high


def _scaled_inputs(inputs: TrainingInputs, limits: Limits) -> TrainingInputs:
    if inputs.label_range is not None:
        if inputs.label_range != limits:
            fail(f"Expected the label_range of the schema, {inputs.label_range}. Got {limits}.")
        return inputs
    if not (isinstance(inputs.records, tuple) and len(inputs.records) == 2):
        fail(
            "Expected a pair of arrays (inputs, targets) with label_range. Got another kind of data: map its targets "
            "from their range to [-1, 1], and leave label_range out."
        )
    test = inputs.test_data
    if test is not None:
        if not (isinstance(test, tuple) and len(test) == 2):
            fail(
                "Expected test_data as a pair of arrays (inputs, targets), as the records are. Got another kind."
            )
        test = (test[0], scaled(test[1], limits))
    records = (inputs.records[0], scaled(inputs.records[1], limits))
    return replace(inputs, records=records, test_data=test, label_range=limits)


def in_label_unit(inputs: TrainingInputs) -> tuple[Any, Any, dict[str, Any]]:
    """Return records and test people with labels in their own unit, and the options of `fit` that map them again."""
    if inputs.task == "classification":
        return inputs.records, inputs.test_data, {}
    pairs = [
        None if pair is None else (pair[0], in_range(pair[1], inputs.label_range))
        for pair in (inputs.records, inputs.test_data)
    ]
    return pairs[0], pairs[1], {"task": inputs.task, "label_range": inputs.label_range}
