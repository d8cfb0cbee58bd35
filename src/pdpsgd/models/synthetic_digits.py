"""Synthetic digits, made by a program: no person is in them, so learning from them costs no privacy.

They look like a benchmark's as far as anybody can say who knows what digits look like, on paper or on a house. Who
reads this file knows all there is to know of them.

>>> images, digits = make_digits("mnist", 4)
>>> images.shape, digits.shape
(torch.Size([4, 1, 28, 28]), torch.Size([4]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from pdpsgd.errors import check_one_of, check_positive

Range = tuple[float, float]

GLYPHS: tuple[tuple[str, ...], ...] = (
    ("50,5 20,25 18,60 40,95 70,85 82,50 72,15 50,5",),
    (
        "50,5 50,50 50,95",
        "35,20 52,5 52,95",
        "35,20 50,5 50,95 / 30,95 70,95",
    ),
    (
        "20,25 45,5 78,22 65,50 20,92 50,90 85,92",
        "20,25 45,5 75,25 60,60 30,90 20,80 40,75 85,95",
    ),
    (
        "20,12 55,5 75,25 45,48 80,70 55,95 18,85",
        "20,8 75,8 45,42 80,68 55,95 18,88",
    ),
    (
        "30,5 20,55 80,50 / 70,10 65,50 60,95",
        "62,5 15,62 88,62 / 62,5 62,95",
    ),
    ("30,8 25,45 60,42 80,68 55,95 18,88 / 30,8 80,6",),
    ("65,5 30,35 20,70 45,95 75,75 55,50 25,65",),
    (
        "15,10 82,10 / 82,10 55,50 40,95",
        "15,10 82,10 / 82,10 55,50 40,95 / 35,50 75,50",
    ),
    ("70,15 40,5 25,25 50,48 75,72 50,95 25,75 50,48 75,25 70,15",),
    (
        "75,25 50,5 25,28 45,50 75,30 73,60 60,95",
        "75,25 50,5 25,28 45,50 75,30 72,70 50,95 25,88",
    ),
)
"""For each digit, ways of writing it: strokes through points x,y in percent, from the top left."""

AT_ONCE = 250


def make_digits(dataset: str, pictures: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make pictures like a benchmark's, pixels from 0 to 1, and the digit that each shows.

    Guarantee: no data is read; what is random about them comes from the seed.
    """
    images, digits = zip(*digit_batches(dataset, pictures, seed=seed), strict=True)
    return torch.cat(images), torch.cat(digits)


def digit_batches(dataset: str, pictures: int, *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the same pictures, some at a time."""
    check_one_of(tuple(DATASETS), dataset=dataset)
    check_positive(pictures=pictures)
    random = torch.Generator().manual_seed(seed)
    for digits in torch.split(torch.randint(10, (pictures,), generator=random), AT_ONCE):
        yield DATASETS[dataset](digits, random), digits


def handwritten_digits(digits: Tensor, random: Generator) -> Tensor:
    """Make digits by many hands, white on black (pictures, 1, 28, 28), centered and of like size, as MNIST's are."""
    written = _written(digits, 96, 0.08, random)
    lines = _leaning(written, random, turn=0.25, lean=(-0.24, 0.4), width=(0.6, 1.15))
    lines = 18 * _centred(lines) / _extent(lines).amax(2, keepdim=True)
    middle = 14 - 0.5 * lines.mean(1, keepdim=True) + 2 * torch.rand(len(digits), 1, 2, generator=random) - 1
    return _pen(lines + middle, 28, width=_uniform(len(digits), 0.6, 1.8, random))[:, None]


def small_digits(digits: Tensor, random: Generator) -> Tensor:
    """Return the same as few and coarse pixels (pictures, 1, 8, 8), as scikit-learn's are."""
    return F.adaptive_avg_pool2d(handwritten_digits(digits, random)[..., 4:24, 4:24], 8)


def house_numbers(digits: Tensor, random: Generator) -> Tensor:
    """Make digits on houses (pictures, 3, 32, 32), often with a neighbor on either side, as SVHN's are."""
    pictures = len(digits)
    size = _uniform(pictures, 15, 28, random)
    middle = 16 + torch.cat([_uniform(pictures, -2, 2, random) for _ in "xy"], dim=2)
    lines = [_on_a_house(digits, size, random) + middle]
    for side in (-1, 1):
        neighbors = torch.randint(10, (pictures,), generator=random)
        beside = torch.cat(
            [side * size * _uniform(pictures, 0.5, 0.85, random), _uniform(pictures, -2, 2, random)], dim=2
        )
        there = _on_a_house(neighbors, size * _uniform(pictures, 0.9, 1.1, random), random) + middle + beside
        lines.append(torch.where(_uniform(pictures, 0, 1, random) < 0.6, there, lines[0]))
    width, softness = size * _uniform(pictures, 0.05, 0.11, random), _uniform(pictures, 0.3, 1.5, random)
    ink = _pen(torch.cat(lines, dim=1), 32, width=width, softness=softness)
    return _colored(ink, random)


DATASETS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "digits": small_digits,
    "mnist": handwritten_digits,
    "svhn": house_numbers,
}
"""For each benchmark, what draws given digits as they are there."""


def _written(digits: Tensor, points: int, wobble: float, random: Generator) -> Tensor:
    """Points along the lines of each digit (pictures, points, 2), by an unsteady hand."""
    lines = torch.empty(len(digits), points, 2)
    for digit, ways in enumerate(GLYPHS):
        which = (digits == digit).nonzero().flatten()
        chosen = torch.randint(len(ways), (len(which),), generator=random)
        for number, way in enumerate(ways):
            rows, strokes = which[chosen == number], way.split(" / ")
            each = points // len(strokes)
            lines[rows] = torch.cat([_stroke(s, len(rows), each, wobble, random) for s in strokes], dim=1)
    return lines


def _stroke(stroke: str, pictures: int, points: int, wobble: float, random: Generator) -> Tensor:
    controls = _line(stroke).expand(pictures, -1, -1)
    if controls.shape[1] == 2:  # something to bend
        controls = torch.cat([controls[:, :1], controls.mean(1, keepdim=True), controls[:, 1:]], dim=1)
    return _curve(controls + wobble * _normal(*controls.shape, random=random), points)


def _leaning(lines: Tensor, random: Generator, *, turn: float, lean: Range, width: Range) -> Tensor:
    """Return the lines made narrower or wider, leaned to the right, and turned."""
    pictures = len(lines)
    x, y = lines[..., :1] - 0.5, lines[..., 1:] - 0.5
    x = x * _uniform(pictures, *width, random) - y * _uniform(pictures, *lean, random)
    angle = turn * _normal(pictures, 1, 1, random=random).clamp(-2, 2)
    return torch.cat([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y], dim=2)


def _on_a_house(digits: Tensor, height: Tensor, random: Generator) -> Tensor:
    written = _written(digits, 48, 0.03, random)
    lines = _leaning(written, random, turn=0.1, lean=(-0.12, 0.2), width=(0.45, 0.95))
    return height * _centred(lines) / _extent(lines)[..., 1:].clamp(min=0.5)


def _centred(lines: Tensor) -> Tensor:
    return lines - 0.5 * (lines.amin(1, keepdim=True) + lines.amax(1, keepdim=True))


def _extent(lines: Tensor) -> Tensor:
    return lines.amax(1, keepdim=True) - lines.amin(1, keepdim=True)


def _colored(ink: Tensor, random: Generator) -> Tensor:
    """Ink and wall in colors that differ in brightness, in uneven light, with a little noise."""
    pictures, side = len(ink), ink.shape[-1]
    wall = torch.rand(pictures, 1, 1, 1, generator=random) + 0.05 * _normal(pictures, 3, 1, 1, random=random)
    turning = 0.2 + 0.6 * torch.rand(pictures, 1, 1, 1, generator=random)
    darker = wall.mean(1, keepdim=True) > turning
    contrast = _uniform(pictures, 0.12, 0.7, random)[:, None] * torch.where(darker, -1.0, 1.0)
    paint = wall + contrast + 0.05 * _normal(pictures, 3, 1, 1, random=random)
    wall, paint = wall.clamp(0, 1), paint.clamp(0, 1)
    x, y = (2 * along / side - 1 for along in _pixels(side))
    slopes = 0.12 * _normal(2, pictures, 1, 1, random=random)
    light = slopes[0] * x + slopes[1] * y + 0.08 * _clouds(pictures, 5, side, random)
    image = wall + (paint - wall) * ink[:, None] + light[:, None]
    return (image + 0.02 * _normal(*image.shape, random=random)).clamp(0, 1)


def _line(text: str) -> Tensor:
    """Points (points, 2) from text that has their x and y in percent.

    >>> _line("0,50 100,25").tolist()
    [[0.0, 0.5], [1.0, 0.25]]
    """
    return torch.tensor([[float(part) for part in point.split(",")] for point in text.split()]) / 100


def _curve(controls: Tensor, points: int) -> Tensor:
    """Place points along a smooth line (Catmull and Rom's) through the control points of each picture.

    >>> _curve(torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]), 3)[0].tolist()
    [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    """
    first, last = 2 * controls[:, :1] - controls[:, 1:2], 2 * controls[:, -1:] - controls[:, -2:-1]
    extended = torch.cat([first, controls, last], dim=1)
    pieces = controls.shape[1] - 1
    along = torch.linspace(0, pieces, points)
    piece = along.long().clamp(max=pieces - 1)
    return _spline([extended[:, piece + i] for i in range(4)], (along - piece)[None, :, None])


def _spline(around: list[Tensor], t: Tensor) -> Tensor:
    """Catmull and Rom's cubic between the middle two of four points."""
    a, b, c, d = around
    return b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))


def _pen(points: Tensor, side: int, *, width: Tensor, softness: Tensor | float = 0.35) -> Tensor:
    """Ink from 0 to 1 (pictures, side, side) of a pen of a `width`, in pixels, that went through the points."""
    grid = torch.stack(_pixels(side), dim=-1).view(1, -1, 2).expand(len(points), -1, -1)
    distance = torch.cdist(points, grid.contiguous()).amin(dim=1).view(-1, side, side)
    return torch.sigmoid((width - distance) / softness)


def _clouds(pictures: int, grain: int, side: int, random: Generator) -> Tensor:
    """Smooth noise (pictures, side, side) from a coarse grid of normal numbers."""
    coarse = _normal(pictures, 1, grain, grain, random=random)
    return F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)[:, 0]


def _pixels(side: int) -> tuple[Tensor, Tensor]:
    """Return the x and the y of each pixel's middle."""
    middles = torch.arange(side) + 0.5
    y, x = torch.meshgrid(middles, middles, indexing="ij")
    return x, y


def _uniform(pictures: int, low: float, high: float, random: Generator) -> Tensor:
    """Return a number for each picture, shaped so that it goes with its pixels."""
    return low + (high - low) * torch.rand(pictures, 1, 1, generator=random)


def _normal(*shape: int, random: Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=random)
