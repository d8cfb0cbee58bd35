"""Teachers: who learns from whom, many small models trained one after the other, and their votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import IntArray
from pdpsgd.errors import check_positive, fail
from pdpsgd.pate.new_networks import NewNetworks
from pdpsgd.pate.plans import VotePlan

NOTHING_LEARNED = 0
"""The class for which a teacher votes who has no records."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """One teacher: the places on the list of the people it learns from, and the weight of its vote."""

    people: IntArray
    weight: float


@dataclass(frozen=True)
class NetworkTraining:
    """How a teacher that is a network is trained: plain Adam, without noise.

    Attributes:
        epochs: how often each record is seen.
        batch_size: records of a step.
        learning_rate: of Adam.
    """

    epochs: int = 20
    batch_size: int = 20
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        check_positive(epochs=self.epochs, batch_size=self.batch_size, learning_rate=self.learning_rate)

    def train(self, network: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        """Train the network in place; images in the layout in which small convolutions are fastest."""
        if inputs.dim() == 4:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        network.train()
        optimizer = torch.optim.Adam(network.parameters(), lr=self.learning_rate)
        for _ in range(self.epochs):
            for chosen in torch.split(torch.randperm(len(inputs)), self.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(inputs[chosen]), targets[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def assign_people(planned: VotePlan, level_of_person: IntArray, *, seed: int | None = None) -> list[Teacher]:
    """Draw who goes to which teacher, from the list alone: never by label, nor by who has supplied a record.

    Guarantee: person i is with exactly `copies` teachers of weight `weight` of i's level (none, if i allows nothing).

    Args:
        planned: the plan of the vote.
        level_of_person: the level of each person on the list.
        seed: to repeat the draw; whoever knows it learns who went where, and nothing else.

    Returns:
        The teachers.
    """
    rng = np.random.default_rng(seed)
    copies, weights = np.array(planned.copies)[level_of_person], np.array(planned.weights)
    number = planned.settings.teachers
    if planned.by_level:
        return _by_level(planned, level_of_person, rng)
    # Everybody's turns one after the other, dealt out in rounds: nobody meets the same teacher twice.
    order = rng.permutation(np.flatnonzero(copies > 0))
    turns = np.repeat(order, copies[order])
    if int(copies.max(initial=0)) > number:
        fail(f"Expected at least {copies.max()} teachers. Got {number}.")
    place = np.arange(turns.size) % number
    return [Teacher(turns[place == teacher], float(weights.max())) for teacher in range(number)]


def _by_level(planned: VotePlan, level_of_person: IntArray, rng: np.random.Generator) -> list[Teacher]:
    used = [level for level, copies in enumerate(planned.copies) if copies > 0]
    people = [rng.permutation(np.flatnonzero(level_of_person == level)) for level in used]
    counts = _proportional(np.array([len(group) for group in people]), planned.settings.teachers)
    return [
        Teacher(part, planned.weights[level])
        for level, group, count in zip(used, people, counts.tolist(), strict=True)
        for part in np.array_split(group, count)
    ]


def _proportional(people: IntArray, total: int) -> IntArray:
    """Whole numbers in proportion to people, at least 1 each, by largest remainders."""
    if total < people.size:
        fail(f"Expected at least one teacher for each of the {people.size} levels. Got {total}.")
    exact = people / people.sum() * total
    counts = np.maximum(1, exact.astype(np.int64))
    while counts.sum() < total:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts


def train_ridge_teachers(
    teachers: Sequence[Teacher],
    inputs: Tensor,
    targets: Tensor,
    public: Tensor,
    *,
    classes: int,
    ridge: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> IntArray:
    """Train a ridge classifier for each teacher, and have it label the public examples.

    In kernel form: a teacher has fewer people than features. All teachers share the products with public examples.

    Args:
        teachers: who learns from whom.
        inputs: everybody's features, one row per person on the list; NaN for somebody without a record; rows that
            are not finite are left out.
        targets: everybody's class.
        public: features of the public examples.
        classes: number of classes.
        ridge: regularization, in units of the mean squared norm of a row.
        progress: told how many of how many teachers are done.

    Returns:
        The class that each teacher gives each public example: (teachers, examples). Sensitive.
    """
    flat, shown = inputs.flatten(1), public.flatten(1)
    found = np.full((len(teachers), len(shown)), NOTHING_LEARNED, dtype=np.int64)
    for number, teacher in enumerate(teachers):
        rows, labels = flat[teacher.people], targets[teacher.people]
        supplied = rows.isfinite().all(dim=1)
        rows, labels = rows[supplied], labels[supplied]
        if len(rows):
            center = rows.mean(dim=0)
            rows = rows - center
            gram = rows @ rows.T
            gram += ridge * gram.diagonal().mean().clamp_min(1e-12) * torch.eye(len(rows))
            wanted = torch.nn.functional.one_hot(labels, classes).float()
            mean = wanted.mean(dim=0)
            weights = rows.T @ torch.linalg.solve(gram, wanted - mean)
            found[number] = ((shown @ weights) - center @ weights + mean).argmax(dim=1).numpy()
        if progress is not None:
            progress(number + 1, len(teachers))
    return found


def train_network_teachers(
    make: Callable[[], nn.Module],
    teachers: Sequence[Teacher],
    inputs: Tensor,
    targets: Tensor,
    public: Tensor,
    *,
    settings: NetworkTraining | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IntArray:
    """Train a network for each teacher, one after the other, and have it label the public examples.

    Guarantee: a teacher's labels follow from its own people's records and its own random numbers: these are seeded
    anew for each teacher, so that nobody's record moves another teacher's. Networks that share what training moves are
    refused.

    Args:
        make: makes a new network that gives one number for each class; its weights are drawn from torch's generator.
        teachers: who learns from whom.
        inputs: everybody's record, one row per person on the list; rows that are not finite are left out.
        targets: everybody's class.
        public: the public examples.
        settings: of the training of each.
        progress: told how many of how many teachers are done.

    Returns:
        The class that each teacher gives each public example: (teachers, examples). Sensitive.
    """
    settings = settings or NetworkTraining()
    new = make if isinstance(make, NewNetworks) else NewNetworks(make)
    found = np.full((len(teachers), len(public)), NOTHING_LEARNED, dtype=np.int64)
    first = int(torch.randint(2**62, ()))
    for number, teacher in enumerate(teachers):
        rows, labels = inputs[teacher.people], targets[teacher.people]
        supplied = rows.flatten(1).isfinite().all(dim=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(first + number)
            if bool(supplied.any()):
                network = new()
                settings.train(network, rows[supplied], labels[supplied])
                found[number] = _labels_of(network, public)
        if progress is not None:
            progress(number + 1, len(teachers))
    return found


@torch.no_grad()
def _labels_of(network: nn.Module, examples: Tensor) -> IntArray:
    network.eval()
    return torch.cat([network(part).argmax(dim=1) for part in torch.split(examples, 500)]).numpy()


def vote_counts(teachers: Sequence[Teacher], labels: IntArray, *, classes: int) -> Tensor:
    """Add up the teachers' weights for each class of each public example. Sensitive until noise is added.

    Args:
        teachers: the teachers.
        labels: the class that each teacher gives each example.
        classes: number of classes.

    Returns:
        The counts, (examples, classes), in double precision.
    """
    counts = torch.zeros(labels.shape[1], classes, dtype=torch.float64)
    for teacher, given in zip(teachers, labels, strict=True):
        counts[torch.arange(labels.shape[1]), torch.from_numpy(given)] += teacher.weight
    return counts
