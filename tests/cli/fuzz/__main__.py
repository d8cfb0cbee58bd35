"""`python -m tests.cli.fuzz`: many cases, each result noted, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from tests.cli import fuzz
from tests.cli.fuzz.cases import make_case
from tests.cli.fuzz.folder import make_folder
from tests.cli.fuzz.runner import Outcome, run_case


def main() -> int:
    """Try cases, print those that end badly, and count how all of them ended."""
    parser = argparse.ArgumentParser(description=fuzz.__doc__)
    parser.add_argument("count", nargs="?", type=int, default=10_000, help="number of cases")
    parser.add_argument("--start-at", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="one case, shown with what it prints")
    parser.add_argument(
        "--record", type=Path, help="file of results; cases that ended well in it are skipped"
    )
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("COLUMNS", "200")
    import torch

    torch.set_num_threads(1)
    numbers = range(asked.start_at, asked.start_at + asked.count) if asked.only is None else [asked.only]
    found = _recorded(asked.record) if asked.only is None else {}
    with tempfile.TemporaryDirectory() as place:
        _make_folder_in(Path(place))
        for number in numbers:
            if number in found:
                continue
            outcome = run_case(make_case(number), Path(place))
            found[number] = "problem" if outcome.problem else f"exit code {outcome.code}"
            _tell(number, outcome, shown=asked.only is not None)
            _note(asked.record, number, outcome)
    counts = Counter(found[number] for number in numbers)
    print(", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items())))
    return 1 if counts["problem"] else 0


def _make_folder_in(place: Path) -> None:
    before = os.getcwd()
    os.chdir(place)
    make_folder(place)
    os.chdir(before)


def _tell(number: int, outcome: Outcome, *, shown: bool) -> None:
    if outcome.problem or shown:
        command = " ".join(word[:60] for word in outcome.case.command)
        print(f"case {number}: {outcome.problem}: {outcome.case.what}: {command}", flush=True)
    if shown:
        print(outcome.output)


def _note(record: Path | None, number: int, outcome: Outcome) -> None:
    if record is None:
        return
    line = {"case": number, "code": outcome.code, "problem": outcome.problem, "what": outcome.case.what}
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _recorded(record: Path | None) -> dict[int, str]:
    """Read which earlier cases ended well, and how: those that did not are tried again."""
    if record is None or not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines() if line.endswith("}")]
    return {line["case"]: f"exit code {line['code']}" for line in lines if not line["problem"]}


if __name__ == "__main__":
    sys.exit(main())
