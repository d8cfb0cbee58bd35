"""Trains in child processes that are killed or interrupted at random moments, until one gets through.

`killed.py FOLDER CHECKPOINT_EVERY` (run by the tests) does it once and prints how often the run was stopped. `killed.py
COUNT` (`make fuzz`) goes on until so many were stopped, half of them by SIGKILL and half by SIGINT, and compares each
model with that of an uninterrupted run. Only what was stopped after the first checkpoint is counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

MOST = 25
INTERRUPTED = 130


def load_problem():
    spec = importlib.util.spec_from_file_location(
        "training_conftest", Path(__file__).with_name("conftest.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Problem()


def train(problem, folder, every):
    plan = problem.plan(steps=(60, 90), fresh=True)
    problem.fit(
        plan=plan,
        run_folder=folder,
        resume=True,
        checkpoint_every=every,
        test_data=problem.test,
        evaluate_every=25,
    )


def stop_until_done(problem, folder, every, moments, *, most=MOST):
    """Train in one child after another, each stopped at a random moment, and count them by signal."""
    stopped = Counter()
    checkpoint = folder / "private" / "checkpoint.safetensors"
    while not (folder / "public" / "result.json").exists():
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                with contextlib.suppress(KeyboardInterrupt):
                    train(problem, folder, every)
                    os._exit(0)
                os._exit(INTERRUPTED)
        used = moments.choice((signal.SIGKILL, signal.SIGINT))
        counts = False
        if stopped.total() < most:
            while not checkpoint.exists() and is_alive(child):
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, 0.5))
            counts = is_alive(child)
            os.kill(child, used)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == INTERRUPTED:
            stopped[used.name] += counts
        elif status:
            sys.exit(1)
    return stopped


def is_alive(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def model_of(folder):
    import safetensors.torch

    return safetensors.torch.load_file(folder / "public" / "model.safetensors")


def many(count):
    """Stop runs until `count` were stopped; end with 1 if one of them has another model than an uninterrupted run."""
    problem, moments = load_problem(), random.Random(count)
    stopped, runs, different = Counter(), 0, 0
    with tempfile.TemporaryDirectory() as place:
        train(problem, Path(place) / "whole", 20)
        whole = model_of(Path(place) / "whole")
        while stopped.total() < count:
            folder, every = Path(place) / f"run{runs}", moments.choice((1, 2, 7, 20, 50))
            stopped += stop_until_done(problem, folder, every, moments, most=min(40, count - stopped.total()))
            found = model_of(folder)
            different += not all(torch.equal(found[name], whole[name]) for name in {*found, *whole})
            runs += 1
            print(f"{stopped.total()} stopped, {runs} runs, {different} with another model", flush=True)
    print(dict(stopped))
    return 1 if different else 0


def main() -> int:
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        return many(int(sys.argv[1]))
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    print(stop_until_done(load_problem(), folder, every, random.Random(every)).total())
    return 0


if __name__ == "__main__":
    sys.exit(main())
