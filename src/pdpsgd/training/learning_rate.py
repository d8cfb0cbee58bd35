"""The learning rate of a run: by the plan's noise where nobody named one, and a word where a named one is far off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdpsgd.errors import warn
from pdpsgd.models.networks import count_parameters
from pdpsgd.planning.advice import doubt_about_rate, rate_for
from pdpsgd.training.components import name_of

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.options import TrainingOptions

OF_OTHERS = 0.01
"""Learning rate of optimizers that scale gradients themselves (adam and the like): a habit, not calibrated."""


def with_learning_rate(options: TrainingOptions, plan: Plan, model: nn.Module) -> TrainingOptions:
    """Choose the learning rate that nobody named, or warn of a named one that does not suit the plan's noise.

    Args:
        options: The options of a run.
        plan: Its plan; only public things decide.
        model: The network, whose size counts.

    Returns:
        Options with a learning rate. A preset's stays, and so does an optimizer that somebody made by hand.
    """
    if callable(options.optimizer):
        return options if options.learning_rate is not None else options.with_defaults(learning_rate=1.0)
    if options.optimizer != "sgd":
        return (
            options if options.learning_rate is not None else options.with_defaults(learning_rate=OF_OTHERS)
        )
    schedule, momentum, parameters = name_of(options.schedule), options.momentum, count_parameters(model)
    started = options.start is not None
    if options.learning_rate is None:
        return options.with_defaults(
            learning_rate=rate_for(plan, parameters, schedule=schedule, momentum=momentum, started=started)
        )
    if options.preset is None and options.said("learning_rate"):
        doubt = doubt_about_rate(
            plan, parameters, options.learning_rate, schedule=schedule, momentum=momentum, started=started
        )
        if doubt is not None:
            warn(doubt)
    return options
