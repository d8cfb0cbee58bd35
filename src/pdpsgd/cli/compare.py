"""`pdpsgd compare`: several mechanisms on the same data and seeds; or two finished models on the same test people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.agreement import confirm_without_promise
from pdpsgd.cli.compare_runs import are_runs, compare_runs
from pdpsgd.cli.option_parameters import Only, with_options
from pdpsgd.cli.shared import option
from pdpsgd.cli.training_options import (
    CommandOptions,
    DataOptions,
    ListOptions,
    make_network,
    read_inputs,
    with_embeddings,
    with_task_of,
)
from pdpsgd.cli.training_run import defaults_of_texts
from pdpsgd.errors import fail
from pdpsgd.training.options import OUTPUT, PLAN, TRAINING

NOT_FOR_RELEASE = (
    "A comparison is for study: its seeds can be guessed, and each run on the same people adds to what they "
    "have spent."
)
PLANNING = ("steps", "batch_size", "max_grad_norm", "rounds")
LEARNING = (
    "optimizer",
    "learning_rate",
    "momentum",
    "weight_decay",
    "schedule",
    "weight_average",
    "loss",
    "records_per_person",
    "max_physical_batch_size",
)

What = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA | RUN RUN",
        help="data to train on (as for train), or folders of two finished runs",
        show_default=False,
    ),
]
By = Annotated[
    str | None,
    option(
        "--by",
        help="with two runs, columns of --test-file that name subgroups",
        panel=OUTPUT,
        show_default=False,
    ),
]
Mechanisms = Annotated[str, option("--mechanisms", help="mechanisms, separated by commas", panel=PLAN)]
Seeds = Annotated[int, option("--seeds", help="number of runs per mechanism", panel=TRAINING)]
FirstSeed = Annotated[int, option("--first-seed", help="seed of the first run", panel=TRAINING)]
Page = Annotated[Path, option("--page", help="file of the report page", panel=OUTPUT)]
Report = Annotated[bool, option("--report/--no-report", help="report page", panel=OUTPUT)]


@with_options
def compare(
    what: What,
    records: DataOptions,
    people: ListOptions,
    options: Annotated[CommandOptions, Only(*PLANNING, "model", "activation", *LEARNING)],
    mechanisms: Mechanisms = "dp-sgd,dp-sgd-exclude,pdp-sgd-exact",
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    by: By = None,
    page: Page = Path("comparison.html"),
    report: Report = True,
    yes: shared.Yes = False,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Train several mechanisms on the same data, people and seeds, and put them side by side.

    Given two run folders instead, put their finished models side by side on the people in --test-file, who have to be
    outside both lists: accuracy, balanced accuracy, AUC and log loss (RMSE, MAE and R^2 of numbers), in all and by
    tier, class and subgroup.

    \b
    Examples:
      pdpsgd compare digits --tiers 1:0.34,2:0.43,3:0.23
      pdpsgd compare people.csv --schema schema.toml --test-share 0.2 \\
          --mechanisms dp-sgd,pdp-sgd-exact,idp-scale --seeds 5
      pdpsgd compare runs/jan runs/feb --test-file people.csv --by sex,age-band
    """
    from pdpsgd.models.networks import count_parameters, default_network
    from pdpsgd.training.comparison import compare as run_comparison
    from pdpsgd.training.other_people import check_other_people
    from pdpsgd.training.tasks import in_label_unit

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if are_runs(what):
        compare_runs(what, records, people, by=by, page=page if report else None, yes=yes, screen=screen)
        return
    if by is not None:
        fail("Expected --by with two runs, whose models are compared by subgroup. Got it with data.")
    if records.finetune is not None:
        fail(
            "Expected --finetune with train: here every run would train adapters for minutes. Got it with compare."
        )
    (data,) = what
    shared.check_output(page, "--page")
    if seeds < 1:
        fail(f"Expected --seeds >= 1. Got {seeds}.")
    inputs = read_inputs(
        data, with_task_of(records, options), people, records_per_person=options.records_per_person
    )
    if inputs.test_data is None or inputs.budgets is None:
        fail("Expected test people, to compare by: give --test-file or --test-share. Got none.")
    check_other_people(inputs)
    confirm_without_promise(inputs, yes=yes)
    budgets = inputs.budgets
    inputs = with_embeddings(inputs, records, screen)
    options = options.with_defaults(**defaults_of_texts(inputs))
    taught, tested, of_task = in_label_unit(inputs)
    of_task |= {"loss": "squared-error"} if of_task else {}
    parameters = count_parameters(make_network(inputs, options.changed(seed=first_seed)))
    norm = options.with_defaults(parameters=parameters).clipping_norm(budgets)
    with screen.bars() as progress:
        made = run_comparison(
            [name.strip() for name in mechanisms.split(",")],
            make_model=lambda seed: make_network(inputs, options.changed(seed=seed)),
            data=taught,
            budgets=budgets,
            test_data=tested,
            test_tiers=None if inputs.test_tiers is None else [str(tier) for tier in inputs.test_tiers],
            record_ids=inputs.record_ids,
            test_ids=None if options.records_per_person is None else inputs.test_ids,
            seeds=range(first_seed, first_seed + seeds),
            plan_options={**{name: getattr(options, name) for name in PLANNING}, "max_grad_norm": norm},
            training={**{name: getattr(options, name) for name in LEARNING}, **of_task},
            name=str(inputs.name),
            model_name=options.model or default_network(inputs.input_shape),
            classes=inputs.classes,
            notes=(*inputs.notes, NOT_FOR_RELEASE),
            progress=progress,
        )
    screen.table(made.table())
    for note in made.notes:
        screen.say(note)
    if report:
        from pdpsgd.reporting import comparison_page

        shared.write_file(page, comparison_page(made))
        screen.say(f"Report: {page}")
    screen.write_json(shared.dump(made.to_dict()))
