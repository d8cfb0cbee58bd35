"""Letters to the people of a run, as files: one person's, or everybody's one after the other."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.reporting.letter_page import Letterhead, letter
from pdpsgd.training.promises import Promise
from pdpsgd.training.run_folder import RunFolder

if TYPE_CHECKING:
    from pdpsgd.ledger.values import Person
    from pdpsgd.planning.plans import Plan

IN_A_FOLDER = 10_000
"""Letters in one folder; more are put into folders of that many, in the order of the list."""
_PLAIN_NAME = re.compile(r"[a-z0-9_-]{1,60}")
_RESERVED_NAME = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")


def write_letter(
    folder: str | Path, head: Letterhead, name: str, person: Person | None, output: Path | None = None
) -> Path:
    """Write the letter of one person, by default into `people/letters/` of the run folder; return where it is."""
    promise = find_promise(folder, head.run.plan, name)
    place = output or RunFolder(folder).letters / file_name(promise.id)
    if output is None:
        _make_folder(place.parent)
    _write(place, letter(head, promise, person))
    return place


def write_letters(
    folder: str | Path,
    head: Letterhead,
    place: Path,
    account: Callable[[str], Person | None],
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write everybody's letter, one after the other: nothing but the current one is in memory.

    Args:
        folder: The run folder.
        head: What all letters have in common.
        place: Where they go; more than `IN_A_FOLDER` go into folders of that many.
        account: Finds a person in the ledger, by id.
        progress: Told the number of letters written, now and then.

    Returns:
        The number of letters.
    """
    plan = head.run.plan
    several = plan.people > IN_A_FOLDER
    for _ in RunFolder(folder).read_promises(plan):
        pass  # to its end, where it may be found to be another run's, before the first letter
    _make_folder(place)
    number = 0
    for number, promise in enumerate(RunFolder(folder).read_promises(plan), start=1):
        into = place / f"{(number - 1) // IN_A_FOLDER:04d}" if several else place
        if several and (number - 1) % IN_A_FOLDER == 0:
            _make_folder(into)
        _write(into / file_name(promise.id), letter(head, promise, account(promise.id)))
        if progress is not None and number % 100 == 0:
            progress(number)
    if progress is not None:
        progress(number)
    return number


def file_name(person: str) -> str:
    """Name the file of a person's letter: their id where that is a safe name, else what is safe of it and a digest.

    >>> file_name("ann-7"), file_name("../Ann")
    ('ann-7.html', '%2E%2E%2FAnn~eb82557102.html')
    """
    if _PLAIN_NAME.fullmatch(person) and not _RESERVED_NAME.fullmatch(person):
        return f"{person}.html"
    digest = hashlib.sha256(person.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    safe = quote(person, safe="", errors="replace").replace("~", "%7E").replace(".", "%2E")[:60]
    return f"{safe}~{digest}.html"


def find_promise(folder: str | Path, plan: Plan, name: str) -> Promise:
    """Find one person's line, in a file that is the plan's to its end."""
    found = [promise for promise in RunFolder(folder).read_promises(plan) if promise.id == name]
    if not found:
        fail(
            f"Expected somebody on the list of {str(folder)!r}. Got {name!r}, who is not on it: ids are as in the "
            "data, and people who were set aside to test on are promised nothing."
        )
    return found[0]


def is_listed(folder: str | Path, plan: Plan, name: str) -> bool:
    """Tell whether somebody on the list of a run has this id."""
    return any(promise.id == name for promise in RunFolder(folder).read_promises(plan))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fail(f"Expected to be able to make the folder {str(path)!r}. Got: {error.strerror}.")


def _write(path: Path, text: str) -> None:
    """Write a letter whole or not at all, readable by its owner only."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PdpsgdError(f"Expected to be able to write {str(path)!r}. Got: {error.strerror}.") from error
