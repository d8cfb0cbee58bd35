"""Compiled code for AES words and noise, several times faster than `cryptography` and numpy; the same bits.

`kernels.c` is compiled the first time it is needed, in a second or two, if the machine has a C compiler and a processor
that does AES (x86), and kept in the user's cache folder. Before it is used, its results are compared with published
ones and with numpy's (`self_check`). Without a compiler, with other results, or with PDPSGD_NATIVE=0, `cryptography`
and numpy do the same, more slowly.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from pdpsgd import _native_build
from pdpsgd.sampling.native.self_check import agrees_with_numpy

SOURCE = Path(__file__).with_name("kernels.c")
# Without contraction every product and sum is rounded by itself, as in numpy.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Return the compiled code, or None where there is none to be trusted."""
    try:
        code, _ = _native_build.load(SOURCE, FLAGS, name="noise")
        return code if agrees_with_numpy(code) else None
    except Exception:  # whatever it is, there is another way to the same words and noise
        return None
