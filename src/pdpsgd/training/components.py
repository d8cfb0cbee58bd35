"""Losses, optimizers, schedules and augmentations by name, so that a settings file can hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from pdpsgd.errors import check_positive, fail, shown
from pdpsgd.training.augmentation import Shifts

Loss = Callable[[Any, Any], Tensor]
Schedule = Callable[[float], float]
Augment = Callable[[Any], Any]


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction=reduction
    )


def _squared_error(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.mse_loss(outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction=reduction)


LOSSES: dict[str, Loss] = {
    "cross-entropy": functional.cross_entropy,
    "binary-cross-entropy": _binary_cross_entropy,
    "squared-error": _squared_error,
}

SCHEDULES: dict[str, Schedule] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


AUGMENTATIONS: dict[str, Augment] = {"shifts": Shifts(2)}


def loss_of(loss: str | Loss) -> Loss:
    """Return a loss by name, or the user's own: a function of outputs and targets, the mean over examples."""
    return loss if callable(loss) else _by_name(LOSSES, loss=loss)


def is_of_logits(loss: str | Loss) -> bool:
    """Tell whether a loss takes outputs as logits; of others it is not known how they become probabilities."""
    kinds = (torch.nn.CrossEntropyLoss, torch.nn.BCEWithLogitsLoss)
    known = (LOSSES["cross-entropy"], LOSSES["binary-cross-entropy"])
    return isinstance(loss, kinds) or loss_of(loss) in known


def summed_loss(loss: str | Loss) -> Loss | None:
    """Return a loss by name as the sum over examples instead of the mean; None for the user's own.

    With a sum an example's gradient does not depend on how many others there are, also by rounding.
    """
    return None if callable(loss) else partial(_sum_over_examples, _by_name(LOSSES, loss=loss))


def _sum_over_examples(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    each: Tensor = loss(outputs, targets, reduction="none")
    return (each if each.dim() < 2 else each.flatten(1).mean(1)).sum()


def schedule_of(schedule: str | Schedule) -> Schedule:
    """Return a schedule by name, or the user's own: from the share of steps done to a factor of the rate."""
    return schedule if callable(schedule) else _by_name(SCHEDULES, schedule=schedule)


def augment_of(augment: str | Augment | None) -> Augment | None:
    """An augmentation by name, or the user's own: from a batch of inputs to as many changed ones. "none" is none."""
    if augment == "none":
        return None
    return _by_name(AUGMENTATIONS, augment=augment) if isinstance(augment, str) else augment


def optimizer_of(
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer],
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    options: Mapping[str, Any],
) -> Optimizer:
    """Return an optimizer by name, or made by the user's own function of the parameters."""
    if callable(optimizer):
        return optimizer(parameters)
    check_positive(learning_rate=learning_rate)
    for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            fail(f"Expected {name} >= 0 and finite. Got {name}={value!r}.")
    kind = _by_name(OPTIMIZERS, optimizer=optimizer)
    keywords: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, **options}
    if momentum:
        if optimizer not in ("sgd", "rmsprop"):
            fail(
                f"Expected momentum=0 with optimizer {optimizer!r}, which has its own. Got "
                f"momentum={momentum!r}."
            )
        keywords["momentum"] = momentum
    try:
        made: Optimizer = kind(parameters, **keywords)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        fail(
            f"Expected optimizer_options that {kind.__name__} accepts. Got {shown(dict(options))} ({reason})."
        )
    return made


def name_of(choice: Any) -> str:
    """Name a choice for the settings: its name, or where the user's own function was defined."""
    if isinstance(choice, str):
        return choice
    module = getattr(choice, "__module__", type(choice).__module__)
    return f"{module}:{getattr(choice, '__qualname__', type(choice).__qualname__)}"


def _by_name(known: Mapping[str, Any], **choice: str) -> Any:
    ((what, name),) = choice.items()
    if name not in known:
        accepted = ", ".join(map(repr, known))
        fail(f"Expected {what} to be one of {accepted}, or a function of your own. Got {what}={name!r}.")
    return known[name]
