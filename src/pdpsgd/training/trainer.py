"""The loop of `fit`: an ordinary training loop around the engine, with evaluation, files, and Ctrl-C."""

from __future__ import annotations

import copy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.budgets.files import ANY, Each, Range, check_shape
from pdpsgd.engine.batches import call, repeated, to_device
from pdpsgd.engine.checks.augmentation import check_augment
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.engine.resuming import check_same_run, check_same_tensors
from pdpsgd.errors import fail
from pdpsgd.gradients.unsupported import train_mode
from pdpsgd.training.ensemble import WeightAverage, round_weight
from pdpsgd.training.evaluation import Evaluation, evaluate
from pdpsgd.training.file_shapes import HISTORY
from pdpsgd.training.leftovers import plain_attributes
from pdpsgd.training.progress import ProgressBar
from pdpsgd.training.run_folder import RunFolder, to_jsonable, without_people

if TYPE_CHECKING:
    import numpy as np

    from pdpsgd.data.schema import Schema
    from pdpsgd.training.components import Loss, Schedule
    from pdpsgd.training.temperature import Calibration
    from pdpsgd.training.temperature_by_steps import PrivateCalibration

STATE = {
    "settings": Each(ANY),
    "history": [HISTORY],
    "ended": [Each(ANY)],
    "start": Each(ANY),
    "seconds": Range(0),
}
"""What a checkpoint holds of the loop, as far as it is no tensor."""
SECONDS_BETWEEN_CHECKPOINTS = 60.0
STEPS_BETWEEN_CHECKPOINTS_OF_MANY = 100


@dataclass(frozen=True, eq=False)
class HeldOutPeople:
    """People to evaluate on, who are not on the list, and the tier of each if known."""

    data: Any
    tiers: Sequence[Any] | np.ndarray[Any, Any] | None
    ids: Any = None  # of each record, where people have many
    task: str = "classification"
    label_range: tuple[float, float] | None = None

    def evaluate(self, model: nn.Module, loss: Loss, calibration: Calibration | None = None) -> Evaluation:
        """Evaluate the model on them."""
        return evaluate(
            model,
            self.data,
            loss,
            tiers=self.tiers,
            ids=self.ids,
            task=self.task,
            label_range=self.label_range,
            calibration=calibration,
        )


class Trainer:
    """One run of `fit`, up to the trained models."""

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        schedule: Schedule,
        augment: Callable[[Any], Any] | None,
        views: int,
        weight_average: float | None,
        settings: Mapping[str, Any],
        description: Mapping[str, Any],
        schema: Schema | None,
        test: HeldOutPeople | None,
        folder: RunFolder | None,
        sensitive: bool,
        summed_loss: Loss | None = None,
        calibration: PrivateCalibration | None = None,
    ) -> None:
        self.model = model
        self.calibration = calibration  # what the last steps train instead of the model, where they do
        self.module = model if calibration is None else calibration.module
        self.loss = loss
        self.summed_loss = summed_loss  # what is trained with instead, where it is there
        self.schedule = schedule
        self.augment = augment
        self._augment_is_checked = False
        self.views = views
        self.settings = settings
        self.description = description
        self.schema = schema
        self.test = test
        self.folder = folder
        self.sensitive = sensitive
        self.attributes = plain_attributes(model)
        self.start = copy.deepcopy(model.state_dict())  # every fresh model begins as the model was given
        self.bare = copy.deepcopy(
            model
        )  # a place for weights that are not being trained: averages, ended rounds
        self.average = None if weight_average is None else WeightAverage(model, weight_average)
        self.ended: list[dict[str, Tensor]] = []  # models of rounds after which a fresh one began
        self.history: list[dict[str, Any]] = []
        self.engine = PrivacyEngine(
            watch_loop=False,  # nothing happens between loader and model but `augment`
            whole_pass=None if self.summed_loss is not None else self._whole_pass,
        )
        self._clock = time.monotonic()
        self._saved = time.monotonic()
        self._log: list[dict[str, Any]] = []
        self._pieces: list[tuple[int, float]] = []  # of the current step

    @property
    def seconds(self) -> float:
        """How long the run took up to now, over all its parts."""
        return time.monotonic() - self._clock

    # --- begin and resume -------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer, *, resume: bool, **private: Any) -> None:
        """Make everything private, and take up an earlier run where that is wanted."""
        folder = self.folder
        self._check_folder(resume)
        train_mode(self.module)
        self.engine.make_private(
            module=self.module,
            optimizer=optimizer,
            criterion=self.summed_loss or self.loss,
            loss_reduction="mean" if self.summed_loss is None else "sum",
            on_fresh_model=self._fresh_model,
            **private,
        )
        self.plan = self.engine.plan
        self.device = next(self.model.parameters()).device
        self.learning_rates = [group["lr"] for group in self.engine.optimizer.param_groups]
        if folder is None:
            return
        if self.engine.ranks.broadcast_object(folder.begun):  # as rank 0 sees it
            self.engine.resume(folder.checkpoint, training=self)
        else:
            if self.engine.ranks.first:
                folder.journal.unlink(missing_ok=True)
                folder.write_plan(self.plan)
                reservation = private.get("reservation")
                place = {} if reservation is None else {"ledger": reservation.description()}
                today = date.today().isoformat()  # when it began, which no record decides
                digest = without_people(self.plan).digest
                folder.write_settings(
                    {**self.settings, "plan": digest, "date": today, **self.description, **place}
                )
                if self.schema is not None:
                    folder.write_schema(self.schema)
            self.engine.keep_journal(folder.journal)
            # The key is safe on disk before the first noise is given out.
            self.engine.save(folder.checkpoint, training=self)

    def state_dict(self) -> dict[str, Any]:
        """Say what a checkpoint holds beside the engine's own part."""
        return {
            "settings": to_jsonable(self.settings),
            "history": self.history,
            "ended": self.ended,
            "start": dict(self.start) if any(r.fresh_model for r in self.plan.rounds[1:]) else {},
            "average": None if self.average is None else (self.average.average, self.average.steps),
            "calibration": None if self.calibration is None else self.calibration.state_dict(),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        place = "" if self.folder is None else str(self.folder.checkpoint)
        check_shape(place, state, STATE)
        check_same_run(state["settings"], to_jsonable(self.settings), place=place)
        now = self.model.state_dict()
        for index, model in enumerate(state["ended"]):
            check_same_tensors(model, now, place=f"{place}: training.ended.{index}")
        if state["start"]:
            check_same_tensors(state["start"], now, place=f"{place}: training.start")
        if self.average is not None:
            average, _ = state["average"]
            check_same_tensors(average, self.average.average, place=f"{place}: training.average")
        self.history = state["history"]
        self.ended = state["ended"]
        self.start = state["start"] or self.start
        self._clock -= state["seconds"]
        if self.average is not None:
            self.average.load(*state["average"])
        if self.calibration is not None:
            now = self.calibration.state_dict()
            check_same_tensors(state["calibration"], now, place=f"{place}: training.calibration")
            self.calibration.load_state_dict(state["calibration"])

    def _check_folder(self, resume: bool) -> None:
        folder = self.folder
        if folder is None:
            if resume:
                fail("Expected run_folder, to know what to resume. Got None.")
            return
        folder.check_is_free(resume=resume, folder=f"run_folder={str(folder.path)!r}", go_on="resume=True")

    # --- the loop ---------------------------------------------------------------------------------------

    def run(self, *, evaluate_every: int | None, checkpoint_every: int | None, progress: bool) -> None:
        """Take the plan's remaining steps."""
        engine, optimizer = self.engine, self.engine.optimizer
        bar = ProgressBar(self.plan, show=progress and engine.ranks.first, begin=engine.steps_taken)
        # On many ranks each would stop at a step of its own.
        with bar, _interruptible(catch=engine.ranks.world_size == 1) as interrupted:
            self._choose_what_to_train(engine.steps_taken)
            for batch in engine.loader:
                self._set_learning_rate(engine.steps_taken)
                self._backward(batch)
                optimizer.step()
                if not optimizer.took_step:
                    continue
                self._note_sensitive(engine.steps_taken - 1)
                if self.calibration is not None and self.calibration.module.calibrating:
                    step = engine.steps_taken - 1
                    self.calibration.update(step, self.plan.rounds[self.plan.round_of_step(step)])
                elif self.average is not None:
                    self.average.update()
                self._choose_what_to_train(engine.steps_taken)
                if not engine.steps_left:
                    # The model is safe and the key erased before anything else can go wrong.
                    self._save()
                    continue
                done = engine.steps_taken
                if evaluate_every and done % evaluate_every == 0:
                    bar.figure(self._note(done))
                bar.step(done)
                if interrupted.is_set():
                    self._save()
                    raise KeyboardInterrupt(self._how_to_resume())
                if self._checkpoint_is_due(done, checkpoint_every):
                    self._save()
            if evaluate_every:
                bar.figure(self._note(self.plan.steps))
            bar.step(self.plan.steps, last=True)
        self._write_sensitive()

    def _backward(self, batch: Any) -> None:
        inputs, targets = (to_device(part, self.device) for part in batch)
        if len(targets) == 0:
            return  # nobody was sampled: the step is noise alone
        if self.augment is not None:
            if not self._augment_is_checked and len(targets) > 1:
                is_cut = self.settings.get("max_physical_batch_size") is not None
                check_augment(self.augment, inputs, len(targets), is_cut=is_cut)
                self._augment_is_checked = True
            if self.views > 1:
                inputs, targets = (repeated(part, self.views) for part in (inputs, targets))
            inputs = self.augment(inputs)
        self.engine.optimizer.zero_grad()
        loss = (self.summed_loss or self.loss)(call(self.module, inputs), targets)
        self.engine.backward(loss)
        if self.sensitive:
            mean = float(loss.detach()) / (1 if self.summed_loss is None else len(targets))
            self._pieces.append((len(targets) // self.views, mean))

    def _whole_pass(self, batch: Any) -> Tensor:
        """Return the sum of a loss of somebody's own over a batch, without augmentation."""
        inputs, targets = (to_device(part, next(self.model.parameters()).device) for part in batch)
        if self.views > 1:
            inputs, targets = (repeated(part, self.views) for part in (inputs, targets))
        loss: Tensor = self.loss(call(self.module, inputs), targets)
        return loss * len(targets)

    def _choose_what_to_train(self, step: int) -> None:
        """Let the model be from the step on at which its calibration is fitted; called between steps."""
        fitted = self.calibration
        if fitted is None or fitted.module.calibrating or step < fitted.begin:
            return
        if self.average is not None:
            self.average.write_to(self.model)
        fitted.module.calibrating = True
        self.model.eval()  # no dropout in what is calibrated

    def _set_learning_rate(self, step: int) -> None:
        begin, end = self._span(step)
        if self.calibration is not None:
            end = self.calibration.begin
        factor = self.schedule((step - begin) / (end - begin)) if step < end else 0.0
        for group, rate in zip(self.engine.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor

    def _span(self, step: int) -> tuple[int, int]:
        """Return the first step, and the end, of the model that this step trains."""
        begin, end, at = 0, self.plan.steps, 0
        for index, r in enumerate(self.plan.rounds):
            if r.fresh_model and index > 0:
                if at > step:
                    end = at
                    break
                begin = at
            at += r.steps
        return begin, end

    def _fresh_model(self, index: int) -> None:
        """Keep the model that ended, and start again from the beginning."""
        self.ended.append({name: value.clone() for name, value in self._weights().items()})
        self.model.load_state_dict(self.start)
        if self.average is not None:
            self.average.restart()

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights that count: the averaged ones, if there is an average."""
        if self.average is None:
            return self.model.state_dict()
        self.bare.load_state_dict(self.model.state_dict())
        self.average.write_to(self.bare)
        return self.bare.state_dict()

    def _note(self, done: int) -> str:
        """Evaluate on test people, keep the figures, and say the first of them."""
        record: dict[str, Any] = {"step": done}
        said = ""
        if self.test is not None:
            self.bare.load_state_dict(self._weights())
            found = self.test.evaluate(self.bare, self.loss)
            record |= {"test_loss": found.loss, "test_accuracy": found.accuracy}
            record |= {"by_tier": {tier: share.accuracy for tier, share in found.by_tier.items()}}
            if found.errors is not None:
                tiers = {tier: each.rmse for tier, each in found.errors_by_tier.items()}
                record |= {"test_rmse": found.errors.rmse, "rmse_by_tier": tiers}
            said = found.headline
        self.history.append(record)
        return said

    def models(self) -> list[tuple[float, nn.Module]]:
        """Return the trained models with their weights: the last one, and those after which a fresh one began."""
        if self.average is not None:
            self.average.write_to(self.model)
        fresh = [index for index, r in enumerate(self.plan.rounds) if index > 0 and r.fresh_model]
        models: list[tuple[float, nn.Module]] = []
        for begin, state in zip(fresh, self.ended, strict=True):
            ended = copy.deepcopy(self.bare)
            ended.load_state_dict(state)
            models.append((round_weight(self.plan, begin - 1), ended))
        return [*models, (round_weight(self.plan, len(self.plan.rounds) - 1), self.model)]

    # --- files ------------------------------------------------------------------------------------------

    def _checkpoint_is_due(self, done: int, every: int | None) -> bool:
        if self.folder is None:
            return False
        if every is not None:
            return done % every == 0
        if self.engine.ranks.world_size > 1:  # clocks differ, and all ranks must save at the same step
            return done % STEPS_BETWEEN_CHECKPOINTS_OF_MANY == 0
        return time.monotonic() - self._saved > SECONDS_BETWEEN_CHECKPOINTS

    def _save(self) -> None:
        if self.folder is None:
            return
        self.engine.save(self.folder.checkpoint, training=self)
        self._saved = time.monotonic()
        if self.engine.ranks.first:
            self.folder.write_history(self.history)
        self._write_sensitive()

    def _note_sensitive(self, step: int) -> None:
        """Keep size and mean loss of the batch that was just stepped, all its pieces together."""
        people = sum(size for size, _ in self._pieces)
        if people:
            mean = sum(size * loss for size, loss in self._pieces) / people
            self._log.append({"step": step, "batch_size": people, "training_loss": mean})
        self._pieces.clear()

    def _write_sensitive(self) -> None:
        if self._log and self.folder is not None and self.engine.ranks.first:
            self.folder.add_sensitive(self._log)
        self._log.clear()

    def _how_to_resume(self) -> str:
        where = f"Interrupted after step {self.engine.steps_taken} of {self.plan.steps}."
        if self.folder is None:
            return f"{where} Nothing was saved: there was no run_folder."
        return (
            f"{where} Everything is saved: resume with the same call and resume=True "
            f"(run_folder={str(self.folder.path)!r})."
        )


@contextmanager
def _interruptible(*, catch: bool) -> Iterator[threading.Event]:
    """Let Ctrl-C end the current step first; a second Ctrl-C ends at once."""
    interrupted = threading.Event()
    if not catch or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(number: int, frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        print("Stopping after this step (Ctrl-C again: at once, losing it).", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
