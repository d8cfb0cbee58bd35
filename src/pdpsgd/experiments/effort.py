"""What a run of the paper's set-up takes, without running it whole: its plan, and the time of a few steps."""

from __future__ import annotations

import time
from typing import Any

import torch

from pdpsgd.experiments.inputs import data_of, model_of
from pdpsgd.experiments.record import Record
from pdpsgd.experiments.settings import Setting
from pdpsgd.experiments.systems import plan_of
from pdpsgd.training import fit, versions

TIMED_STEPS = 300


def measure_all(settings: list[Setting], record: Record, *, seed: int = 0) -> None:
    """Measure the settings that are not on record yet, one after another on the same machine."""
    for setting in settings:
        if not record.has(setting.key(seed)):
            record.add(measure(setting, seed=seed))


def measure(setting: Setting, *, seed: int = 0, steps: int = TIMED_STEPS) -> dict[str, Any]:
    """Iterations and models by the plan, and processor time of an iteration over the first steps.

    Processor time rather than the clock's, so that other work on the machine counts for less.
    """
    train, _ = data_of(setting)
    budgets = setting.population.budgets(len(train[1]), shuffle=seed)
    planned = plan_of(setting, budgets, seed=seed)
    model = model_of(setting)
    torch.manual_seed(seed)
    seconds = []
    for count in (1, steps):  # the first includes what is done once
        began = time.process_time()
        fit(
            model_of(setting),
            train,
            budgets,
            plan=planned.prefix(count),
            learning_rate=setting.recipe.learning_rate / setting.recipe.max_grad_norm,
            schedule=setting.recipe.schedule,
            seed=seed,
            progress=False,
        )
        seconds.append(time.process_time() - began)
    models = 1 + sum(r.fresh_model for r in planned.rounds[1:])
    return {
        "key": setting.key(seed),
        "setting": setting.to_dict(),
        "seed": seed,
        "iterations": planned.steps,
        "rounds": [[r.steps, r.noise_multiplier, r.threshold] for r in planned.rounds],
        "models": models,
        "parameters": models * sum(parameter.numel() for parameter in model.parameters()),
        "processor_milliseconds": round(1000 * (seconds[1] - seconds[0]) / (steps - 1), 3),
        "timed_steps": steps,
        "versions": versions(),
    }
