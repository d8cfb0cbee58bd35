"""`pdpsgd train`: own data or a benchmark in; a model, a run folder and a report page out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pdpsgd._cache import cache_place
from pdpsgd.cli import shared
from pdpsgd.cli.agreement import confirm_without_promise
from pdpsgd.cli.earlier_run import Like, command_record, differences
from pdpsgd.cli.option_parameters import with_options
from pdpsgd.cli.own_ledger import TrainingLedger, ledger_of, open_or_create
from pdpsgd.cli.rehearsal import check_rehearsal, rehearse_run
from pdpsgd.cli.shared import HistoryOptions, option
from pdpsgd.cli.training_options import (
    CommandOptions,
    DataOptions,
    ListOptions,
    Source,
    is_own_data,
    read_inputs,
    with_calibration,
    with_embeddings,
    with_features,
    with_task_of,
)
from pdpsgd.cli.training_run import (
    check_folder,
    completed,
    explained_if_resumed,
    fit_by_plan,
    fit_in_ledger,
    network_of,
    noted_if_interrupted,
    show_result,
)
from pdpsgd.errors import fail
from pdpsgd.training.options import OUTPUT, PLAN
from pdpsgd.training.run_folder import RunFolder
from pdpsgd.training.versions import versions

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
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
      pdpsgd train people.csv --label income --id-column person --test-share 0.2
      pdpsgd train people.csv --schema schema.toml --test-share 0.2
      pdpsgd train people.csv --schema schema.toml --rehearse
      pdpsgd train people.csv --schema schema.toml --spend "1 of 12"
      pdpsgd train february.csv --like runs/jan --start runs/jan
      pdpsgd train people.csv --config run.toml

    \b
    Several rows per person; texts; images with a network of your own:
      pdpsgd train visits.csv --schema schema.toml --records-per-person 4
      pdpsgd train mails.parquet --text text --label kind --id-column sender \\
          --records-per-person 4
      pdpsgd train images.npz --budgets people.csv --id-column person \\
          --model my_networks:small_cnn

    \b
    Benchmarks:
      pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23
      pdpsgd train fashion-mnist --preset fashion-mnist --tiers 0.5:0.5,1:0.5
    """
    from pdpsgd.models.networks import count_parameters
    from pdpsgd.planning.mechanisms.least_squares import NAME as LEAST_SQUARES
    from pdpsgd.training.other_people import check_other_people

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if rehearse:
        check_rehearsal(plan=plan, history=earlier.history, resume=options.resume)
        rehearse_run(data, records, people, options, ledger, screen, report=report)
        return
    own_data = is_own_data(data)
    record = command_record(data, (records, people, options, earlier, ledger), versions())
    for sentence in () if like is None else differences(like, record):
        screen.say(sentence)
    ready = None if plan is None else _ready_plan(plan, options, earlier)
    by_plan = ready is not None and ready.ledger is None and not any(x.history for x in ready.levels)
    by_files = bool(earlier.history) or (ready is not None and ready.ledger is None and not by_plan)
    counted_otherwise = by_files or by_plan or people.tiers is not None
    place = ledger.place(own_data=own_data, counted_otherwise=counted_otherwise)
    check_folder(options, place)
    with explained_if_resumed(options):
        inputs = read_inputs(
            data,
            with_task_of(records, options),
            people,
            listed=ledger.listed,
            records_per_person=options.records_per_person,
        )
        inputs = with_calibration(inputs, options.calibrate, data, records, people)
        check_other_people(inputs)  # as they were read: features of equal rows may be rounded otherwise
        confirm_without_promise(inputs, yes=yes or options.resume)
        inputs = with_features(inputs, options.preset, screen.say)
        inputs = with_embeddings(inputs, records, screen)
        if inputs.mapped:
            screen.say(
                f"{data} is large: its encoded rows are in a file without a name in {cache_place()}, not in memory."
            )
        for note in inputs.notes:
            screen.say(f"Note: {note}")
        place, inputs = ledger_of(
            inputs, place, ledger, screen, own_data=own_data, by_files=by_files, by_plan=by_plan
        )
        options, claimed = completed(options, ready, inputs, data, quiet=quiet)
        with claimed, noted_if_interrupted(options, record):
            network = network_of(inputs, options, screen)
            if (options.mechanism if ready is None else ready.mechanism) != LEAST_SQUARES:
                options = options.with_defaults(parameters=count_parameters(network))
            if place is None:
                made = ready or _plan(inputs, options, people, earlier)
                result = fit_by_plan(network, inputs, options, made, screen, yes=yes)
            else:
                with open_or_create(place, screen) as kept:
                    result = fit_in_ledger(
                        network, inputs, options, ready, kept, ledger, screen, yes=yes, place=kept.place
                    )
    RunFolder(str(options.run_folder)).write_command(record)
    show_result(result, screen, inputs.classes)
    if report:
        from pdpsgd.reporting import write_run_report

        screen.say(f"Report:  {write_run_report(str(options.run_folder))}")
    screen.write_json(shared.dump({**result.to_dict(), "run_folder": str(options.run_folder)}))


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
