"""First weights for a network from synthetic digits: plain training, before any data is touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.data.benchmarks.catalog import benchmark
from pdpsgd.models.synthetic_digits import digit_batches

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and of how much."""

STARTS = ("random", "drawn")
"""What first weights can be: those of torch, or those from synthetic digits."""

PICTURES = 40_000
PASSES = 4
BATCH_SIZE = 128
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.5


def start_at_zero(model: nn.Module) -> None:
    """Start a linear model at zero: its training is convex, so that is as good a start as any."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def start_from_synthetic(
    model: nn.Module,
    dataset: str,
    *,
    features_of: Callable[[Tensor], Tensor] = lambda images: images,
    pictures: int = PICTURES,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Train the model, in place, to tell apart synthetic digits like a benchmark's.

    They are normalized as the benchmark is; `features_of` makes of them what the model is given of its images.

    Guarantee: no data of people is read, so what is trained from here on costs what it would cost from any other
    start. What is random comes from the seed.
    """
    told = progress or (lambda name, done, total: None)
    inputs, digits = _examples(dataset, features_of, pictures, seed, partial(told, "Digits generated"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = math.ceil(PASSES * pictures / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    was_training = model.training
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random = torch.Generator().manual_seed(seed)
        for step in range(steps):
            batch = torch.randint(pictures, (BATCH_SIZE,), generator=random)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(inputs[batch]), digits[batch]))
            optimizer.step()
            schedule.step()
            told("Learned from them", step + 1, steps)
    optimizer.zero_grad()
    model.train(was_training)


def _examples(
    dataset: str,
    features_of: Callable[[Tensor], Tensor],
    pictures: int,
    seed: int,
    told: Callable[[int, int], None],
) -> tuple[Tensor, Tensor]:
    constants = benchmark(dataset).normalization
    inputs, labels, done = [], [], 0
    for images, digits in digit_batches(dataset, pictures, seed=seed):
        inputs.append(features_of(constants.normalize_(images)))
        labels.append(digits)
        done += len(digits)
        told(done, pictures)
    return torch.cat(inputs), torch.cat(labels)
