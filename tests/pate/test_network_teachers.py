"""Networks as teachers: they learn, each by itself, and nobody's record reaches another teacher."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pdpsgd.models.networks import linear_model
from pdpsgd.pate import train_network_teachers
from pdpsgd.pate.teachers import Teacher


def _blobs(number: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.arange(number) % classes
    return torch.eye(classes)[targets] * 4 + torch.randn(number, classes), targets


def _teachers(people: int, number: int) -> list[Teacher]:
    return [Teacher(part, 1.0) for part in np.array_split(np.arange(people), number)]


def test_each_teacher_learns_from_its_own_people() -> None:
    torch.manual_seed(0)
    inputs, targets = _blobs(240)
    public, truth = _blobs(60)
    labels = train_network_teachers(
        _teachers(240, 6), inputs, targets, public, network=lambda: linear_model(3, 3), learning_rate=0.05
    )
    assert labels.shape == (6, 60)
    assert ((labels == truth.numpy()).mean(axis=1) > 0.9).all()


def test_a_record_changes_its_own_teacher_and_no_other() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 1, 6, 6), torch.randint(3, (60,))
    public, teachers = torch.randn(200, 1, 6, 6), _teachers(60, 4)

    def network() -> nn.Module:  # its first weights and its dropout are the teacher's own coins
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3))

    def labels(rows: torch.Tensor) -> np.ndarray:
        torch.manual_seed(1)
        return train_network_teachers(teachers, rows, targets, public, network=network, epochs=3)

    everybody, without = labels(inputs), inputs.clone()
    without[20] = torch.nan  # has not supplied a record; is with teacher 1
    changed = (labels(without) != everybody).any(axis=1)
    assert changed.tolist() == [False, True, False, False]


def test_a_teacher_without_records_votes_for_the_first_class_and_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    nothing = torch.full((4, 3), torch.nan)
    labels = train_network_teachers(
        _teachers(4, 2),
        nothing,
        torch.tensor([1, 2, 1, 2]),
        torch.randn(5, 3),
        network=lambda: linear_model(3, 3),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (labels == 0).all()
    assert seen == [(1, 2), (2, 2)]
