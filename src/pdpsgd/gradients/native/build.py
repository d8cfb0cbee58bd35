"""Compiles `kernels.c` on the machine it runs on."""

from __future__ import annotations

import ctypes
from pathlib import Path

from pdpsgd import _native_build

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")


def load() -> tuple[ctypes.CDLL, str]:
    """Return the compiled code and a digest of it, from the cache folder or else by compiling it."""
    return _native_build.load(SOURCE, FLAGS, name="native")
