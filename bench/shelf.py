"""A private step over a plain one, for every network of `zoo` and `zoo_own`: who is slow, and who is behind Opacus.

    python bench/shelf.py [mlp bert mnist:1024 ...] [--seconds 3] [--json FILE] [--page FILE] [--memory]

All contenders take turns in one process, on one thread, and processor time is measured: machines that others use too
allow no other clock. What counts is the median turn. Private steps are those of the whole engine: batches sampled,
loop checked, cryptographic noise. Plain SGD is the faster one of as written and channels last.

With --memory, peak memory instead: of plain SGD with one batch again and again, of plain SGD with batches that are
drawn from as many people as the engine's, and vary in size as its do, and of the engine; each in its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from torch import Tensor, nn

import pdpsgd
from steps import crowd, opacus_ghost, opacus_hooks, plain_channels_last
from zoo import ZOO, Network
from zoo_own import MORE

Step = Callable[[], None]
SHELF = ZOO | MORE
NETWORKS = [
    name for kind in SHELF for name in ([kind, f"{kind}:1024"] if kind in ("mnist", "svhn") else [kind])
]


def plain(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Plain SGD, as the model is written."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        network.criterion(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def private(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """The whole engine, on batches that it samples."""
    people, theirs = crowd(inputs, targets)
    plan = pdpsgd.plan(
        pdpsgd.Budgets([8.0] * len(people)), steps=100_000, batch_size=len(inputs), accountant="rdp"
    )
    model, optimizer, loader = pdpsgd.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=(people, theirs),
        plan=plan,
        criterion=network.criterion,
    )
    batches = iter(loader)

    def step() -> None:
        some, their_targets = next(batches)
        optimizer.zero_grad()
        network.criterion(model(some), their_targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def drawn(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Plain SGD on batches drawn as the engine draws them, from people in memory."""
    people, theirs = crowd(inputs, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes = torch.distributions.Binomial(len(people), torch.tensor(len(inputs) / len(people)))

    def step() -> None:
        some = torch.randint(len(people), (max(1, int(sizes.sample())),))
        optimizer.zero_grad()
        network.criterion(model(people[some]), theirs[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


ALONE = {"plain": plain, "drawn": drawn, "private": private}


def contenders(network: Network, batch: int) -> dict[str, Step]:
    """Return what takes a step, for all who can train the network."""
    kinds: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
        "plain": lambda *given: plain(network, *given),
        "private": lambda *given: private(network, *given),
    }
    if network.inputs(1).dim() == 4 and not network.reconstructs:
        kinds["plain, channels last"] = plain_channels_last
    if not network.reconstructs:
        kinds |= {"Opacus, hooks": opacus_hooks, "Opacus, ghost": opacus_ghost}
    found = {}
    for name, make in kinds.items():
        torch.manual_seed(0)
        inputs = network.inputs(batch)
        try:
            step = make(network.build(), inputs, network.targets(inputs))
            for _ in range(12 if name == "private" else 3):
                step()
            found[name] = step
        except Exception as problem:  # a peer that cannot train the model is no reason to show nothing
            if "Opacus" not in name:
                raise
            print(f"{name} fails: {str(problem).splitlines()[0][:100] if str(problem) else problem!r}")
    return found


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Let all take turns; ratios are to the faster plain SGD."""
    kind, _, number = name.partition(":")
    network = SHELF[kind]
    batch = int(number or network.batch)
    running = contenders(network, batch)
    start = time.perf_counter()
    running["plain"]()
    turn = max(1, min(16, int(0.05 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {contender: [] for contender in running}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["plain"]) < 3:
        for contender, step in running.items():
            step()  # warms the caches again after the others
            begin = time.process_time()
            for _ in range(turn):
                step()
            times[contender].append((time.process_time() - begin) / turn)
    medians = {contender: statistics.median(turns) for contender, turns in times.items()}
    best = min(median for contender, median in medians.items() if contender.startswith("plain"))
    ratios = {contender: median / best for contender, median in medians.items() if "plain" not in contender}
    return {
        "network": kind,
        "batch": batch,
        "wanted": network.wanted,
        "plain_ms": 1e3 * best,
        "ratios": ratios,
    }


def peak(name: str, contender: str) -> float:
    """Take some steps alone, and return the peak memory of this process in MB."""
    kind, _, number = name.partition(":")
    network = SHELF[kind]
    torch.manual_seed(0)
    inputs = network.inputs(int(number or network.batch))
    step = ALONE[contender](network, network.build(), inputs, network.targets(inputs))
    for _ in range(12):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare_memory(name: str) -> None:
    """Print the peak memory of all, and the ratios of the engine's to the others'."""
    found = {}
    for contender in ALONE:
        command = [sys.executable, __file__, name, "--alone", contender]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[contender] = float(output.split()[-1])
    own = found["private"]
    print(
        f"{name}: plain {found['plain']:,.0f} MB, drawn batches {found['drawn']:,.0f}, private {own:,.0f}: "
        f"{own / found['plain']:.2f} and {own / found['drawn']:.2f}",
        flush=True,
    )


def cells(row: dict[str, Any]) -> list[str]:
    ratios = [row["ratios"].get(name) for name in ("private", "Opacus, hooks", "Opacus, ghost")]
    shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return [
        row["network"],
        str(row["batch"]),
        f"{row['plain_ms']:.2f}",
        shown[0],
        f"{row['wanted']:.2f}",
        *shown[1:],
    ]


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## Networks from the shelf",
        "",
        f"By `python bench/shelf.py`: torch {torch.__version__}, one thread, processor time, all contenders in turn in "
        "one process; the whole engine, with cryptographic noise. *wanted* is the ratio that is aimed at. Empty: "
        "Opacus fails, or was not asked (networks that reconstruct their input).",
        "",
        "| network | batch | plain SGD, ms | private, ratio | wanted | Opacus, hooks | Opacus, ghost |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--alone", choices=tuple(ALONE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.alone:
        print(peak(options.networks[0], options.alone))
        return
    if options.memory:
        for name in options.networks:
            compare_memory(name)
        return
    rows = []
    for name in options.networks:
        rows.append(measure(name, options.seconds))
        print(" ".join(cells(rows[-1])), flush=True)
        gc.collect()
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        if options.page:
            options.page.write_text(page(rows))


if __name__ == "__main__":
    main()
