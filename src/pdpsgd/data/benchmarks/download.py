"""Fetching published files: checked, resumed after an interruption, and never half-written.

What arrives goes to `NAME.part`; only a complete file with the right checksum gets its name. An interrupted
transfer leaves the part, and the next attempt asks the server for the rest (HTTP Range).
"""

from __future__ import annotations

import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from pdpsgd.data.benchmarks.formats import md5_of
from pdpsgd.errors import PdpsgdError, fail

Report = Callable[[int, "int | None"], None]  # bytes here so far, bytes in all if the server says

ATTEMPTS = 4  # per address; each continues where the last one broke off
BLOCK = 1 << 16
PAUSE = 1.0  # seconds, growing with the attempts
TIMEOUT = 30.0
BROKEN = (ConnectionError, TimeoutError, http.client.HTTPException, urllib.error.URLError)


def download(
    addresses: Sequence[str], destination: Path, *, md5: str, report: Report = lambda done, total: None
) -> Path:
    """Fetch the file from the first address that gives it, and check it before it gets its name."""
    part = destination.with_name(destination.name + ".part")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as stream:
            _lock(stream, part)
            problems = _fetch_from_any(addresses, stream, part, md5, report)
            kept = stream.seek(0, os.SEEK_END)
        if not problems:
            os.replace(part, destination)
            return destination
        if not kept:
            part.unlink()
    except OSError as error:
        fail(f"Could not write {destination}: {error.strerror or error}. Choose another data folder.")
    rest = f" The {kept:,} bytes that arrived are kept; run this again to continue." if kept else ""
    fail(
        f"Could not download {destination.name}. {' '.join(problems)}{rest} "
        f"Or get the file in some other way and put it into {destination.parent}."
    )


def _fetch_from_any(
    addresses: Sequence[str], stream: IO[bytes], part: Path, md5: str, report: Report
) -> list[str]:
    """Complete the part from the first address that can; the answer is what went wrong if none could."""
    problems = []
    for address in addresses:
        problem = _fetch(address, stream, part, md5, report)
        if problem is None:
            os.fsync(stream.fileno())
            return []
        problems.append(f"{address}: {problem}.")
    return problems


def _fetch(address: str, stream: IO[bytes], part: Path, md5: str, report: Report) -> str | None:
    """Complete the part from this address; the answer is what went wrong, if anything."""
    problem = "nothing arrived"
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE)
        resumed = stream.seek(0, os.SEEK_END) > 0
        try:
            problem = _transfer(address, stream, report)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                return f"the server answered {error.code} {error.reason}"
            problem = ""  # nothing is left to fetch: the part is complete, or not what it should be
        except BROKEN as error:
            problem = str(getattr(error, "reason", None) or error or type(error).__name__)
        if problem:
            continue
        stream.flush()
        if (found := md5_of(part)) == md5:
            return None
        stream.truncate(0)
        problem = f"what arrived has md5 {found}, not the published {md5}"
        if not resumed:
            return problem  # a whole transfer that is wrong stays wrong; a resumed one deserves a fresh start
    return problem


def _transfer(address: str, stream: IO[bytes], report: Report) -> str:
    """Request what is missing; return what went wrong, or nothing if all arrived."""
    done = stream.seek(0, os.SEEK_END)
    request = urllib.request.Request(address, headers={"User-Agent": "pdpsgd", "Accept-Encoding": "identity"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if done and not (response.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
            stream.truncate(0)  # the server does not resume, and sends everything
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        report(done, total)
        while block := response.read(BLOCK):
            stream.write(block)
            done += len(block)
            report(done, total)
    stream.flush()
    if total is not None and done < total:
        return f"the connection ended after {done:,} of {total:,} bytes"
    return ""


def _lock(stream: IO[bytes], part: Path) -> None:
    """Refuse a second download of one file at the same time: the two would mix."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PdpsgdError(f"{part} is being downloaded by another process. Wait for it to end.") from None
