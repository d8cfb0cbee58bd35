"""A private run put together from its parts: options, records and their people, one key for all ranks, observers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from pdpsgd._typing import IdArray, IntArray
from pdpsgd.engine.arguments import check_counts
from pdpsgd.engine.checks.after_steps import AfterSteps
from pdpsgd.engine.checks.attributes import PlainAttributes
from pdpsgd.engine.checks.buffers import BufferWatch
from pdpsgd.engine.checks.collation import check_collation, collation_is_unseen
from pdpsgd.engine.checks.first_batches import FirstBatches
from pdpsgd.engine.checks.row_rounding import Pass, settle_layout
from pdpsgd.engine.distributed import Ranks
from pdpsgd.engine.earlier_training import EarlierTraining
from pdpsgd.engine.execution import Execution
from pdpsgd.engine.fingerprints import describe_model, describe_optimizer, fingerprint_data, items_repeat
from pdpsgd.engine.journal import JournalKeeper
from pdpsgd.engine.loader import PrivateLoader
from pdpsgd.engine.many_records import ManyRecords
from pdpsgd.engine.noising import current_release
from pdpsgd.engine.norms import NormKeeper
from pdpsgd.engine.observers import ClearedGradients, FreshModels, Observers, Seeding, StepObserver
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.engine.power_iterations import PowerIterations
from pdpsgd.engine.records import DatasetRecords, Records, match_many_records, match_records, records_of
from pdpsgd.engine.reservation import ReservationWatch
from pdpsgd.engine.run import Run
from pdpsgd.engine.spending import SpendingFilter
from pdpsgd.errors import check_one_of, fail, warn
from pdpsgd.gradients.clipping import ClippedGradients

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.ledger import ReservedRun
    from pdpsgd.planning.plans import Plan
    from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How the loop takes its steps: what `make_private` is told of loss, views and batches."""

    loss_reduction: str
    criterion: Callable[..., Tensor] | None
    views: int
    records_per_person: int | None
    max_physical_batch_size: int | None
    steps_per_epoch: int | None
    on_fresh_model: Callable[[int], None] | None
    keep_norms: bool = False

    def __post_init__(self) -> None:
        check_one_of(("mean", "sum"), loss_reduction=self.loss_reduction)
        check_counts(
            max_physical_batch_size=self.max_physical_batch_size,
            steps_per_epoch=self.steps_per_epoch,
            views=self.views,
            records_per_person=self.records_per_person,
        )

    @property
    def records_at_once(self) -> int | None:
        """How many records a physical batch has at most, each with all its views."""
        return self.max_physical_batch_size and max(1, self.max_physical_batch_size // self.views)

    def may_cut(self, people: int) -> bool:
        """Tell whether a step of so many people may come as several physical batches."""
        most = people * (self.records_per_person or 1)
        return self.records_at_once is not None and self.records_at_once < most

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        many = {} if self.records_per_person is None else {"records_per_person": self.records_per_person}
        return {
            "loss_reduction": self.loss_reduction,
            "views": self.views,
            "max_physical_batch_size": self.max_physical_batch_size,
            **many,
            **({"keep_norms": True} if self.keep_norms else {}),
        }


@dataclass(frozen=True, eq=False)
class Holdings:
    """The records at hand, and whose they are (sensitive)."""

    records: Records
    record_of_person: IntArray
    many: ManyRecords | None

    def fingerprint(self, key: bytes) -> str:
        """Return a keyed digest of who holds which records."""
        if self.many is None:
            return fingerprint_data(self.record_of_person, key=key)
        return fingerprint_data((self.many.of_people.order, self.many.of_people.starts), key=key)


def match_holdings(
    data: DataLoader[Any] | Dataset[Any] | Sequence[Tensor],
    plan: Plan,
    options: LoopOptions,
    *,
    people: int,
    ids: IdArray | None,
    record_ids: ArrayLike | None,
    record_of_person: ArrayLike | None,
) -> Holdings:
    """Match records with the people of the list.

    Args:
        data: A loader, a map-style dataset, or tensors.
        plan: The plan; where clipping norms differ, rows have to stay in their places.
        options: The loop's options.
        people: Number of people on the list.
        ids: Their ids, if they have any.
        record_ids: The person of each record.
        record_of_person: The number of each person's record instead.

    Raises:
        PdpsgdError: A record is nobody's, somebody has more than allowed, or the collation moves rows.
    """
    records = records_of(data)
    # Rows have to stay where they are: what decides is the person of a row.
    differ = any(len(set(r.clip_scales)) > 1 or r.spending_limits is not None for r in plan.rounds)
    by_place = differ or (options.records_per_person or 1) > 1
    check_collation(records, by_place=by_place)
    whose: dict[str, Any] = {
        "people": people,
        "records": len(records),
        "ids": ids,
        "record_ids": record_ids,
        "record_of_person": record_of_person,
    }
    if options.records_per_person is None:
        return Holdings(records, match_records(**whose), None)
    many = ManyRecords(
        match_many_records(**whose),
        options.records_per_person,
        options.records_at_once,
        fill=options.loss_reduction == "mean",
    )
    return Holdings(records, many.record_of_person, many)


def join_ranks(
    ranks: Ranks,
    source: RandomSource,
    *,
    plan: Plan,
    levels: IntArray,
    module: nn.Module,
    optimizer: Optimizer,
    options: LoopOptions,
    holdings: Holdings,
) -> RandomSource:
    """Refuse ranks that differ, give all of them rank 0's key and first weights, and return the common source."""
    if ranks.world_size > 1:
        ranks.check_same(
            plan=plan.digest,
            people=hashlib.sha256(levels.tobytes()).hexdigest(),
            model=describe_model(module),
            optimizer=describe_optimizer(optimizer),
            options=tuple(options.to_dict().items()),
        )
    source = ranks.share_key(source.take())
    if ranks.world_size > 1:
        # Somebody whose record differs between ranks, or lies elsewhere, would be there twice or not at all.
        key = source.key_bytes()
        ranks.check_same(data=holdings.records.fingerprint(key), records_of_people=holdings.fingerprint(key))
    ranks.broadcast_module(module)
    return source


def _unseen_on_ranks(records: Records, ranks: Ranks) -> list[str]:
    """Say that ranks may read records in an order of their own, where data cannot be told from other data."""
    if ranks.world_size == 1 or not isinstance(records, DatasetRecords) or items_repeat(records.dataset):
        return []
    warn(
        "Whether all ranks read the same records in the same order could not be checked: items of the dataset differ "
        "each time they are read, also with the same random numbers of torch, NumPy and Python. If ranks do not, "
        "somebody's record may be used for two people. Draw random numbers in it from torch."
    )
    return ["a dataset whose items differ each time, so that ranks may read others"]


def assemble(
    *,
    plan: Plan,
    levels: IntArray,
    module: nn.Module,
    optimizer: Optimizer,
    options: LoopOptions,
    holdings: Holdings,
    source: RandomSource,
    ranks: Ranks,
    reservation: ReservedRun | None,
    observers: Sequence[StepObserver],
    watch_loop: bool,
    watch_after_steps: bool,
    whole_pass: Pass | None = None,
    budgets: Budgets | None = None,
) -> Run:
    """Put the parts of a run together. Nothing is checked here: see `PrivacyEngine.make_private`."""
    gradients = ClippedGradients(module)
    settled = settle_layout(
        gradients,
        holdings.records,
        expected=max(r.expected_batch_size for r in plan.rounds) / ranks.world_size,
        limit=options.records_at_once,
        views=options.views,
        whole_pass=whole_pass,
        divides=options.loss_reduction == "mean",
    )
    execution = Execution(
        plan=plan,
        level_of_person=levels,
        record_of_person=holdings.record_of_person,
        source=source,
        rank=ranks.rank,
        world_size=ranks.world_size,
        layout=settled.layout,
        many_records=holdings.many,
    )
    journal = JournalKeeper(execution, ranks)
    attributes = PlainAttributes(module)
    first_batches = FirstBatches(
        gradients,
        criterion=options.criterion,
        loss_reduction=options.loss_reduction,
        views=options.views,
        watch_loop=watch_loop,
        steps=plan.steps,
        unseen=[
            *(["collate_fn"] if collation_is_unseen(holdings.records) else []),
            *_unseen_on_ranks(holdings.records, ranks),
        ],
        is_cut=options.may_cut(len(levels)),
    )
    fresh_models = FreshModels(
        execution=execution,
        module=module,
        optimizer=optimizer,
        ranks=ranks,
        on_fresh_model=options.on_fresh_model,
    )
    spending = None if plan.filtered_round is None else SpendingFilter(execution, levels)
    norms = NormKeeper(execution, levels) if options.keep_norms else None
    if norms is not None and ranks.world_size > 1:
        fail("Expected one process, to keep norms. Got several: run without torchrun, or without keep_norms.")
    power_iterations = PowerIterations(module)
    in_order = (
        *([AfterSteps(module)] if watch_after_steps else []),
        fresh_models,
        Seeding(execution),
        *([EarlierTraining(module, optimizer, plan)] if ranks.first else []),
        ClearedGradients(gradients),
        power_iterations,
        BufferWatch(module, trainable=gradients.sums),
        attributes,
        *([] if reservation is None else [ReservationWatch(reservation, execution)]),
        *([] if spending is None else [spending]),
        *([] if norms is None else [norms]),
        *observers,
        first_batches,  # the last one: it watches what the loop does, not what observers do
        journal,
    )
    everyone = Observers(execution, in_order)
    private = PrivateOptimizer(
        optimizer,
        gradients=gradients,
        execution=execution,
        observers=everyone,
        ranks=ranks,
        loss_reduction=options.loss_reduction,
        views=options.views,
        release=current_release(),
        spending=spending,
        norms=norms,
        count_unseen=lambda: len(first_batches.unseen),
    )
    loader = PrivateLoader(
        execution,
        holdings.records,
        optimizer=private,
        observers=everyone,
        steps_per_epoch=options.steps_per_epoch,
    )
    return Run(
        plan=plan,
        level_of_person=levels,
        record_of_person=holdings.record_of_person,
        records=holdings.records,
        module=module,
        execution=execution,
        gradients=gradients,
        optimizer=private,
        loader=loader,
        ranks=ranks,
        journal=journal,
        first_batches=first_batches,
        attributes=attributes,
        reservation=reservation,
        many_records=holdings.many,
        spending=spending,
        norms=norms,
        budgets=budgets,
        observers=everyone,
        power_iterations=power_iterations,
        assumed_here=tuple(each for each in ranks.all_values(settled.assumed) if each is not None),
        options={**options.to_dict(), "secure": source.secure},
    )
