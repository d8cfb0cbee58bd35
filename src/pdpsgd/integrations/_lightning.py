"""Every private name of lightning that the adapter uses, in one place; checked with lightning 2.6."""

from __future__ import annotations

from typing import Any

CHECKED_WITH = "2.6"


def evaluated_on(trainer: Any) -> list[Any]:
    """Return the loaders that the trainer validates or tests on now; none where it does neither.

    (`trainer.val_dataloaders` goes on naming those of `trainer.fit` while `trainer.validate` is given others.)
    """
    combined = trainer._evaluation_loop._combined_loader
    return [] if combined is None else list(combined.flattened)
