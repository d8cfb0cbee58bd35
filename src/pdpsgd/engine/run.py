"""The parts of one private run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd._typing import IntArray
    from pdpsgd.engine.checks.first_batches import FirstBatches
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.journal import JournalKeeper
    from pdpsgd.engine.loader import PrivateLoader
    from pdpsgd.engine.optimizer import PrivateOptimizer
    from pdpsgd.engine.records import Records
    from pdpsgd.gradients.clipping import ClippedGradients
    from pdpsgd.planning.plans import Plan


@dataclass(frozen=True, eq=False)
class Run:
    """What `PrivacyEngine.make_private` has put together."""

    plan: Plan
    level_of_person: IntArray
    record_of_person: IntArray
    records: Records
    module: nn.Module
    execution: Execution
    gradients: ClippedGradients
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    ranks: Ranks
    journal: JournalKeeper
    first_batches: FirstBatches
    options: dict[str, Any] = field(default_factory=dict)
