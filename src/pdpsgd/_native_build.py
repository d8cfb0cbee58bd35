"""Compiles C code on the machine it runs on, and keeps the result in the user's cache folder.

For `gradients.native` and `sampling.native`, which check what they get before they use it. With PDPSGD_NATIVE=0
nothing is compiled or loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from pdpsgd._cache import cache_folder, is_ours

COMPILERS = ("cc", "gcc", "clang")


def load(source: Path, flags: tuple[str, ...], *, name: str) -> tuple[ctypes.CDLL, str]:
    """Return compiled code and a digest of it, from the cache folder or else by compiling it.

    Args:
        source: The C file.
        flags: What the compiler is told, apart from files.
        name: What the kept file's name begins with.

    Raises:
        OSError: If there is no compiler that can compile this, or compiling is switched off.
    """
    if os.environ.get("PDPSGD_NATIVE", "1") == "0" or os.name != "posix":
        raise FileNotFoundError("compiled code is switched off, or not for this system")
    folder, name = cache_folder(), f"{name}-{digest_of_needs(source, flags)}.so"
    if folder is not None:
        with suppress(OSError):
            return _loaded(folder / name)
    with tempfile.TemporaryDirectory(prefix="pdpsgd-") as inside:
        made = Path(inside) / name
        _compile(source, flags, made)
        with suppress(OSError):
            if folder is not None:
                return _loaded(_kept(made, folder))
        return _loaded(made)  # stays loaded when the file is gone


def _loaded(file: Path) -> tuple[ctypes.CDLL, str]:
    if not is_ours(file):
        raise PermissionError(f"{file} can be changed by others")
    return ctypes.CDLL(str(file)), hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _kept(made: Path, folder: Path) -> Path:
    """Put the file into the folder, whole or not at all, whoever else does the same."""
    content = made.read_bytes()
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy:
        copy.write(content)
    os.chmod(copy.name, 0o700)
    os.replace(copy.name, folder / made.name)
    return folder / made.name


def _compile(source: Path, flags: tuple[str, ...], target: Path) -> None:
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        command = [compiler, *flags, str(source), "-o", str(target)]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=180)
            if target.exists():
                return
    raise FileNotFoundError("no C compiler that can compile this")


def digest_of_needs(source: Path, flags: tuple[str, ...]) -> str:
    """Return a digest of what the compiled code is for: this source, these flags, a processor with these abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        processor = platform.processor()
    parts = (source.read_bytes(), repr(flags).encode(), platform.machine().encode(), processor.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
