"""From budgets to a plan that anyone can check, before any data is touched. No torch.

`pdpsgd.plan` computes a plan; here are the mechanisms that it chooses from, loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdpsgd.planning.mechanisms.base import Mechanism
    from pdpsgd.planning.mechanisms.registry import MECHANISMS

__all__ = ["MECHANISMS", "Mechanism"]

_LOADED_ON_USE = {"MECHANISMS": "registry", "Mechanism": "base"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(f"pdpsgd.planning.mechanisms.{_LOADED_ON_USE[name]}"), name)
    raise AttributeError(f"module 'pdpsgd.planning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
