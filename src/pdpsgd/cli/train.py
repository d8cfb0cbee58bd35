"""`pdpsgd train`: one's own data or a benchmark in; a model, a run folder and a report page out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdpsgd.cli import shared
from pdpsgd.cli import training_options as options
from pdpsgd.cli.shared import OUTPUT, PLAN, option
from pdpsgd.cli.training_options import TRAINING
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.data.people import PeopleData
    from pdpsgd.training.fitting import TrainingResult


def train(
    data: options.Source,
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
    plan: Annotated[
        Path | None,
        option(
            "--plan", help="Train by this plan (JSON) instead of making one.", panel=PLAN, show_default=False
        ),
    ] = None,
    mechanism: shared.Mechanism = "pdp-sgd-exact",
    steps: shared.Steps = None,
    batch_size: shared.BatchSize = 1024,
    accountant: shared.AccountantName = None,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    rounds: shared.Rounds = None,
    noise_multiplier: shared.NoiseMultiplier = None,
    drawn: shared.Drawn = "step",
    weights: shared.Weights = None,
    threshold_loss: shared.ThresholdLoss = None,
    history: shared.EarlierPlans = None,
    history_budgets: shared.EarlierLists = None,
    history_fixed: shared.HistoryFixed = False,
    max_levels: shared.MaxLevels = 256,
    preset: options.PresetName = None,
    model: options.Model = None,
    activation: options.Activation = None,
    optimizer: options.OptimizerName = "sgd",
    optimizer_option: Annotated[
        list[str] | None,
        option(
            "--optimizer-option",
            help="More for the optimizer, as in nesterov=true; as often as needed.",
            panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    learning_rate: options.LearningRate = 1.0,
    momentum: options.Momentum = 0.0,
    weight_decay: options.WeightDecay = 0.0,
    schedule: options.ScheduleName = "cosine",
    weight_average: options.WeightAverage = None,
    loss: options.LossName = "cross-entropy",
    augment: Annotated[
        str | None,
        option(
            "--augment",
            help="shifts (of images, by up to two pixels), none, or your own module:function that changes a batch "
            "of inputs, example by example.",
            panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    views: Annotated[
        int,
        option(
            "--views",
            min=1,
            help="Each record goes through the model in so many augmented versions, averaged before clipping.",
            panel=TRAINING,
        ),
    ] = 1,
    max_physical_batch_size: options.PhysicalBatch = None,
    evaluate_every: Annotated[
        int | None,
        option(
            "--evaluate-every",
            help="Look at test people every so many steps.",
            panel=TRAINING,
            show_default="a twentieth of the steps",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        option(
            "--seed",
            help="Make the run repeatable. The seed can be guessed: not for release.",
            panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    secure: Annotated[
        bool,
        option(
            "--secure/--no-secure",
            help="A cryptographic generator for draws and noise; without, not for release.",
            panel=TRAINING,
        ),
    ] = True,
    run_folder: Annotated[
        Path | None,
        option(
            "--run-folder", help="Where everything goes.", panel=OUTPUT, show_default="a new one in runs/"
        ),
    ] = None,
    resume: Annotated[
        bool, option("--resume", help="Go on with the run in --run-folder.", panel=OUTPUT)
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        option(
            "--checkpoint-every", help="Save every so many steps.", panel=OUTPUT, show_default="every minute"
        ),
    ] = None,
    sensitive: Annotated[
        bool,
        option(
            "--sensitive",
            help="Also log batch sizes and training losses, in a file that says not to publish it.",
            panel=OUTPUT,
        ),
    ] = False,
    report: Annotated[bool, option("--report/--no-report", help="Write report.html.", panel=OUTPUT)] = True,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Train a model that gives every person the privacy they asked for.

    The run folder holds the plan, the model (safetensors), the settings, figures over the steps, the promise
    made to each person (promises.csv) and a report page. It never holds who was drawn.

    \b
    Examples:
      pdpsgd train people.csv --label income --id-column person --epsilon-column epsilon
      pdpsgd train people.csv --schema schema.toml --test-share 0.2 --steps 500 --batch-size 256
      pdpsgd train people.csv --label income --id-column person --history runs/first/plan.json
      pdpsgd train images.npz --budgets people.csv --id-column person --model my_networks:small_cnn
      pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23 --steps 300 --batch-size 256
      pdpsgd train --config run.toml mnist
      pdpsgd train fashion-mnist --preset fashion-mnist --tiers 0.5:0.5,1:0.5
    """
    from pdpsgd.models.networks import default_network
    from pdpsgd.planning.planner import plan as make_plan
    from pdpsgd.training.presets import options_with
    from pdpsgd.training.presets import preset as find_preset

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if resume and run_folder is None:
        fail("Expected --run-folder with --resume, to know what to go on with. Got none.")
    _check_folder(run_folder, resume)
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
    if preset is not None and noise_multiplier is not None and steps == find_preset(preset).steps:
        steps = None  # the noise decides how many
    people = options.with_features(material.data, preset, screen.say)
    for note in people.notes:
        screen.say(f"Note: {note}")
    if plan is None:
        lists = [
            shared.read_budgets(
                path,
                id_column=id_column,
                epsilon_column=epsilon_column,
                delta_column=delta_column,
                delta=delta,
                allow_infinite=allow_infinite,
            )
            for path in history_budgets or []
        ]
        made = make_plan(
            material.budgets,
            mechanism,
            steps,
            batch_size,
            accountant,
            max_grad_norm,
            rounds=rounds,
            noise_multiplier=noise_multiplier,
            drawn=drawn,
            weights=shared.parse_weights(weights),
            loss=threshold_loss,
            history=shared.earlier_plans(history, lists, material.budgets),
            history_fixed=history_fixed,
            max_levels=max_levels,
        )
    elif history:
        fail("Expected --history without --plan: a ready plan has its history in it, or none. Got both.")
    else:
        made = shared.read_plan(plan, verify=True)
    if preset is not None:
        own = None if learning_rate == find_preset(preset).learning_rate else learning_rate
        options_with(preset, made, max_grad_norm=None, learning_rate=own)
    folder = run_folder or _new_folder(f"{Path(data).stem}-{made.mechanism}")
    with screen.bars() as progress:
        network = options.make_network(
            people,
            model,
            activation,
            seed=seed,
            preset=preset,
            progress=progress,
            resumed=resume and (folder / "checkpoint.safetensors").exists(),
        )

    from pdpsgd.training.fitting import fit

    try:
        result = fit(
            network,
            (people.inputs, people.targets),
            material.budgets,
            plan=made,
            record_ids=people.ids,
            optimizer=optimizer,
            optimizer_options=_parse_options(optimizer_option or []),
            learning_rate=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            schedule=schedule,
            weight_average=weight_average,
            loss=loss,
            augment=shared.find_function(augment) if augment and ":" in augment else augment,
            views=1 if augment == "none" else views,
            test_data=people.test_data,
            test_tiers=material.test_tiers,
            evaluate_every=evaluate_every or max(1, made.steps // 20),
            max_physical_batch_size=max_physical_batch_size,
            seed=seed,
            secure=secure,
            run_folder=folder,
            checkpoint_every=checkpoint_every,
            resume=resume,
            sensitive=sensitive,
            progress=not quiet,
        )
    except KeyboardInterrupt:
        if (folder / "checkpoint.safetensors").exists():
            again = f"Repeat the command with --run-folder {folder} --resume to go on."
            raise KeyboardInterrupt(f"Everything up to the last checkpoint is saved. {again}") from None
        raise
    _describe(
        folder,
        people,
        model=model or default_network(people.input_shape),
        activation=activation,
        preset=preset,
    )
    _show(result, people, screen)
    if report:
        from pdpsgd.reporting import write_run_report

        screen.say(f"Report:  {write_run_report(folder)}")
    screen.write_json(shared.dump({**result.to_dict(), "run_folder": str(folder)}))


def _show(result: TrainingResult, data: PeopleData, screen: shared.Screen) -> None:
    from pdpsgd.cli.plan import show

    show(result.plan, screen)
    if result.evaluation is not None and result.accuracy is not None:
        tiers = "".join(f", {value:.1%} at epsilon {tier}" for tier, value in result.accuracy_by_tier.items())
        tested = result.evaluation.people
        screen.say(f"Accuracy on {tested:,} test people: {result.accuracy:.1%}{tiers}.")
    elif result.evaluation is None:
        screen.say("No test people, so no accuracy: give --test-file or --test-share.")
    if result.release_note is not None:
        screen.say(f"NOT FOR RELEASE: {result.release_note}.")
    screen.say(f"Folder:  {result.run_folder} (plan, model, settings, history, promises.csv)")


def _describe(
    folder: Path, data: PeopleData, *, model: str, activation: str | None, preset: str | None
) -> None:
    """Add to the settings what only the command line knows: which data, which network, which remarks."""
    from pdpsgd.training.presets import preset as find_preset
    from pdpsgd.training.run_folder import SENSITIVE, RunFolder

    run = RunFolder(folder)
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    settings |= {"data": data.name, "model": model, "classes": list(data.classes), "notes": list(data.notes)}
    # A preset may say that the network is given features instead of pixels, and where it starts.
    start = "random" if preset is None else find_preset(preset).start
    said = {"activation": activation, "preset": preset, "start": None if start == "random" else start}
    settings |= {name: value for name, value in said.items() if value}
    run.write_settings(settings)
    if data.schema is not None:
        # A draft was read from the private data: it is not for publishing until somebody has confirmed it.
        name = "schema.toml" if data.schema.confirmed else f"{SENSITIVE}-schema-draft.toml"
        shared.write_file(folder / name, data.schema.to_toml())


def _check_folder(folder: Path | None, resume: bool) -> None:
    """Refuse a folder with a run in it before time is spent on reading and planning."""
    if folder is None:
        return
    if (folder / "result.json").exists():
        fail(f"Expected a folder without a finished run. Got --run-folder {str(folder)!r}.")
    if (folder / "checkpoint.safetensors").exists() and not resume:
        fail(
            "Expected a new folder, or --resume to go on with the run that was begun in it. Got "
            "--run-folder "
            f"{str(folder)!r}."
        )


def _new_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that is not there yet."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _parse_options(texts: list[str]) -> dict[str, Any]:
    """`nesterov=true` as {"nesterov": True}."""
    parsed = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"Expected --optimizer-option as name=value, for example nesterov=true. Got {text!r}.")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed
