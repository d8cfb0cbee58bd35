"""One call from people's budgets to a trained model: plan, train, evaluate, leave a run folder.

The names below are loaded when they are first used: most of them need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdpsgd.training.comparison import Comparison, compare
    from pdpsgd.training.evaluation import Evaluation, evaluate
    from pdpsgd.training.fitting import TrainingResult, fit
    from pdpsgd.training.options import TrainingOptions
    from pdpsgd.training.presets import Preset, preset

_LOADED_ON_USE = {
    "Comparison": "pdpsgd.training.comparison",
    "Evaluation": "pdpsgd.training.evaluation",
    "Preset": "pdpsgd.training.presets",
    "TrainingOptions": "pdpsgd.training.options",
    "TrainingResult": "pdpsgd.training.fitting",
    "compare": "pdpsgd.training.comparison",
    "evaluate": "pdpsgd.training.evaluation",
    "fit": "pdpsgd.training.fitting",
    "preset": "pdpsgd.training.presets",
}

__all__ = [
    "Comparison",
    "Evaluation",
    "Preset",
    "TrainingOptions",
    "TrainingResult",
    "compare",
    "evaluate",
    "fit",
    "preset",
]


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'pdpsgd.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
