"""How long steps take on this machine, measured on made-up records: nobody's data is looked at."""

from __future__ import annotations

import copy
import time
import warnings

import numpy as np
import torch
from torch import nn

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.planning.planner import plan
from pdpsgd.training.fitting import fit

SIZES = (64, 1024)
STEPS = 6


def seconds_per_step(
    model: nn.Module, input_shape: tuple[int, ...], classes: int, batch_size: float
) -> float:
    """Measure private steps of two sizes, on random records, and lay a line through them.

    Args:
        model: The network, which stays as it is.
        input_shape: The shape of one example.
        classes: The number of classes.
        batch_size: The expected batch size of the steps to come.

    Returns:
        Seconds for one step of that size, without evaluation.
    """
    times = [_measure(model, input_shape, classes, size) for size in SIZES]
    slope = max((times[1] - times[0]) / (SIZES[1] - SIZES[0]), 0.0)
    return max(times[0] + slope * (batch_size - SIZES[0]), times[0] / 2)


def _measure(model: nn.Module, input_shape: tuple[int, ...], classes: int, size: int) -> float:
    people = 2 * size
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(people, *input_shape, generator=random)
    targets = torch.randint(classes, (people,), generator=random)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds = []
        for steps in (2, 2 + STEPS):  # what a run needs to begin and end is in both
            made = plan(Budgets(np.ones(people), delta=1e-6), steps=steps, batch_size=size)
            begin = time.perf_counter()
            fit(
                copy.deepcopy(model),
                (inputs, targets),
                Budgets(np.ones(people), delta=1e-6),
                plan=made,
                learning_rate=0.1,
                progress=False,
            )
            seconds.append(time.perf_counter() - begin)
    return max(seconds[1] - seconds[0], 1e-4) / STEPS
