"""A ledger of many people: enroll, plan, reserve, show one; seconds and memory.

python bench/ledger.py [people]
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.ledger import Ledger

Result = TypeVar("Result")


def main(people: int) -> None:
    rng = np.random.default_rng(0)
    ids = np.char.add("person-", np.arange(people).astype(str))
    budgets = Budgets(rng.choice(np.geomspace(0.5, 4, 20), people), ids=ids)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "people.ledger")
        total = 0.0

        def timed(what: str, act: Callable[[], Result]) -> Result:
            nonlocal total
            start, processor = time.perf_counter(), time.process_time()
            result = act()
            seconds, busy = time.perf_counter() - start, time.process_time() - processor
            total += seconds
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{what:<28} {seconds:8.3f} s ({busy:.3f} s of a core)   {memory:6.0f} MB at most so far")
            return result

        print(f"{people:,} people")
        timed("enroll", lambda: ledger.enroll(budgets))
        plan = timed("plan", lambda: ledger.plan("1 of 12", steps=1000, batch_size=1024))
        run = timed("reserve", lambda: ledger.reserve(plan))
        print(f"{'together':<28} {total:8.3f} s")
        timed("start", lambda: ledger.start(run.number))
        timed("show one person", lambda: ledger.person(ids[people // 2]))
        timed("plan the second run", lambda: ledger.plan("1 of 12", steps=1000, batch_size=1024))
        timed("check without certificates", lambda: ledger.check(certificates=False))
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
        print(f"{'files':<28} {size:8.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
