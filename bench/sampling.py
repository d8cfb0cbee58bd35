"""Time to draw a batch with 1, 20 and 256 levels, beside Opacus's sampler, whatever the number of people.

    python bench/sampling.py [--batch 1024] [--draws 200] [--json FILE]

All samplers take turns, a few draws each, so that a busy machine slows them alike; what is printed is the
median draw. Targets: flat within a factor of 2 from 1e5 to 1e7 people, and 100 times faster than Opacus at
1e7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from rich.console import Console
from rich.table import Table

from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource

PEOPLE = (10**5, 10**6, 10**7)
LEVELS = (1, 20, 256)
STEPS = 100_000
OPACUS = "Opacus"

Draw = Callable[[], object]


def ours(people: int, levels: int, batch: float, *, secure: bool = False) -> tuple[Draw, float, float]:
    """A draw, and the seconds that setting up and the first draw took; rates differ by a factor of 2.5."""
    level_of_person = np.arange(people) % levels
    sizes = np.bincount(level_of_person)
    weights = np.linspace(1.0, 2.5, levels)
    rates = batch * weights / (weights * sizes).sum()
    one = Round(
        STEPS, 1.0, float((sizes * rates).sum()), (1.0,) * levels, tuple(rates.tolist()), (1.0,) * levels
    )
    plan = Plan("by-hand", tuple(Level(1.0 + i, 1e-5, int(n)) for i, n in enumerate(sizes)), (one,))
    steps = itertools.count()
    start = time.perf_counter()
    sampler = PoissonSampler(plan, level_of_person, RandomSource.from_operating_system(secure=secure))
    ready = time.perf_counter()
    sampler.draw(next(steps))
    return lambda: sampler.draw(next(steps)), ready - start, time.perf_counter() - ready


def opacus(people: int, batch: float) -> Draw:
    batches = iter(UniformWithReplacementSampler(num_samples=people, sample_rate=batch / people, steps=STEPS))
    return lambda: next(batches)


def measure(contenders: dict[tuple[str, int], Draw], draws: int) -> dict[tuple[str, int], float]:
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in contenders}
    for _ in range(draws // 10):
        for name, draw in contenders.items():
            # A mask over ten million people takes as long as a thousand draws of ours: once a turn is enough.
            for _ in range(1 if name[0] == OPACUS else 10):
                start = time.perf_counter()
                draw()
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=float, default=1024, help="expected batch size")
    parser.add_argument("--draws", type=int, default=200, help="draws of each of our samplers")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    contenders: dict[tuple[str, int], Draw] = {}
    setup: dict[tuple[str, int], tuple[float, float]] = {}
    for people in PEOPLE:
        for levels in LEVELS:
            name = f"ours, {levels} level{'s' * (levels > 1)}"
            contenders[name, people], *setup[name, people] = ours(people, levels, options.batch)
        secure = "ours, 20 levels, secure"
        contenders[secure, people], *setup[secure, people] = ours(people, 20, options.batch, secure=True)
        contenders[OPACUS, people] = opacus(people, options.batch)
    medians = measure(contenders, options.draws)
    report(options, medians, setup)


def report(options: Any, medians: dict[tuple[str, int], float], setup: dict[tuple[str, int], Any]) -> None:
    table = Table(title=f"Milliseconds a draw, expected batch {options.batch:g}")
    table.add_column("sampler")
    for people in PEOPLE:
        table.add_column(f"n = {people:.0e}", justify="right")
    table.add_column("slowest / fastest", justify="right")
    table.add_column("Opacus / this, n = 1e7", justify="right")
    table.add_column("set up and first draw, n = 1e7", justify="right")
    rows = []
    for name in dict.fromkeys(name for name, _ in medians):
        times = [medians[name, people] for people in PEOPLE]
        first = sum(setup[name, PEOPLE[-1]]) if (name, PEOPLE[-1]) in setup else None
        row = {
            "sampler": name,
            "milliseconds": {str(n): 1000 * t for n, t in zip(PEOPLE, times, strict=True)},
            "slowest_to_fastest": max(times) / min(times),
            "opacus_to_this_at_1e7": medians[OPACUS, PEOPLE[-1]] / times[-1],
            "setup_seconds_at_1e7": first,
        }
        rows.append(row)
        table.add_row(
            name,
            *(f"{1000 * t:.3f}" for t in times),
            f"{row['slowest_to_fastest']:.2f}",
            f"{row['opacus_to_this_at_1e7']:.0f}",
            "" if first is None else f"{first:.2f} s",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"batch": options.batch, "samplers": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
