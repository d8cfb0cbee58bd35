"""How far one person moves the clipped sum, in clipping norms, when many people's gradients point the same way.

    python bench/sensitivity.py [--people 20000 200000 1000000] [--layers linear ...] [--seeds 2] [--at-once 20000]

Rounding adds up where gradients do: everybody's record is nearly the same here, so that the sum is n clipping norms
long. One person's record is taken out, either with the row kept at weight 0, as the engine does it, or with the row
dropped, which moves everybody else to another place in the batch. Printed is the largest distance found over seeds and
people, the first, the last and one in the middle; it must not be above 1 with the row kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pdpsgd.gradients import ClippedGradients
from pdpsgd.gradients.native import dispatch as native

Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]

LAYERS: dict[str, Layer] = {
    "linear": (lambda: nn.Linear(20, 10), (20,)),
    "linear, 4 positions": (lambda: nn.Linear(20, 10), (4, 20)),
    "linear, 40 positions": (lambda: nn.Linear(6, 5), (40, 6)),
    "convolution": (lambda: nn.Conv2d(1, 4, 3), (1, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Flatten(1), nn.LayerNorm(24)), (3,)),
}


def clipped_sum(module: nn.Module, inputs: Tensor, clip_norms: Tensor, at_once: int) -> Tensor:
    clipped = ClippedGradients(module)
    clipped.zero_sums()
    for records, norms in zip(inputs.split(at_once), clip_norms.split(at_once), strict=True):
        outputs = module(records)
        (outputs * torch.linspace(0.9, 1.1, outputs[0].numel()).view(outputs.shape[1:])).sum().backward()
        clipped.clipped_sum(norms, largest_clip_norm=1.0, loss_reduction="sum")
    total = torch.cat([part.flatten() for part in clipped.flat_sums])
    clipped.remove()
    return total


def like_minded(shape: tuple[int, ...], people: int, seed: int, *, tokens: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if tokens:
        return torch.randint(5, shape, generator=generator).repeat(people, *[1] * len(shape))
    common = 3 * torch.randn(shape, generator=generator)
    return common + 1e-3 * torch.randn(people, *shape, generator=generator)


def distances(layer: Layer, people: int, seeds: int, at_once: int) -> Iterator[tuple[float, float]]:
    build, shape = layer
    for seed in range(seeds):
        torch.manual_seed(seed)
        module = build()
        inputs = like_minded(shape, people, seed, tokens=isinstance(module, nn.Sequential))
        norms = torch.ones(people)
        whole = clipped_sum(module, inputs, norms, at_once)
        for person in (0, people // 2, people - 1):
            without = norms.clone()
            without[person] = 0
            kept = clipped_sum(module, inputs, without, at_once)
            others = torch.arange(people) != person
            dropped = clipped_sum(module, inputs[others], norms[others], at_once)
            yield float((whole - kept).norm()), float((whole - dropped).norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--people", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=20_000, help="people in a physical batch")
    options = parser.parse_args()
    code = "compiled code" if native.library() is not None else "PyTorch's operations"
    table = Table("layer", *(f"{people:,} people" for people in options.people))
    for name in options.layers:
        cells = []
        for people in options.people:
            found = list(distances(LAYERS[name], people, options.seeds, options.at_once))
            kept, dropped = (max(values) for values in zip(*found, strict=True))
            cells.append(f"{kept:.6f} / {dropped:.6f}")
        table.add_row(name, *cells)
    console = Console()
    console.print(f"Largest distance in clipping norms, row kept / dropped; sums by {code}.")
    console.print(table)


if __name__ == "__main__":
    main()
