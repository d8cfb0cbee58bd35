"""The user's own training loop, made private: `PrivacyEngine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.registry import accountant
from pdpsgd.engine.arguments import (
    check_criterion,
    check_module,
    check_optimizer,
    check_plan,
    check_precision,
    people_of,
    with_roster,
)
from pdpsgd.engine.assembly import LoopOptions, assemble, join_ranks, match_holdings
from pdpsgd.engine.checks.held_out import check_held_out
from pdpsgd.engine.checks.row_rounding import Pass
from pdpsgd.engine.distributed import Ranks
from pdpsgd.engine.execution import Execution
from pdpsgd.engine.loader import PrivateLoader
from pdpsgd.engine.observers import StepObserver
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.engine.records import TensorRecords
from pdpsgd.engine.reservation import begin_reserved, circumstances_of
from pdpsgd.engine.resuming import erase_saved_keys, resume_run, save_run
from pdpsgd.engine.run import Run
from pdpsgd.engine.spending import NORMS_PER_UNIT
from pdpsgd.errors import fail
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.planning.verdict import Verdict, verdict
from pdpsgd.sampling.source import RandomSource

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pdpsgd.accounting.individual import IndividualSums
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.engine.checkpoints import HasState
    from pdpsgd.ledger import ReservedRun
    from pdpsgd.planning.plans import Plan


class Spent(NamedTuple):
    """What a level has spent so far."""

    epsilon: float
    delta: float


class PrivacyEngine:
    """A module, an optimizer and a data loader made private, for one run of one plan.

    >>> engine = PrivacyEngine()                                                        # doctest: +SKIP
    >>> module, optimizer, loader = engine.make_private(                                # doctest: +SKIP
    ...     module=module, optimizer=optimizer, data_loader=loader, plan=plan, budgets=budgets)
    >>> for inputs, targets in loader:                                                  # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     criterion(module(inputs), targets).backward()
    ...     optimizer.step()

    Guarantee: if the loop sends each batch through the module once, with a loss in which examples do not mix,
    and publishes nothing computed from the training data but the module's parameters (at any step), then
    every person of level l gets the (epsilon_l, delta_l) that the plan proves for it, under adding or
    removing their record, or all of their records together. See docs/engine.md for what is checked and what is
    up to the loop. `pdpsgd.write_run(engine, folder)` leaves the run folder that `fit` leaves.

    Args:
        observers: Whoever else watches the run's steps; each may refuse (see `StepObserver`).
        watch_loop: Whether to look at what the loop does with the first batches. False is for loops that do
            nothing between loader and model, and whose loss is checked elsewhere.
        watch_after_steps: Whether the verdict says what else writes to the model; by default where the loop is watched.
        whole_pass: From a batch to the sum of its losses, where the loop does nothing else with one, to be tried with
            made-up rows before the run; the loop then calls `backward`.
    """

    def __init__(
        self,
        *,
        observers: Sequence[StepObserver] = (),
        watch_loop: bool = True,
        watch_after_steps: bool | None = None,
        whole_pass: Pass | None = None,
    ) -> None:
        self._whole_pass = whole_pass
        self._observers = tuple(observers)
        self._watch_loop = watch_loop
        self._watch_after_steps = watch_loop if watch_after_steps is None else watch_after_steps
        self._made: Run | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any] | Sequence[Tensor],
        plan: Plan,
        budgets: Budgets | None = None,
        record_ids: ArrayLike | None = None,
        record_of_person: ArrayLike | None = None,
        records_per_person: int | None = None,
        max_grad_norm: float | None = None,
        loss_reduction: str = "mean",
        criterion: Callable[..., Tensor] | None = None,
        views: int = 1,
        max_physical_batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        seed: int | None = None,
        secure: bool = True,
        source: RandomSource | None = None,
        on_fresh_model: Callable[[int], None] | None = None,
        keep_norms: bool = False,
        reservation: ReservedRun | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """Make a training loop private.

        At the first batches a model or loss in which examples mix is refused.

        Args:
            module: The model; it keeps its type, parameters and names.
            optimizer: Any torch optimizer over the module's parameters.
            data_loader: A loader, a map-style dataset, or tensors whose first dimension counts records.
            plan: What to execute: rounds of steps with their noise, and a sampling rate for each level.
            budgets: Who is on which level; needed unless the plan knows its people or has one level only.
            record_ids: The person of each record. By default person i of the list has record i.
            record_of_person: The number of each person's record instead, -1 where none was supplied.
            records_per_person: K, where people have many records (repeated `record_ids`): of a person who is sampled, K
                take part at most, chosen afresh each time; their mean gradient is clipped as a whole. All records of a
                person are protected together, however many there are. Sum the loss if you can: with a mean, batches are
                filled up to a power of two of records, which costs time.
            max_grad_norm: The clipping norm, by default the plan's. Noise follows it, and privacy stays.
            loss_reduction: How the loss is reduced over the batch: "mean" or "sum".
            criterion: The loss as `criterion(outputs, targets)`, to be probed; otherwise the loop is watched.
            views: Number of augmented views of each record, in consecutive rows
                (`inputs.repeat_interleave(views, 0)`). Their gradients are averaged before clipping.
            max_physical_batch_size: Bound on memory: the loader yields a step in several batches, and `step()`
                only adds up until the last.
            steps_per_epoch: Number of steps after which a pass over the loader ends.
            seed: Makes the run reproducible, and so not for release.
            secure: Whether randomness is cryptographic. Without it the run is not for release.
            source: Where all randomness comes from, instead of `seed` and `secure`; a new one for every run. With a
                key that was given to it, or with a class of its own, the run is not for release.
            on_fresh_model: Called with the round's number where the plan starts a new model; must reset the
                module's parameters.
            keep_norms: Whether to add up the norms of each person's gradients, for `individual_sums`. Changes nothing
                that is released; what is kept is sensitive.
            reservation: The run of a ledger that this is, as `Ledger.running` or `Ledger.hold` give it. It is begun
                before any record is read. Without it, a run of a ledger's plan is not for release.

        Returns:
            The module, a wrapped optimizer, and a loader over the plan's steps; always these three.

        Raises:
            PdpsgdError: What is given does not fit together, or would break the promise.
        """
        if self._made is not None:
            fail(
                "Expected a new PrivacyEngine for every run. Got one that has made something private before."
            )
        options = LoopOptions(
            loss_reduction=loss_reduction,
            criterion=criterion,
            views=views,
            records_per_person=records_per_person,
            max_physical_batch_size=max_physical_batch_size,
            steps_per_epoch=steps_per_epoch,
            on_fresh_model=on_fresh_model,
            keep_norms=keep_norms,
        )
        check_optimizer(optimizer)
        check_module(module)
        check_precision(module, loss_reduction=loss_reduction)
        check_criterion(criterion, module, views=views)
        plan = check_plan(plan, max_grad_norm=max_grad_norm, on_fresh_model=on_fresh_model)
        levels, ids = people_of(plan, budgets)
        ranks = Ranks.join(device=next((parameter.device for parameter in module.parameters()), None))
        if reservation is not None:
            by_place = budgets is None and record_ids is None and record_of_person is None
            begin_reserved(reservation, with_roster(plan, budgets, levels), module, ranks, by_place=by_place)
        holdings = match_holdings(
            data_loader,
            plan,
            options,
            people=len(levels),
            ids=ids,
            record_ids=record_ids,
            record_of_person=record_of_person,
        )
        source = join_ranks(
            ranks,
            source or _new_source(seed, secure=secure),
            plan=plan,
            levels=levels,
            module=module,
            optimizer=optimizer,
            options=options,
            holdings=holdings,
        )
        self._made = run = assemble(
            plan=with_roster(plan, budgets, levels),
            levels=levels,
            module=module,
            optimizer=optimizer,
            options=options,
            holdings=holdings,
            source=source,
            ranks=ranks,
            reservation=reservation,
            observers=self._observers,
            watch_loop=self._watch_loop,
            watch_after_steps=self._watch_after_steps,
            whole_pass=self._whole_pass,
            budgets=budgets,
        )
        return module, run.optimizer, run.loader

    @property
    def steps_taken(self) -> int:
        """How many steps of the plan count as taken: released, or skipped."""
        return self._run.execution.steps_done

    @property
    def steps_left(self) -> int:
        """How many steps of the plan are still to be taken."""
        return self._run.execution.steps_left

    @property
    def release_note(self) -> str | None:
        """Why results of this run are not for release; None if nothing speaks against it."""
        return self.verdict().note

    def verdict(self, *, unseen_code: Sequence[str] = (), **circumstances: Any) -> Verdict:
        """Say whether the promise holds for all, holds with exceptions, or the result is not for release.

        Args:
            unseen_code: What the caller's own guards could not see through, beside the engine's.
            circumstances: What else only the caller knows, as for `pdpsgd.planning.verdict.verdict`.
        """
        run, source = self._run, self.source
        return verdict(
            run.plan,
            seeded=source.seeded,
            weak_generator=None if source.cryptographic else source.algorithm,
            test_double=run.test_double,
            unseen_code=[*run.unseen_code, *unseen_code],
            assumed=run.assumed,
            beside=run.observers.beside,
            **circumstances_of(run.reservation),
            **circumstances,
        )

    def spent(self) -> tuple[Spent, ...]:
        """Compute what each level has spent up to now, if nothing decided to look now but public things.

        Guarantee: a run that was always going to end at this step is (epsilon, delta)-DP with these values.
        If the run is stopped because of what the model showed, they are not a proof: the plan's total is, as
        the run might have gone on. (Privacy filters and odometers need other theorems.)
        """
        so_far = self.plan.prefix(self.steps_taken)
        account = accountant(self.plan.accountant)
        if not account.proves:
            account = accountant("pld")
        return tuple(
            Spent(account.epsilon(so_far.history_of(index), level.delta), level.delta)
            for index, level in enumerate(self.plan.levels)
        )

    def save(self, path: str | os.PathLike[str], **others: HasState) -> None:
        """Write a checkpoint between two steps: model, optimizer, position, key, `others` (schedulers, say).

        On many ranks every rank must call it; rank 0 writes. The file holds the run's secret key: keep it to
        yourself. After the plan's last step it is left out, and erased from what was saved before; `close` does
        the latter, too.
        Beside the file lies the run's journal (see `keep_journal`), without which it cannot be resumed.
        """
        if self._run.reservation is not None:
            self._run.reservation.check(
                now=True
            )  # a process that was replaced must not write over the other's file
        save_run(self._run, path, others)

    def resume(self, path: str | os.PathLike[str], **others: HasState) -> None:
        """Continue from a checkpoint; to be called after `make_private` with the same things as before.

        Refuses another plan, other people, data, model, optimizer, options or number of ranks than the
        checkpoint was made with, a damaged file, a run that was closed, and one whose journal is gone. From
        now on it stops where a repeated step has other gradients than before. A checkpoint of the last step
        brings the trained model back; no step is left.
        """
        resume_run(self._run, path, others)

    def keep_journal(self, path: str | os.PathLike[str]) -> None:
        """Note the sum of each step, so that a resumed run cannot use the same noise on another.

        The first `save` does this beside the checkpoint, and `resume` goes on with it; call it before the
        first `save` to have the journal elsewhere.
        """
        self._run.journal.keep(Path(path))

    def backward(self, loss: Tensor) -> None:
        """Do what `loss.backward()` does, but multiply a mean by its rows on the way back.

        So that what a row gives is not rounded differently in batches of different sizes.
        """
        rows = self._rows_of_mean()
        if rows:
            self._run.gradients.pass_back(loss, rows)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def summed(self, loss: Tensor) -> Tensor:
        """Return the sum over the current batch, for somebody else to pass back in a loop that is not watched."""
        rows = self._rows_of_mean()
        return self._run.gradients.summed(loss, rows) if rows else loss

    def _rows_of_mean(self) -> int:
        """Return how many rows the current batch's mean is of; 0 where the loss is a sum."""
        run = self._run
        rows = int(run.execution.batch_to_step().size * run.options["views"])
        return rows if run.options["loss_reduction"] == "mean" else 0

    def forfeit_step(self) -> None:
        """Skip the current batch, for a reason that does not depend on it: its step counts as taken."""
        self._run.execution.forfeit()
        self._run.gradients.forget()

    def check(self, loss: Callable[..., Tensor], inputs: Any, targets: Any = None) -> bool:
        """Refuse a loss or module in which examples mix; returns whether the batch was enough to tell."""
        return self._run.first_batches.check(loss, inputs, targets)

    def check_held_out(self, others: Any, *, purpose: str = "to test on") -> None:
        """Refuse other people, to test on, whose records are trained on; to be called where no ids tell."""
        run = self._run
        records = run.records
        held = run.records_of_people[0]
        check_held_out(
            records.tensors if isinstance(records, TensorRecords) else getattr(records, "dataset", None),
            others,
            purpose=purpose,
            used=None if len(held[held >= 0]) == len(records) else held[held >= 0],
        )

    def close(self) -> None:
        """End the run: give the module back as it was, and erase the key, also from checkpoints of this run."""
        run = self._run
        run.first_batches.stop()
        run.attributes.forget()
        run.gradients.remove()
        run.execution.forget()
        run.execution.source.erase()
        erase_saved_keys(run)

    # --- the parts of the run ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, with its people."""
        return self._run.plan

    @property
    def budgets(self) -> Budgets | None:
        """What each person allows, as it was given to `make_private`."""
        return self._run.budgets

    @property
    def reservation(self) -> ReservedRun | None:
        """The run of a ledger that this is, if it is one."""
        return self._run.reservation

    @property
    def loop_options(self) -> Mapping[str, Any]:
        """What `make_private` was told of loss, views, batches and randomness."""
        return dict(self._run.options)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one input, where records are tensors."""
        records = self._run.records
        return tuple(records.tensors[0].shape[1:]) if isinstance(records, TensorRecords) else None

    @property
    def level_of_person(self) -> IntArray:
        """The level of each person on the list."""
        return self._run.level_of_person

    @property
    def record_of_person(self) -> IntArray:
        """The number of each person's (first) record, -1 for none (sensitive)."""
        return self._run.record_of_person

    @property
    def spent_of_people(self) -> FloatArray | None:
        """What each person has spent under a filter, as mu^2 (sensitive); None for plans without one."""
        spending = self._run.spending
        return None if spending is None else spending.spent / NORMS_PER_UNIT**2

    @property
    def individual_sums(self) -> IndividualSums | None:
        """What each person's gradients have cost up to now (sensitive); None where norms are not kept."""
        return None if self._run.norms is None else self._run.norms.sums

    @property
    def module(self) -> nn.Module:
        """The module that is trained."""
        return self._run.module

    @property
    def optimizer(self) -> PrivateOptimizer:
        """The private optimizer."""
        return self._run.optimizer

    @property
    def loader(self) -> PrivateLoader:
        """The private loader."""
        return self._run.loader

    @property
    def execution(self) -> Execution:
        """Where the run stands in its plan (sensitive)."""
        return self._run.execution

    @property
    def gradients(self) -> ClippedGradients:
        """The clipped sums (sensitive)."""
        return self._run.gradients

    @property
    def ranks(self) -> Ranks:
        """This process among those of the run."""
        return self._run.ranks

    @property
    def source(self) -> RandomSource:
        """Where all randomness comes from (secret)."""
        return self._run.execution.source

    @property
    def _run(self) -> Run:
        if self._made is None:
            fail("Expected make_private to have been called on this engine. It has not been.")
        return self._made


def _new_source(seed: int | None, *, secure: bool) -> RandomSource:
    if seed is None:
        return RandomSource.from_operating_system(secure=secure)
    return RandomSource.from_seed(seed, secure=secure)
