"""The parts of one private run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.sampling.source import RandomSource

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd._typing import IntArray
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.engine.checks.attributes import PlainAttributes
    from pdpsgd.engine.checks.first_batches import FirstBatches
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.journal import JournalKeeper
    from pdpsgd.engine.loader import PrivateLoader
    from pdpsgd.engine.many_records import ManyRecords
    from pdpsgd.engine.norms import NormKeeper
    from pdpsgd.engine.observers import Observers
    from pdpsgd.engine.optimizer import PrivateOptimizer
    from pdpsgd.engine.power_iterations import PowerIterations
    from pdpsgd.engine.records import Records
    from pdpsgd.engine.spending import SpendingFilter
    from pdpsgd.gradients.clipping import ClippedGradients
    from pdpsgd.ledger import ReservedRun
    from pdpsgd.planning.plans import Plan


ON_ANOTHER_RANK = "what the loop does on another rank (the warning there says what)"


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
    attributes: PlainAttributes
    observers: Observers
    power_iterations: PowerIterations
    reservation: ReservedRun | None
    many_records: ManyRecords | None = None
    spending: SpendingFilter | None = None
    norms: NormKeeper | None = None
    budgets: Budgets | None = None
    assumed_here: tuple[str, ...] = ()  # of the model, as it could not be tried by this process
    options: dict[str, Any] = field(default_factory=dict)
    checkpoints: set[Path] = field(default_factory=set)  # with the key in them
    before: dict[str, Any] = field(
        default_factory=dict
    )  # what the part before an interruption said of itself

    @property
    def records_of_people(self) -> tuple[IntArray, ...]:
        """Whose record is which: the record of each person; or, where some have many, all by person."""
        if self.many_records is None:
            return (self.record_of_person,)
        return self.many_records.of_people.order, self.many_records.of_people.starts

    @property
    def unseen_code(self) -> list[str]:
        """What the guards could not see through, one short description each."""
        here = self.first_batches.unseen
        elsewhere = [ON_ANOTHER_RANK] if self.optimizer.unseen_on_all_ranks > len(here) else []
        return list(dict.fromkeys([*self.before.get("unseen_code", ()), *here, *elsewhere]))

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is assumed of the model, now or before an interruption."""
        before = self.before.get("assumed") or ()
        return tuple(dict.fromkeys([*before, *self.assumed_here, *self.observers.assumed]))

    @property
    def test_double(self) -> bool:
        """Whether noise did not come from a `RandomSource` as it is."""
        return bool(
            self.before.get("test_double")
            or self.optimizer.release.is_double
            or type(self.execution.source) is not RandomSource
        )
