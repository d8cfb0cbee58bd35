"""First weights from images made by random processes: no person's data, and no knowledge of the task either.

After DP-RandP (Tang et al., arXiv:2306.06076), for the paper's small networks. `normalized` only scales random weights,
layer by layer, so that on such images every unit before an activation has mean 0 and standard deviation 1. `processes`
first trains all layers but the last so that two views of an image are alike and views of different images are not
(the contrastive loss of SimCLR), and then does the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STARTS = ("normalized", "processes")
SIZE = 28
SHAPES = 10
BATCH = 128
STEPS = 1_200
LEARNING_RATE = 2e-3
TEMPERATURE = 0.2


def images(number: int, random: torch.Generator) -> Tensor:
    """Generate images from 0 to 1: up to ten ellipses and rectangles, gray or striped, one over the other on black.

    Each image is mirrored with probability one half: left and right are then the same.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(number, 1, 1, generator=random)

    line = torch.linspace(-1, 1, SIZE)
    y, x = line[None, :, None], line[None, None, :]
    mirrored = torch.rand(number, 1, 1, generator=random) < 0.5
    x = torch.where(mirrored, x.abs(), x).expand(number, SIZE, SIZE)
    made = torch.zeros(number, SIZE, SIZE)
    for _ in range(SHAPES):
        angle, across, along = uniform(0, math.pi), uniform(0.08, 0.6), uniform(0.08, 0.9)
        dx, dy = x - uniform(-0.7, 0.7), y - uniform(-0.7, 0.7)
        u, v = dx * angle.cos() + dy * angle.sin(), dy * angle.cos() - dx * angle.sin()
        ellipse = (u / across) ** 2 + (v / along) ** 2 < 1
        rectangle = (u.abs() < across) & (v.abs() < along)
        inside = torch.where(uniform(0, 1) < 0.5, ellipse, rectangle) & (uniform(0, 1) < 0.7)
        stripes = 0.5 + 0.5 * torch.sin(uniform(4, 30) * u + uniform(0, 6))
        value = uniform(0, 1) * torch.where(uniform(0, 1) < 0.3, stripes, torch.ones(1))
        made = torch.where(inside, value, made)
    return made[:, None]


def view(shown: Tensor, random: torch.Generator) -> Tensor:
    """Return the images moved, turned, resized, brighter or darker, and with noise."""
    number = len(shown)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(number, generator=random)

    angle, wide, high = uniform(-0.3, 0.3), uniform(0.8, 1.25), uniform(0.8, 1.25)
    moves = torch.stack(
        [
            torch.stack([wide * angle.cos(), -angle.sin(), uniform(-0.15, 0.15)], 1),
            torch.stack([angle.sin(), high * angle.cos(), uniform(-0.15, 0.15)], 1),
        ],
        1,
    )
    grid = F.affine_grid(moves, list(shown.shape), align_corners=False)
    moved = F.grid_sample(shown, grid, align_corners=False) * uniform(0.6, 1.4)[:, None, None, None]
    return moved + 0.05 * torch.randn(moved.shape, generator=random)


def start_from_processes(network: nn.Sequential, start: str, *, mean: float, deviation: float) -> None:
    """Give the network its first weights, in place; the last layer keeps its own.

    Guarantee: no data of people is read. `mean` and `deviation` are the constants by which the benchmark is
    normalized. What is random comes from torch's seed, as random weights do.
    """
    if start == "processes":
        network.load_state_dict(_trained(network, mean, deviation), strict=True)
        last = network[-1]
        assert isinstance(last, nn.Linear)
        last.reset_parameters()
    random = torch.Generator().manual_seed(1)
    normalize_layers(network, (images(1024, random) - mean) / deviation)


@torch.no_grad()
def normalize_layers(network: nn.Sequential, shown: Tensor) -> None:
    """Scale and shift every layer but the last so that its outputs have mean 0 and deviation 1 on these images."""
    for layer in list(network)[:-1]:
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            out = layer(shown)
            others = [d for d in range(out.dim()) if d != 1]
            scale = 1 / out.std(others).clamp_min(1e-3)
            layer.bias.copy_((layer.bias - out.mean(others)) * scale)
            layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
        shown = layer(shown)


def contrastive_loss(one: Tensor, other: Tensor) -> Tensor:
    """Return SimCLR's loss: each view is to be recognized among all by the other view of its image."""
    both = F.normalize(torch.cat([one, other]), dim=1)
    alike = both @ both.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(both), dtype=torch.bool), -math.inf)
    partner = torch.arange(len(both)).roll(len(one))
    return F.cross_entropy(alike, partner)


def _trained(network: nn.Sequential, mean: float, deviation: float) -> dict[str, Tensor]:
    shape = tuple((name, tuple(p.shape)) for name, p in network.named_parameters())
    if shape not in _TRAINED:
        _TRAINED[shape] = _train(network, mean, deviation)
    return _TRAINED[shape]


_TRAINED: dict[object, dict[str, Tensor]] = {}
"""One training serves all runs of a process: it is from its own seed."""


def _train(network: nn.Sequential, mean: float, deviation: float) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    features = network[:-1]
    head = nn.Linear(32, 32)
    optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        shown = images(BATCH, random)
        views = [(view(shown, random) - mean) / deviation for _ in range(2)]
        optimizer.zero_grad()
        loss = contrastive_loss(head(features(views[0])), head(features(views[1])))
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in network.state_dict().items()}
