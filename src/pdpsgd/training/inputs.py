"""What a run trains and tests on, however it came in: arrays, a dataset, a loader, or people's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.budgets.readers import NO_UTF8
from pdpsgd.data.people import PeopleData
from pdpsgd.data.preprocessing import Preprocessing
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pdpsgd.data.schema import Schema


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """Records with the person of each, what these people allow, and test people.

    `name`, `classes`, `notes` and `schema` are known where the records were read by `load_people`.
    `learned_from_data` says that ranges, categories or classes were, and `without_promise` counts test people who
    said what they allow and are promised nothing. `ledger_off` says that a ledger should be kept of them, and is not.
    `rehearsal` says that records are made up.
    `calibration_data` are people outside the list, on whom probabilities are calibrated.
    Where records are `texts`, inputs are their numbers until `encoder` (its description) has read them.
    """

    records: Any
    budgets: Budgets | None
    record_ids: Any = None
    record_of_person: Any = None
    test_data: Any = None
    test_tiers: Sequence[Any] | np.ndarray[Any, Any] | None = None
    test_ids: Any = None
    calibration_data: Any = None
    name: str | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: Schema | None = None
    learned_from_data: bool = False
    without_promise: int = 0
    ledger_off: bool = False
    rehearsal: bool = False
    other_fits: str | None = None
    """What speaks against the run because of others on the same people that nothing counts."""
    texts: tuple[str, ...] = ()
    encoder: Mapping[str, Any] | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    features: str | None = None
    shape: tuple[int, ...] | None = None
    """The shape of one record before features were made of it."""
    mapped: bool = False
    """Whether records lie in a file, since they are too many for memory."""
    task: str = "classification"
    label_range: tuple[float, float] | None = None
    """The public range of a label that is a number; targets are then from -1 to 1."""

    @classmethod
    def from_people(
        cls, data: PeopleData, budgets: Budgets | None, test_tiers: Sequence[Any] | None = None
    ) -> TrainingInputs:
        """Take records, test people, names and notes from what `load_people` gave back."""
        return cls(
            records=(data.inputs, data.targets),
            budgets=budgets,
            record_ids=data.ids,
            test_data=data.test_data,
            test_tiers=test_tiers,
            test_ids=data.test_ids,
            name=data.name,
            classes=data.classes,
            notes=data.notes,
            schema=data.schema,
            learned_from_data=data.learned_from_data,
            texts=data.texts,
            preprocessing=data.preprocessing,
            shape=data.input_shape,
            task="classification" if data.label_range is None else "regression",
            label_range=data.label_range,
            mapped=data.mapped,
        )

    @property
    def known_task(self) -> str | None:
        """What is predicted, where the data tells: by a schema, or by names of classes."""
        return self.task if self.classes or self.label_range is not None else None

    @property
    def outputs(self) -> int | None:
        """The number of outputs that a network for these records has, where it is known."""
        return 1 if self.task == "regression" else len(self.classes) or None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example, where records are tensors."""
        return tuple(self.records[0].shape[1:])

    def with_features(self, name: str, features_of: Callable[[Any], Any]) -> TrainingInputs:
        """Replace every input by its features of that name, each computed from that input alone."""
        inputs, targets = self.records
        test, other = (
            None if part is None else (features_of(part[0]), part[1])
            for part in (self.test_data, self.calibration_data)
        )
        made = replace(self, records=(features_of(inputs), targets), test_data=test, features=name)
        return replace(made, calibration_data=other)

    def with_embeddings(
        self, embed: Callable[[Sequence[str]], Any], encoder: Mapping[str, Any]
    ) -> TrainingInputs:
        """Replace every text by its embedding, computed from that text alone; the encoder is in the settings."""
        embedded = embed(self.texts)
        made = self.with_features(
            f"text encoder {encoder['name']}", lambda numbers: embedded[numbers[:, 0].long()]
        )
        return replace(made, texts=(), encoder=encoder)

    def with_tokens(
        self, tokens: Callable[[Sequence[str]], Any], encoder: Mapping[str, Any]
    ) -> TrainingInputs:
        """Replace every text by its tokens, or their states, for a network with adapters that is given them."""
        read = tokens(self.texts)
        made = self.with_features(f"tokens of {encoder['name']}", lambda numbers: read[numbers[:, 0].long()])
        return replace(made, texts=(), encoder=encoder)

    def description(self) -> dict[str, Any]:
        """Describe the data for the settings of a run; empty where nothing is known of it."""
        if self.name is None:
            return {}
        read_by = {} if self.encoder is None else {"encoder": dict(self.encoder)}
        known: dict[str, Any] = {
            "data": self.name,
            "classes": list(self.classes),
            "notes": [note for note in self.notes if NO_UTF8 not in note],
            **read_by,
            **({"rehearsal": True} if self.rehearsal else {}),
        }
        if self.task == "regression":
            known |= {"task": self.task, "label": None if self.schema is None else self.schema.label}
            if self.label_range is not None and not self.learned_from_data:
                known["label_range"] = list(self.label_range)
        return known


def inputs_of(
    data: Any,
    budgets: Budgets | ArrayLike | None,
    *,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
    test_data: Any = None,
    test_budgets: Budgets | None = None,
    test_tiers: ArrayLike | None = None,
    test_ids: ArrayLike | None = None,
) -> TrainingInputs:
    """Put the arguments of `fit` about data and people into one value.

    Args:
        data: A pair of arrays or tensors, a dataset, a loader, `PeopleData`, or ready inputs.
        budgets: What each person allows.
        record_ids: The person of each record.
        record_of_person: The record of each person, -1 where there is none.
        test_data: Other people, never on the list.
        test_budgets: What test people allow, which names their tiers.
        test_tiers: The tier of each test record.
        test_ids: The person of each test record, where people have many.

    Returns:
        The inputs of a run, arrays turned into tensors.

    Raises:
        PdpsgdError: If tiers are named twice.
    """
    if isinstance(data, TrainingInputs):
        return data
    people = budgets if budgets is None or isinstance(budgets, Budgets) else Budgets(budgets)
    tiers = _tiers(test_budgets, test_tiers)
    if isinstance(data, PeopleData):
        if data.texts:
            fail(
                "Expected features of the texts, from an encoder (pdpsgd.models.encoders). Got the texts: embed them, "
                "and give fit the embeddings as (inputs, targets)."
            )
        made = TrainingInputs.from_people(data, people)
        test = made.test_data if test_data is None else as_tensors(test_data)
        ids = made.record_ids if record_ids is None else record_ids
        tested = test_ids if test_ids is not None or test_data is not None else made.test_ids
        return replace(
            made,
            record_ids=ids,
            record_of_person=record_of_person,
            test_data=test,
            test_tiers=tiers,
            test_ids=tested,
        )
    records = as_tensors(data)
    return TrainingInputs(
        records=records,
        budgets=people,
        record_ids=record_ids,
        record_of_person=record_of_person,
        test_data=as_tensors(test_data),
        test_tiers=tiers,
        test_ids=test_ids,
        shape=shape_of(records),
    )


def shape_of(records: Any) -> tuple[int, ...] | None:
    """Return the shape of one record, where records are one tensor."""
    inputs: Any = records[0] if isinstance(records, tuple) and records else None
    return tuple(inputs.shape[1:]) if hasattr(inputs, "shape") else None


def as_tensors(data: Any) -> Any:
    """Turn arrays in a pair into tensors; leave everything else as it is."""
    import torch

    if isinstance(data, (tuple, list)):
        return tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data)
    return data


def _tiers(budgets: Budgets | None, tiers: ArrayLike | None) -> np.ndarray[Any, Any] | None:
    if budgets is not None and tiers is not None:
        fail("Expected test_budgets or test_tiers, not both.")
    if budgets is not None:
        if not ((budgets.epsilon > 0) & (budgets.delta > 0)).all():
            fail(
                "Expected test people who allow something. Got test_budgets with epsilon or delta 0, whose record is "
                "never to be used: leave their rows out."
            )
        return budgets.epsilon
    return None if tiers is None else np.asarray(tiers)
