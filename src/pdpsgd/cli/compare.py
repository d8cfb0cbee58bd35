"""`pdpsgd compare`: several mechanisms on the same data and seeds, as a table and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pdpsgd.cli import shared
from pdpsgd.cli import training_options as options
from pdpsgd.cli.shared import OUTPUT, PLAN, option
from pdpsgd.cli.training_options import TRAINING
from pdpsgd.errors import fail

NOT_FOR_RELEASE = (
    "A comparison is for study: its seeds can be guessed, and each run on the same people adds to what they "
    "have spent."
)


def compare(
    data: options.Source,
    mechanisms: Annotated[
        str, option("--mechanisms", help="Which ones, separated by commas.", panel=PLAN)
    ] = "dp-sgd,pdp-sgd-exact",
    seeds: Annotated[int, option("--seeds", help="How many runs of each.", panel=TRAINING)] = 3,
    first_seed: Annotated[int, option("--first-seed", help="The seed of the first run.", panel=TRAINING)] = 0,
    label: options.Label = None,
    schema: options.SchemaFile = None,
    test_file: options.TestFile = None,
    test_share: options.TestShare = None,
    image_size: options.ImageSize = 32,
    grey: options.Grey = False,
    people_file: options.PeopleFile = None,
    data_folder: options.DataFolder = None,
    id_column: shared.IdColumn = None,
    epsilon_column: shared.EpsilonColumn = "epsilon",
    delta_column: shared.DeltaColumn = None,
    delta: shared.Delta = 1e-5,
    tiers: shared.Tiers = None,
    tiers_seed: options.TiersSeed = 0,
    budgets: options.BudgetsFile = None,
    allow_infinite: shared.AllowInfinite = False,
    steps: shared.Steps = None,
    batch_size: shared.BatchSize = 1024,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    rounds: shared.Rounds = None,
    model: options.Model = None,
    activation: options.Activation = None,
    optimizer: options.OptimizerName = "sgd",
    learning_rate: options.LearningRate = 1.0,
    momentum: options.Momentum = 0.0,
    weight_decay: options.WeightDecay = 0.0,
    schedule: options.ScheduleName = "cosine",
    weight_average: options.WeightAverage = None,
    loss: options.LossName = "cross-entropy",
    max_physical_batch_size: options.PhysicalBatch = None,
    page: Annotated[Path, option("--page", help="Where the report page goes.", panel=OUTPUT)] = Path(
        "comparison.html"
    ),
    report: Annotated[bool, option("--report/--no-report", help="Write the page.", panel=OUTPUT)] = True,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Train several mechanisms on the same data, people and seeds, and put them side by side.

    \b
    Examples:
      pdpsgd compare digits --tiers 1:0.34,2:0.43,3:0.23 --steps 300 --batch-size 256
      pdpsgd compare people.csv --label income --id-column person --test-share 0.2 \\
          --mechanisms dp-sgd,pdp-sgd-exact,idp-scale --seeds 5
    """
    from pdpsgd.models.networks import default_network
    from pdpsgd.training.comparison import compare as run_comparison

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if seeds < 1:
        fail(f"Expected --seeds >= 1. Got {seeds}.")
    material = options.read_material(
        data,
        label=label,
        id_column=id_column,
        epsilon_column=epsilon_column,
        delta_column=delta_column,
        delta=delta,
        tiers=tiers,
        tiers_seed=tiers_seed,
        budgets_file=budgets,
        allow_infinite=allow_infinite,
        schema=schema,
        test_file=test_file,
        test_share=test_share,
        image_size=image_size,
        grey=grey,
        people_file=people_file,
        data_folder=data_folder,
    )
    people = material.data
    if people.test_data is None:
        fail("Expected test people, to compare by: give --test-file or --test-share. Got none.")
    training = {
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "weight_average": weight_average,
        "loss": loss,
        "max_physical_batch_size": max_physical_batch_size,
    }
    with screen.bars() as progress:
        made = run_comparison(
            [name.strip() for name in mechanisms.split(",")],
            make_model=lambda seed: options.make_network(people, model, activation, seed=seed),
            data=(people.inputs, people.targets),
            budgets=material.budgets,
            test_data=people.test_data,
            test_tiers=material.test_tiers,
            record_ids=people.ids,
            seeds=range(first_seed, first_seed + seeds),
            plan_options={
                "steps": steps,
                "batch_size": batch_size,
                "max_grad_norm": max_grad_norm,
                "rounds": rounds,
            },
            training=training,
            name=people.name,
            model_name=model or default_network(people.input_shape),
            classes=people.classes,
            notes=(*people.notes, NOT_FOR_RELEASE),
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
