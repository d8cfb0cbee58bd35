"""Runs a case in a copy of the sound folder, and looks at how it ended and what it left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.main import get_command
from typer.testing import CliRunner

from pdpsgd.cli import app
from tests.cli.fuzz.cases import Case
from tests.cli.fuzz.ledgers import what_is_kept

SECONDS = 30
"""After which a case counts as one that hangs."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `problem` is None if it ended well."""

    case: Case
    code: int | None
    output: str
    problem: str | None


class Hangs(BaseException):
    """A case that takes too long."""


_command = cache(get_command)
"""The command, built once: typer's runner builds it for every call, which takes longer than most cases."""


def run_case(case: Case, sound: Path) -> Outcome:
    """Run a case in a copy of the sound folder, and look at how it ended and what it left."""
    with tempfile.TemporaryDirectory() as place, _in_folder(Path(place) / "work", sound) as folder:
        case.damage(folder)
        before = contents(folder)
        try:
            with _limited_to(SECONDS), patch("typer.testing._get_command", _command):
                result = CliRunner().invoke(app, list(case.command))
        except Hangs:
            return Outcome(case, None, "", f"hangs: more than {SECONDS} seconds")
        problem = _problem_of(result, case, before, contents(folder))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            shown = "".join(traceback.format_exception(result.exception))
            return Outcome(case, result.exit_code, result.output + shown, problem)
        return Outcome(case, result.exit_code, result.output, problem)


def _problem_of(result: Any, case: Case, before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        if isinstance(result.exception, Hangs):
            return f"hangs: more than {SECONDS} seconds"
        return f"traceback: {type(result.exception).__name__}: {str(result.exception)[:100]}"
    if result.exit_code not in case.fine:
        return f"exit code {result.exit_code}"
    if "Traceback" in result.output:
        return "a traceback in the output"
    if result.exit_code != 2:
        return None
    if "Error" not in result.output:
        return "no sentence"
    if len(result.output) > 4000:
        return f"{len(result.output)} characters of output"
    may_change = case.may_change
    if may_change and "new/private/checkpoint.safetensors" in after:
        may_change = (*may_change, "new")  # begun before the damaged ledger failed: it can be resumed
    changed = sorted(
        name
        for name in {*before, *after}
        if before.get(name) != after.get(name) and not name.startswith(may_change)
    )
    return f"left behind: {changed[:5]}" if changed else None


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file, and a mark for every folder; of a ledger, whom it charges for what."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> bytes:
    if path.is_dir():
        return b"a folder"
    return what_is_kept(path) if path.suffix == ".ledger" else path.read_bytes()


@contextlib.contextmanager
def _in_folder(folder: Path, sound: Path) -> Iterator[Path]:
    shutil.copytree(sound, folder)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _limited_to(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs

    clocks = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, stop) for number in clocks.values()}
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: others may be busy, too
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
