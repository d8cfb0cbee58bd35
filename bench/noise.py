"""Time to make a step's noise, by every generator and implementation, and its share of a step of the paper's CNNs.

    python bench/noise.py [--numbers 26010 62006 1000000] [--turns 30] [--seconds 3] [--json FILE]

All take turns, so that a busy machine slows them alike; what is printed is the median, in nanoseconds for each number
that is released, with the sum rounded to integers, noise added and rounded to the grid. The share of a step is measured
in one run of the engine at batch 64, the time inside `quantize` and `release` against the time of all steps: as they
are, with other code for noise alone, and as on a machine without a C compiler. Target: at most 8 %. `torch normal_` is
there to compare with (32 bits of seed on processors, tails that end at 5.8 standard deviations, no grid).

On a machine that others use too, `--clock cpu` measures processor time instead of time on the wall.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pdpsgd.engine import optimizer as engine_optimizer
from pdpsgd.gradients.native import dispatch as gradients_dispatch
from pdpsgd.sampling.generators import AES, SFC64, SHAKE
from pdpsgd.sampling.native import dispatch
from pdpsgd.sampling.noise import quantize
from pdpsgd.sampling.source import RandomSource
from pdpsgd.sampling.step_noise import AHEAD, TOGETHER
from steps import MODELS, TURN, private_loop

TORCH = "torch normal_"
COMPILED, NOT_COMPILED = "AES, compiled", "AES, cryptography and numpy"
NOTHING_COMPILED = "no C compiler (AES, cryptography and numpy)"
KEY = bytes(range(32))
TARGET = 0.08


def contenders(numbers: int) -> dict[str, Callable[[], None]]:
    sums = [torch.zeros(size, dtype=torch.float64) for size in (numbers * 3 // 4, numbers - numbers * 3 // 4)]
    made = {
        TORCH: torchs(sums),
        NOT_COMPILED: without_compiled_code(ours(RandomSource.from_key(KEY, algorithm=AES), sums)),
        "SHAKE, hashlib and numpy": ours(RandomSource.from_key(KEY, algorithm=SHAKE), sums),
        "SFC64 (not for release), numpy": ours(
            RandomSource.from_key(KEY, secure=False, algorithm=SFC64), sums
        ),
    }
    if dispatch.library() is not None:
        made[COMPILED] = ours(RandomSource.from_key(KEY, algorithm=AES), sums)
    return made


def ours(source: RandomSource, sums: list[torch.Tensor]) -> Callable[[], None]:
    steps, out = itertools.count(), [torch.empty_like(total, dtype=torch.float32) for total in sums]

    def add_noise() -> None:
        totals = quantize(sums, clipping_norm=1.0)
        source.release(totals, clipping_norm=1.0, noise_multiplier=1.0, step=next(steps), out=out)

    return add_noise


def torchs(sums: list[torch.Tensor]) -> Callable[[], None]:
    generator, singles = torch.Generator(), [total.float() for total in sums]

    def add_noise() -> None:
        for total in singles:
            total.add_(torch.empty_like(total).normal_(generator=generator))

    return add_noise


def without_compiled_code(function: Callable[[], None]) -> Callable[[], None]:
    def outer() -> None:
        with no_compiled_code():
            function()

    return outer


@contextmanager
def no_compiled_code(*, of_gradients: bool = False) -> Iterator[None]:
    library, of_layers = dispatch.library, gradients_dispatch._library
    dispatch.library = lambda: None  # type: ignore[assignment]
    if of_gradients:
        gradients_dispatch._library = lambda: (None, None)  # type: ignore[assignment]
    try:
        yield
    finally:
        dispatch.library, gradients_dispatch._library = library, of_layers


def measure(numbers: int, turns: int, clock: Callable[[], float]) -> dict[str, float]:
    """The median nanoseconds per number of each contender, over as many steps as are made together."""
    made = contenders(numbers)
    steps = max(1, min(AHEAD, TOGETHER // numbers))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(-2, turns):
        for name, add_noise in made.items():
            for _ in range(steps if turn < 0 else 1):  # what the others left in the cache is not its fault
                add_noise()
            start = clock()
            for _ in range(steps):
                add_noise()
            if turn >= 0:
                seconds[name].append((clock() - start) / steps)
    return {name: 1e9 * statistics.median(times) / numbers for name, times in seconds.items()}


def share_of_step(model: str, seconds: float, clock: Callable[[], float], **options: Any) -> dict[str, float]:
    """The milliseconds of a step through the engine at batch 64, and the share that rounding and noise have in it."""
    make, inputs_of = MODELS[model]
    torch.manual_seed(0)
    engine, step = private_loop(make(), inputs_of(64), torch.randint(10, (64,)), **options)
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent += clock() - start

        return outer

    plain = engine_optimizer.quantize
    engine_optimizer.quantize = timed(plain)
    engine.source.release = timed(engine.source.release)
    try:
        for _ in range(2 * TURN):
            step()
        spent, steps, start = 0.0, 0, clock()
        while clock() < start + seconds:
            step()
            steps += 1
        whole = clock() - start
    finally:
        engine_optimizer.quantize = plain
    return {"milliseconds": 1000 * whole / steps, "share": spent / whole}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, nargs="+", default=[26_010, 62_006, 1_000_000])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each share of a step")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    found = {numbers: measure(numbers, options.turns, clock) for numbers in options.numbers}
    table = Table(title="Nanoseconds per number, one thread (ratio to torch)")
    for column in ("generator", *(f"{numbers:,} numbers" for numbers in found)):
        table.add_column(column, justify="left" if column == "generator" else "right")
    for name in found[options.numbers[0]]:
        table.add_row(name, *(f"{row[name]:.1f} ({row[name] / row[TORCH]:.2f})" for row in found.values()))
    Console().print(table)

    shares: dict[str, dict[str, float]] = {}
    for model in ("mnist", "svhn"):
        shares[f"{model}, {COMPILED}"] = share_of_step(model, options.seconds, clock)
        with no_compiled_code():
            shares[f"{model}, {NOT_COMPILED}"] = share_of_step(model, options.seconds, clock)
        with no_compiled_code(of_gradients=True):
            shares[f"{model}, {NOTHING_COMPILED}"] = share_of_step(model, options.seconds, clock)
    for name, row in shares.items():
        verdict = "within" if row["share"] <= TARGET else "above"
        print(f"{name}: {row['share']:.1%} of a step of {row['milliseconds']:.2f} ms, {verdict} {TARGET:.0%}")
    if options.json:
        options.json.write_text(json.dumps({"nanoseconds": found, "shares": shares}, indent=1) + "\n")


if __name__ == "__main__":
    main()
