"""Time to make a step's noise: the default mode and the secure one, beside torch's own.

    python bench/secure_noise.py [--parameters 26010 62006 1000000] [--turns 30] [--json FILE]

All take turns, so that a busy machine slows them alike; what is printed is the median, and its ratio to
`normal_` with a `torch.Generator` (fast, but with 32 bits of seed on CPUs, and tails that end at 5.8
standard deviations).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pdpsgd.sampling.generators import AES, SHAKE
from pdpsgd.sampling.source import RandomSource

TORCH = "torch normal_"
KEY = bytes(range(32))


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Eight tensors, two of them large, as a small network has them."""
    small = [32, 64, 100, 10, 320, 500]
    rest = parameters - sum(small)
    return [(rest * 3 // 4,), (rest - rest * 3 // 4,), *((size,) for size in small)]


def contenders(parameters: int) -> dict[str, Callable[[], None]]:
    sums = [torch.zeros(shape) for shape in shapes(parameters)]
    sources = {
        "default (sfc64)": RandomSource.from_key(KEY),
        f"secure ({SHAKE})": RandomSource.from_key(KEY, secure=True, algorithm=SHAKE),
    }
    if importlib.util.find_spec("cryptography"):
        sources[f"secure ({AES})"] = RandomSource.from_key(KEY, secure=True, algorithm=AES)
    made = {name: ours(source, sums) for name, source in sources.items()}
    return {TORCH: torchs(sums), **made}


def ours(source: RandomSource, sums: Sequence[torch.Tensor]) -> Callable[[], None]:
    steps = itertools.count()
    return lambda: source.noise_(sums, standard_deviation=1.0, step=next(steps))


def torchs(sums: Sequence[torch.Tensor]) -> Callable[[], None]:
    generator, steps = torch.Generator(), itertools.count()

    def add_noise() -> None:
        generator.manual_seed(next(steps))
        for total in sums:
            total.add_(torch.empty_like(total).normal_(generator=generator))

    return add_noise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[26_010, 62_006, 1_000_000])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)

    table = Table(title="Milliseconds for the noise of a step, one thread (ratio to torch)")
    table.add_column("generator")
    rows: dict[str, dict[str, float]] = {}
    for parameters in options.parameters:
        table.add_column(f"{parameters:,} parameters", justify="right")
        made = contenders(parameters)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.turns):
            for name, add_noise in made.items():
                for _ in range(3):
                    start = time.perf_counter()
                    add_noise()
                    seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            rows.setdefault(name, {})[str(parameters)] = 1000 * statistics.median(times)
    for name, medians in rows.items():
        table.add_row(name, *(f"{ms:.3f} ({ms / rows[TORCH][n]:.2f})" for n, ms in medians.items()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
