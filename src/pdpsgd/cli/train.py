"""`pdpsgd train`: own data or a benchmark in; a model, a run folder and a report page out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdpsgd._cache import cache_place
from pdpsgd.cli import shared
from pdpsgd.cli.like import Like, command_record, differences
from pdpsgd.cli.option_parameters import with_options
from pdpsgd.cli.own_ledger import (
    TrainingLedger,
    announce,
    default_place,
    knows_some,
    open_or_create,
    settle_folder,
)
from pdpsgd.cli.rehearsal import check_rehearsal
from pdpsgd.cli.shared import HistoryOptions, option
from pdpsgd.cli.training_options import (
    LORA_DEFAULTS,
    TEXT_DEFAULTS,
    CommandOptions,
    DataOptions,
    ListOptions,
    Source,
    confirm_without_promise,
    is_own_data,
    make_network,
    read_inputs,
    with_calibration,
    with_embeddings,
    with_features,
    with_task_of,
)
from pdpsgd.errors import fail
from pdpsgd.planning.verdict import NOT_FOR_RELEASE
from pdpsgd.training.options import OUTPUT, PLAN
from pdpsgd.training.run_folder import RunFolder
from pdpsgd.training.versions import versions

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.ledger import Ledger
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.fitting import TrainingResult
    from pdpsgd.training.inputs import TrainingInputs

PlanFile = Annotated[
    Path | None, option("--plan", help="ready plan (JSON) to train by", panel=PLAN, show_default=False)
]
Rehearse = Annotated[
    bool,
    option("--rehearse", help="rehearsal on made-up rows: no record is read, nothing spent", panel=OUTPUT),
]
Report = Annotated[
    bool, option("--report/--no-report", help="report page in the output folder", panel=OUTPUT)
]


@with_options
def train(
    data: Source,
    records: DataOptions,
    people: ListOptions,
    options: CommandOptions,
    earlier: HistoryOptions,
    ledger: TrainingLedger,
    plan: PlanFile = None,
    report: Report = True,
    yes: shared.Yes = False,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
    like: Like = None,
    rehearse: Rehearse = False,
) -> None:
    """Train a model that gives every person the privacy they asked for.

    The run folder has three parts. public/ holds the plan, the model (safetensors), the settings, figures on test
    people and a report page; people/ the promise made to each person; private/ the checkpoint. Who was sampled is
    written nowhere.

    Of own data a ledger is kept (people.ledger): budgets are what people allow over all runs together, and a run takes
    --spend of what is left, a quarter by default. It is said before the run starts, and `pdpsgd ledger show` tells.

    \b
    Examples:
      pdpsgd train people.csv --label income --id-column person --epsilon-column epsilon
      pdpsgd train people.csv --schema schema.toml --test-share 0.2 --steps 500 --batch-size 256
      pdpsgd train people.csv --label income --id-column person --spend "1 of 12"
      pdpsgd train people.csv --label income --id-column person --history runs/first
      pdpsgd train february.csv --schema runs/jan/public/schema.toml --start runs/jan
      pdpsgd train february.csv --like runs/jan --start runs/jan
      pdpsgd train people.csv --schema schema.toml --steps 500 --rehearse
      pdpsgd train mails.csv --label kind --id-column sender --records-per-person 4 --test-share 0.2
      pdpsgd train mails.parquet --text text --label kind --id-column sender --records-per-person 4
      pdpsgd train images.npz --budgets people.csv --id-column person --model my_networks:small_cnn
      pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23 --steps 300 --batch-size 256
      pdpsgd train --config run.toml mnist
      pdpsgd train fashion-mnist --preset fashion-mnist --tiers 0.5:0.5,1:0.5
    """
    from pdpsgd.models.networks import count_parameters
    from pdpsgd.planning.mechanisms.least_squares import NAME as LEAST_SQUARES

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if rehearse:
        check_rehearsal(plan=plan, history=earlier.history, resume=options.resume)
        _rehearse(data, records, people, options, ledger, screen, report=report)
        return
    own_data = is_own_data(data)
    record = command_record(data, (records, people, options, earlier, ledger), versions())
    for sentence in () if like is None else differences(like, record):
        screen.say(sentence)
    ready = None if plan is None else _ready_plan(plan, options, earlier)
    by_files = bool(earlier.history) or (ready is not None and ready.ledger is None)
    place = ledger.place(own_data=own_data, counted_otherwise=by_files or people.tiers is not None)
    _check_folder(options, place)
    inputs = read_inputs(
        data,
        with_task_of(records, options),
        people,
        listed=ledger.listed,
        records_per_person=options.records_per_person,
    )
    inputs = with_calibration(inputs, options.calibrate, records, people)
    confirm_without_promise(inputs, yes=yes or options.resume)
    inputs = with_features(inputs, options.preset, screen.say)
    inputs = with_embeddings(inputs, records, screen)
    if inputs.mapped:
        screen.say(
            f"{data} is large: its encoded rows are in a file without a name in {cache_place()}, not in memory."
        )
    for note in inputs.notes:
        screen.say(f"Note: {note}")
    place, inputs = _ledger_of(inputs, place, ledger, screen, own_data=own_data, by_files=by_files)
    options, claimed = _completed(options, ready, inputs, data, quiet=quiet)
    with claimed:
        network = _network(inputs, options, screen)
        if (options.mechanism if ready is None else ready.mechanism) != LEAST_SQUARES:
            options = options.with_defaults(parameters=count_parameters(network))
        if place is None:
            made = ready or _plan(inputs, options, people, earlier)
            result = _fit(network, inputs, _with_evaluation(options, made), plan=made)
        else:
            with open_or_create(place, screen) as kept:
                result = _fit_in_ledger(network, inputs, options, ready, kept, ledger, screen)
    RunFolder(str(options.run_folder)).write_command(record)
    _show(result, screen, inputs.classes)
    _show_chosen(result, options, screen, of_texts=inputs.encoder is not None)
    if report:
        from pdpsgd.reporting import write_run_report

        screen.say(f"Report:  {write_run_report(str(options.run_folder))}")
    screen.write_json(shared.dump({**result.to_dict(), "run_folder": str(options.run_folder)}))


def _rehearse(
    data: str,
    records: DataOptions,
    people: ListOptions,
    options: CommandOptions,
    ledger: TrainingLedger,
    screen: shared.Screen,
    *,
    report: bool,
) -> None:
    """Do all of a run on made-up rows, in a folder of its own, and say what it takes; nothing is booked."""
    from time import monotonic

    from pdpsgd._cache import size_text
    from pdpsgd.cli.rehearsal import NOTE, peak_memory, rehearsed_inputs
    from pdpsgd.models.networks import count_parameters
    from pdpsgd.planning.mechanisms.least_squares import NAME as LEAST_SQUARES

    began = monotonic()
    listed = None if ledger.no_ledger else ledger.listed
    inputs = rehearsed_inputs(data, records, people, options, listed=listed)
    screen.say(NOTE)
    if options.run_folder is not None:
        options = options.changed(run_folder=Path(f"{options.run_folder}-rehearsal"))
    _check_folder(options, None)
    stem = str(Path(data).with_name(f"{Path(data).stem}-rehearsal"))
    options, claimed = _completed(options, None, inputs, stem, quiet=screen.quiet)
    with claimed:
        network = _network(inputs, options, screen)
        if options.mechanism != LEAST_SQUARES:
            options = options.with_defaults(parameters=count_parameters(network))
        made = options.plan_or(None, inputs.budgets)
        result = _fit(network, inputs, _with_evaluation(options, made), plan=made)
    _show(result, screen, inputs.classes)
    page = None
    if report:
        from pdpsgd.reporting import write_run_report

        page = write_run_report(str(options.run_folder))
        screen.say(f"Report:  {page} (as the page will look, on made-up rows)")
    memory, seconds = peak_memory(), monotonic() - began
    said = "" if memory is None else f", at most {size_text(memory)} of memory"
    screen.say(
        f"Rehearsed: {result.plan.steps:,} steps in {result.seconds:.1f} s, {seconds:.1f} s in all{said}. The plan is "
        "for people's whole budgets: with a ledger the run takes a share of them, with more noise, in the same time."
    )
    figures = {"seconds": round(seconds, 1), "training_seconds": result.seconds, "peak_memory_bytes": memory}
    screen.write_json(
        shared.dump({**figures, "rehearsal": True, "report": None if page is None else str(page)})
    )


def _ledger_of(
    inputs: TrainingInputs,
    place: str | None,
    asked: TrainingLedger,
    screen: shared.Screen,
    *,
    own_data: bool,
    by_files: bool,
) -> tuple[str | None, TrainingInputs]:
    """Say where the ledger of these people is, or note that none is kept where one should be."""
    if place is None:
        off = own_data and (asked.no_ledger or knows_some(default_place(), inputs.budgets))
        if own_data and by_files and not asked.no_ledger:
            screen.say(
                "Note: A ready plan or a history is counted by itself: this run is entered in no ledger. What people "
                "allow is promised for it alone, and a later run has to be planned with it as --history."
            )
        return None, replace(inputs, ledger_off=off)
    if inputs.budgets is not None and not inputs.budgets.named and asked.ledger is None:
        screen.say(
            "Note: People have no ids, so no ledger is kept: another run on them would not be counted."
        )
        return None, inputs
    return place, inputs


def _ready_plan(file: Path, options: CommandOptions, earlier: HistoryOptions) -> Plan:
    """Read and check a ready plan."""
    if earlier.history:
        fail("Expected --history without --plan: a ready plan has its history in it, or none. Got both.")
    return options.plan_or(shared.read_plan(file, verify=True), None)


def _plan(
    inputs: TrainingInputs, options: CommandOptions, people: ListOptions, earlier: HistoryOptions
) -> Plan:
    """Compute the plan of a run that is in no ledger."""
    assert inputs.budgets is not None  # read_inputs reads them, too
    if earlier.history or earlier.history_budgets:
        plans = earlier.plans(inputs.budgets, people)
        more = {"history": plans, "history_fixed": earlier.history_fixed}
        return options.changed(plan_options=more).plan_or(None, inputs.budgets)
    return options.plan_or(None, inputs.budgets)


def _completed(
    options: CommandOptions, plan: Plan | None, inputs: TrainingInputs, source: str, *, quiet: bool
) -> tuple[CommandOptions, AbstractContextManager[None]]:
    """Fill in the defaults that depend on the data; a folder that nobody named is claimed before it is used."""
    from pdpsgd.models.networks import default_network

    mechanism = options.mechanism if plan is None else plan.mechanism
    of_texts = _defaults_of_texts(inputs)
    of_start = {} if options.start is None else _network_of(options.start)
    named = {"model": default_network(inputs.input_shape), **of_texts, **of_start}
    claimed: AbstractContextManager[None] = nullcontext()
    if options.run_folder is None:
        folder = new_folder(f"{Path(source).stem}-{mechanism}")
        options, claimed = options.with_defaults(run_folder=folder.path), folder.removed_if_empty()
    return options.with_defaults(**named, progress=not quiet), claimed


def _defaults_of_texts(inputs: TrainingInputs) -> dict[str, Any]:
    """Return the options that suit texts: those of a linear model, or of adapters."""
    if inputs.encoder is None:
        return {}
    known = LORA_DEFAULTS if inputs.encoder.get("finetune") else TEXT_DEFAULTS
    return {**known, "batch_size": _quarter(inputs)}


def _network_of(start: Any) -> dict[str, Any]:
    """Name the network of the run that is started from, if it is known."""
    from pdpsgd.training.start import find_start

    known = find_start(start).description
    if known is None or known.network.name is None:
        return {}
    return {"model": known.network.name, "activation": known.network.activation}


def _quarter(inputs: TrainingInputs) -> float:
    """Return an expected batch size for few people: a quarter of the list, 1,024 at most."""
    return float(min(1024, max(1, (0 if inputs.budgets is None else len(inputs.budgets)) // 4)))


def _with_evaluation(options: CommandOptions, plan: Plan) -> CommandOptions:
    """Evaluate twenty times, unless something else is asked for."""
    return options.with_defaults(evaluate_every=max(1, plan.steps // 20))


def _network(inputs: TrainingInputs, options: CommandOptions, screen: shared.Screen) -> nn.Module:
    """Make the network, whose first weights may take a while."""
    folder = RunFolder(str(options.run_folder))
    with screen.bars() as progress:
        return make_network(inputs, options, progress=progress, resumed=options.resume and folder.begun)


def _fit_in_ledger(
    network: nn.Module,
    inputs: TrainingInputs,
    options: CommandOptions,
    plan: Plan | None,
    ledger: Ledger,
    asked: TrainingLedger,
    screen: shared.Screen,
) -> TrainingResult:
    """Reserve the run, say what it takes, and train under the reservation.

    The folder is this process's own before anything is reserved for it.
    """
    from pdpsgd.engine.distributed import is_first_rank
    from pdpsgd.training.booking import book, given_up_after_errors

    options.check_choices()
    folder = RunFolder(str(options.run_folder))
    with folder.in_use() if is_first_rank() else nullcontext():
        _check_folder(options, None)  # another process may have been faster
        reserved = book(
            ledger,
            budgets=inputs.budgets,
            options=options.changed(spend=asked.spend),
            plan=plan,
            folder=folder,
            number=asked.reservation,
        )
        with given_up_after_errors(reserved, folder):
            announce(reserved, ledger.place, asked.spend, screen)
            return _fit(network, inputs, _with_evaluation(options, reserved.plan), reservation=reserved)


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


def _show(result: TrainingResult, screen: shared.Screen, classes: Sequence[str]) -> None:
    from pdpsgd.cli.plan import show
    from pdpsgd.training.class_figures import class_sentences
    from pdpsgd.training.probability_figures import probability_sentences
    from pdpsgd.training.regression import error_sentences

    show(result.plan, screen)
    if result.evaluation is not None and result.accuracy is not None:
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
        for sentence in (*class_sentences(figures, classes), *probability_sentences(figures)):
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


def _show_chosen(
    result: TrainingResult, options: CommandOptions, screen: shared.Screen, *, of_texts: bool
) -> None:
    """Say which settings nobody named, and how much the noise leaves of the signal."""
    from pdpsgd.planning.advice import outlook, too_noisy

    if options.parameters is None:
        return  # nothing is trained step by step
    seen = outlook(result.plan, options.parameters)
    values = {
        "batch_size": f"batch size {seen.batch_size:,.0f}",
        "max_grad_norm": f"clipping norm {result.plan.max_grad_norm:g}",
        "learning_rate": f"learning rate {result.settings['learning_rate']:g}",
    }
    chosen = [value for name, value in values.items() if options.sources[name] == "default"]
    if chosen:
        why = "as did best on mails" if of_texts else "by what people allow; `pdpsgd advise` says why"
        screen.say(f"Chosen ({why}): {', '.join(chosen)}.")
    doubt = too_noisy(seen)
    if doubt is not None:
        screen.say(
            f"The signal-to-noise ratio was {seen.signal_to_noise:.2g}: {doubt} can be expected of it."
        )


def _check_folder(options: CommandOptions, place: str | None) -> None:
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


def new_folder(name: str) -> RunFolder:
    """Make the first of runs/NAME, runs/NAME-2, ... that is not there yet: of two commands at once, one makes it."""
    from pdpsgd.engine.distributed import is_first_rank

    number = 1
    folder = RunFolder(Path("runs") / name)
    while not (folder.claim() if is_first_rank() else not folder.path.exists()):
        number += 1
        folder = RunFolder(Path("runs") / f"{name}-{number}")
    return folder
