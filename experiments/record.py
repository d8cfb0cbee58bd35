"""What came out, run by run: JSON lines that are only ever added to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.settings import Setting
from pdpsgd.errors import fail


class Record:
    """A file of finished runs.

    Each run is appended as one line in one write, so several processes may share a file, and a run that was
    stopped leaves nothing behind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._read: tuple[str, list[dict[str, Any]]] = ("", [])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        if text != self._read[0]:  # other processes may have written
            self._read = (text, list(self._runs(text)))
        return iter(self._read[1])

    def _runs(self, text: str) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                run = json.loads(line)
            except json.JSONDecodeError as error:
                fail(f"Expected one JSON object a line in {self.path}. Line {number}: {error}.")
            yield run

    def has(self, setting: Setting, seed: int) -> bool:
        """Return whether this run is done."""
        return any(run["seed"] == seed for run in self.of(setting))

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
        """Return the finished runs of a setting, one for each seed."""
        wanted = setting.to_dict()  # compared by value, so that a batch of 64 is one of 64.0
        return [run for run in self if run["setting"] == wanted]
