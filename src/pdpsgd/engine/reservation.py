"""A run under its reservation in a ledger: begun before records are read, watched while it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients.instrument import rules_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.ledger import ReservedRun
    from pdpsgd.planning.plans import Plan


class ReservationWatch(StepObserver):
    """Stops this process where another one has taken its run over, or has released steps that this one would repeat."""

    def __init__(self, reservation: ReservedRun, execution: Execution) -> None:
        self._reservation = reservation
        self._execution = execution
        self._is_tied = False

    def step_begins(self, step: int, round: int) -> None:
        """Ask the ledger, every few seconds."""
        self._reservation.check()

    def step_releases(self, step: int, sums: Sequence[Tensor]) -> None:
        """Tie the run to its random key before this process gives out any noise: one charge, one set of noise."""
        if not self._is_tied:
            self._reservation.tie(self._execution.source.name)
            self._is_tied = True


def begin_reserved(
    reservation: ReservedRun, plan: Plan, module: nn.Module, ranks: Ranks, *, by_place: bool
) -> None:
    """Begin a reserved run on rank 0; what can be refused without looking at a record is refused before."""
    reservation.check_plan(plan)
    if by_place and not reservation.in_order_of_records:
        fail(
            "Expected record_ids (the person of each record), to know whose record is whose: a ledger has its people "
            "in an order of its own. Got none."
        )
    list(rules_of(module))
    refused = None
    if ranks.first:
        try:
            reservation.begin()
        except PdpsgdError as error:
            if ranks.world_size == 1:
                raise
            refused = str(error)
    refused = ranks.broadcast_object(refused)
    if refused is not None:
        fail(refused)
    reservation.begin(watches=ranks.first)


def circumstances_of(reservation: ReservedRun | None) -> dict[str, Any]:
    """Say what a reservation adds to a verdict."""
    if reservation is None or not reservation.begun:
        return {}
    return {
        "in_ledger": reservation.ledger_id,
        "above_consent": reservation.statement.above_consent,
        "withdrawn": reservation.statement.withdrawn,
        "changed": reservation.statement.changed,
    }
