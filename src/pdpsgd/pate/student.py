"""The student's part, from public things only: what to ask about, labels for what is around it, and training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import IntArray
from pdpsgd.errors import fail


def ask_about(
    public: Tensor, questions: int, *, dimensions: int = 50, rounds: int = 20, seed: int = 0
) -> IntArray:
    """Choose the public examples nearest to the centers of k-means on their features, the fullest cluster first.

    Guarantee: looks at public examples only, so it costs nobody anything.

    Args:
        public: features of the public examples.
        questions: how many to choose.
        dimensions: principal components that distances are taken in.
        rounds: of k-means.
        seed: of the first centers.

    Returns:
        The numbers of the examples.
    """
    if not 0 < questions <= len(public):
        fail(f"Expected 1 to {len(public):,} questions, the public examples there are. Got {questions}.")
    points = _components(public, dimensions)
    generator = torch.Generator().manual_seed(seed)
    centers = points[torch.randperm(len(points), generator=generator)[:questions]]
    for _ in range(rounds):
        cluster = torch.cdist(points, centers).argmin(dim=1)
        size = torch.bincount(cluster, minlength=questions)
        sums = torch.zeros_like(centers).index_add_(0, cluster, points)
        centers = torch.where(size[:, None] > 0, sums / size.clamp_min(1)[:, None], centers)
    distance = torch.cdist(centers, points)
    chosen: list[int] = []
    taken = torch.zeros(len(points), dtype=torch.bool)
    for center in torch.argsort(size, descending=True).tolist():
        nearest = int(distance[center].masked_fill(taken, torch.inf).argmin())
        taken[nearest] = True
        chosen.append(nearest)
    return np.array(chosen, dtype=np.int64)


def spread_labels(
    public: Tensor,
    examples: IntArray,
    labels: IntArray,
    *,
    classes: int,
    neighbors: int = 10,
    dimensions: int = 50,
    rounds: int = 50,
    kept: float = 0.9,
) -> Tensor:
    """Spread answered labels over the nearest-neighbor graph of all public examples (Zhou et al. 2004).

    Guarantee: post-processing of public labels.

    Args:
        public: features of the public examples.
        examples: which of them were answered.
        labels: their answers.
        classes: number of classes.
        neighbors: of each example in the graph.
        dimensions: principal components that distances are taken in.
        rounds: how often labels are passed on.
        kept: the share that comes from neighbors each time.

    Returns:
        A distribution over classes for every public example.
    """
    if not len(examples):
        fail("Expected at least one answer to spread. Got none: the vote answered nothing.")
    points = _components(public, dimensions)
    near = torch.cat(
        [
            torch.cdist(part, points).topk(neighbors + 1, largest=False).indices
            for part in torch.split(points, 1000)
        ]
    )
    rows = torch.arange(len(points)).repeat_interleave(neighbors)
    edges = torch.stack([rows, near[:, 1:].flatten()])
    both = torch.cat([edges, edges.flip(0)], dim=1)
    degree = torch.bincount(both[0], minlength=len(points)).float().clamp_min(1).rsqrt()
    graph = torch.sparse_coo_tensor(
        both, degree[both[0]] * degree[both[1]], (len(points), len(points)), check_invariants=False
    ).coalesce()
    start = torch.zeros(len(points), classes)
    start[torch.from_numpy(examples), torch.from_numpy(labels)] = 1.0
    start /= start.sum(dim=0).clamp_min(1)  # a class that was asked about more often does not spread further
    state = start
    for _ in range(rounds):
        state = kept * torch.sparse.mm(graph, state) + (1 - kept) * start
    return state / state.sum(dim=1, keepdim=True).clamp_min(1e-30)


def train_student(
    model: nn.Module,
    inputs: Tensor,
    wanted: Tensor,
    *,
    steps: int = 200,
    batch_size: int = 512,
    learning_rate: float = 2e-3,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train a model, in place, on public examples and their labels: plain training with Adam, without noise.

    Guarantee: post-processing of public labels.

    Args:
        model: gives one number for each class.
        inputs: public examples.
        wanted: a distribution over classes for each of them (one-hot for a label).
        steps: number of steps.
        batch_size: examples of a step, or all if there are fewer.
        learning_rate: of Adam.
        progress: told how many of how many steps are done.

    Raises:
        PdpsgdError: there is no example, or not a distribution for each.
    """
    if not len(inputs) or len(inputs) != len(wanted):
        fail(
            f"Expected examples, and a distribution over classes for each. Got {len(inputs)} and {len(wanted)}."
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-4)
    for step in range(steps):
        chosen = torch.randint(len(inputs), (min(batch_size, len(inputs)),))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), wanted[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps)


def _components(features: Tensor, dimensions: int) -> Tensor:
    """The first principal components of each row."""
    flat = features.flatten(1).float()
    flat = flat - flat.mean(dim=0)
    if flat.shape[1] <= dimensions:
        return flat
    _, _, basis = torch.svd_lowrank(flat, q=dimensions, niter=4)
    return flat @ basis
