"""Time and memory of a private training step, beside plain SGD and Opacus, measured in one run.

    python bench/steps.py [--models mnist svhn transformer] [--batches 64 1024] [--seconds 3] [--json FILE]

The contenders take turns, 16 steps each, until every one has had its share of time; what is printed is the mean
step of the median turn, and its ratio to plain SGD in the better of the two memory layouts. "pdpsgd, whole engine"
draws its batches itself, so that their size varies; the others are given one batch again and again. Peak memory is
that of a process of its own. Data are random and nothing is learned: only speed is measured here.

On a machine that others use too, `--threads 1 --clock cpu` measures processor time instead of time on the wall.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from pdpsgd.gradients import ClippedGradients
from pdpsgd.models import mnist_cnn, svhn_cnn

Step = Callable[[], None]

TURN = 16  # steps in a row; our engine makes noise, and draws people, for up to so many at once


class Transformer(nn.Module):
    """Two layers of width 64 on 32 tokens of a vocabulary of 1,000."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        # One row of positions per example, because Opacus needs it.
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x.mean(1))
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mnist": (mnist_cnn, lambda batch: torch.randn(batch, 1, 28, 28)),
    "svhn": (svhn_cnn, lambda batch: torch.randn(batch, 3, 32, 32)),
    "transformer": (Transformer, lambda batch: torch.randint(1000, (batch, 32))),
}


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def plain_channels_last(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    if inputs.dim() == 4:
        model = model.to(memory_format=torch.channels_last)
        # With one channel both layouts are the same numbers; the strides say which kernels are used.
        inputs = inputs.to(memory_format=torch.channels_last)
        if inputs.shape[1] == 1:
            inputs = inputs.as_strided(inputs.shape, (inputs[0].numel(), 1, inputs.shape[3], 1))
    return plain(model, inputs, targets)


def ours(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    watched = ClippedGradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip_norms = torch.ones(len(inputs))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        watched.zero_sums()
        watched.clipped_sum(clip_norms)
        for total in watched.flat_sums:
            total.add_(torch.randn_like(total)).div_(len(inputs))
        for parameter, total in watched.sums.items():
            parameter.grad = total
        optimizer.step()

    return step


def engine(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    return private_loop(model, inputs, targets)[1]


def private_loop(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Any, Step]:
    import pdpsgd

    people = 2 * len(inputs) if len(inputs) > 500 else 100 * len(inputs)  # not too many: they are in memory
    plan = pdpsgd.plan(
        pdpsgd.Budgets([8.0] * people), steps=100_000, batch_size=len(inputs), accountant="rdp"
    )
    copies = people // len(inputs)
    data = (inputs.repeat(copies, *[1] * (inputs.dim() - 1)), targets.repeat(copies))
    made = pdpsgd.PrivacyEngine()
    private, optimizer, loader = made.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=data,
        plan=plan,
        criterion=F.cross_entropy,
    )
    batches = iter(loader)

    def step() -> None:
        some, their_targets = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(private(some), their_targets).backward()
        optimizer.step()

    return made, step


def opacus_hooks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.validators import ModuleValidator

    wrapped = GradSampleModule(ModuleValidator.fix(model))  # it has a multi-head attention of its own
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(inputs),
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    wrapped = GradSampleModuleFastGradientClipping(
        ModuleValidator.fix(model), max_grad_norm=1.0, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(inputs),
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()

    return step


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain SGD, channels last": plain_channels_last,
    "plain SGD, as written": plain,
    "pdpsgd, clipped sums": ours,
    "pdpsgd, whole engine": engine,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost": opacus_ghost,
}


def prepare(contender: str, model: str, batch: int) -> Step:
    torch.manual_seed(0)
    build, draw = MODELS[model]
    return CONTENDERS[contender](build(), draw(batch), torch.randint(10, (batch,)))


def warmed_up(contender: str, model: str, batch: int) -> Step | None:
    """A peer that cannot train the model is no reason to show nothing."""
    try:
        step = prepare(contender, model, batch)
        for _ in range(3):
            step()
    except Exception as error:
        print(f"{contender} cannot run {model}: {error}", file=sys.stderr)
        return None
    return step


def step_times(model: str, batch: int, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of a step; the contenders take turns."""
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for name in CONTENDERS:
        step = warmed_up(name, model, batch)
        if step is not None:
            steps[name] = step
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end:
        for name, step in steps.items():
            step()  # warms the caches again after the others
            start = clock()
            for _ in range(TURN):
                step()
            times[name].append((clock() - start) / TURN)
    return {name: 1e3 * statistics.median(values) for name, values in times.items() if values}


def engine_shares(model: str, batch: int, seconds: float) -> dict[str, float]:
    """Which share of a step through the engine goes into drawing people, making noise, and bookkeeping.

    There is no accounting in a step: the plan has done it before.
    """
    torch.manual_seed(0)
    build, draw = MODELS[model]
    made, step = private_loop(build(), draw(batch), torch.randint(10, (batch,)))
    spent = {"drawing": 0.0, "noise": 0.0, "bookkeeping": 0.0}

    def timed(owner: Any, name: str, share: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[share] += time.perf_counter() - start

        setattr(owner, name, outer)

    timed(made.execution.sampler, "draw", "drawing")
    timed(made.source, "noise_", "noise")
    timed(made.execution, "hand_out", "bookkeeping")
    timed(made.execution, "take_back", "bookkeeping")
    timed(made.optimizer._buffers, "check", "bookkeeping")
    for _ in range(2 * TURN):
        step()
    for share in spent:
        spent[share] = 0.0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        for _ in range(TURN):
            step()
    whole = time.perf_counter() - start
    return {share: value / whole for share, value in spent.items()}


def peak_memory(contender: str, model: str, batch: int) -> float | None:
    """Peak resident MB of a process that does nothing else."""
    command = [sys.executable, __file__, "--peak-of", contender, "--models", model, "--batches", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    return float(done.stdout) if done.returncode == 0 else None


def peak_of_this_process() -> float:
    """Peak resident MB. (On Linux getrusage would give the parent's, if that was larger.)"""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(width=110)
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        table = Table(title=f"{model}, batch {batch}")
        for column in ("", "ms a step", "x best plain SGD", "peak MB", "x plain SGD"):
            table.add_column(column, justify="left" if not column else "right")
        chosen = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for row in chosen:
            memory = "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
            ratio = "-" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}"
            table.add_row(
                row["contender"], f"{row['milliseconds']:.2f}", f"{row['time_ratio']:.2f}", memory, ratio
            )
        console.print(table)


def page(rows: list[dict[str, Any]], shares: dict[str, dict[str, float]]) -> str:
    """The tables as a page."""
    lines = [
        "# Time and memory of a training step",
        "",
        f"Written by `python bench/steps.py --page FILE`: torch {torch.__version__}, {torch.get_num_threads()} "
        f"threads, {os.cpu_count()} processor cores, all contenders in turn in one run. Random data, the paper's two "
        "networks and a transformer of two layers of width 64. *Clipped sums* is a step with our gradients and "
        "nothing else of the engine; *whole engine* also draws its batches, checks what the loop does, and makes "
        "its noise.",
        "",
        "| model | batch | contender | ms a step | x best plain SGD | peak MB | x plain SGD |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
        ratio = "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}"
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['contender']} | {row['milliseconds']:.2f} | "
            f"{row['time_ratio']:.2f} | {memory} | {ratio} |"
        )
    lines += ["", "Of a step through the engine (accounting takes nothing: the plan has done it before):", ""]
    lines += ["| step | drawing | noise | bookkeeping |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {found['drawing']:.1%} | {found['noise']:.1%} | {found['bookkeeping']:.1%} |"
        for name, found in shares.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each contender, model and batch")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--threads", type=int, help="how many threads torch may use")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--page", metavar="FILE", help="write the tables as Markdown")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.peak_of:
        step = prepare(options.peak_of, options.models[0], options.batches[0])
        for _ in range(5):
            step()
        print(peak_of_this_process())
        return
    torch.set_num_threads(options.threads or torch.get_num_threads())
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    for name in set(CONTENDERS) - set(options.contenders):
        del CONTENDERS[name]
    rows: list[dict[str, Any]] = []
    shares: dict[str, dict[str, float]] = {}
    for model in options.models:
        for batch in options.batches:
            times = step_times(model, batch, options.seconds, clock)
            memory = {name: None if options.no_memory else peak_memory(name, model, batch) for name in times}
            best = min(value for name, value in times.items() if name.startswith("plain"))
            least = min((memory[name] or 0.0) for name in times if name.startswith("plain"))
            for name, value in times.items():
                rows.append(
                    {
                        "model": model,
                        "batch": batch,
                        "contender": name,
                        "milliseconds": value,
                        "time_ratio": value / best,
                        "peak_mb": memory[name],
                        "memory_ratio": memory[name] / least if memory[name] and least else None,
                    }
                )
            show(rows[-len(times) :])
            if "pdpsgd, whole engine" in times:
                shares[f"{model}, batch {batch}"] = found = engine_shares(model, batch, options.seconds)
                parts = ", ".join(f"{share} {value:.1%}" for share, value in found.items())
                print(f"Of a step through the engine: {parts}. Accounting: none, the plan has done it.")
    if options.page:
        pathlib.Path(options.page).write_text(page(rows, shares), encoding="utf-8")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            settings = {
                "threads": torch.get_num_threads(),
                "clock": options.clock,
                "torch": torch.__version__,
            }
            json.dump({**settings, "rows": rows, "engine_shares": shares}, file, indent=1)


if __name__ == "__main__":
    main()
