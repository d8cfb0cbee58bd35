"""One call from people's budgets to a trained model: `fit`."""

from __future__ import annotations

import copy
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.checkpoints import erase_key
from pdpsgd.engine import PrivacyEngine, Spent
from pdpsgd.ensemble import WeightAverage, WeightedModels, round_weight
from pdpsgd.errors import fail
from pdpsgd.evaluation import Evaluation, evaluate, to_device
from pdpsgd.progress import ProgressBar
from pdpsgd.recipes import Loss, Schedule, loss_of, name_of, optimizer_of, schedule_of
from pdpsgd.run_folder import RunFolder, plain

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from pdpsgd.budgets import Budgets
    from pdpsgd.plan import Plan

SECONDS_BETWEEN_CHECKPOINTS = 60.0


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A trained model, what it cost each level, and how good it is. Public things only.

    `models` are the models that `model` combines, with their weights, where the plan trained several. `release_note`
    says why nothing of this is for release; None if nothing speaks against it.
    """

    model: nn.Module
    plan: Plan
    spent: tuple[Spent, ...]
    evaluation: Evaluation | None
    history: tuple[Mapping[str, Any], ...]
    models: tuple[tuple[float, nn.Module], ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    release_note: str | None
    run_folder: Path | None

    @property
    def accuracy(self) -> float | None:
        """Share of the test people that the model gets right."""
        return None if self.evaluation is None else self.evaluation.accuracy

    @property
    def accuracy_by_tier(self) -> dict[str, float]:
        """The same by the tier of the test people, where it is known."""
        return {} if self.evaluation is None else {k: v.accuracy for k, v in self.evaluation.by_tier.items()}

    def to_dict(self) -> dict[str, Any]:
        """The result without the models, as plain data."""
        levels = [
            {
                "epsilon": level.epsilon,
                "delta": level.delta,
                "people": level.people,
                "proven_epsilon": level.proven_epsilon,
                "spent_epsilon": spent.epsilon,
            }
            for level, spent in zip(self.plan.levels, self.spent, strict=True)
        ]
        return {
            "mechanism": self.plan.mechanism,
            "steps": self.plan.steps,
            "release_note": self.release_note,
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "levels": levels,
            "models": len(self.models),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": self.seconds,
            "versions": dict(self.versions),
        }


def fit(
    model: nn.Module,
    data: Any,
    budgets: Budgets | ArrayLike | None = None,
    *,
    plan: Plan | None = None,
    mechanism: str = "pdp-sgd-exact",
    steps: int = 1000,
    batch_size: float = 1024,
    max_grad_norm: float = 1.0,
    accountant: str = "pld",
    plan_options: Mapping[str, Any] | None = None,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] = "sgd",
    learning_rate: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: str | Schedule = "cosine",
    weight_average: float | None = None,
    loss: str | Loss = "cross-entropy",
    augment: Callable[[Any], Any] | None = None,
    test_data: Any = None,
    test_budgets: Budgets | None = None,
    test_tiers: ArrayLike | None = None,
    evaluate_every: int | None = None,
    max_physical_batch_size: int | None = None,
    seed: int | None = None,
    secure: bool = False,
    run_folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    sensitive: bool = False,
    progress: bool = True,
) -> TrainingResult:
    """Plan, train privately, evaluate: one call.

    `data` is a pair of arrays or tensors (inputs, targets), a dataset, or a data loader; `budgets` says what each person
    allows, and by default person i has record i. Without a `plan`, one is made from `mechanism`, `steps`, `batch_size`
    (the expected one), `max_grad_norm`, `accountant` and `plan_options`.

    `loss` (mean over examples), `optimizer` and `schedule` are names or functions of your own; everything else is
    plain data. `weight_average` is the decay of a moving average of the weights, which then are the model's.
    `augment(inputs)` changes a batch's inputs, example by example, before they go through the model.
    `test_data` are other people, never on the list; `test_budgets` or `test_tiers` say which tier each belongs to.

    With a `run_folder` the run leaves its plan, model, promises and history there, and checkpoints to `resume` from;
    `sensitive=True` also logs batch sizes and training losses, in a file that says so. `seed` makes a run
    reproducible, guessable and so not for release; `secure=True` uses a cryptographic generator.

    Guarantee: the returned model, and everything else in the result and the run folder (apart from files named
    SENSITIVE, and the checkpoint while the run lasts), gives every person of level l the (epsilon_l, delta_l) that
    the plan proves for it, provided that `loss`, `augment` and the model treat examples one by one (a probe refuses
    what it can see of the opposite) and that settings were not chosen by looking at the private data.
    """
    began = time.monotonic()
    planned, people = _plan_of(
        plan,
        budgets,
        mechanism=mechanism,
        steps=steps,
        batch_size=batch_size,
        max_grad_norm=max_grad_norm,
        accountant=accountant,
        **(plan_options or {}),
    )
    settings = {
        "optimizer": name_of(optimizer),
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "optimizer_options": dict(optimizer_options or {}),
        "schedule": name_of(schedule),
        "weight_average": weight_average,
        "loss": name_of(loss),
        "augment": None if augment is None else name_of(augment),
        "max_physical_batch_size": max_physical_batch_size,
        "seed": seed,
        "secure": secure,
    }
    training = _Training(
        model=model,
        loss=loss_of(loss),
        schedule=schedule_of(schedule),
        augment=augment,
        weight_average=weight_average,
        settings=settings,
        test=None if test_data is None else _Test(as_tensors(test_data), _tiers(test_budgets, test_tiers)),
        folder=None if run_folder is None else RunFolder(run_folder),
        sensitive=sensitive,
    )
    training.begin(
        optimizer_of(
            optimizer,
            (parameter for parameter in model.parameters() if parameter.requires_grad),
            learning_rate=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            options=optimizer_options or {},
        ),
        resume=resume,
        plan=planned,
        budgets=people,
        data_loader=as_tensors(data),
        record_ids=record_ids,
        record_of_person=record_of_person,
        max_physical_batch_size=max_physical_batch_size,
        seed=seed,
        secure=secure,
    )
    training.run(evaluate_every=evaluate_every, checkpoint_every=checkpoint_every, progress=progress)
    return training.finish(began)


@dataclass(frozen=True)
class _Test:
    data: Any
    tiers: np.ndarray[Any, Any] | None


class _Training:
    """One run of `fit`: an ordinary training loop around the engine, with its files."""

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        schedule: Schedule,
        augment: Callable[[Any], Any] | None,
        weight_average: float | None,
        settings: dict[str, Any],
        test: _Test | None,
        folder: RunFolder | None,
        sensitive: bool,
    ) -> None:
        self.model = model
        self.loss = loss
        self.schedule = schedule
        self.augment = augment
        self.settings = settings
        self.test = test
        self.folder = folder
        self.sensitive = sensitive
        self.bare = copy.deepcopy(
            model
        )  # as it was given: the start of every fresh model, and a place for averages
        self.start = copy.deepcopy(model.state_dict())
        self.average = None if weight_average is None else WeightAverage(model, weight_average)
        self.ended: list[
            dict[str, Tensor]
        ] = []  # models of rounds that ended, where rounds begin with a fresh model
        self.history: list[dict[str, Any]] = []
        self.seconds_before = 0.0
        self.engine = PrivacyEngine()

    # --- begin and resume --------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer, *, resume: bool, budgets: Budgets | None, **options: Any) -> None:
        """Make everything private, and take up an earlier run where that is wanted."""
        folder = self.folder
        if folder is not None and folder.finished:
            fail(
                f"Expected a folder without a finished run. Got run_folder={str(folder.path)!r}, where one ended."
            )
        if folder is not None and folder.begun and not resume:
            fail(
                f"Expected a new folder, or resume=True to go on with the run that was begun in "
                f"run_folder={str(folder.path)!r}. Got resume=False."
            )
        if resume and folder is None:
            fail("Expected run_folder, to know what to resume. Got None.")
        self.budgets = budgets
        self.model.train()
        self.engine.make_private(
            module=self.model,
            optimizer=optimizer,
            budgets=budgets,
            on_fresh_model=self._fresh_model,
            **options,
        )
        self.plan = self.engine.plan
        self.device = next(self.model.parameters()).device
        self.learning_rates = [group["lr"] for group in self.engine.optimizer.param_groups]
        self.probed = False
        if folder is None:
            return
        if folder.begun:
            self.engine.resume(folder.checkpoint, training=self)
        elif self.engine.ranks.first:
            folder.write_plan(self.plan)
            folder.write_settings({**self.settings, "plan": self.plan.digest, "versions": versions()})
        self.engine.keep_journal(folder.path / "checkpoint.journal")
        if self.engine.steps_taken == 0:
            # The key is safe on disk before the first noise is given out.
            self.engine.save(folder.checkpoint, training=self)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the engine's own part."""
        return {
            "settings": self.settings,
            "history": self.history,
            "ended": self.ended,
            "start": self.start if any(r.fresh_model for r in self.plan.rounds[1:]) else {},
            "average": None if self.average is None else (self.average.average, self.average.steps),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        from pdpsgd.resuming import check_same_run

        check_same_run(
            plain(state["settings"]), plain(self.settings), place=str(self.folder and self.folder.checkpoint)
        )
        self.history = state["history"]
        self.ended = state["ended"]
        self.start = state["start"] or self.start
        self.seconds_before = state["seconds"]
        if self.average is not None:
            self.average.load(*state["average"])

    @property
    def seconds(self) -> float:
        """How long the run took up to now, over all its parts."""
        return (
            self.seconds_before + time.monotonic() - self.began
            if hasattr(self, "began")
            else self.seconds_before
        )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, evaluate_every: int | None, checkpoint_every: int | None, progress: bool) -> None:
        """Take the plan's remaining steps."""
        engine, optimizer = self.engine, self.engine.optimizer
        self.began = self.saved = time.monotonic()
        log: list[dict[str, Any]] = []
        show = progress and engine.ranks.first
        with (
            ProgressBar(self.plan, show=show, begin=engine.steps_taken) as bar,
            _interruptible() as interrupted,
        ):
            for batch in engine.loader:
                self._set_learning_rate(engine.steps_taken)
                loss = self._backward(batch)
                optimizer.step()
                if self.sensitive:
                    log.append({"step": engine.steps_taken, "batch_size": _size(batch), "loss": loss})
                if not optimizer.took_step:
                    continue
                if self.average is not None:
                    self.average.update()
                done = engine.steps_taken
                last = done == self.plan.steps
                if evaluate_every and (done % evaluate_every == 0 or last):
                    bar.accuracy(self._note(done))
                bar.step(done, last=last)
                if self.folder is not None and (
                    interrupted.is_set() or self._checkpoint_is_due(done, checkpoint_every)
                ):
                    self._save(log)
                if interrupted.is_set():
                    break
        if interrupted.is_set() and engine.steps_left:
            raise KeyboardInterrupt(self._how_to_resume())
        self._write_sensitive(log)

    def _backward(self, batch: Any) -> float | None:
        inputs, targets = (to_device(part, self.device) for part in batch)
        if self.augment is not None:
            inputs = self.augment(inputs)
        if _size(batch) == 0:
            return None  # nobody was drawn: the step is noise alone
        if not self.probed:
            self.engine.check(self.loss, inputs, targets)
            self.probed = True
        self.engine.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) if self.sensitive else None

    def _set_learning_rate(self, step: int) -> None:
        begin, end = self._span(step)
        factor = self.schedule((step - begin) / (end - begin))
        for group, rate in zip(self.engine.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor

    def _span(self, step: int) -> tuple[int, int]:
        """First step, and end, of the model that this step trains."""
        begin, end, at = 0, self.plan.steps, 0
        for index, r in enumerate(self.plan.rounds):
            if r.fresh_model and index > 0:
                if at <= step:
                    begin = at
                else:
                    end = at
                    break
            at += r.steps
        return begin, end

    def _fresh_model(self, index: int) -> None:
        """A round begins with a fresh model: keep the one that ended, and start again from the beginning."""
        self.ended.append({name: value.clone() for name, value in self._state_to_keep().items()})
        self.model.load_state_dict(self.start)
        if self.average is not None:
            self.average.restart()

    def _state_to_keep(self) -> dict[str, Tensor]:
        if self.average is None:
            return self.model.state_dict()
        self.bare.load_state_dict(self.model.state_dict())
        self.average.write_to(self.bare)
        return self.bare.state_dict()

    def _note(self, done: int) -> float | None:
        """Evaluate on test people and keep the figures."""
        record: dict[str, Any] = {"step": done, "learning_rate": self.engine.optimizer.param_groups[0]["lr"]}
        accuracy = None
        if self.test is not None:
            self.bare.load_state_dict(self._state_to_keep())
            found = evaluate(self.bare, self.test.data, self.loss, tiers=self.test.tiers)
            accuracy = found.accuracy
            record |= {"test_loss": found.loss, "test_accuracy": accuracy}
            record |= {"by_tier": {tier: share.accuracy for tier, share in found.by_tier.items()}}
        self.history.append(record)
        return accuracy

    # --- files -------------------------------------------------------------------------------------------------------

    def _checkpoint_is_due(self, done: int, every: int | None) -> bool:
        if every is not None:
            return done % every == 0
        if self.engine.ranks.world_size > 1:
            return done % 100 == 0  # clocks differ, and all ranks must save at the same step
        return time.monotonic() - self.saved > SECONDS_BETWEEN_CHECKPOINTS

    def _save(self, log: list[dict[str, Any]]) -> None:
        assert self.folder is not None
        self.engine.save(self.folder.checkpoint, training=self)
        self.saved = time.monotonic()
        if self.engine.ranks.first:
            self.folder.write_history(self.history)
        self._write_sensitive(log)

    def _write_sensitive(self, log: list[dict[str, Any]]) -> None:
        if log and self.folder is not None and self.engine.ranks.first:
            self.folder.add_sensitive(log)
        log.clear()

    def _how_to_resume(self) -> str:
        done, steps = self.engine.steps_taken, self.plan.steps
        if self.folder is None:
            return f"Interrupted after step {done} of {steps}. Nothing was saved: there was no run_folder."
        return (
            f"Interrupted after step {done} of {steps}. Everything is saved: resume with the same call and resume=True "
            f"(run_folder={str(self.folder.path)!r})."
        )

    def finish(self, began: float) -> TrainingResult:
        """Put the result together, write it, and forget the key."""
        engine = self.engine
        if self.average is not None:
            self.average.write_to(self.model)
        models = self._models()
        weights = [weight for weight, _ in models]
        model = self.model if len(models) == 1 else WeightedModels([m for _, m in models], weights)
        release_note = engine.release_note
        engine.ranks.check_same(model=engine.ranks.world_size > 1 and _bits(self.model))
        result = TrainingResult(
            model=model,
            plan=self.plan,
            spent=tuple(
                Spent(level.proven_epsilon, level.delta) if level.proven_epsilon is not None else spent
                for level, spent in zip(self.plan.levels, self._spent(), strict=True)
            ),
            evaluation=None
            if self.test is None
            else evaluate(model, self.test.data, self.loss, tiers=self.test.tiers),
            history=tuple(self.history),
            models=tuple(models),
            settings=self.settings,
            versions=versions(),
            seconds=round(self.seconds_before + time.monotonic() - began, 1),
            release_note=release_note,
            run_folder=None if self.folder is None else self.folder.path,
        )
        if self.folder is not None and engine.ranks.first:
            self.folder.write_history(self.history)
            self.folder.write_model(model)
            if self.budgets is not None:
                self.folder.write_promises(self.plan, self.budgets)
            self.folder.write_result(result.to_dict())
            erase_key(self.folder.checkpoint)
        engine.close()
        return result

    def _spent(self) -> Sequence[Spent]:
        """Spending by the accountant, only where the plan itself has no proven figure."""
        if all(level.proven_epsilon is not None for level in self.plan.levels):
            return [Spent(0.0, level.delta) for level in self.plan.levels]
        return self.engine.spent()

    def _models(self) -> list[tuple[float, nn.Module]]:
        """The models of rounds that began afresh, and the last one, with their weights."""
        ends = [index for index, r in enumerate(self.plan.rounds) if index > 0 and r.fresh_model]
        models: list[tuple[float, nn.Module]] = []
        for end, state in zip(ends, self.ended, strict=True):
            ended = copy.deepcopy(self.bare)
            ended.load_state_dict(state)
            models.append((round_weight(self.plan, end - 1), ended))
        return [*models, (round_weight(self.plan, len(self.plan.rounds) - 1), self.model)]


def versions() -> dict[str, str]:
    """What the run was made with."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    for name in ("pdpsgd", "dp-accounting"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def as_tensors(data: Any) -> Any:
    """Arrays in a pair become tensors; everything else stays."""
    if isinstance(data, (tuple, list)):
        return tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data)
    return data


def _plan_of(plan: Plan | None, budgets: Any, **options: Any) -> tuple[Plan, Budgets | None]:
    from pdpsgd.budgets import Budgets

    people = budgets if budgets is None or isinstance(budgets, Budgets) else Budgets(budgets)
    if plan is not None:
        return plan, people
    if people is None:
        fail("Expected budgets (what each person allows), or a plan that knows its people. Got neither.")
    from pdpsgd.planning import plan as make_plan

    return make_plan(people, **options), people


def _tiers(budgets: Budgets | None, tiers: ArrayLike | None) -> np.ndarray[Any, Any] | None:
    if budgets is not None and tiers is not None:
        fail("Expected test_budgets or test_tiers, not both.")
    if budgets is not None:
        return budgets.epsilon
    return None if tiers is None else np.asarray(tiers)


def _size(batch: Any) -> int:
    targets = batch[-1]
    return len(targets)


def _bits(module: nn.Module) -> str:
    from pdpsgd.distributed import digest_of_module

    return digest_of_module(module)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C end the step in hand first; a second Ctrl-C ends at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
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
