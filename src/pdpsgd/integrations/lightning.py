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
from pdpsgd.errors import PdpsgdError, fail, warn
from pdpsgd.integrations._lightning import evaluated_on
from pdpsgd.integrations._lightning_checks import (
    check_hyperparameters,
    check_trainer,
    places_of,
    refuse_deciding_by,
    said_of,
)
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
    private.logged = {}
    private.other_people = []
    private.private_options = {"data_loader": data_loader, "plan": plan, "budgets": budgets, **options}
    return module


class PrivateTraining:
    """What comes before a LightningModule's own class: batches of the plan, a private optimizer, refusals."""

    private_options: dict[str, Any]
    engine: PrivacyEngine
    handed: HandedBatch
    of_training: set[str]
    """Names of figures that `training_step`, or a hook around it, logs."""
    logged: dict[str, str]
    """Those that loggers write to files, and where."""
    other_people: list[Any]
    """Loaders of people to validate and test on, who are known not to be trained on."""

    def configure_optimizers(self) -> Any:
        """Make the module's own optimizer private; a scheduler, if there is one, stays as it is."""
        check_trainer(self.trainer)  # type: ignore[attr-defined]
        check_hyperparameters(self)
        self._check_is_new()
        configured = super().configure_optimizers()  # type: ignore[misc]
        optimizer, scheduler = _one_optimizer(configured)
        self.engine = PrivacyEngine(
            observers=[TrainingStepProbe(self)],
            watch_loop=False,
            watch_after_steps=True,
            whole_pass=self._whole_pass,
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

    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        """Do what Lightning does, for the sum over the batch: dividing by its size would round."""
        super().backward(self.engine.summed(loss), *arguments, **named)  # type: ignore[misc]

    def _whole_pass(self, batch: Any) -> Tensor:
        """Return the sum of the losses of a batch that comes from the loader."""
        with _as_forward(self):
            loss: Tensor = _loss_of(self(batch))  # type: ignore[operator]
        rows = len(tensors(batch)[0]) * self.private_options.get("views", 1)
        return loss * rows if self.private_options.get("loss_reduction", "mean") == "mean" else loss

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

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **more: Any
    ) -> None:
        """Log a figure, unless it is of the training data and something decides, or is named, by it.

        Where a logger writes it to a file, that file is named.
        """
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.training and name not in self.of_training:
            self.of_training.add(name)
            refuse_deciding_by(name, trainer)
            if trainer.loggers and logger is not False:
                self.logged[name] = places_of(trainer.loggers)
                warn(
                    f"{said_of([name], self.logged[name])} (self.log(..., logger=False) leaves it out of there; what "
                    "validation_step logs of other people may be published.)"
                )
        super().log(name, value, prog_bar, logger, **more)  # type: ignore[misc]

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

    @property
    def beside(self) -> tuple[str, ...]:
        """What loggers have written of the training data, in a sentence for each place."""
        logged = self._module.logged
        places = dict.fromkeys(logged.values())
        return tuple(said_of([name for name, place in logged.items() if place == one], one) for one in places)

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
        given = own(self, *arguments, **named)
        if given is None and any(len(tensor) for tensor in tensors(arguments) if tensor.dim()):
            fail(
                "Expected training_step to return a loss for every batch. Got None: a batch must not be left out "
                "because of what is in it."
            )
        if not self.automatic_optimization:  # type: ignore[attr-defined]
            fail("Expected automatic optimization. Got automatic_optimization=False since make_private.")
        return given

    return training_step


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
