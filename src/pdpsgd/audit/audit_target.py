"""The training to audit: a network, its loss, people's records, and spare records for canaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd._typing import IntArray
from pdpsgd.audit.example_canaries import OtherPeople, mislabeled
from pdpsgd.audit.observed_run import Criterion, Optimization
from pdpsgd.errors import fail


@dataclass(frozen=True, eq=False)
class AuditTarget:
    """The training to audit: a network, its loss, people's records, and spare records for canaries.

    `spare_inputs` and `spare_targets` are records of people who are not on the list (test people); canaries get them
    with a wrong label. The last `made_up` of them are nobody's, and taken only where the others do not suffice.
    `classes` is 0 where labels are numbers from -1 to 1. `learning_rate` is that of plain SGD, or says how the run
    moves. `notes` say in what the audited training differs from the run's.
    Where people have many records, `person_of_record` has the place on the list of each record's person, and
    `records_per_person` is the plan's K; otherwise person i has record i, and those past the last record have none.
    """

    make_model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    level_of_person: npt.NDArray[np.int64]
    spare_inputs: Tensor
    spare_targets: Tensor
    classes: int
    criterion: Criterion = functional.cross_entropy
    learning_rate: float | Optimization = 1.0
    person_of_record: IntArray | None = None
    records_per_person: int | None = None
    made_up: int = 0
    notes: tuple[str, ...] = ()

    @property
    def others(self) -> OtherPeople:
        """The records of people who are no canaries, with their places on the list."""
        if self.person_of_record is None:
            return OtherPeople.in_order(self.inputs, self.targets)
        return OtherPeople(self.inputs, self.targets, self.person_of_record, self.records_per_person)

    @property
    def shadow_rate(self) -> Callable[[float], float] | None:
        """The learning rate of shadow models over the steps; None where they cannot train as the run does."""
        chosen = Optimization.of(self.learning_rate)
        rate, schedule = chosen.sgd_rate, chosen.schedule
        if rate is None or self.person_of_record is not None:
            return None
        return lambda progress: rate * schedule(progress)

    def canary_examples(self, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return spare records with a wrong label, one for each canary."""
        if len(self.spare_inputs) < count:
            fail(
                f"Expected at least {count} spare records, one for each example canary. Got {len(self.spare_inputs)}. "
                "Ask for fewer (--example-canaries)."
            )
        real = len(self.spare_inputs) - self.made_up
        chosen = np.concatenate([generator.permutation(real), real + generator.permutation(self.made_up)])[
            :count
        ]
        return mislabeled(
            self.spare_inputs[chosen], self.spare_targets[chosen], classes=self.classes, generator=generator
        )
