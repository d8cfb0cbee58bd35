"""Any LightningModule, trained by a plan: one call before `trainer.fit`.

    module = pdpsgd.integrations.lightning.make_private(module, data_loader=loader, plan=plan, budgets=budgets)
    lightning.Trainer(max_epochs=1).fit(module)

The module keeps its own `training_step` and `configure_optimizers`; what changes is where batches come from
and what the optimizer does with gradients. A training loss that `training_step` logs is computed from the
private data: do not publish it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pdpsgd.engine._torch import version
from pdpsgd.engine.batches import tensors
from pdpsgd.engine.checks.held_out import check_held_out
from pdpsgd.engine.checks.probe import check_examples_do_not_mix
from pdpsgd.engine.checks.rows import SeenValues
from pdpsgd.engine.observers import StepObserver
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.integrations._lightning import evaluated_on
from pdpsgd.integrations._torch import move_scheduler

try:
    import lightning
except ImportError as error:  # pragma: no cover
    raise PdpsgdError(
        "Expected the package lightning. Install it: pip install 'pdpsgd[lightning]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.planning.plans import Plan

__all__ = ["PrivateTraining", "make_private"]


def make_private(
    module: lightning.LightningModule,
    *,
    data_loader: Any,
    plan: Plan,
    budgets: Budgets | None = None,
    **options: Any,
) -> lightning.LightningModule:
    """Make a LightningModule train by a plan.

    One pass over the loader takes all of the plan's steps: use `Trainer(max_epochs=1)`, or give
    `steps_per_epoch` and let the epochs add up to the plan's steps.

    Guarantee: that of `PrivacyEngine`, for the parameters at any step. Metrics that `training_step` logs are
    not covered; callbacks and schedulers that decide by them are refused. What is tried for examples that mix is
    `training_step` with the hooks that transfer batches; a batch that anything else has changed is refused.

    Args:
        module: The module; it keeps its `training_step` and `configure_optimizers`.
        data_loader: A loader, a map-style dataset, or tensors whose first dimension counts records.
        plan: What to execute.
        budgets: Who is on which level; needed unless the plan knows its people or has one level only.
        options: The other options of `PrivacyEngine.make_private`.

    Returns:
        The same module.

    Raises:
        PdpsgdError: The module, or an option, does not go together with a plan.
    """
    if not isinstance(module, lightning.LightningModule):
        fail(f"Expected a LightningModule. Got {type(module).__name__}.")
    if isinstance(module, PrivateTraining):
        fail("Expected a module that is not private yet. Got one that make_private gave back.")
    if not module.automatic_optimization:
        fail(
            "Expected automatic optimization. Got automatic_optimization=False: a loop of its own uses "
            "pdpsgd.PrivacyEngine directly."
        )
    if options.get("max_physical_batch_size") is not None:
        fail(
            "Expected no max_physical_batch_size: Lightning asks beforehand how many batches there will "
            "be, and that "
            "number is secret. Use pdpsgd.fit or PrivacyEngine to limit memory."
        )
    kind = type(module)
    if kind.backward is not lightning.LightningModule.backward:
        fail(
            f"Expected Lightning's own backward. Got one of {kind.__name__}: what it does to the loss is not tried for "
            "examples that mix. Do it in training_step."
        )
    own = {"training_step": _checked(kind.training_step)}
    module.__class__ = type(f"Private{kind.__name__}", (PrivateTraining, kind), own)
    private: Any = module
    private.handed = HandedBatch()
    private.of_training = set()
    private.other_people = []
    private.private_options = {"data_loader": data_loader, "plan": plan, "budgets": budgets, **options}
    return module


class PrivateTraining:
    """What comes before a LightningModule's own class: batches of the plan, a private optimizer, refusals."""

    private_options: dict[str, Any]
    engine: PrivacyEngine
    handed: HandedBatch
    of_training: set[str]
    """Names of figures that `training_step` logs."""
    other_people: list[Any]
    """Loaders of people to validate and test on, who are known not to be trained on."""

    def configure_optimizers(self) -> Any:
        """Make the module's own optimizer private; a scheduler, if there is one, stays as it is."""
        _check_trainer(self.trainer)  # type: ignore[attr-defined]
        self._check_is_new()
        configured = super().configure_optimizers()  # type: ignore[misc]
        optimizer, scheduler = _one_optimizer(configured)
        self.engine = PrivacyEngine(
            observers=[TrainingStepProbe(self)], watch_loop=False, watch_after_steps=True
        )
        _, private, self._private_loader = self.engine.make_private(
            module=self,  # type: ignore[arg-type]
            optimizer=optimizer,
            **self.private_options,
        )
        if scheduler is None:
            return private
        _attach(scheduler, private)
        return {"optimizer": private, "lr_scheduler": scheduler}

    def train_dataloader(self) -> Any:
        """Return the loader of the plan's steps."""
        return self._private_loader

    def on_train_start(self) -> None:
        """Refuse batches from elsewhere, and people to validate on who are trained on, before any step is taken."""
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.train_dataloader is not self._private_loader:
            fail(
                "Expected trainer.fit(module) to take its batches from the plan. Got a training loader beside it (an "
                "argument of trainer.fit, or a datamodule with train_dataloader): give the records to "
                "make_private(data_loader=...) alone."
            )
        self._check_others(evaluated_on(trainer), "to validate on")
        super().on_train_start()  # type: ignore[misc]

    def on_validation_start(self) -> None:
        """Refuse people to validate on who are trained on."""
        self._check_others(evaluated_on(self.trainer), "to validate on")  # type: ignore[attr-defined]
        super().on_validation_start()  # type: ignore[misc]

    def on_test_start(self) -> None:
        """Refuse people to test on who are trained on."""
        self._check_others(evaluated_on(self.trainer), "to test on")  # type: ignore[attr-defined]
        super().on_test_start()  # type: ignore[misc]

    def _check_others(self, loaders: list[Any], purpose: str) -> None:
        for loader in loaders:
            if not any(loader is known for known in self.other_people):
                engine = getattr(self, "engine", None)
                if engine is not None:
                    engine.check_held_out(loader, purpose=purpose)
                else:
                    check_held_out(self.private_options["data_loader"], loader, purpose=purpose)
                self.other_people.append(loader)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note what the last of the transferring hooks hands on."""
        batch = super().on_after_batch_transfer(batch, dataloader_idx)  # type: ignore[misc]
        if self.trainer.training:  # type: ignore[attr-defined]
            self.handed.note(batch)
        return batch

    def log(self, name: str, *arguments: Any, **named: Any) -> None:
        """Log a figure, unless it is of the training data and something decides by it."""
        if self._current_fx_name == "training_step" and name not in self.of_training:  # type: ignore[attr-defined]
            self.of_training.add(name)
            _refuse_deciding_by(name, self.trainer)  # type: ignore[attr-defined]
        super().log(name, *arguments, **named)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to train on from Lightning's checkpoint, which does not know where the plan stands."""
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.state.fn == "fit":
            fail(
                "Expected a run from its beginning. Got ckpt_path: Lightning's checkpoints hold neither the run's key "
                "nor its place in the plan, so that steps would be taken again. "
                "Train by a new plan that counts this one as history (plan(..., history=[...])), or use pdpsgd.fit, "
                "which can be resumed. For trainer.test and trainer.validate checkpoints are fine."
            )

    def _check_is_new(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and engine.steps_taken:
            fail(
                f"Expected one trainer.fit for each make_private. Got a second one after {engine.steps_taken} steps: "
                "the plan's steps would be taken again. Train on by a new plan that counts this one as history "
                "(plan(..., history=[...])), with a new module that these weights are loaded into."
            )

    def on_fit_end(self) -> None:
        """Forget the key once the plan is complete."""
        super().on_fit_end()  # type: ignore[misc]
        if self.engine.steps_left == 0:
            self.engine.close()


class HandedBatch:
    """The tensors of a batch as the transferring hooks have handed it on (sensitive, kept until `training_step`)."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int]] = []

    def note(self, batch: Any) -> None:
        """Remember the tensors, and how often each was written to."""
        self._tensors = [(tensor, version(tensor)) for tensor in tensors(batch)]

    def check(self, given: Any) -> None:
        """Refuse a `training_step` that is given others, or the same ones changed."""
        handed, self._tensors = self._tensors, []
        now = tensors(given)
        if len(now) != len(handed) or any(
            tensor is not before or version(tensor) != writes
            for tensor, (before, writes) in zip(now, handed, strict=True)
        ):
            fail(
                "Expected training_step to get the batch as it was transferred. Got one that a callback or "
                "on_train_batch_start has changed, where examples may mix unseen. Do it in training_step, or in "
                "on_after_batch_transfer, which are tried."
            )


class TrainingStepProbe(StepObserver):
    """Probe of what comes after the loader, transferring hooks and `training_step` as a whole.

    On the first batch that is large enough to tell, and on new classes.
    """

    def __init__(self, module: PrivateTraining) -> None:
        self._module = module
        self._done = False
        self._seen = SeenValues()  # a class that no batch had before shows only now

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Refuse a training step in which examples mix."""
        if self._seen.has_news(batch.examples, batch.size) or not self._done:
            with _as_forward(self._module):
                self._done = check_examples_do_not_mix(
                    self._module,  # type: ignore[arg-type]
                    _loss_of,
                    (batch.examples,),
                    loss_reduction=self._module.private_options.get("loss_reduction", "mean"),
                )


@contextmanager
def _as_forward(module: Any) -> Iterator[None]:
    """For a while, calling the module is its training step, without logging."""

    def training_step(batch: Any) -> Any:
        # The step may call the module itself, and then means its own forward.
        stand_in = module.__dict__.pop("forward")
        module.__dict__.update({name: own for name, own in before.items() if name == "forward"})
        try:
            takes_index = len(inspect.signature(module.training_step).parameters) > 1  # as Lightning allows
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = module.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)
        finally:
            module.__dict__["forward"] = stand_in

    stand_ins = {
        "forward": training_step,
        "log": lambda *values, **options: None,
        "log_dict": lambda *values, **options: None,
    }
    before = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del module.__dict__[name]
        module.__dict__.update(before)


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `training_step` that looks at what it is given."""

    @wraps(own)
    def training_step(self: PrivateTraining, *arguments: Any, **named: Any) -> Any:
        self.handed.check((arguments, named))
        return own(self, *arguments, **named)

    return training_step


def _refuse_deciding_by(name: str, trainer: Any) -> None:
    """Refuse callbacks and schedulers that decide by a figure of the training data."""
    names = {name, f"{name}_step", f"{name}_epoch"}
    plateaus = (each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau)
    for each in (*trainer.callbacks, *plateaus):
        if getattr(each, "monitor", None) in names:
            kind = type(getattr(each, "scheduler", each)).__name__
            fail(
                f"Expected callbacks and schedulers that decide by figures on other people. Got {kind}, which watches "
                f"{each.monitor!r}: training_step computes that from the private data, and no noise covers what "
                "follows from it. Watch a figure of validation_step."
            )


def _loss_of(step_output: Any) -> Any:
    return step_output["loss"] if isinstance(step_output, dict) else step_output


def _one_optimizer(configured: Any) -> tuple[Any, Any]:
    """Take the optimizer and its scheduler from the forms that Lightning allows for one of each."""
    if isinstance(configured, dict):
        return configured["optimizer"], configured.get("lr_scheduler")
    if isinstance(configured, (list, tuple)):
        two_lists = len(configured) == 2 and isinstance(configured[0], (list, tuple))
        optimizers, schedulers = configured if two_lists else (configured, [])
        if len(optimizers) != 1 or len(schedulers) > 1:
            fail(f"Expected configure_optimizers to give one optimizer. Got {len(optimizers)}.")
        return optimizers[0], schedulers[0] if schedulers else None
    return configured, None


def _attach(configured: Any, private: Any) -> None:
    """Let the scheduler belong to the private optimizer, which shares the groups that it sets rates in."""
    scheduler = configured["scheduler"] if isinstance(configured, dict) else configured
    move_scheduler(scheduler, private)


def _check_trainer(trainer: Any) -> None:
    """Refuse what would change gradients behind the mechanism's back."""
    if trainer.gradient_clip_val:
        fail(f"Expected no gradient_clip_val: the plan clips. Got {trainer.gradient_clip_val!r}.")
    if trainer.overfit_batches:
        fail(
            "Expected overfit_batches=0: it validates on the batches that are trained on. Got "
            f"{trainer.overfit_batches!r}."
        )
    if trainer.accumulate_grad_batches != 1:
        fail(
            "Expected accumulate_grad_batches=1: a step is one batch. Got "
            f"{trainer.accumulate_grad_batches!r}."
        )
    if "16" in str(trainer.precision):
        fail(f"Expected precision of 32 or 64 bits, without loss scaling. Got {trainer.precision!r}.")
    if trainer.world_size != 1:
        fail(f"Expected one device with Lightning. Got {trainer.world_size}: use pdpsgd.fit under torchrun.")
