"""The training of a run on people's own table, to be audited: the run's network, preprocessing and list of people."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd.audit.auditing import AuditTarget
from pdpsgd.data.people import TABLES, PeopleData, load_people
from pdpsgd.errors import fail
from pdpsgd.planning.plans import Plan
from pdpsgd.training.predict import load_run, model_files
from pdpsgd.training.run_folder import RunFolder

MADE_UP = 5_000
"""Spare records that are made up, beside those of people who are not on the list."""


def own_target(
    plan: Plan, data: Path, run_folder: Path, *, learning_rate: float, seed: int | None = None
) -> AuditTarget:
    """Return the training of a finished run on its own table.

    Args:
        plan: The plan of the run.
        data: The table that it was trained on.
        run_folder: The run, whose schema, network and list of people are taken.
        learning_rate: The learning rate of the audited training.
        seed: Decides which spare records are made up.

    Returns:
        What to audit. Spare records, for canaries, are those of people in the table who are not on the list, and rows
        whose columns come from different people.

    Raises:
        PdpsgdError: If the data is no table, or the run knows no schema, ids or promises.
    """
    levels = _levels_by_id(run_folder)
    _, description, place = model_files(run_folder)
    if data.suffix.lower() not in TABLES or description.label is None or description.task != "classification":
        fail(
            f"Expected the table of a run that predicts classes, to audit it on own data. Got {str(data)!r}: without "
            "--data the mechanism is audited alone."
        )
    records = _read(data, run_folder)
    listed = np.array([str(name) in levels for name in records.ids.tolist()])
    if not listed.any():
        fail(f"Expected people of the run's list in {str(data)!r}, by their ids. Got none of them.")
    own_ids = [str(name) for name in records.ids[listed].tolist()]
    here = set(own_ids)
    absent = [level for name, level in levels.items() if name not in here]
    inputs, targets = records.inputs[torch.from_numpy(listed)], records.targets[torch.from_numpy(listed)]
    spare, labels = _made_up(inputs, targets, seed)
    others = torch.from_numpy(~listed)

    def make_model() -> nn.Module:
        return _with_first_weights(description.network.make(place))

    load_run(run_folder)  # a network that cannot be made again is refused before anything is run
    return AuditTarget(
        make_model=make_model,
        inputs=inputs,
        targets=targets,
        level_of_person=np.array([levels[name] for name in own_ids] + absent, dtype=np.int64),
        spare_inputs=torch.cat([records.inputs[others], spare]),
        spare_targets=torch.cat([records.targets[others], labels]),
        classes=len(description.classes),
        learning_rate=learning_rate,
    )


def _with_first_weights(network: nn.Module) -> nn.Module:
    """Give a network, whose layers may be described only, weights as every layer begins with."""
    if any(parameter.is_meta for parameter in network.parameters()):
        network = network.to_empty(device="cpu")
    for layer in network.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    return network


def _levels_by_id(run_folder: Path) -> dict[str, int]:
    path = RunFolder(run_folder).promises
    if path is None:
        fail(f"Expected people/promises.csv in {str(run_folder)!r}, to know who is on which level. Got none.")
    with path.open(newline="", encoding="utf-8") as file:
        return {row["id"]: int(row["level"]) for row in csv.DictReader(file)}


def _read(data: Path, run_folder: Path) -> PeopleData:
    """Read the table as the run did: by the schema that it left."""
    schema = RunFolder(run_folder).schema
    if schema is None:
        fail(f"Expected a schema in {str(run_folder)!r}, to read {str(data)!r} as the run did. Got none.")
    found = load_people(data, schema=schema)
    if not found.named:
        fail(
            f"Expected person ids in {str(data)!r}, by the run's schema. Got none: records cannot be matched."
        )
    return found


def _made_up(inputs: Tensor, targets: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Make rows whose columns come from different people."""
    generator = np.random.default_rng(seed)
    count = min(MADE_UP, 20 * len(inputs))
    columns = [inputs[generator.integers(len(inputs), size=count), i] for i in range(inputs.shape[1])]
    return torch.stack(columns, dim=1), targets[generator.integers(len(inputs), size=count)]
