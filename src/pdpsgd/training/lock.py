"""One process at a time in a run folder: two that resume the same run would write over each other's files."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdpsgd.budgets.files import lock
from pdpsgd.errors import fail

_HELD: dict[str, int] = {}
"""Lock files of this process, from which the operating system does not protect it, and the thread that took each."""


@contextmanager
def locked(file: Path, *, again: bool = False) -> Iterator[None]:
    """Hold a lock, which the operating system takes back from a process that dies.

    Args:
        file: The lock's file, made here and removed at the end. One that a killed process left is no obstacle.
        again: Whether this thread may hold it already; then whoever took it first gives it back.

    Raises:
        PdpsgdError: Another process holds it, or the file cannot be made.
    """
    name = os.path.realpath(file)
    if again and _HELD.get(name) == threading.get_ident():
        yield
        return
    if name in _HELD:
        fail(
            f"Expected a run folder that is not in use. Got {str(file.parents[1])!r}, used by this process already."
        )
    descriptor = _acquire(file)
    _HELD[name] = threading.get_ident()
    try:
        yield
    finally:
        _HELD.pop(name, None)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # while it is held: see `_acquire`
        os.close(descriptor)


def _acquire(file: Path) -> int:
    while True:
        descriptor = _open(file)
        if not lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace")
            os.close(descriptor)
            fail(
                f"Expected a run folder that nobody else uses. Got {str(file.parents[1])!r}, in use by "
                f"{holder or 'another process'}. Wait until it ends, or stop it; what it saved can then be resumed."
            )
        # Between opening and locking, whoever held the lock may have removed the file: then it protects nothing.
        if _is_same(file, descriptor):
            with contextlib.suppress(OSError):  # on a full disk nobody is named
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
            return descriptor
        os.close(descriptor)


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except OSError:
        return False


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        fail(f"Expected a run folder that can be written to. Got {str(file.parents[1])!r}: {error.strerror}.")
