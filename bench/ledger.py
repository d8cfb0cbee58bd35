"""A ledger of many people: enroll, plan, reserve, show one; seconds and memory.

python bench/ledger.py [people]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.ledger import Ledger

Result = TypeVar("Result")


def main(people: int) -> None:
    print(f"{people:,} people; each part in a process of its own, as commands are")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("write", "enroll", "reserve", "later"):
            subprocess.run([sys.executable, __file__, str(people), part, folder], check=True)
        size = sum(path.stat().st_size for path in Path(folder).glob("people.ledger*")) / 2**20
        print(f"{'files':<28} {size:8.0f} MB")


def run_part(people: int, what: str, folder: Path) -> None:
    if what == "write":
        chosen = np.random.default_rng(0).choice(np.geomspace(0.5, 4, 20), people)
        names = polars.Series([f"person-{i}" for i in range(people)])
        polars.DataFrame({"person": names, "epsilon": chosen}).write_csv(folder / "people.csv")
        Ledger.create(folder / "people.ledger")
        return
    ledger = Ledger(folder / "people.ledger")
    if what == "enroll":
        timed("enroll", lambda: ledger.enroll(Budgets.from_table(folder / "people.csv", id_column="person")))
    elif what == "reserve":
        plan = timed("plan", lambda: ledger.plan("1 of 12", steps=1000, batch_size=1024))
        timed("reserve", lambda: ledger.reserve(plan))
    else:
        timed("start", lambda: ledger.start(1))
        timed("show one person", lambda: ledger.person(f"person-{people // 2}"))
        timed("show one person again", lambda: ledger.person(f"person-{people // 3}"))
        timed("check without certificates", lambda: ledger.check(certificates=False))


def timed(what: str, act: Callable[[], Result]) -> Result:
    start, processor = time.perf_counter(), time.process_time()
    result = act()
    seconds, busy = time.perf_counter() - start, time.process_time() - processor
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:<28} {seconds:8.3f} s ({busy:.3f} s of a core)   {memory:6.0f} MB", flush=True)
    return result


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    if len(sys.argv) > 2:
        run_part(count, sys.argv[2], Path(sys.argv[3]))
    else:
        main(count)
