"""The user's own training loop, made private: `PrivacyEngine`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from pdpsgd._typing import IdArray, IntArray
from pdpsgd.accounting.registry import accountant
from pdpsgd.engine.batches import Chunk, to_device
from pdpsgd.engine.checks.collation import check_collation
from pdpsgd.engine.checks.watch import LossWatch
from pdpsgd.engine.distributed import Ranks
from pdpsgd.engine.execution import Execution
from pdpsgd.engine.fingerprints import fingerprint_data
from pdpsgd.engine.journal import Journal
from pdpsgd.engine.loader import PrivateLoader
from pdpsgd.engine.optimizer import PrivateOptimizer, check_optimizer
from pdpsgd.engine.records import match_records, records_of
from pdpsgd.engine.resuming import resume_run, save_run
from pdpsgd.errors import check_one_of, check_positive, fail
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.verdict import needs_to_be_verified, release_note
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.engine.checkpoints import HasState
    from pdpsgd.planning.plans import Plan


class Spent(NamedTuple):
    """What a level has spent so far."""

    epsilon: float
    delta: float


class PrivacyEngine:
    """Makes a module, an optimizer and a data loader private, for one run of one plan.

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
    removing their record. See docs/engine.md for what is checked and what is up to the loop.
    """

    def __init__(self) -> None:
        self._execution: Execution | None = None

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
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """Make a training loop private: the module, a wrapped optimizer, and a loader over the plan's steps.

        `budgets` says who is on which level (needed unless the plan knows its people or has one level only).
        By default person i of the list has record i of the data; `record_ids` names the person of each
        record, `record_of_person` gives the number of each person's record (-1: none supplied).

        `max_grad_norm` may be left out: the plan's rules. With another one the run clips, and adds noise, at
        that norm instead; privacy is the same, because it depends on the ratio of noise to norm only.

        At the first batch, a model or loss in which examples mix is refused; `criterion(outputs, targets)`,
        if given, is probed for that, otherwise the loop is watched (see `loss_watch`).
        `max_physical_batch_size` bounds memory: the loader yields a step in several batches, and `step()`
        only adds up until the last. `seed` makes the run reproducible and so not for release,
        and so does `secure=False`, which uses a generator that is not cryptographic.
        With `views` the loop sends each record through the model in so many augmented views, in consecutive
        rows (`inputs.repeat_interleave(views, 0)`): their gradients are averaged before clipping, so a record
        counts once. `on_fresh_model(round)` is called where the plan starts a new model, and must reset the
        module's parameters.
        """
        if self._execution is not None:
            fail(
                "Expected a new PrivacyEngine for every run. Got one that has made something private before."
            )
        check_one_of(("mean", "sum"), loss_reduction=loss_reduction)
        for name, value in (
            ("max_physical_batch_size", max_physical_batch_size),
            ("steps_per_epoch", steps_per_epoch),
            ("views", views),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                fail(f"Expected {name} to be a whole number >= 1, or None. Got {value!r}.")
        if views > 1 and criterion is None:
            fail("Expected criterion (the loss), to check that examples do not mix in it. Got None.")
        check_optimizer(optimizer)
        _check_module(module)
        _check_criterion(criterion, module)
        plan = _with_norm(plan, max_grad_norm)
        if needs_to_be_verified(plan):
            plan.verify()  # made or changed by hand, or elsewhere: refused if it breaks a promise
        if on_fresh_model is None and any(r.fresh_model for r in plan.rounds[1:]):
            fail(
                "Expected on_fresh_model, a function that resets the module's parameters: the plan trains a "
                "fresh model in each round. Got None. (pdpsgd.fit does this by itself.)"
            )

        levels, ids = _people(plan, budgets)
        records = records_of(data_loader)
        check_collation(records, by_place=any(len(set(r.clip_scales)) > 1 for r in plan.rounds))
        numbers = match_records(
            people=len(levels),
            records=len(records),
            ids=ids,
            record_ids=record_ids,
            record_of_person=record_of_person,
        )
        ranks = Ranks.join(device=_device(module))
        if source is None:
            source = (
                RandomSource.from_operating_system(secure=secure)
                if seed is None
                else RandomSource.from_seed(seed, secure=secure)
            )
        if ranks.world_size > 1:
            ranks.check_same(plan=plan.digest, people=hashlib.sha256(levels.tobytes()).hexdigest())
        source = ranks.share_key(source)
        if ranks.world_size > 1:
            # Somebody whose record differs between ranks, or lies elsewhere, would be there twice or not at all.
            key = source.key_bytes()
            ranks.check_same(
                data=records.fingerprint(key), records_of_people=fingerprint_data(numbers, key=key)
            )
        ranks.spread_module(module)
        if budgets is not None and plan.roster is None and plan.not_for_release is None:
            # Its file then says on whom it was carried out.
            plan = replace(plan, roster=Roster(budgets.ids, levels, budgets.named))

        self.plan = plan
        self.ranks = ranks
        self.source = source
        self.module = module
        self.criterion = criterion
        self.level_of_person = levels
        self.record_of_person = numbers
        self.records = records
        self.journal: Journal | None = None
        self.loop_is_known = False  # whether nothing happens between loader and model that has to be watched
        self._last_watch: LossWatch | None = None
        self._criterion_is_checked = criterion is None
        self._round_begun = -1  # a step may be handed out twice, but its round begins once
        self._on_fresh_model = on_fresh_model
        self._loss_reduction = loss_reduction
        self._views = views
        self.options = {
            "loss_reduction": loss_reduction,
            "views": views,
            "max_physical_batch_size": max_physical_batch_size,
            "secure": source.secure,
        }
        self.execution = self._execution = Execution(
            plan=plan,
            level_of_person=levels,
            record_of_person=numbers,
            sampler=PoissonSampler(plan, levels, source, rank=ranks.rank, world_size=ranks.world_size),
            max_physical_batch_size=max_physical_batch_size and max(1, max_physical_batch_size // views),
        )
        self.gradients = ClippedGradients(module)
        self.optimizer = PrivateOptimizer(
            optimizer,
            gradients=self.gradients,
            execution=self._execution,
            source=source,
            ranks=ranks,
            loss_reduction=loss_reduction,
            views=views,
        )
        self.loader = PrivateLoader(self._execution, records, steps_per_epoch=steps_per_epoch)
        self.loader.inspect = self._inspect
        self._execution.finish_empty_step = self.optimizer.step
        self._execution.seed_of_step = self._seed_of_step
        self._execution.when_handed_out = [self._begin_step, self.optimizer.begin]
        return module, self.optimizer, self.loader

    @property
    def steps_taken(self) -> int:
        """How many steps of the plan count as taken: released, or given up."""
        return self._running.steps_done

    @property
    def steps_left(self) -> int:
        """How many steps of the plan are still to be taken."""
        return self._running.steps_left

    @property
    def release_note(self) -> str | None:
        """Why results of this run are not for release; None if nothing speaks against it."""
        return release_note(self.plan, guessable=self.source.seeded or not self.source.cryptographic)

    def spent(self) -> tuple[Spent, ...]:
        """What each level has spent up to now, if nothing decided to look now but public things.

        Guarantee: a run that was always going to end at this step is (epsilon, delta)-DP with these values.
        If the run is stopped because of what the model showed, they are not a proof: the plan's total is, as
        the run might have gone on. (Privacy filters and odometers need other theorems.)
        """
        so_far = self._running.plan.prefix(self.steps_taken)
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
        yourself, and call `pdpsgd.engine.checkpoints.erase_key` when the run has ended. Beside it lies the run's
        journal (see `keep_journal`), without which it cannot be resumed.
        """
        save_run(self, path, others)

    def resume(self, path: str | os.PathLike[str], **others: HasState) -> None:
        """Go on from a checkpoint; to be called after `make_private` with the same things as before.

        Refuses another plan, other people, data, model, optimizer, options or number of ranks than the
        checkpoint was made with, a damaged file, a run that has ended, and one whose journal is gone. From
        now on it stops where a repeated step meets other gradients than before.
        """
        resume_run(self, path, others)

    def keep_journal(self, path: str | os.PathLike[str]) -> None:
        """Note what each step's noise meets, so that a resumed run cannot let it meet anything else.

        The first `save` does this beside the checkpoint, and `resume` goes on with it; call it before the
        first `save` to have the journal elsewhere.
        """
        if self.ranks.first:
            if self.journal is not None:
                self.journal.close(remove=False)
            self.journal = self.optimizer.journal = Journal(
                Path(path), self.source, max_grad_norm=self.plan.max_grad_norm
            )

    def forfeit_step(self) -> None:
        """Give up the batch in hand, for a reason that does not depend on it: its step counts as taken."""
        self._running.forfeit()
        self.gradients.forget()

    def check(self, loss: Callable[..., Tensor], inputs: Any, targets: Any = None) -> bool:
        """Refuse a loss or module in which examples mix; returns whether the batch was enough to tell."""
        from pdpsgd.engine.checks.probe import check_examples_do_not_mix

        return check_examples_do_not_mix(
            self.module, loss, inputs, targets, loss_reduction=self._loss_reduction
        )

    def draw_from(self, source: RandomSource) -> None:
        """Take draws and noise from this source from now on."""
        self.source = self.optimizer.source = source
        self._running.sampler = PoissonSampler(
            self.plan, self.level_of_person, source, rank=self.ranks.rank, world_size=self.ranks.world_size
        )

    def close(self) -> None:
        """End the run: give the module back as it was and forget the key."""
        if self.optimizer.watch is not None:
            self.optimizer.watch.stop(report=False)
        self.gradients.remove()
        if self.journal is not None:
            self.journal.close(remove=True)
        self._running.sampler.forget()
        self.source.erase()

    @property
    def _running(self) -> Execution:
        if self._execution is None:
            fail("Expected make_private to have been called on this engine. It has not been.")
        return self._execution

    def _seed_of_step(self, step: int) -> int:
        return step_seed(self.source, purpose="fetch", step=step, rank=self.ranks.rank)

    def _inspect(self, batch: Any) -> None:
        """Try the criterion on the batch, and look at what the loop does with it, until batches were enough to tell."""
        self._criterion_is_checked = self._criterion_is_checked or self._probe(batch)
        last, chunk = self._last_watch, self._running.in_hand
        watched = self.loop_is_known or (last is not None and last.concluded)
        if watched and self._criterion_is_checked:
            self.loader.inspect = None
        elif not watched and chunk is not None and chunk.size > 1:
            self._last_watch = self.optimizer.watch = LossWatch(
                self.gradients,
                batch,
                chunk.size,
                owner=self,
                loss_reduction=self._loss_reduction,
                views=self._views,
                criterion_is_checked=self.criterion is not None,
                sizes_divided_by=() if last is None else last.sizes_divided_by,
            )
            self._last_watch.start()

    def _probe(self, batch: Any) -> bool:
        """Try the criterion on the batch; whether it was enough to tell."""
        assert self.criterion is not None
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            fail("Expected batches of (inputs, targets), to try the criterion on them. Got something else.")
        inputs, targets = (to_device(part, _device(self.module)) for part in batch)
        return self.check(self.criterion, inputs, targets)

    def _begin_step(self, chunk: Chunk) -> None:
        if not chunk.first:
            return
        execution = self._running
        index = execution.round_index(chunk.step)
        begins = execution.starts_round(chunk.step) and index > self._round_begun
        self._round_begun = max(index, self._round_begun)
        if begins and index > 0 and self.plan.rounds[index].fresh_model:
            assert self._on_fresh_model is not None
            self._on_fresh_model(index)
            self.ranks.spread_module(self.module)
            self.optimizer.state.clear()
        _seed_torch(step_seed(self.source, purpose="torch", step=chunk.step, rank=self.ranks.rank))


def step_seed(source: RandomSource, *, purpose: str, step: int, rank: int = 0) -> int:
    """A seed for what is random in a step besides draws and noise: augmentation, dropout.

    It comes from the key and the step's number, so that these repeat when a step is repeated after an
    interruption: were they to differ, the step's noise would meet two different gradients.
    """
    place = step.to_bytes(8, "little") + rank.to_bytes(8, "little")
    person = f"pdpsgd {purpose}".encode()
    digest = hashlib.blake2b(place, digest_size=8, key=source.key_bytes(), person=person).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _with_norm(plan: Plan, max_grad_norm: float | None) -> Plan:
    if max_grad_norm is None or max_grad_norm == plan.max_grad_norm:
        return plan
    check_positive(max_grad_norm=max_grad_norm)
    return replace(plan, max_grad_norm=max_grad_norm)


def _people(plan: Plan, budgets: Budgets | None) -> tuple[IntArray, IdArray | None]:
    """The level of each person on the list, and their ids."""
    if budgets is not None:
        return np.asarray(plan.level_of_person(budgets), dtype=np.int64), budgets.ids
    if plan.roster is not None:
        return np.asarray(plan.roster.level, dtype=np.int64), plan.roster.ids
    if len(plan.levels) == 1:
        return np.zeros(plan.people, dtype=np.int64), None
    fail(f"Expected budgets, to know who is on which of the plan's {len(plan.levels)} levels. Got None.")


def _check_module(module: nn.Module) -> None:
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        fail(
            f"Expected the bare module. Got it inside {type(module).__name__}: take it out (`.module`). "
            "Under torchrun the ranks are joined by pdpsgd itself, because gradients must be clipped before "
            "they are added up."
        )


def _check_criterion(criterion: Callable[..., Tensor] | None, module: nn.Module) -> None:
    if isinstance(criterion, nn.Module):
        own = {id(parameter) for parameter in module.parameters()}
        for name, parameter in criterion.named_parameters():
            if parameter.requires_grad and id(parameter) not in own:
                fail(
                    "Expected a criterion without trainable parameters of its own: they would be moved by gradients "
                    f"without noise. Got {name} of shape {tuple(parameter.shape)}. Make it a part of the module, or "
                    "freeze it (requires_grad_(False))."
                )


def _device(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)
