"""Mechanisms: functions from budgets and a schedule to rounds. A new one is one file and a line in `registry`."""

from __future__ import annotations

from pdpsgd.planning.mechanisms.base import Mechanism, Request
from pdpsgd.planning.mechanisms.registry import MECHANISMS

__all__ = ["MECHANISMS", "Mechanism", "Request"]
