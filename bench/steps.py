"""Time and memory of a private training step, beside plain SGD and Opacus, measured in one run.

    python bench/steps.py [--models mnist svhn transformer] [--batches 64 1024] [--seconds 3] [--json FILE]

Each contender has a process of its own, as it has in use (in one process they would clear each other's memory away).
They take turns, 16 steps each, until every one has had its share of time; what is printed is the mean step of the
median turn, its ratio to the fastest of the contenders named "plain SGD", and the peak memory of the process, with its
ratio to the least among them.
"pdpsgd, whole engine" and "plain SGD, drawn batches" draw their batches, so that the size varies and memory gets
fragmented ("256 at once" bounds that); the others are given one batch again and again. Data are random and nothing is
learned: only speed is measured here.

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

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.models.networks import mnist_cnn, svhn_cnn

Step = Callable[[], None]

AT_ONCE = 256  # people, where the engine is told to take no more through the model together
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


def plain_drawn(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """As the engine gets its batches: gathered from people in memory, and of varying size, which takes memory."""
    if inputs.dim() == 4:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    people, their_targets = crowd(inputs, targets)
    rate = torch.tensor(len(inputs) / len(people))

    def step() -> None:
        size = int(torch.binomial(torch.tensor(float(len(people))), rate))
        drawn = torch.randint(len(people), (size,))
        some = people[drawn]
        if some.dim() == 4:
            some = some.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        F.cross_entropy(model(some), their_targets[drawn]).backward()
        optimizer.step()

    return step


def crowd(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """More people than a batch has, though not too many: they are in memory."""
    copies = 2 if len(inputs) > 500 else 100
    return tuple(part.repeat(copies, *[1] * (part.dim() - 1)) for part in (inputs, targets))  # type: ignore[return-value]


def ours(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    clipped = ClippedGradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip_norms = torch.ones(len(inputs))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        clipped.zero_sums()
        clipped.clipped_sum(clip_norms)
        for total in clipped.flat_sums:
            total.add_(torch.randn_like(total, dtype=torch.float32)).div_(len(inputs))
        for parameter, total in clipped.sums.items():
            parameter.grad = total.to(parameter.dtype)
        optimizer.step()

    return step


def engine(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    return private_loop(model, inputs, targets)[1]


def engine_not_compiled(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    os.environ["PDPSGD_NATIVE"] = "0"  # asked for at the first step, and this process has no other contender
    return engine(model, inputs, targets)


def engine_in_parts(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    return private_loop(model, inputs, targets, AT_ONCE)[1]


def private_loop(
    model: nn.Module, inputs: Tensor, targets: Tensor, at_once: int | None = None
) -> tuple[Any, Step]:
    import pdpsgd

    data = crowd(inputs, targets)
    plan = pdpsgd.plan(
        pdpsgd.Budgets([8.0] * len(data[0])), steps=100_000, batch_size=len(inputs), accountant="rdp"
    )
    made = pdpsgd.PrivacyEngine()
    private, optimizer, loader = made.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=data,
        plan=plan,
        criterion=F.cross_entropy,
        max_physical_batch_size=at_once,
    )
    batches = iter(loader)

    def step() -> None:
        for some, their_targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(private(some), their_targets).backward()
            optimizer.step()
            if optimizer.took_step:
                return

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
    "plain SGD, drawn batches": plain_drawn,
    "pdpsgd, clipped sums": ours,
    "pdpsgd, whole engine": engine,
    "pdpsgd, not compiled": engine_not_compiled,
    f"pdpsgd, {AT_ONCE} at once": engine_in_parts,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost": opacus_ghost,
}


def prepare(contender: str, model: str, batch: int) -> Step:
    torch.manual_seed(0)
    build, draw = MODELS[model]
    return CONTENDERS[contender](build(), draw(batch), torch.randint(10, (batch,)))


class Contender:
    """A process that takes so many steps whenever it is told to, and says how long a step took."""

    def __init__(self, name: str, model: str, batch: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--contender", name, "--models", model, "--batches", str(batch)]
        command += ["--clock", options.clock, "--threads", str(torch.get_num_threads())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.is_ready = self._read() == "ready"
        if not self.is_ready:  # a peer that cannot train the model is no reason to show nothing
            problem = self._process.communicate()[1].strip().splitlines()
            print(
                f"{name} cannot run {model}: {problem[-1] if problem else 'no reason given'}", file=sys.stderr
            )

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{TURN}\n")
        self._process.stdin.flush()
        return float(self._read())

    def end(self) -> float:
        """Return the process's peak memory in MB."""
        return float(self._process.communicate()[0])

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def contend(step: Step, clock: Callable[[], float]) -> None:
    """What happens in a contender's process."""
    for _ in range(2 * TURN):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        step()  # warms the caches again after the others
        start = clock()
        for _ in range(int(line)):
            step()
        print((clock() - start) / int(line), flush=True)
    print(peak_of_this_process())


def measure(model: str, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Median milliseconds of a step, and peak memory; the contenders take turns."""
    fitting = [
        name for name in options.contenders if CONTENDERS[name] is not engine_in_parts or batch > AT_ONCE
    ]
    entered = {name: Contender(name, model, batch, options) for name in fitting}
    running = {name: contender for name, contender in entered.items() if contender.is_ready}
    times: dict[str, list[float]] = {name: [] for name in running}
    end = time.perf_counter() + options.seconds * len(running)
    while time.perf_counter() < end:
        for name, contender in running.items():
            times[name].append(1e3 * contender.turn())
    memory = {name: contender.end() for name, contender in running.items()}
    plain = [name for name in running if name.startswith("plain")] or list(running)
    best = min(statistics.median(times[name]) for name in plain)
    least = min(memory[name] for name in plain)
    return [
        {
            "model": model,
            "batch": batch,
            "contender": name,
            "milliseconds": statistics.median(times[name]),
            "time_ratio": statistics.median(times[name]) / best,
            "peak_mb": memory[name],
            "memory_ratio": memory[name] / least,
        }
        for name in running
    ]


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
    timed(made.source, "release", "noise")
    timed(made.execution, "begin_batch", "bookkeeping")
    timed(made.execution, "end_batch", "bookkeeping")
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


def peak_of_this_process() -> float:
    """Peak resident MB. (On Linux getrusage would give the parent's, if that was larger.)"""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['milliseconds']:.2f}",
        f"{row['time_ratio']:.2f}",
        f"{row['peak_mb']:.0f}",
        f"{row['memory_ratio']:.2f}",
    ]


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(width=110)
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        table = Table(title=f"{model}, batch {batch}")
        for column in ("", "ms a step", "x best plain SGD", "peak MB", "x plain SGD"):
            table.add_column(column, justify="left" if not column else "right")
        chosen = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for row in chosen:
            table.add_row(row["contender"], *cells(row))
        console.print(table)


def page(rows: list[dict[str, Any]], shares: dict[str, dict[str, float]]) -> str:
    """The tables as a page."""
    lines = [
        "# Time and memory of a training step",
        "",
        f"Written by `python bench/steps.py --page FILE`: torch {torch.__version__}, {torch.get_num_threads()} "
        f"threads, {os.cpu_count()} processor cores, all contenders in turn in one run, each in a process of its "
        f"own; compiled code: {'yes' if native.library() else 'no'}. Random data, the paper's two networks and a "
        "transformer of two layers of width 64. *Clipped sums* is a step with our gradients and nothing else of the "
        "engine; *whole engine* also draws its batches, checks what the loop does, and makes its noise. Its people "
        "are in memory and its batches vary in size, as those of *drawn batches* do, which takes memory with "
        f"PyTorch's kernels and allocator whoever trains; *{AT_ONCE} at once* is the engine with "
        f"`max_physical_batch_size={AT_ONCE}`, which bounds it; *not compiled* is the engine without a C compiler or "
        "AVX2.",
        "",
        "| model | batch | contender | ms a step | x best plain SGD | peak MB | x plain SGD |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['batch']} | {row['contender']} | {' | '.join(cells(row))} |" for row in rows
    ]
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
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--page", metavar="FILE", help="write the tables as Markdown")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    if options.contender:
        step = prepare(options.contender, options.models[0], options.batches[0])
        contend(step, time.process_time if options.clock == "cpu" else time.perf_counter)
        return
    rows: list[dict[str, Any]] = []
    shares: dict[str, dict[str, float]] = {}
    for model in options.models:
        for batch in options.batches:
            found = measure(model, batch, options)
            rows += found
            show(found)
            if "pdpsgd, whole engine" in options.contenders:
                shares[f"{model}, batch {batch}"] = parts = engine_shares(model, batch, options.seconds)
                said = ", ".join(f"{share} {value:.1%}" for share, value in parts.items())
                print(f"Of a step through the engine: {said}. Accounting: none, the plan has done it.")
    if options.page:
        pathlib.Path(options.page).write_text(page(rows, shares), encoding="utf-8")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            settings = {
                "threads": torch.get_num_threads(),
                "clock": options.clock,
                "torch": torch.__version__,
                "compiled_code": native.library() is not None,
            }
            json.dump({**settings, "rows": rows, "engine_shares": shares}, file, indent=1)


if __name__ == "__main__":
    main()
