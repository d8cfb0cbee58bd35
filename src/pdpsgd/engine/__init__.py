"""Executes a plan in any training loop."""

from __future__ import annotations

from pdpsgd.engine.observers import StepObserver
from pdpsgd.engine.privacy_engine import PrivacyEngine

__all__ = ["PrivacyEngine", "StepObserver"]
