"""What to audit, from files and names: a plan from a file or a run folder, training from a benchmark's name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.optim import Optimizer

from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.observed_run import Optimization
from pdpsgd.data.benchmarks.loading import load
from pdpsgd.models.networks import by_name, default_network
from pdpsgd.planning.plans import Plan
from pdpsgd.training.components import OPTIMIZERS, SCHEDULES, optimizer_of
from pdpsgd.training.presets import preset as find_preset
from pdpsgd.training.run_folder import RunFolder


def plan_and_settings(path: str | os.PathLike[str]) -> tuple[Plan, dict[str, Any]]:
    """Read the plan in a file, or the plan and settings of a run folder."""
    place = Path(path)
    if not place.is_dir():
        return Plan.read(place), {}
    folder = RunFolder(place)
    return folder.read_plan(), folder.read_settings()


def target_of(
    plan: Plan,
    data: str,
    *,
    model: str | None = None,
    activation: str | None = None,
    preset: str | None = None,
    learning_rate: float | Optimization = 1.0,
    folder: str | os.PathLike[str] | None = None,
    run_folder: str | os.PathLike[str] | None = None,
) -> AuditTarget:
    """Return the training of a named benchmark under this plan.

    Who is on which level is read from the run folder's promises, where there are such; otherwise people are
    put on the plan's levels in order. People past the last record supplied none; records past the last person
    are left out. A `preset` says what the network is given of each image, and with which weights it starts.
    """
    dataset = load(data, folder=folder)
    recipe = None if preset is None else find_preset(preset)
    if recipe is not None:
        dataset = recipe.prepare(dataset)
    classes = len(dataset.classes)
    shape = dataset.input_shape
    name = model or default_network(shape)

    def made() -> nn.Module:
        if recipe is None:
            return by_name(name, input_shape=shape, classes=classes, activation=activation)
        own = recipe if model is None else replace(recipe, model=model, activation=activation)
        return own.make_model(dataset)

    first = made()  # a wrong name is refused before anything is run
    drawn = recipe is not None and recipe.start == "drawn"
    make_model: Callable[[], nn.Module] = partial(deepcopy, first) if drawn else made  # a minute's work, once
    people = plan.people
    return AuditTarget(
        make_model=make_model,
        inputs=dataset.train_inputs[:people],
        targets=dataset.train_targets[:people],
        level_of_person=_levels(plan, run_folder),
        spare_inputs=dataset.test_inputs,
        spare_targets=dataset.test_targets,
        classes=classes,
        learning_rate=learning_rate,
    )


def optimization_of(
    settings: Mapping[str, Any], learning_rate: float | None
) -> tuple[Optimization, str | None]:
    """Return how a run moved, by its settings, and a note where that cannot be repeated.

    Args:
        settings: The settings of the run; empty for a plan alone.
        learning_rate: The learning rate, where another one is wanted.

    Returns:
        Optimizer and schedule of the run; plain SGD where its optimizer was made by hand.
    """
    rate = learning_rate or named_in(settings, "learning_rate") or 1.0
    schedule = SCHEDULES.get(settings.get("schedule", ""), SCHEDULES["constant"])
    name = settings.get("optimizer", "sgd")
    known = name in OPTIMIZERS
    momentum, decay, options = (
        settings.get(key) if known else None for key in ("momentum", "weight_decay", "optimizer_options")
    )

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return optimizer_of(
            name if known else "sgd",
            parameters,
            learning_rate=rate,
            momentum=momentum or 0.0,
            weight_decay=decay or 0.0,
            options=options or {},
        )

    plain = not known or (name == "sgd" and not (momentum or decay or options))
    note = f"Audited with plain SGD at learning rate {rate:g} instead of the run's own optimizer ({name})."
    return Optimization(make, schedule, sgd_rate=rate if plain else None), None if known else note


def named_in(settings: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of these settings that is there."""
    return next((settings[key] for key in keys if settings.get(key) is not None), None)


def _levels(plan: Plan, run_folder: str | os.PathLike[str] | None) -> npt.NDArray[np.int64]:
    if run_folder is not None and RunFolder(run_folder).promises is not None:
        promises = RunFolder(run_folder).read_promises(plan)
        return np.array([promise.level for promise in promises], dtype=np.int64)
    return np.repeat(np.arange(len(plan.levels)), [level.people for level in plan.levels])
