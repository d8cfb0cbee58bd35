"""Networks as teachers: small ones by the hundred, one after the other, each from its own people and its own coins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import IntArray
from pdpsgd.pate.teachers import NOTHING_LEARNED, Teacher

MakeNetwork = Callable[[], nn.Module]


def train_network_teachers(
    teachers: Sequence[Teacher],
    inputs: Tensor,
    targets: Tensor,
    public: Tensor,
    *,
    network: MakeNetwork,
    epochs: int = 20,
    batch_size: int = 20,
    learning_rate: float = 2e-3,
    progress: Callable[[int, int], None] | None = None,
) -> IntArray:
    """Train a network for each teacher with Adam, without noise, and have it label the public examples.

    Guarantee: a teacher's labels depend on the records of its own people and on coins that are tossed for it before any
    training. Taking a person's record away changes the labels of the teachers that the person is with, and no others.

    Args:
        teachers: who learns from whom.
        inputs: everybody's inputs, one row per person on the list; rows that are not finite are left out.
        targets: everybody's class.
        public: the public examples that are asked about.
        network: makes a new network, which gives one number for each class.
        epochs: passes over a teacher's people.
        batch_size: people of a step.
        learning_rate: of Adam.
        progress: told how many of how many teachers are done.

    Returns:
        The class that each teacher gives each public example: (teachers, examples). Sensitive.
    """
    shown = _as_network_input(public)
    found = np.full((len(teachers), len(shown)), NOTHING_LEARNED, dtype=np.int64)
    coins = torch.randint(2**62, (len(teachers),)).tolist()
    for number, (teacher, coin) in enumerate(zip(teachers, coins, strict=True)):
        rows, labels = inputs[teacher.people], targets[teacher.people]
        supplied = rows.flatten(1).isfinite().all(dim=1)
        if bool(supplied.any()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(coin)
                model = network()
                _train(
                    model,
                    _as_network_input(rows[supplied]),
                    labels[supplied],
                    epochs,
                    batch_size,
                    learning_rate,
                )
                found[number] = _labels(model, shown)
        if progress is not None:
            progress(number + 1, len(teachers))
    return found


def _as_network_input(rows: Tensor) -> Tensor:
    """Put images in the layout in which convolutions and poolings of small networks are fastest."""
    return rows.contiguous(memory_format=torch.channels_last) if rows.dim() == 4 else rows


def _train(
    model: nn.Module, rows: Tensor, labels: Tensor, epochs: int, batch_size: int, learning_rate: float
) -> None:
    if rows.dim() == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-4, fused=True)
    model.train()
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(rows)), batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def _labels(model: nn.Module, shown: Tensor) -> IntArray:
    model.eval()
    return torch.cat([model(part).argmax(dim=1) for part in torch.split(shown, 1000)]).numpy()
