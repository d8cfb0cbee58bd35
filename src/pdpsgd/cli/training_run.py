"""A run on the terminal: its network, what it takes and is expected to give, training, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.cli.agreement import confirm_signal, warn_of_release
from pdpsgd.cli.earlier_run import spelled
from pdpsgd.cli.own_ledger import TrainingLedger, announce, settle_folder
from pdpsgd.cli.shared import Screen
from pdpsgd.cli.training_options import DEFAULTS_OF_TEXTS, CommandOptions, make_network
from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.planning.verdict import NOT_FOR_RELEASE
from pdpsgd.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.ledger import Ledger
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.fitting import TrainingResult
    from pdpsgd.training.inputs import TrainingInputs


def completed(
    options: CommandOptions, plan: Plan | None, inputs: TrainingInputs, source: str, *, quiet: bool
) -> tuple[CommandOptions, AbstractContextManager[None]]:
    """Fill in the defaults that depend on the data; a folder that nobody named is claimed before it is used."""
    from pdpsgd.models.networks import default_network

    mechanism = options.mechanism if plan is None else plan.mechanism
    of_texts = defaults_of_texts(inputs)
    of_start = {} if options.start is None else _network_of_start(options.start)
    named = {"model": default_network(inputs.input_shape), **of_texts, **of_start}
    claimed: AbstractContextManager[None] = nullcontext()
    if options.run_folder is None:
        folder = new_folder(f"{Path(source).stem}-{mechanism}")
        options, claimed = options.with_defaults(run_folder=folder.path), folder.removed_if_empty()
    return options.with_defaults(**named, progress=not quiet), claimed


def defaults_of_texts(inputs: TrainingInputs) -> dict[str, Any]:
    """Return the options that suit texts: those of a linear model, or of adapters."""
    if inputs.encoder is None:
        return {}
    known = DEFAULTS_OF_TEXTS[inputs.encoder.get("finetune")]
    return {**known, "batch_size": _quarter(inputs)}


def _network_of_start(start: Any) -> dict[str, Any]:
    """Name the network of the run that is started from, if it is known."""
    from pdpsgd.training.start import find_start

    known = find_start(start).description
    if known is None or known.network.name is None:
        return {}
    return {"model": known.network.name, "activation": known.network.activation}


def _quarter(inputs: TrainingInputs) -> float:
    """Return an expected batch size for few people: a quarter of the list, 1,024 at most."""
    return float(min(1024, max(1, (0 if inputs.budgets is None else len(inputs.budgets)) // 4)))


def _with_evaluation(options: CommandOptions, plan: Plan, inputs: TrainingInputs) -> CommandOptions:
    """Evaluate twenty times, unless something else is asked for, but never more records than the run trains on."""
    trained = sum(each.steps * each.expected_batch_size for each in plan.rounds)
    tested = 0 if inputs.test_data is None else len(inputs.test_data[0])
    times = max(1, min(20, int(trained / max(tested, 1))))
    return options.with_defaults(evaluate_every=max(1, plan.steps // times))


def network_of(inputs: TrainingInputs, options: CommandOptions, screen: Screen) -> nn.Module:
    """Make the network, whose first weights may take a while."""
    folder = RunFolder(str(options.run_folder))
    with screen.bars() as progress:
        return make_network(inputs, options, progress=progress, resumed=options.resume and folder.begun)


def fit_in_ledger(
    network: nn.Module,
    inputs: TrainingInputs,
    options: CommandOptions,
    plan: Plan | None,
    ledger: Ledger,
    asked: TrainingLedger,
    screen: Screen,
    *,
    yes: bool,
    place: str,
) -> TrainingResult:
    """Reserve the run, say what it takes, and train under the reservation.

    The folder is this process's own before anything is reserved for it.

    Args:
        network: The network to train.
        inputs: Records and people.
        options: The options of the run.
        plan: A ready plan, or None.
        ledger: The ledger to reserve the run in.
        asked: Which reservation, and what share of what is left.
        screen: Where it is said.
        yes: Whether somebody agreed beforehand to what would be asked.
        place: How the ledger is named on the screen.

    Returns:
        The trained model, with what it took.
    """
    from pdpsgd.engine.distributed import is_first_rank
    from pdpsgd.training.booking import book, given_up_after_errors

    options.check_choices()
    folder = RunFolder(str(options.run_folder))
    with folder.in_use() if is_first_rank() else nullcontext():
        check_folder(options, None)  # another process may have been faster
        goes_on = options.resume and folder.begun
        reserved = book(
            ledger,
            budgets=inputs.budgets,
            options=options.changed(spend=asked.spend),
            plan=plan,
            folder=folder,
            number=asked.reservation,
            agree=lambda made: _agree(made, inputs, options, yes=yes),
        )
        with given_up_after_errors(reserved, folder):
            announce(reserved, place, asked.spend, screen, rehearsed=inputs.rehearsal, resumed=goes_on)
            _show_plan(reserved.plan, network, inputs, options, screen, allows=reserved.allowed_by_level())
            return _fit(
                network, inputs, _with_evaluation(options, reserved.plan, inputs), reservation=reserved
            )


def _agree(plan: Plan, inputs: TrainingInputs, options: CommandOptions, *, yes: bool) -> None:
    """Say what speaks against a run before it is reserved."""
    warn_of_release(inputs, seeded=options.seed is not None)
    confirm_signal(plan, options.parameters, yes=yes, charges=True)


def fit_by_plan(
    network: nn.Module,
    inputs: TrainingInputs,
    options: CommandOptions,
    plan: Plan,
    screen: Screen,
    *,
    yes: bool = False,
) -> TrainingResult:
    """Train by a plan that is in no ledger."""
    confirm_signal(plan, options.parameters, yes=yes, charges=False)
    _show_plan(plan, network, inputs, options, screen)
    return _fit(network, inputs, _with_evaluation(options, plan, inputs), plan=plan)


def _fit(network: nn.Module, inputs: TrainingInputs, options: CommandOptions, **how: Any) -> TrainingResult:
    """Train; Ctrl-C names the command that continues."""
    from pdpsgd.training.fitting import fit

    folder = RunFolder(str(options.run_folder))
    try:
        return fit(network, inputs, options=options, **how)
    except KeyboardInterrupt:
        if folder.begun:
            again = f"Repeat the command with --run-folder {folder.path} --resume to continue."
            raise KeyboardInterrupt(f"Everything up to the last checkpoint is saved. {again}") from None
        raise


def show_result(
    result: TrainingResult, screen: Screen, classes: Sequence[str], *, rehearsed: bool = False
) -> None:
    """Say how good the model is, what holds for whom, and where everything is."""
    from pdpsgd.training.class_figures import class_sentences
    from pdpsgd.training.probability_figures import probability_sentences
    from pdpsgd.training.regression import error_sentences

    if result.evaluation is not None and rehearsed:
        screen.say(
            f"Test people: {result.evaluation.people:,}. Figures on them are chance: rows are made up."
        )
    elif result.evaluation is not None and result.accuracy is not None:
        tiers = "".join(f", {value:.1%} at epsilon {tier}" for tier, value in result.accuracy_by_tier.items())
        tested = result.evaluation.people
        per_person = result.evaluation.accuracy_per_person
        if per_person is None:
            screen.say(f"Accuracy on {tested:,} test people: {result.accuracy:.1%}{tiers}.")
        else:
            screen.say(
                f"Accuracy on all records of {tested:,} test people: {result.accuracy:.1%} per record{tiers}; "
                f"{per_person:.1%} per person, each counted once."
            )
        figures = result.evaluation.to_dict()
        of_probabilities = probability_sentences(figures, calibrated=result.calibration is not None)
        for sentence in (*class_sentences(figures, classes), *of_probabilities):
            screen.say(sentence)
    elif result.evaluation is not None:
        for sentence in error_sentences(result.evaluation.to_dict()):
            screen.say(sentence)
    else:
        screen.say("No test people, so no accuracy: give --test-file or --test-share.")
    for sentence in result.verdict.sentences:
        screen.say(sentence)
    may = "public/ may be published; people/ and private/ may not"
    if result.verdict.outcome == NOT_FOR_RELEASE:
        may = "nothing in it is for release"
    screen.say(f"Folder:  {result.run_folder} ({may})")


def _show_plan(
    plan: Plan,
    network: nn.Module,
    inputs: TrainingInputs,
    options: CommandOptions,
    screen: Screen,
    *,
    allows: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Show the plan before training, and say which settings nobody named."""
    from pdpsgd.cli.plan import show
    from pdpsgd.planning.advice import outlook
    from pdpsgd.training.learning_rate import with_learning_rate

    show(plan, screen, allows=allows)
    if options.parameters is None:
        return  # nothing is trained step by step
    rated = options if options.learning_rate is not None else with_learning_rate(options, plan, network)
    values = {
        "batch_size": f"batch size {outlook(plan, options.parameters).batch_size:,.0f}",
        "max_grad_norm": f"clipping norm {plan.max_grad_norm:g}",
        "learning_rate": f"learning rate {rated.learning_rate:g}",
    }
    chosen = [value for name, value in values.items() if rated.sources[name] == "default"]
    if chosen:
        why = "by what people allow; `pdpsgd advise` says why"
        if inputs.encoder is not None:
            why = "as did best on mails"
        screen.say(f"Chosen ({why}): {', '.join(chosen)}.")


def check_folder(options: CommandOptions, place: str | None) -> None:
    """Refuse a folder with a run in it before time is spent on reading and planning."""
    if options.run_folder is None:
        if options.resume:
            fail("Expected --run-folder with --resume, to know what to continue. Got none.")
        return
    folder = RunFolder(options.run_folder)
    if place is not None and folder.finished:
        settle_folder(place, folder)
    named = f"--run-folder {str(folder.path)!r}"
    folder.check_is_free(resume=options.resume, folder=named, go_on="--resume")


@contextmanager
def explained_if_resumed(options: CommandOptions) -> Iterator[None]:
    """Say, with what is refused of a run that goes on, that it takes all options again, and which it began with."""
    try:
        yield
    except PdpsgdError as error:
        folder = None if options.run_folder is None else RunFolder(options.run_folder)
        if not options.resume or folder is None or not folder.begun:
            raise
        known = folder.read_command()
        began = "" if known is None else f" It was begun with: {spelled(known)}"
        fail(
            f"{error} (--resume remembers no options: repeat the whole command that began the run, with --run-folder "
            f"{folder.path} --resume.{began})"
        )


@contextmanager
def noted_if_interrupted(options: CommandOptions, record: Mapping[str, Any]) -> Iterator[None]:
    """Leave what the command was asked for in a folder whose run was interrupted, to be found when it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        folder = RunFolder(str(options.run_folder))
        if folder.begun and not folder.finished:
            folder.write_command(record)
        raise


def new_folder(name: str) -> RunFolder:
    """Make the first of runs/NAME, runs/NAME-2, ... that is not there yet: of two commands at once, one makes it."""
    from pdpsgd.engine.distributed import is_first_rank

    number = 1
    folder = RunFolder(Path("runs") / name)
    while not (folder.claim() if is_first_rank() else not folder.path.exists()):
        number += 1
        folder = RunFolder(Path("runs") / f"{name}-{number}")
    return folder
