"""One call from people's budgets to a trained model: `fit`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.checkpoints import erase_key
from pdpsgd.engine.checks.augmentation import check_augment
from pdpsgd.engine.fingerprints import digest_of_module
from pdpsgd.engine.privacy_engine import Spent
from pdpsgd.errors import fail
from pdpsgd.training.components import (
    Augment,
    Loss,
    Schedule,
    augment_of,
    loss_of,
    name_of,
    optimizer_of,
    schedule_of,
)
from pdpsgd.training.ensemble import WeightedModels
from pdpsgd.training.evaluation import Evaluation
from pdpsgd.training.presets import options_with
from pdpsgd.training.run_folder import RunFolder
from pdpsgd.training.trainer import HeldOutPeople, Trainer

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from pdpsgd.planning.plans import Plan


CACHE_FRIENDLY = 512
"""Records that go through a model together on a processor: more fall out of its cache, which takes longer."""


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A trained model, what it cost each level, and how good it is. Public things only.

    `models` are the models that `model` combines, with their weights, where the plan trained several.
    `release_note` says why nothing of this is for release; None if nothing speaks against it.
    """

    model: nn.Module
    plan: Plan
    spent: tuple[Spent, ...]
    evaluation: Evaluation | None
    history: tuple[Mapping[str, Any], ...]
    models: tuple[tuple[float, nn.Module], ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    release_note: str | None
    run_folder: Path | None

    @property
    def accuracy(self) -> float | None:
        """Share of the test people that the model gets right."""
        return None if self.evaluation is None else self.evaluation.accuracy

    @property
    def accuracy_by_tier(self) -> dict[str, float]:
        """The same by the tier of the test people, where it is known."""
        return {} if self.evaluation is None else {k: v.accuracy for k, v in self.evaluation.by_tier.items()}

    def to_dict(self) -> dict[str, Any]:
        """The result without the models, as plain data."""
        levels = [
            {
                "epsilon": level.epsilon,
                "delta": level.delta,
                "people": level.people,
                "proven_epsilon": level.proven_epsilon,
                "spent_epsilon": spent.epsilon,
            }
            for level, spent in zip(self.plan.levels, self.spent, strict=True)
        ]
        return {
            "mechanism": self.plan.mechanism,
            "steps": self.plan.steps,
            "release_note": self.release_note,
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "levels": levels,
            "models": len(self.models),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": self.seconds,
            "versions": dict(self.versions),
        }


def fit(
    model: nn.Module,
    data: Any,
    budgets: Budgets | ArrayLike | None = None,
    *,
    plan: Plan | None = None,
    preset: str | None = None,
    mechanism: str = "pdp-sgd-exact",
    steps: int | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | None = None,
    accountant: str | None = None,
    plan_options: Mapping[str, Any] | None = None,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] = "sgd",
    learning_rate: float | None = None,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: str | Schedule | None = None,
    weight_average: float | None = None,
    loss: str | Loss = "cross-entropy",
    augment: str | Augment | None = None,
    views: int | None = None,
    test_data: Any = None,
    test_budgets: Budgets | None = None,
    test_tiers: ArrayLike | None = None,
    evaluate_every: int | None = None,
    max_physical_batch_size: int | None = None,
    seed: int | None = None,
    secure: bool = True,
    run_folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    sensitive: bool = False,
    progress: bool = True,
) -> TrainingResult:
    """Plan, train privately, evaluate: one call.

    `data` is a pair of arrays or tensors (inputs, targets), a dataset, or a data loader; `budgets` says what
    each person allows, and by default person i has record i. Without a `plan`, one is made from `mechanism`,
    `steps`, `batch_size` (the expected one), `max_grad_norm`, `accountant` and `plan_options`.

    A `preset` (see `pdpsgd.training.presets`) says what is not said here of steps, batch_size, max_grad_norm,
    learning_rate, momentum, schedule, weight_average, augment and views. Without one, batches are of 1,024,
    gradients are clipped at 1, and the learning rate is 1 with a cosine schedule and no momentum.

    `loss` (mean over examples), `optimizer`, `schedule` and `augment` are names or functions of your own;
    everything else is plain data. `weight_average` is the decay of a moving average of the weights, which then are the
    model's. `augment(inputs)` changes a batch's inputs, example by example, before they go through the model;
    "shifts" moves each image by up to two pixels, "none" is for a preset that has some. With `views` each record
    goes through in so many of them, whose gradients are averaged before clipping. `max_physical_batch_size` is how
    many examples go through the model together (a record with `views` counts as so many); it changes memory and
    speed, not results. By default that is 512 on processors, and everybody who was drawn on other devices.
    `test_data` are other people, never on the list; `test_budgets` or `test_tiers` say which tier each
    belongs to.

    With a `run_folder` the run leaves its plan, model, promises and history there, and checkpoints to
    `resume` from; `sensitive=True` also logs batch sizes and training losses, in a file that says so. `seed`
    makes a run reproducible and so not for release, and so does `secure=False`, which uses a generator that is
    not cryptographic.

    Guarantee: the returned model, and everything else in the result and the run folder (apart from files
    named SENSITIVE, and the checkpoint while the run lasts), gives every person of level l the (epsilon_l,
    delta_l) that the plan proves for it, provided that `loss`, `augment` and the model treat examples one by
    one (a probe refuses what it can see of the opposite) and that settings were not chosen by looking at the
    private data.
    """
    how = options_with(
        preset,
        plan,
        steps=steps,
        batch_size=batch_size,
        max_grad_norm=max_grad_norm,
        learning_rate=learning_rate,
        momentum=momentum,
        schedule=schedule,
        weight_average=weight_average,
        augment=augment,
        views=views,
    )
    if steps is None and (plan_options or {}).get("noise_multiplier") is not None:
        how["steps"] = None  # the noise decides how many
    planned, people = _plan_of(
        plan,
        budgets,
        mechanism=mechanism,
        steps=how["steps"],
        batch_size=how["batch_size"],
        max_grad_norm=how["max_grad_norm"],
        accountant=accountant,
        **(plan_options or {}),
    )
    changes = augment_of(how["augment"])
    if changes is None and views is None:
        how["views"] = 1  # a preset's augmentation was switched off, and its views with it
    folder = None if run_folder is None else RunFolder(run_folder)
    if max_physical_batch_size is None and resume and folder is not None and folder.begun:
        max_physical_batch_size = folder.read_settings().get("max_physical_batch_size")
    elif max_physical_batch_size is None and all(p.device.type == "cpu" for p in model.parameters()):
        max_physical_batch_size = CACHE_FRIENDLY
    settings = {
        "optimizer": name_of(optimizer),
        "learning_rate": how["learning_rate"],
        "momentum": how["momentum"],
        "weight_decay": weight_decay,
        "optimizer_options": dict(optimizer_options or {}),
        "schedule": name_of(how["schedule"]),
        "weight_average": how["weight_average"],
        "loss": name_of(loss),
        "augment": None if changes is None else name_of(how["augment"]),
        "views": how["views"],
        "max_physical_batch_size": max_physical_batch_size,
        "seed": seed,
        "secure": secure,
    }
    records = as_tensors(data)
    if isinstance(how["views"], bool) or not isinstance(how["views"], int) or how["views"] < 1:
        fail(f"Expected views to be a whole number >= 1. Got {how['views']!r}.")
    if how["views"] > 1 and changes is None:
        fail(f"Expected augment, to make several views of a record. Got views={how['views']!r} without it.")
    if changes is not None and isinstance(records, tuple):
        check_augment(changes, records[0][:4], len(records[0][:4]))
    trainer = Trainer(
        model=model,
        loss=loss_of(loss),
        schedule=schedule_of(how["schedule"]),
        augment=changes,
        views=how["views"],
        weight_average=how["weight_average"],
        settings=settings,
        test=None
        if test_data is None
        else HeldOutPeople(as_tensors(test_data), _tiers(test_budgets, test_tiers)),
        folder=folder,
        sensitive=sensitive,
    )
    made = optimizer_of(
        optimizer,
        (parameter for parameter in model.parameters() if parameter.requires_grad),
        learning_rate=how["learning_rate"],
        momentum=how["momentum"],
        weight_decay=weight_decay,
        options=optimizer_options or {},
    )
    trainer.begin(
        made,
        resume=resume,
        plan=planned,
        budgets=people,
        data_loader=records,
        record_ids=record_ids,
        record_of_person=record_of_person,
        views=how["views"],
        max_physical_batch_size=max_physical_batch_size,
        seed=seed,
        secure=secure,
    )
    trainer.run(evaluate_every=evaluate_every, checkpoint_every=checkpoint_every, progress=progress)
    return _finish(trainer, people)


def _finish(trainer: Trainer, budgets: Budgets | None) -> TrainingResult:
    """Put the result together, write it, and forget the key."""
    engine, plan, folder = trainer.engine, trainer.plan, trainer.folder
    models = trainer.models()
    engine.ranks.check_same(model=digest_of_module(trainer.model) if engine.ranks.world_size > 1 else "")
    model = models[0][1] if len(models) == 1 else WeightedModels(models)
    result = TrainingResult(
        model=model,
        plan=plan,
        spent=_spent(trainer),
        evaluation=None if trainer.test is None else trainer.test.evaluate(model, trainer.loss),
        history=tuple(trainer.history),
        models=tuple(models),
        settings=trainer.settings,
        versions=versions(),
        seconds=round(trainer.seconds, 1),
        release_note=engine.release_note,
        run_folder=None if folder is None else folder.path,
    )
    if folder is not None and engine.ranks.first:
        folder.write_history(trainer.history)
        folder.write_model(model)
        if budgets is not None:
            folder.write_promises(plan, budgets)
        folder.write_result(result.to_dict())
        erase_key(folder.checkpoint)
    engine.close()
    return result


def _spent(trainer: Trainer) -> tuple[Spent, ...]:
    """What the run cost: as the plan proves, and by the accountant where the plan says nothing."""
    levels = trainer.plan.levels
    proven = tuple(
        Spent(level.proven_epsilon, level.delta) for level in levels if level.proven_epsilon is not None
    )
    return proven if len(proven) == len(levels) else trainer.engine.spent()


def versions() -> dict[str, str]:
    """What the run was made with."""
    packages = ("pdpsgd", "torch", "numpy", "dp-accounting")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def as_tensors(data: Any) -> Any:
    """Arrays in a pair become tensors; everything else stays."""
    if isinstance(data, (tuple, list)):
        return tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data)
    return data


def _plan_of(plan: Plan | None, budgets: Any, **options: Any) -> tuple[Plan, Budgets | None]:
    people = budgets if budgets is None or isinstance(budgets, Budgets) else Budgets(budgets)
    if plan is not None:
        return plan, people
    if people is None:
        fail("Expected budgets (what each person allows), or a plan that knows its people. Got neither.")
    from pdpsgd.planning.planner import plan as make_plan

    return make_plan(people, **options), people


def _tiers(budgets: Budgets | None, tiers: ArrayLike | None) -> np.ndarray[Any, Any] | None:
    if budgets is not None and tiers is not None:
        fail("Expected test_budgets or test_tiers, not both.")
    if budgets is not None:
        return budgets.epsilon
    return None if tiers is None else np.asarray(tiers)
