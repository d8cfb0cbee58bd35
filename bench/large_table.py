"""Peak memory of `pdpsgd train` on a Parquet file of many rows.

    python bench/large_table.py [ROWS] [STEPS]     (20,000,000 rows of 15 features by default)

Makes the file in a temporary folder, trains on it with a declared schema, and prints the largest resident memory: what
the process cannot give back (anonymous pages), and pages of files, which the system takes back when it needs memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars

PART = 500_000
CITIES = ("Bern", "Oslo", "Rome", "Graz")
SCHEMA = (
    'label = "y"\nclasses = ["0", "1"]\nid_column = "person"\nconfirmed = true\n'
    + "".join(f'[columns.x{i}]\nkind = "numeric"\nlow = -4\nhigh = 4\n' for i in range(10))
    + f'[columns.city]\nkind = "categorical"\ncategories = [{", ".join(map(repr, CITIES))}]\n'.replace(
        "'", '"'
    )
    + '[columns.epsilon]\nkind = "ignored"\n'
)


def write_table(folder: Path, rows: int) -> None:
    """Write the table part by part, and put the parts together without holding them."""
    rng = np.random.default_rng(0)
    parts = []
    for start in range(0, rows, PART):
        size = min(PART, rows - start)
        x = rng.normal(size=(size, 10)).astype(np.float32)
        columns = {
            "person": np.arange(start, start + size),
            **{f"x{i}": x[:, i] for i in range(10)},
            "city": np.array(CITIES)[rng.integers(0, len(CITIES), size)],
            "epsilon": rng.choice([0.5, 2.0, 8.0], size),
            "y": (x[:, 0] + x[:, 1] + rng.normal(size=size) > 0).astype(np.int8),
        }
        parts.append(folder / f"part{len(parts):05}.parquet")
        polars.DataFrame(columns).write_parquet(parts[-1])
    polars.scan_parquet(parts).sink_parquet(folder / "people.parquet")
    for part in parts:
        part.unlink()
    (folder / "schema.toml").write_text(SCHEMA)


def peaks(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Watch a process: the largest of each kind of memory, in GB."""
    most: dict[str, float] = {}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except FileNotFoundError:
            break
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile"):
                most[name] = max(most.get(name, 0.0), int(value.split()[0]) * 1024 / 1e9)
        time.sleep(0.05)
    return most


def main() -> None:
    rows, steps = (
        int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 20_000_000), (2, 20))
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder, rows)
        command = (
            "train",
            "people.parquet",
            "--schema",
            "schema.toml",
            "--steps",
            str(steps),
            "--batch-size",
            "1024",
        )
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pdpsgd", *command, "--no-ledger", "--no-report", "--quiet"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        most = peaks(process)
        seconds = time.monotonic() - started
        size = (folder / "people.parquet").stat().st_size / 1e9
    print(
        f"{rows:,} rows, Parquet file of {size:.2f} GB, {steps} steps: {seconds:.0f} s, exit {process.returncode}"
    )
    print(
        f"Peak resident {most['VmHWM']:.2f} GB: {most['RssAnon']:.2f} GB of its own, {most['RssFile']:.2f} GB of files"
    )


if __name__ == "__main__":
    main()
