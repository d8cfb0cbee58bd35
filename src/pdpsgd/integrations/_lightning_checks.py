"""What a Trainer of Lightning is refused for, and what is said of the files that it writes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import LearningRateFinder

from pdpsgd.engine.checks.held_out import check_held_out
from pdpsgd.errors import PdpsgdError, fail

PRECISIONS = ("32", "32-true", "64", "64-true")


def check_trainer(trainer: Any) -> None:
    """Refuse what would change gradients behind the mechanism's back."""
    if trainer.gradient_clip_val:
        fail(f"Expected no gradient_clip_val: the plan clips. Got {trainer.gradient_clip_val!r}.")
    if trainer.overfit_batches:
        fail(
            "Expected overfit_batches=0: it validates on the batches that are trained on. Got "
            f"{trainer.overfit_batches!r}."
        )
    if trainer.accumulate_grad_batches != 1:
        fail(
            "Expected accumulate_grad_batches=1: a step is one batch. Got "
            f"{trainer.accumulate_grad_batches!r}."
        )
    for each in trainer.callbacks:
        if isinstance(each, LearningRateFinder):
            fail(
                "Expected settings that were chosen without the private data. Got LearningRateFinder (Tuner), which "
                "tries some on it and looks at the training loss. See docs/choosing.md."
            )
    if str(trainer.precision) not in PRECISIONS:
        fail(f"Expected precision of 32 or 64 bits, without loss scaling. Got {trainer.precision!r}.")
    if trainer.world_size != 1:
        fail(f"Expected one device with Lightning. Got {trainer.world_size}: use pdpsgd.fit under torchrun.")


def check_hyperparameters(module: Any) -> None:
    """Refuse records among hyperparameters: `save_hyperparameters` puts them into every checkpoint."""
    for name, value in dict(module.hparams).items():
        if _are_same(module.private_options["data_loader"], value):
            fail(
                f"Expected hyperparameters without the records that are trained on. Got them as {name!r}: "
                "save_hyperparameters puts them into every checkpoint, and loggers into files. Write "
                f"save_hyperparameters(ignore=[{name!r}])."
            )


def _are_same(records: Any, value: Any) -> bool:
    """Tell whether something is the records, or part of them, by where it lies."""
    try:
        check_held_out(records, value, by_values=False)
    except PdpsgdError:
        return True
    return False


def refuse_deciding_by(name: str, trainer: Any) -> None:
    """Refuse callbacks and schedulers that decide by a figure of the training data."""
    names = {name, f"{name}_step", f"{name}_epoch"}
    for each in trainer.callbacks:
        if any(f"{{{one}{end}" in str(getattr(each, "filename", None)) for one in names for end in "}:!"):
            fail(
                f"Expected file names without figures of the private data. Got {type(each).__name__} with "
                f"filename={each.filename!r}: whoever sees the file's name sees {name!r}, which has no noise. Take a "
                "figure of validation_step, the epoch or the step."
            )
    plateaus = (each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau)
    for each in (*trainer.callbacks, *plateaus):
        if getattr(each, "monitor", None) in names:
            kind = type(getattr(each, "scheduler", each)).__name__
            fail(
                f"Expected callbacks and schedulers that decide by figures on other people. Got {kind}, which watches "
                f"{each.monitor!r}: training_step computes that from the private data, and no noise covers what "
                "follows from it. Watch a figure of validation_step."
            )


def places_of(loggers: list[Any]) -> str:
    """Say where loggers write to: the folder of each, or its kind."""
    return ", ".join(
        f"{getattr(each, 'log_dir', None) or getattr(each, 'save_dir', None) or ''} ({type(each).__name__})".strip()
        for each in loggers
    )


def said_of(names: list[str], places: str) -> str:
    """Say what is written where of the private data."""
    figures = ", ".join(map(repr, names))
    return (
        f"What is logged in training ({figures}) follows from the private data, and no noise covers it: what is "
        f"written to {places} is not for publishing."
    )
