"""What came out, run by run: JSON lines that are only ever added to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdpsgd.errors import fail
from pdpsgd.experiments.settings import Setting


class Record:
    """A file of finished runs.

    Each run is appended as one line in one write, so several processes may share a file, and a run that was
    stopped leaves nothing behind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                run = json.loads(line)
            except json.JSONDecodeError as error:
                fail(f"Expected one JSON object a line in {self.path}. Line {number}: {error}.")
            yield run

    def has(self, key: str) -> bool:
        """Whether the run with this key is done."""
        return any(run["key"] == key for run in self)

    def add(self, run: dict[str, Any]) -> None:
        """Append a finished run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(run) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def of(self, setting: Setting) -> list[dict[str, Any]]:
        """The finished runs of a setting, one for each seed."""
        wanted = setting.to_dict()
        return [run for run in self if run["setting"] == wanted]
