"""Attacks on our own training, and tests that it follows its plan: `audit` runs them all.

Torch is loaded when something that trains is first used; the bounds need numpy and scipy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdpsgd.audit.audit_target import AuditTarget
    from pdpsgd.audit.auditing import audit
    from pdpsgd.audit.result import AuditResult

__all__ = ["AuditResult", "AuditTarget", "audit"]

_LOADED_ON_USE = {"AuditResult": "result", "AuditTarget": "audit_target", "audit": "auditing"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(f"pdpsgd.audit.{_LOADED_ON_USE[name]}"), name)
    raise AttributeError(f"module 'pdpsgd.audit' has no attribute {name!r}")
