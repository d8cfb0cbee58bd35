"""Trains in child processes that are killed at random moments, until one gets through; run by the tests.

Usage: killed.py FOLDER CHECKPOINT_EVERY. Prints how often the run was killed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

MOST_KILLS = 25


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


def main() -> None:
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    problem = load_problem()
    moments = random.Random(every)
    kills = 0
    while not (folder / "public" / "result.json").exists():
        child = os.fork()
        if child == 0:
            train(problem, folder, every)
            os._exit(0)
        if kills < MOST_KILLS:
            time.sleep(moments.uniform(0.0, 0.5))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
        elif status:
            sys.exit(1)
    print(kills)


if __name__ == "__main__":
    main()
