"""Train PyTorch models so that every person gets the privacy they asked for.

`Budgets` says what each person allows, `plan` computes a plan that provably keeps it, `fit` or
`PrivacyEngine` trains by it. Planning needs no torch; what trains is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets import Budgets
from pdpsgd.errors import PdpsgdError, PromiseBroken
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round

if TYPE_CHECKING:
    from pdpsgd.engine.privacy_engine import PrivacyEngine
    from pdpsgd.ledger.ledger import Ledger
    from pdpsgd.planning.planner import plan
    from pdpsgd.reporting.own_loop import write_run
    from pdpsgd.training.comparison import compare
    from pdpsgd.training.evaluation import evaluate
    from pdpsgd.training.fitting import TrainingResult, fit
    from pdpsgd.training.options import TrainingOptions
    from pdpsgd.training.predict import load_run

__version__ = "0.1.0"
__all__ = [
    "Budgets",
    "Ledger",
    "Level",
    "PdpsgdError",
    "Plan",
    "PrivacyEngine",
    "PromiseBroken",
    "Round",
    "TrainingOptions",
    "TrainingResult",
    "compare",
    "evaluate",
    "fit",
    "load_run",
    "plan",
    "write_run",
]

_LOADED_ON_USE = {
    "Ledger": "pdpsgd.ledger.ledger",
    "PrivacyEngine": "pdpsgd.engine.privacy_engine",
    "TrainingOptions": "pdpsgd.training.options",
    "TrainingResult": "pdpsgd.training.fitting",
    "compare": "pdpsgd.training.comparison",
    "evaluate": "pdpsgd.training.evaluation",
    "fit": "pdpsgd.training.fitting",
    "load_run": "pdpsgd.training.predict",
    "plan": "pdpsgd.planning.planner",
    "write_run": "pdpsgd.reporting.own_loop",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'pdpsgd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
