"""One call from people's budgets to a trained model: `fit`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.checks.augmentation import check_augment
from pdpsgd.engine.distributed import is_first_rank
from pdpsgd.engine.fingerprints import digest_of_module
from pdpsgd.engine.privacy_engine import PrivacyEngine, Spent
from pdpsgd.errors import fail, warn
from pdpsgd.ledger import Ledger
from pdpsgd.models.networks import count_parameters
from pdpsgd.planning.mechanisms.least_squares import NAME as LEAST_SQUARES
from pdpsgd.training.booking import book, put_in_order_of, settle, under
from pdpsgd.training.components import (
    Augment,
    Loss,
    Schedule,
    augment_of,
    loss_of,
    name_of,
    optimizer_of,
    schedule_of,
    summed_loss,
)
from pdpsgd.training.devices import move
from pdpsgd.training.ensemble import WeightedModels
from pdpsgd.training.evaluation import Evaluation
from pdpsgd.training.inputs import TrainingInputs, as_tensors, inputs_of, shape_of
from pdpsgd.training.learning_rate import with_learning_rate
from pdpsgd.training.least_squares import ONE_STEP, LeastSquares
from pdpsgd.training.leftovers import plain_attributes, remove_leftovers
from pdpsgd.training.model_description import ModelDescription, NetworkDescription
from pdpsgd.training.options import TrainingOptions
from pdpsgd.training.other_people import check_other_people
from pdpsgd.training.probability_calibration import BY_STEPS, calibration_of, check_calibration, outputs_of
from pdpsgd.training.run_folder import RunFolder
from pdpsgd.training.start import Start, find_start
from pdpsgd.training.tasks import with_task
from pdpsgd.training.temperature import Calibration
from pdpsgd.training.temperature_by_steps import PrivateCalibration
from pdpsgd.training.trainer import HeldOutPeople, Trainer
from pdpsgd.training.versions import versions

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from pdpsgd.ledger import ReservedRun
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.verdict import Verdict


CACHE_FRIENDLY = 512
"""Records that go through a model together on a processor: more fall out of its cache, which takes longer."""


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A trained model, what it cost each level, and how good it is.

    Public things only, except `seconds`: the time depends on how many records people hold. No file has it.

    `models` are the models that `model` combines, with their weights, where the plan trained several.
    `verdict` says whether the promise holds for all, for all but some, or nothing of this is for release.
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
    verdict: Verdict
    run_folder: Path | None
    ledger: Mapping[str, Any] | None = None
    """The run's place in a ledger, and what it took of what people allow over all runs, by tier."""
    calibration: Calibration | None = None
    """Temperature and biases that belong after the model; figures on test people are with them."""

    @property
    def release_note(self) -> str | None:
        """Why nothing of this is for release; None if nothing speaks against it."""
        return self.verdict.note

    @property
    def accuracy(self) -> float | None:
        """Share of the test people that the model gets right."""
        return None if self.evaluation is None else self.evaluation.accuracy

    @property
    def accuracy_by_tier(self) -> dict[str, float]:
        """The same by the tier of the test people, where it is known."""
        return {} if self.evaluation is None else {k: v.accuracy for k, v in self.evaluation.by_tier.items()}

    @property
    def rmse(self) -> float | None:
        """Root of the mean squared error on test people, in the unit of a label that is a number."""
        errors = None if self.evaluation is None else self.evaluation.errors
        return None if errors is None else errors.rmse

    def to_dict(self) -> dict[str, Any]:
        """Return the result without the models, as plain data."""
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
            "verdict": self.verdict.to_dict(),
            "release_note": self.release_note,
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "levels": levels,
            "models": len(self.models),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "versions": dict(self.versions),
            **({} if self.ledger is None else {"ledger": dict(self.ledger)}),
        }


def fit(
    model: nn.Module,
    data: Any,
    budgets: Budgets | ArrayLike | None = None,
    *,
    options: TrainingOptions | None = None,
    plan: Plan | None = None,
    preset: str | None = None,
    mechanism: str | None = None,
    steps: int | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | None = None,
    accountant: str | None = None,
    plan_options: Mapping[str, Any] | None = None,
    record_ids: ArrayLike | None = None,
    record_of_person: ArrayLike | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    learning_rate: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: str | Schedule | None = None,
    start: str | os.PathLike[str] | None = None,
    weight_average: float | None = None,
    calibrate: Any = None,
    loss: str | Loss | None = None,
    task: str | None = None,
    label_range: tuple[float, float] | None = None,
    augment: str | Augment | None = None,
    views: int | None = None,
    records_per_person: int | None = None,
    test_data: Any = None,
    test_budgets: Budgets | None = None,
    test_tiers: ArrayLike | None = None,
    test_ids: ArrayLike | None = None,
    evaluate_every: int | None = None,
    max_physical_batch_size: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    secure: bool | None = None,
    run_folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool | None = None,
    sensitive: bool | None = None,
    keep_norms: bool | None = None,
    purpose: str | None = None,
    operator: str | None = None,
    contact: str | None = None,
    progress: bool | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    spend: str | float | None = None,
    reservation: ReservedRun | None = None,
) -> TrainingResult:
    """Plan, train privately, evaluate: one call.

    Guarantee: the returned model, and everything else in the result and in `public/` of the run folder, gives every
    person of level l the (epsilon_l, delta_l) that the plan proves for it, provided that `loss`, `augment` and the
    model treat examples one by one (a probe refuses what it can see of the opposite) and that settings were not
    chosen by looking at the private data.

    Args:
        model: The network to train, in place.
        data: A pair of arrays or tensors (inputs, targets), a dataset, a data loader, or what `load_people` gives.
        budgets: What each person allows. By default person i has record i.
        options: All further options in one value; those below come first. None means: not said, so that the preset
            or the default of `TrainingOptions` decides.
        plan: A ready plan, instead of one computed from `mechanism`, `steps`, `batch_size`, `max_grad_norm`,
            `accountant` and `plan_options`.
        preset: A named recipe (`pdpsgd.training.presets`) for what is not said here.
        mechanism: The mechanism that turns budgets into sampling rates and noise, "pdp-sgd-exact" by default.
        steps: The total number of steps, 300 by default.
        batch_size: The expected batch size, by default one that suits what people allow (docs/choosing.md).
        max_grad_norm: The clipping norm of per-example gradients, by default one that suits what people allow and the
            size of the network (docs/choosing.md).
        accountant: "pld" (default), "rdp", or "gdp", which proves nothing.
        plan_options: Further arguments of `pdpsgd.plan`.
        record_ids: The person of each record, by their id in `budgets`.
        record_of_person: The record of each person on the list; -1 where there is none.
        optimizer: A name ("sgd" by default), or a function from parameters to an optimizer.
        learning_rate: The learning rate, by default what suits the plan's noise and the network (docs/choosing.md). One
            that is far from that is warned of.
        momentum: Momentum, 0 by default.
        weight_decay: Weight decay, 0 by default.
        optimizer_options: Further arguments of the optimizer.
        schedule: A name ("cosine" by default), or a function from the share of steps done to a factor of the rate.
        start: An earlier run, or a safetensors file, whose weights the model begins with. The settings say which; a
            model that is not for release makes this one so.
        weight_average: The decay of a moving average of the weights, which then are the model's.
        calibrate: Other people, (inputs, targets), on whom temperature and a bias per class are fitted after training;
            or "steps": the last tenth of the plan's steps fit them instead, at no further cost.
        loss: A name ("cross-entropy" by default, "squared-error" for a regression), or a function of outputs and
            targets: the mean over examples.
        task: "regression" where targets are numbers; by default they are classes, or what a schema says.
        label_range: The public range of targets that are numbers: it is mapped to [-1, 1] for training, what lies
            outside counts as its nearer end, and figures and predictions are in the targets' own unit.
        augment: "shifts" (images, by up to two pixels), "none" (for a preset that has one), or a function that changes
            a batch of inputs example by example.
        views: Augmented views of each record, whose gradients are averaged before clipping (augmentation multiplicity).
        records_per_person: K, where people have many records (repeated `record_ids`): of a person who is sampled, K
            take part at most, chosen afresh each time, and their mean gradient is clipped as a whole.
        test_data: Other people, never on the list.
        test_budgets: What the test people allow, which names the tier of each.
        test_tiers: The tier of each test person.
        test_ids: The person of each test record, where people have many: all of them are tested on.
        evaluate_every: Steps between evaluations on test people; by default only the last model is evaluated.
        max_physical_batch_size: Examples that go through the model together (a record counts once per view). Changes
            memory and speed, not results. By default 512 on CPUs, and the whole batch on other devices.
        device: "cpu", "cuda", "cuda:N" or "auto": the model is moved there. By default it stays where it is.
        seed: Makes the run repeatable, and so not for release.
        secure: Whether sampling and noise come from a cryptographic generator (default); not for release without.
        run_folder: Where the run leaves its plan, model, promises and figures, and checkpoints to resume from.
        checkpoint_every: Steps between checkpoints; by default one is written every minute.
        resume: Whether to continue the run in `run_folder`.
        sensitive: Whether to log batch sizes and training losses, in `private/` of the run folder.
        keep_norms: Whether to add up the norms of each person's gradients, in `private/` of the run folder, for
            `pdpsgd audit --individual`. Changes nothing that is released.
        purpose: What the model is for, in a sentence: for the run's page and for letters to its people.
        operator: Who trains and answers for it.
        contact: Whom people may ask: an address, a phone number, a page.
        progress: Whether to show a progress bar (default).
        ledger: The ledger of these people, or its place. The run is reserved there, started before the first record
            is read, and finished at the end; `budgets` then say what people allow over all runs together.
        spend: What the run takes of what people have left there: "0.25" (default), "1 of 12" of the whole, or "all".
        reservation: A run that is reserved already (`Ledger.hold`), instead of `ledger` and `spend`.

    Returns:
        The trained model, what it cost each level, and how good it is on the test people.

    Raises:
        PdpsgdError: If budgets, plan, data, model or options cannot keep the promise, or do not fit together.
        KeyboardInterrupt: After Ctrl-C, once the current step is complete; says how to resume.
    """
    given = {k: v for k, v in locals().items() if v is not None and k in TrainingOptions.declared()}
    chosen = (options or TrainingOptions()).changed(**given)
    inputs = inputs_of(
        data,
        budgets,
        record_ids=record_ids,
        record_of_person=record_of_person,
        test_data=test_data,
        test_budgets=test_budgets,
        test_tiers=test_tiers,
        test_ids=test_ids,
    )
    inputs, chosen = with_task(inputs, chosen)
    if isinstance(chosen.calibrate, (tuple, list)):
        inputs = replace(inputs, calibration_data=as_tensors(tuple(chosen.calibrate)))
    chosen.check_choices()
    if chosen.keep_norms and chosen.run_folder is None:
        fail("Expected run_folder, to keep norms in its private/. Got None.")
    check_calibration(chosen, inputs)
    check_other_people(inputs, by_values=False)
    known = plan if reservation is None else reservation.plan
    solving = (chosen.mechanism if known is None else known.mechanism) == LEAST_SQUARES
    if not solving:
        chosen = chosen.with_defaults(parameters=count_parameters(model))
    origin = None if solving else _start(model, inputs, chosen)
    move(model, chosen.device)
    solved = LeastSquares.of(model, chosen) if solving else None
    with _in_use(chosen.run_folder, again=reservation is not None):
        if reservation is None and chosen.ledger is not None:
            reservation = _book(model, inputs, plan, chosen)
        with under(reservation, None if chosen.run_folder is None else RunFolder(chosen.run_folder)):
            if reservation is not None:
                put_in_order_of(inputs.budgets, reservation)
            made = chosen.plan_or(plan, inputs.budgets) if reservation is None else reservation.plan
            if solved is None:
                chosen = with_learning_rate(chosen, made, model)
            trainer = _trainer(model, inputs, made, chosen, reservation, origin, solved)
            if reservation is not None:
                check_other_people(inputs)
            trainer.run(
                evaluate_every=chosen.evaluate_every if solved is None else None,
                checkpoint_every=chosen.checkpoint_every,
                progress=chosen.progress,
            )
            try:
                return _finish(trainer, inputs, reservation, origin, solved)
            finally:
                trainer.engine.close()


def _in_use(folder: str | os.PathLike[str] | None, *, again: bool) -> AbstractContextManager[None]:
    """Keep other processes out of the run folder; among ranks, the first does."""
    return RunFolder(folder).in_use(again=again) if folder is not None and is_first_rank() else nullcontext()


def _start(model: nn.Module, inputs: TrainingInputs, options: TrainingOptions) -> Start | None:
    """Give the model its first weights, where they come from an earlier one."""
    if options.start is None:
        return None
    origin = find_start(options.start)
    origin.check_fits(inputs)
    origin.load_into(model)
    return origin


def _book(
    model: nn.Module, inputs: TrainingInputs, plan: Plan | None, options: TrainingOptions
) -> ReservedRun:
    """Reserve the run in its ledger, or take up the reservation of the run folder."""
    ledger = options.ledger if isinstance(options.ledger, Ledger) else Ledger(options.ledger)
    folder = None if options.run_folder is None else RunFolder(options.run_folder)
    if folder is not None:
        settle(ledger, folder)
        folder.check_is_free(
            resume=options.resume, folder=f"run_folder={str(folder.path)!r}", go_on="resume=True"
        )
    if inputs.budgets is None and inputs.record_ids is None:
        fail(
            "Expected record_ids (the person of each record), or budgets in the order of the records, to know whose "
            "record is whose on the ledger's list. Got neither."
        )
    device = next((parameter.device for parameter in model.parameters()), None)
    return book(
        ledger,
        budgets=inputs.budgets,
        options=options,
        plan=plan,
        folder=folder,
        device=device,
        agree=lambda made: _warn_before_charging(made, options),
    )


def _warn_before_charging(plan: Plan, options: TrainingOptions) -> None:
    """Say what speaks against a run before anybody is charged for it; where warnings are errors, nobody is."""
    from pdpsgd.planning.advice import doubt_about_signal, outlook

    if options.parameters is None:
        return  # nothing is trained step by step
    doubt = doubt_about_signal(outlook(plan, options.parameters), options.parameters)
    if doubt is not None:
        warn(f"{doubt} People are charged for this run whatever becomes of it.")


def _trainer(
    model: nn.Module,
    inputs: TrainingInputs,
    plan: Plan,
    options: TrainingOptions,
    reservation: ReservedRun | None,
    origin: Start | None,
    solved: LeastSquares | None,
) -> Trainer:
    """Make the trainer of a run, and let it begin or resume."""
    loss, summed = loss_of(options.loss), None
    if (options.records_per_person or 1) > 1:
        summed = summed_loss(options.loss)
    if solved is not None:
        model, summed = solved.statistics, solved.loss(plan)
        options = options.fixed(**ONE_STEP)
    if reservation is None:  # a reserved run looks at no record before it has started
        check_other_people(inputs)
    folder = None if options.run_folder is None else RunFolder(options.run_folder).make()
    physical = _physical_batch_size(model, options, folder)
    augment = augment_of(options.augment)
    # A reserved run looks at no record before it has started: there the first batch is checked.
    if augment is not None and isinstance(inputs.records, tuple) and reservation is None:
        few = inputs.records[0][:4]
        check_augment(augment, few, len(few), is_cut=physical is not None)
    settings = _settings(options, max_physical_batch_size=physical)
    if origin is not None:
        settings["started_from"] = dict(origin.lineage)
    described = {**inputs.description(), **options.description()}
    trainer = Trainer(
        model=model,
        loss=loss,
        schedule=schedule_of(options.schedule),
        augment=augment,
        views=options.views,
        weight_average=options.weight_average,
        settings=settings,
        description={**described, "sources": _sources(options, {*settings, *described})},
        schema=inputs.schema,
        test=_held_out(inputs, options),
        summed_loss=summed,
        calibration=PrivateCalibration(model, outputs_of(model, inputs), plan)
        if options.calibrate == BY_STEPS
        else None,
        folder=folder,
        sensitive=options.sensitive,
    )
    assert options.learning_rate is not None  # with_learning_rate has chosen one
    optimizer = optimizer_of(
        options.optimizer,
        (parameter for parameter in model.parameters() if parameter.requires_grad),
        learning_rate=options.learning_rate,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        options=options.optimizer_options,
    )
    trainer.begin(
        optimizer,
        resume=options.resume,
        plan=plan,
        budgets=inputs.budgets if reservation is None else None,  # a reserved plan knows its people
        reservation=reservation,
        data_loader=inputs.records,
        record_ids=inputs.record_ids,
        record_of_person=inputs.record_of_person,
        views=options.views,
        records_per_person=options.records_per_person,
        max_physical_batch_size=physical,
        seed=options.seed,
        secure=options.secure,
        keep_norms=options.keep_norms,
    )
    return trainer


def _physical_batch_size(model: nn.Module, options: TrainingOptions, folder: RunFolder | None) -> int | None:
    """Choose how many examples go through the model together; a resumed run keeps to what it was begun with."""
    if options.max_physical_batch_size is not None:
        return options.max_physical_batch_size
    if options.resume and folder is not None and folder.begun:
        return folder.read_settings().get("max_physical_batch_size")
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    least = (options.records_per_person or 1) * options.views  # those of a person go together
    return max(CACHE_FRIENDLY, 1 << (least - 1).bit_length()) if on_cpu else None


def _held_out(inputs: TrainingInputs, options: TrainingOptions) -> HeldOutPeople | None:
    """Return the people to test on, and whose record is which if they have many."""
    if inputs.test_data is None:
        return None
    ids = None if options.records_per_person is None else inputs.test_ids
    return HeldOutPeople(inputs.test_data, inputs.test_tiers, ids, inputs.task, inputs.label_range)


def _settings(options: TrainingOptions, *, max_physical_batch_size: int | None) -> dict[str, Any]:
    """Name everything that the course of training depends on: a resumed run must agree with all of it."""
    augmented = augment_of(options.augment) is not None
    most = options.records_per_person
    return {
        **({} if most is None else {"records_per_person": most}),
        "optimizer": name_of(options.optimizer),
        "learning_rate": options.learning_rate,
        "momentum": options.momentum,
        "weight_decay": options.weight_decay,
        "optimizer_options": dict(options.optimizer_options),
        "schedule": name_of(options.schedule),
        "weight_average": options.weight_average,
        **({} if options.calibrate is None else {"calibrate": _calibrate_name(options)}),
        "loss": name_of(options.loss),
        "augment": name_of(options.augment) if augmented else None,
        "views": options.views,
        "max_physical_batch_size": max_physical_batch_size,
        "seed": options.seed,
        "secure": options.secure,
    }


def _calibrate_name(options: TrainingOptions) -> str:
    """Name the way probabilities are calibrated."""
    return options.calibrate if isinstance(options.calibrate, str) else "people outside the list"


def _sources(options: TrainingOptions, names: Collection[str]) -> dict[str, str]:
    """Say where the settings come from that are not left at their default."""
    return {name: source for name, source in options.sources.items() if name in names and source != "default"}


def _finish(
    trainer: Trainer,
    inputs: TrainingInputs,
    reservation: ReservedRun | None,
    origin: Start | None,
    solved: LeastSquares | None,
) -> TrainingResult:
    """Put the result together and write it; of the key nothing is left on the disk by now."""
    engine, plan, folder = trainer.engine, trainer.plan, trainer.folder
    models = trainer.models() if solved is None else [(1.0, solved.solve(plan))]
    engine.ranks.check_same(model=digest_of_module(trainer.model) if engine.ranks.world_size > 1 else "")
    model = models[0][1] if len(models) == 1 else WeightedModels(models)
    calibration = calibration_of(trainer.calibration, model, inputs)
    evaluation = None if trainer.test is None else trainer.test.evaluate(model, trainer.loss, calibration)
    before = trainer.attributes if solved is None else plain_attributes(solved.model)
    unknown = sorted({each for _, part in models for each in remove_leftovers(part, before)})
    result = TrainingResult(
        model=model,
        plan=plan,
        spent=spent_in_all(engine),
        evaluation=evaluation,
        history=tuple(trainer.history),
        models=tuple(models),
        settings=trainer.settings,
        versions=versions(),
        seconds=round(trainer.seconds, 1),
        verdict=engine.verdict(
            schema_from_data=inputs.learned_from_data,
            without_promise=inputs.without_promise,
            unseen_code=unknown,
            ledger_off=inputs.ledger_off,
            rehearsal=inputs.rehearsal,
            other_fits=inputs.other_fits,
            start_not_for_release=None if origin is None else origin.not_for_release,
        ),
        run_folder=None if folder is None else folder.path,
        ledger=None if reservation is None else reservation.description(),
        calibration=calibration,
    )
    if folder is not None and engine.ranks.first:
        folder.write_history(trainer.history)
        described = describe_model(models, inputs, trainer.description)
        against = result.verdict.against_release
        folder.write_model(model, replace(described, calibration=calibration, not_for_release=against))
        promised = inputs.budgets if reservation is None else reservation.promises()
        if promised is not None and not inputs.rehearsal:
            folder.write_promises(plan, promised)
        if (sums := engine.individual_sums) is not None:
            folder.write_norms(sums, plan)
        folder.write_result(result.to_dict())
    return result


def describe_model(
    models: Sequence[tuple[float, nn.Module]], inputs: TrainingInputs, known: Mapping[str, Any]
) -> ModelDescription:
    """Say what has to be known of a model to use it."""
    shape = shape_of(inputs.records)
    network = NetworkDescription.of(
        models[0][1],
        input_shape=shape,
        outputs=inputs.outputs,
        name=known.get("model"),
        activation=known.get("activation"),
        models=len(models),
    )
    return ModelDescription(
        network=network,
        preprocessing=inputs.preprocessing,
        shape=inputs.shape,
        features=inputs.features,
        encoder=inputs.encoder,
        task=inputs.task,
        label_range=inputs.label_range,
        classes=inputs.classes,
        confirmed=not inputs.learned_from_data,
    )


def spent_in_all(engine: PrivacyEngine) -> tuple[Spent, ...]:
    """Say what a run cost: as the plan proves, and by the accountant where the plan says nothing."""
    levels = engine.plan.levels
    proven = tuple(
        Spent(level.proven_epsilon, level.delta) for level in levels if level.proven_epsilon is not None
    )
    return proven if len(proven) == len(levels) else engine.spent()
