"""What a run is made with."""

from __future__ import annotations

import platform
from importlib.metadata import version

PACKAGES = ("pdpsgd", "torch", "numpy", "dp-accounting")


def versions() -> dict[str, str]:
    """Say what the run was made with."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
