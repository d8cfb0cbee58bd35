"""The training of a run on people's own records, to be audited: the run's network, preprocessing and list of people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import IntArray
from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.observed_run import Criterion, Optimization
from pdpsgd.data.people import PeopleData, others_like
from pdpsgd.errors import fail
from pdpsgd.models.embedding_cache import EmbeddingCache
from pdpsgd.models.encoders import Progress
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.sampling.record_choice import HOW_TO_HAVE_MANY
from pdpsgd.training.components import LOSSES
from pdpsgd.training.model_description import ModelDescription
from pdpsgd.training.predict import TrainedModel, load_run, model_files
from pdpsgd.training.run_folder import RunFolder

MADE_UP = 5_000
"""Spare records that are made up, beside those of people who are not on the list."""


def own_target(
    data: Path,
    run_folder: Path,
    *,
    optimization: Optimization,
    people_file: Path | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> AuditTarget:
    """Return the training of a finished run on its own records.

    Args:
        data: What it was trained on: a table, a folder of images, or an .npz file.
        run_folder: The run, whose preprocessing, network and list of people are taken.
        optimization: How the audited training moves.
        people_file: Whose image is whose, in a folder; by default as for the run, if that file is still there.
        seed: Decides which spare records are made up.
        progress: Told how many texts are embedded.

    Returns:
        What to audit. Spare records, for canaries, are those of people in the data who are not on the list, and
        records put together from those of several people.

    Raises:
        PdpsgdError: If the run cannot be trained again on this data, or knows no ids or promises.
    """
    folder = RunFolder(run_folder)
    levels = {promise.id: promise.level for promise in folder.read_promises(folder.read_plan())}
    _, description, place = model_files(run_folder)
    settings = folder.read_settings()
    many = settings.get("records_per_person")
    if description.encoder is not None and "finetune" in description.encoder:
        fail(
            f"Expected a run whose encoder is frozen, to audit it on {str(data)!r}. Got adapters in the encoder, whose "
            "gradients for every canary at every step would take many times as long as training: without --data the "
            "mechanism is audited alone."
        )
    records = _read(data, description, people_file or _people_file_of(run_folder), place)
    trained = load_run(run_folder)  # a network that cannot be made again is refused before anything is run
    inputs, test_inputs = _inputs_of(trained, records, progress)
    whose = _Listed.of(records, levels, data, many=many is not None)
    spare, labels = _made_up(inputs[whose.rows], records.targets[whose.rows], description, seed)
    others = torch.from_numpy(np.setdiff1d(np.arange(len(inputs)), whose.rows))
    spare_inputs, spare_targets = [inputs[others], spare], [records.targets[others], labels]
    if test_inputs is not None and records.test_targets is not None:
        spare_inputs.insert(1, test_inputs)
        spare_targets.insert(1, records.test_targets)
    criterion, notes = _criterion(settings, description)
    return AuditTarget(
        make_model=lambda: _with_first_weights(description, place),
        inputs=inputs[whose.rows],
        targets=records.targets[whose.rows],
        level_of_person=whose.level_of_person,
        spare_inputs=torch.cat(spare_inputs),
        spare_targets=torch.cat(spare_targets),
        made_up=len(spare),
        classes=0 if description.task == "regression" else max(2, len(description.classes)),
        criterion=criterion,
        learning_rate=optimization,
        person_of_record=whose.person_of_record if many is not None else None,
        records_per_person=many,
        notes=notes,
    )


@dataclass(frozen=True, eq=False)
class _Listed:
    """The rows of people on the list, and the list: people with a record first, then those without."""

    rows: IntArray
    person_of_record: IntArray
    level_of_person: IntArray

    @classmethod
    def of(cls, records: PeopleData, levels: dict[str, int], data: Path, *, many: bool) -> _Listed:
        names = [str(name) for name in records.ids.tolist()]
        rows = np.array([row for row, name in enumerate(names) if name in levels], dtype=np.int64)
        if not rows.size:
            hint = " Say with --people-file whose image is whose." if data.is_dir() else ""
            fail(f"Expected people of the run's list in {str(data)!r}, by their ids. Got none of them.{hint}")
        place: dict[str, int] = {}
        for row in rows.tolist():
            if not many and names[row] in place:
                fail(
                    f"Expected one record per person in {str(data)!r}, as in the run. Got more of {names[row]!r}. "
                    f"{HOW_TO_HAVE_MANY}"
                )
            place.setdefault(names[row], len(place))
        absent = [level for name, level in levels.items() if name not in place]
        return cls(
            rows,
            np.array([place[names[row]] for row in rows.tolist()], dtype=np.int64),
            np.array([*(levels[name] for name in place), *absent], dtype=np.int64),
        )


def _read(data: Path, description: ModelDescription, people_file: Path | None, place: str) -> PeopleData:
    """Read the records as the run did: by what is kept with its model."""
    shape, schema = description.shape, description.preprocessing.schema
    if data.is_dir() and (shape is None or len(shape) != 3):
        fail(
            f"Expected records such as {place} says: of shape {shape}. Got a folder of images, {str(data)!r}."
        )
    images = shape if shape is not None and len(shape) == 3 else (3, 32, 32)
    found = others_like(
        data,
        schema,
        classes=description.classes,
        image_size=(images[1], images[2]),
        color=images[0] == 3,
        people_file=people_file,
    )
    if shape is not None and not found.texts and found.input_shape != shape:
        fail(
            f"Expected records of shape {shape} in {str(data)!r}, as in the run. Got shape {found.input_shape}."
        )
    if not found.named:
        fail(
            f"Expected ids of people in {str(data)!r}, as in people/promises.csv of the run. Got none: records cannot "
            "be matched."
        )
    return found


def _people_file_of(run_folder: Path) -> Path | None:
    """Find the file that said whose image is whose, if the run was given one and it is still there."""
    command = RunFolder(run_folder).read_command() or {}
    named = command.get("options", {}).get("people_file")
    return Path(named) if named is not None and Path(named).exists() else None


def _inputs_of(
    trained: TrainedModel, records: PeopleData, progress: Progress | None
) -> tuple[Tensor, Tensor | None]:
    """Return what the network is given of the records, and of test people beside them; embeddings are kept."""
    encoded = trained.description.encoder
    if encoded is None:
        made = trained.features_of(records.inputs)
        return made, None if records.test_inputs is None else trained.features_of(records.test_inputs)
    return trained.encoder.embed(records.texts, cache=EmbeddingCache.of_user(), progress=progress), None


def _criterion(settings: dict[str, Any], description: ModelDescription) -> tuple[Criterion, tuple[str, ...]]:
    """Return the run's loss, or the usual one of its task, and say what is left out."""
    usual = "squared-error" if description.task == "regression" else "cross-entropy"
    named = settings.get("loss", usual)
    notes = []
    if named not in LOSSES:
        notes.append(f"Audited with {usual} instead of the run's own loss ({named}).")
    if settings.get("start"):
        notes.append("Audited from fresh first weights instead of those that the run started from.")
    return LOSSES.get(named, LOSSES[usual]), tuple(notes)


def _with_first_weights(description: ModelDescription, place: str) -> nn.Module:
    """Make the run's network, whose layers may be described only, with weights as every layer begins with."""
    network = description.network.make(place)
    if any(parameter.is_meta for parameter in network.parameters()):
        network = network.to_empty(device="cpu")
    for layer in network.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    if description.encoder is not None and description.network.name == "linear":
        start_at_zero(network)
    return network


def _made_up(
    inputs: Tensor, targets: Tensor, description: ModelDescription, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Put records together: rows of a table from the columns of many people, others of two halves."""
    generator = np.random.default_rng(seed)
    count = min(MADE_UP, 20 * len(inputs))

    def anybody() -> IntArray:
        return generator.integers(len(inputs), size=count)

    if inputs.dim() == 2 and description.encoder is None:
        made = torch.stack([inputs[anybody(), column] for column in range(inputs.shape[1])], dim=1)
    else:
        half = inputs.shape[-1] // 2
        made = torch.cat([inputs[anybody()][..., :half], inputs[anybody()][..., half:]], dim=-1)
    return made, targets[anybody()]
