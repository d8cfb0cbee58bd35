"""The user's cache folder: where it is, what lies in it, how large it may get, and how it is emptied.

All that the package keeps for itself goes there, and may be deleted at any time. The environment variable PDPSGD_CACHE
names another folder, PDPSGD_CACHE_LIMIT another limit in GB.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdpsgd.errors import fail

VARIABLE, LIMIT_VARIABLE = "PDPSGD_CACHE", "PDPSGD_CACHE_LIMIT"
LIMIT_GB = 4.0
EMBEDDINGS = "embeddings.sqlite"
FEATURES = "features"


@dataclass(frozen=True)
class CachedFile:
    """A file in the cache folder. `asked_for` says that somebody told us to put it there: a downloaded benchmark."""

    path: Path
    what: str
    size: int
    used: float
    asked_for: bool = False


def cache_place() -> Path:
    """Return where the cache folder is, or would be: PDPSGD_CACHE, else by the habits of the platform."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local")).expanduser() / "pdpsgd"
    if sys.platform == "darwin":
        return Path("~/Library/Caches/pdpsgd").expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else "~/.cache").expanduser() / "pdpsgd"


def use_cache_folder(folder: Path | None) -> None:
    """Let this process, and those that it starts, use another cache folder; None changes nothing."""
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            fail(f"Expected a folder to keep things in (--cache-folder). Got {str(folder)!r}, which is none.")
        os.environ[VARIABLE] = str(folder.expanduser().absolute())


def cache_folder() -> Path | None:
    """Return the cache folder, made if need be; None if there is none that is this user's alone."""
    folder = cache_place()
    with suppress(OSError):
        if folder.is_absolute():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder if is_ours(folder) else None
    return None


def is_ours(path: Path) -> bool:
    """Tell whether a file or folder is this user's, and nobody else can write there."""
    found = path.stat()
    return not hasattr(os, "geteuid") or (
        found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def cache_limit() -> int:
    """Return how many bytes the cache may hold, but for what was asked for."""
    text = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_GB)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1e9:
        fail(f"Expected {LIMIT_VARIABLE} to be a number of GB >= 0, such as {LIMIT_GB:g}. Got {text!r}.")
    return int(limit * 1e9)


def cached_files() -> list[CachedFile]:
    """List what lies in the cache folder, the longest unused first."""
    root = cache_place()
    found = []
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        with suppress(OSError):  # removed by somebody else in the meantime
            kind = _kind(path.relative_to(root))
            if kind is not None and path.is_file() and not path.is_symlink():
                known = path.stat()
                used = max(known.st_atime, known.st_mtime)
                found.append(CachedFile(path, kind[0], known.st_size, used, kind[1]))
    return sorted(found, key=lambda each: each.used)


def make_room(size: int) -> list[CachedFile]:
    """Remove what was not used for longest, until so many bytes more are within the limit.

    Args:
        size: The bytes that are to be added.

    Returns:
        What was removed. Embeddings keep to the limit by themselves, and what was asked for stays.
    """
    kept = [each for each in cached_files() if not each.asked_for]
    total, removed = sum(each.size for each in kept) + size, []
    for each in kept:
        if total <= cache_limit():
            break
        if each.path.name == EMBEDDINGS:
            continue
        with suppress(OSError):
            each.path.unlink()
            removed.append(each)
            total -= each.size
    return removed


def clear_cache() -> list[CachedFile]:
    """Remove all that the package keeps for itself; downloaded benchmarks stay."""
    removed = []
    for each in cached_files():
        if not each.asked_for:
            with suppress(OSError):
                each.path.unlink()
                removed.append(each)
    with suppress(OSError):
        (cache_place() / FEATURES).rmdir()
    return removed


def size_text(size: float) -> str:
    """Write a number of bytes for people.

    >>> size_text(555_200_000), size_text(1200)
    ('555 MB', '1.2 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _kind(path: Path) -> tuple[str, bool] | None:
    """Say what a file is, by its place and name, and whether it was asked for; None if it is not ours."""
    if len(path.parts) == 2 and path.parts[0] == FEATURES:
        return "features of images, computed once", False
    if len(path.parts) > 1:
        return "benchmark, downloaded or put there", True
    if path.name.startswith(EMBEDDINGS):
        return "embeddings of texts, as private as these", False
    return ("compiled code", False) if path.suffix == ".so" and "-" in path.stem else None
