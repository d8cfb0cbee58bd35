"""The options of a run, defined once for `fit`, the command line and presets.

An option has a help text, a default and a panel of the command line's help. Once options are made, each value also
has a source: "given" (by the caller or on the command line), "file" (`--config`), "preset" or "default".

>>> options = TrainingOptions(preset="mnist", steps=300)
>>> options.steps, options.batch_size, options.weight_decay
(300, 1024, 0.0)
>>> [options.sources[name] for name in ("steps", "batch_size", "weight_decay")]
['given', 'preset', 'default']
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdpsgd.errors import fail, shown
from pdpsgd.training.presets import preset as find_preset

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.components import Augment, Loss, Schedule

PLAN = "Plan"
TRAINING = "Model and training"
OUTPUT = "Output"

ACCOUNTABLE = ("purpose", "operator", "contact")
"""Options that say what a run is for and who answers for it: on its page, and in letters to its people."""
LONGEST_LINE = 500
SAID = ("given", "file")
"""Sources of values that somebody chose for this run."""

Made = TypeVar("Made", bound="Options")


def check_one_line(name: str, value: Any) -> None:
    """Refuse a text for people that is empty, long, or more than a line; None is none."""
    if value is None:
        return
    if (
        not isinstance(value, str)
        or not value.strip()
        or not value.isprintable()
        or len(value) > LONGEST_LINE
    ):
        fail(f"Expected {name} to be a line of text, {LONGEST_LINE} characters at most. Got {shown(value)}.")


@dataclass(frozen=True)
class Option:
    """One option: its default and how the command line offers it.

    `kind` is its type on the command line (None: there is no such option there), `names` its spellings where they are
    not simply the field's name, `shown` the text that help shows as its default.
    """

    default: Any
    help: str
    panel: str
    kind: Any = str
    names: tuple[str, ...] = ()
    shown: str | bool = True
    least: int | None = None


class _NotSaid:
    def __repr__(self) -> str:
        return "not said"


NOT_SAID: Any = _NotSaid()


def option(default: Any, help: str, *, panel: str, kind: Any = str, **more: Any) -> Any:
    """Declare a field of an options class; it is `NOT_SAID` until its value is found."""
    shown = more.pop("shown", default is not None)
    return field(
        default=NOT_SAID, metadata={"option": Option(default, help, panel, kind, shown=shown, **more)}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Values that know where they come from: what is said, then a preset, then defaults."""

    from_file: InitVar[Collection[str]] = ()
    sources: Mapping[str, str] = field(init=False, repr=False, compare=False)
    late: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self, from_file: Collection[str]) -> None:
        object.__setattr__(self, "sources", {})
        object.__setattr__(self, "late", {})
        for name in self.declared():
            if (value := getattr(self, name)) is not NOT_SAID:
                self._set(name, value, "file" if name in from_file else "given")
        recommended = self._recommended()
        for name, known in self.declared().items():
            if name in self.sources:
                continue
            if name in recommended:
                self._set(name, recommended[name], "preset")
            else:
                self._set(name, known.default, "default")

    @classmethod
    def declared(cls) -> dict[str, Option]:
        """Name all options, in the order in which they are declared."""
        return {each.name: each.metadata["option"] for each in fields(cls) if "option" in each.metadata}

    def said(self, name: str) -> bool:
        """Tell whether somebody chose this value for the run, rather than a preset or a default."""
        return self.sources[name] in SAID

    def changed(self: Made, **values: Any) -> Made:
        """Make options in which these values are given as well; presets and defaults follow anew."""
        kept = {name: getattr(self, name) for name in self.sources if self.said(name) and name not in values}
        from_file = [name for name in kept if self.sources[name] == "file"]
        return type(self)(**kept, **values, from_file=from_file).with_defaults(**self.late)

    def with_defaults(self: Made, **values: Any) -> Made:
        """Make options in which these defaults, known only now, take the place of the declared ones."""
        made = copy.copy(self)
        object.__setattr__(made, "late", {**self.late, **values})
        for name, value in values.items():
            if self.sources[name] == "default":
                object.__setattr__(made, name, value)
        return made

    def fixed(self: Made, **values: Any) -> Made:
        """Make options with these values, which follow from others and have no source of their own."""
        made = copy.copy(self)
        object.__setattr__(made, "sources", {**self.sources, **dict.fromkeys(values, "default")})
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def _only_one_of(self, first: str, second: str, expected: str) -> None:
        """Refuse two options of which one is enough; what is given now wins over what a file or an earlier run says."""
        names = [name for name in (first, second) if getattr(self, name) != self.declared()[name].default]
        given = [name for name in names if self.sources[name] == "given"]
        if len(names) == 2 and len(given) != 1:
            fail(f"{expected} Got both.")
        for name in names if len(names) == 2 else ():
            if name not in given:
                self._set(name, self.declared()[name].default, "default")

    def _recommended(self) -> Mapping[str, Any]:
        """Values of the preset, if one was chosen."""
        return {}

    def _set(self, name: str, value: Any, source: str) -> None:
        object.__setattr__(self, name, value)
        self.sources[name] = source  # type: ignore[index]  # a dict, until the options are made


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """What `plan` is asked for."""

    mechanism: str = option(
        "pdp-sgd-exact", "mechanism, such as dp-sgd, sampling, pdp-sgd-exact, idp-scale", panel=PLAN
    )
    steps: int | None = option(None, "total number of steps", panel=PLAN, kind=int, shown="300")
    batch_size: float | None = option(
        None,
        "expected batch size (people per step)",
        panel=PLAN,
        kind=float,
        shown="by what people allow",
    )
    accountant: str | None = option(
        None, "pld (tight), rdp, or gdp (an approximation that proves nothing)", panel=PLAN, shown="pld"
    )
    max_grad_norm: float | None = option(
        None,
        "clipping norm of per-example gradients",
        panel=PLAN,
        kind=float,
        shown="1, or by what people allow",
    )
    rounds: int | None = option(
        None, "maximum number of rounds, for mechanisms with thresholds", panel=PLAN, kind=int
    )
    noise_multiplier: float | None = option(
        None, "fixed noise multiplier; the number of steps follows", panel=PLAN, kind=float
    )
    drawn: str = option("step", "sampling of people at every 'step', or once per 'round'", panel=PLAN)
    weights: tuple[float, float] | None = option(
        None, "w1,w2 of the threshold's loss, as in 0.7,0.3", panel=PLAN
    )
    threshold_loss: str | None = option(None, "adaptive or adaptive-as-printed", panel=PLAN)
    exclude_below: float | None = option(
        None, "for dp-sgd-exclude, the smallest epsilon of those who take part", panel=PLAN, kind=float
    )
    filter_noise: float | None = option(
        None,
        "for pdp-gd-filter, noise as a share of what lasts to the end",
        panel=PLAN,
        kind=float,
        shown="0.9",
    )
    gamma: float = option(
        1.0,
        "fairness, from 0 (equal influence) to 1 (all that people allow)",
        panel=PLAN,
        kind=float,
    )
    gamma_from: float | None = option(
        None, "epsilon above which gamma draws budgets together", panel=PLAN, kind=float, shown="the smallest"
    )
    max_levels: int = option(256, "maximum number of privacy levels", panel=PLAN, kind=int)
    parameters: int | None = option(None, "number of parameters of the network", panel=PLAN, kind=None)

    def make_plan(self, budgets: Budgets, *, history: Sequence[Plan] = (), **more: Any) -> Plan:
        """Compute the plan for these people.

        Args:
            budgets: What each person allows.
            history: Plans that were run on these people before.
            more: Further arguments of `pdpsgd.plan`; they come first.

        Returns:
            The plan, with what it proves for every level.
        """
        from pdpsgd.planning.planner import plan

        asked: dict[str, Any] = {
            "mechanism": self.mechanism,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "accountant": self.accountant,
            "max_grad_norm": self.clipping_norm(budgets),
            "rounds": self.rounds,
            "noise_multiplier": self.noise_multiplier,
            "drawn": self.drawn,
            "weights": self.weights,
            "loss": self.threshold_loss,
            "exclude_below": self.exclude_below,
            "filter_noise": self.filter_noise,
            "gamma": self.gamma,
            "gamma_from": self.gamma_from,
            "max_levels": self.max_levels,
            "history": history,
        }
        return plan(budgets, **(asked | more))

    def clipping_norm(self, budgets: Budgets) -> float:
        """Return the clipping norm that was said, or one that suits these people and the network, if it is known."""
        from pdpsgd.planning.defaults import CLIPPING_NORM, default_clipping_norm
        from pdpsgd.planning.levels import make_levels

        if self.max_grad_norm is not None:
            return self.max_grad_norm
        if self.parameters is None:
            return CLIPPING_NORM
        return default_clipping_norm(make_levels(budgets)[0], self.parameters)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(PlanOptions):
    """How a run plans, trains and what it leaves behind; every field is an argument of `fit`, or of its `plan_options`.

    A preset says what nobody else says. Two values follow from others: a given noise multiplier leaves the number of
    steps open, and without an augmentation there is one view of each record.
    """

    preset: str | None = option(
        None, "named recipe: mnist, fashion-mnist, svhn, with -scattering or -drawn", panel=TRAINING
    )
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] = option(
        "sgd", "sgd, adam, adamw, rmsprop or adagrad", panel=TRAINING
    )
    optimizer_options: Mapping[str, Any] = option(
        {},
        "further argument of the optimizer, as in nesterov=true (repeatable)",
        panel=TRAINING,
        kind=list[str],
        names=("--optimizer-option",),
        shown=False,
    )
    learning_rate: float | None = option(
        None,
        "learning rate",
        panel=TRAINING,
        kind=float,
        names=("--learning-rate", "--lr"),
        shown="by the plan's noise",
    )
    momentum: float = option(0.0, "momentum, for sgd and rmsprop", panel=TRAINING, kind=float)
    weight_decay: float = option(0.0, "weight decay", panel=TRAINING, kind=float)
    schedule: str | Schedule = option(
        "cosine", "learning rate schedule: cosine, linear or constant", panel=TRAINING
    )
    start: str | PathLike[str] | None = option(
        None, "earlier run, or .safetensors file, whose weights are the first", panel=TRAINING, kind=Path
    )
    weight_average: float | None = option(
        None, "decay of a moving average of the weights, as in 0.99", panel=TRAINING, kind=float
    )
    calibrate: Any = option(
        None,
        "calibration: file of people outside the list, or 'steps' (the last)",
        panel=TRAINING,
        shown="no calibration",
    )
    loss: str | Loss = option(
        "cross-entropy",
        "cross-entropy, binary-cross-entropy or squared-error",
        panel=TRAINING,
        shown="by the task",
    )
    task: str | None = option(None, "classification or regression", panel=TRAINING, kind=None)
    label_range: tuple[float, float] | None = option(
        None, "public range of a label that is a number", panel=TRAINING, kind=None
    )
    augment: str | Augment | None = option(
        None, "augmentation: shifts (two pixels), none, or module:function", panel=TRAINING
    )
    views: int = option(
        1, "augmented views per record, averaged before clipping", panel=TRAINING, kind=int, least=1
    )
    records_per_person: int | None = option(
        None,
        "records of a person per step, at most, where people have many",
        panel=TRAINING,
        kind=int,
        shown="one record each",
    )
    max_physical_batch_size: int | None = option(
        None,
        "records in memory at once; does not change results",
        panel=TRAINING,
        kind=int,
        shown="512 on CPUs",
    )
    device: str | None = option(
        None, "cpu, cuda, cuda:N, or auto: a GPU if there is one", panel=TRAINING, shown="where the model is"
    )
    evaluate_every: int | None = option(
        None, "steps between evaluations on test people", panel=TRAINING, kind=int, shown="steps / 20"
    )
    seed: int | None = option(None, "seed for a repeatable run; not for release", panel=TRAINING, kind=int)
    secure: bool = option(
        True,
        "cryptographic generator; without it, not for release",
        panel=TRAINING,
        kind=bool,
        names=("--secure/--no-secure",),
    )
    purpose: str | None = option(None, "what the model is for, in a sentence", panel=OUTPUT)
    operator: str | None = option(None, "who trains and answers for it", panel=OUTPUT)
    contact: str | None = option(None, "whom people may ask: address, phone or page", panel=OUTPUT)
    run_folder: str | PathLike[str] | None = option(
        None, "output folder", panel=OUTPUT, kind=Path, shown="a new one in runs/"
    )
    resume: bool = option(
        False, "continuation of the run in --run-folder", panel=OUTPUT, kind=bool, shown=False
    )
    checkpoint_every: int | None = option(
        None, "steps between checkpoints", panel=OUTPUT, kind=int, shown="one per minute"
    )
    sensitive: bool = option(
        False,
        "log of batch sizes and training losses, not for publishing",
        panel=OUTPUT,
        kind=bool,
        shown=False,
    )
    keep_norms: bool = option(
        False,
        "sums of each person's gradient norms, for audit --individual",
        panel=OUTPUT,
        kind=bool,
        names=("--keep-norms",),
        shown=False,
    )
    ledger: Any = option(None, "ledger of these people", panel=PLAN, kind=None)
    spend: str | float = option("0.25", "share of what people have left in the ledger", panel=PLAN, kind=None)
    progress: bool = option(True, "progress bar on the error stream", panel=OUTPUT, kind=None)
    plan_options: Mapping[str, Any] = option({}, "further arguments of pdpsgd.plan", panel=PLAN, kind=None)

    def __post_init__(self, from_file: Collection[str]) -> None:
        super().__post_init__(from_file)
        noise_is_fixed = self.said("noise_multiplier") or "noise_multiplier" in self.plan_options
        if noise_is_fixed and not self.said("steps"):
            self._set("steps", None, "default")
        if self.augment in (None, "none") and not self.said("views"):
            self._set("views", 1, "default")
        if isinstance(self.views, bool) or not isinstance(self.views, int) or self.views < 1:
            fail(f"Expected views to be a whole number >= 1. Got {self.views!r}.")
        for name, least in (("records_per_person", 1), ("checkpoint_every", 1), ("evaluate_every", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                fail(f"Expected {name} to be a whole number >= {least}, or None. Got {shown(value)}.")
        for name in ACCOUNTABLE:
            check_one_line(name, getattr(self, name))
        if self.views > 1 and self.augment in (None, "none"):
            fail(f"Expected augment, to make several views of a record. Got views={self.views!r} without it.")

    def check_choices(self) -> None:
        """Refuse unknown names, and settings that the optimizer refuses, before anything is charged or written."""
        import torch

        from pdpsgd.training.components import augment_of, loss_of, optimizer_of, schedule_of
        from pdpsgd.training.devices import device_of

        if self.device is not None:
            device_of(self.device)
        loss_of(self.loss)
        schedule_of(self.schedule)
        augment_of(self.augment)
        if not callable(self.optimizer):
            optimizer_of(
                self.optimizer,
                [torch.nn.Parameter(torch.zeros(1))],
                learning_rate=1.0 if self.learning_rate is None else self.learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                options=self.optimizer_options,
            )

    def plan_or(self, plan: Plan | None, budgets: Budgets | None) -> Plan:
        """Check a ready plan against these options, or compute one.

        A preset's learning rate belongs to its clipping norm, so with another norm it has to be given too.
        """
        norm = self.max_grad_norm if plan is None else plan.max_grad_norm
        if self.preset is not None and self.sources["learning_rate"] == "preset":
            belongs = self._recommended()["max_grad_norm"]
            if norm is not None and norm != belongs:
                fail(
                    f"Expected max_grad_norm={belongs:g}, to which the learning rate of preset {self.preset!r} "
                    f"belongs, or a learning_rate of your own. Got max_grad_norm={norm:g}."
                )
        if plan is not None:
            return plan
        if budgets is None:
            fail("Expected budgets (what each person allows), or a plan that knows its people. Got neither.")
        return self.make_plan(budgets, **self.plan_options)

    def description(self) -> dict[str, Any]:
        """Describe, for the settings of the run, what these options know beside how to train."""
        known = {name: getattr(self, name) for name in ACCOUNTABLE}
        return {name: value for name, value in known.items() if value is not None}

    def _recommended(self) -> Mapping[str, Any]:
        chosen = self.preset
        return {} if chosen is NOT_SAID or chosen is None else find_preset(chosen).fit_options()
