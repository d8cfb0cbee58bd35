"""People to test or to calibrate on must be others than those who are trained on: by ids, else by their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.budgets.budgets import as_read
from pdpsgd.engine.checks.held_out import check_held_out
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd._typing import IdArray, IntArray
    from pdpsgd.training.inputs import TrainingInputs

TO_TEST, TO_CALIBRATE = "to test on", "to calibrate on"


def check_other_people(inputs: TrainingInputs, *, by_values: bool = True) -> None:
    """Refuse test people, and people to calibrate on, who are trained on.

    Args:
        inputs: What a run trains, tests and calibrates on.
        by_values: Whether to look at records, beside ids (of the list, which is public) and where records are.

    Raises:
        PdpsgdError: A test person is on the list, or the records of others are records that are trained on.
    """
    _check_ids(inputs)
    for others, purpose in ((inputs.test_data, TO_TEST), (inputs.calibration_data, TO_CALIBRATE)):
        if others is not None:
            trained, of_others = _told_apart(inputs.records, inputs), _told_apart(others, inputs)
            check_held_out(trained, of_others, purpose=purpose, used=_used(inputs), by_values=by_values)


def _check_ids(inputs: TrainingInputs) -> None:
    """Refuse test people whose ids are on the list."""
    listed = inputs.budgets
    if inputs.test_ids is None or listed is None or not listed.named:
        return
    both = _written(np.asarray(inputs.test_ids)) & _written(listed.ids)
    if both:
        fail(
            f"Expected test people who are not on the list. Got {min(both)!r} on the list and among test_ids: their "
            "record would be used beyond what they allow."
        )


def _written(ids: IdArray) -> set[str]:
    """Return ids as people read them."""
    read = as_read(ids)
    return set(map(str, (ids if read is None else read).tolist()))


def _told_apart(records: Any, inputs: TrainingInputs) -> Any:
    """Return records that are equal where people's are: of texts, which stand there as numbers, the first equal one."""
    if not inputs.texts:
        return records
    import torch

    known: dict[str, int] = {}
    numbers = torch.tensor([known.setdefault(text, place) for place, text in enumerate(inputs.texts)])
    return numbers[records[0][:, 0].long()], records[1]


def _used(inputs: TrainingInputs) -> IntArray | None:
    """Return the numbers of the records that somebody on the list has; None for all of them."""
    if inputs.record_of_person is None:
        return None
    numbers = np.asarray(inputs.record_of_person)
    return numbers[numbers >= 0]
