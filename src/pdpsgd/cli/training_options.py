"""Options that `train` and `compare` share, and the data, people and network that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pdpsgd._typing import FloatArray, IdArray
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.cli import shared
from pdpsgd.cli.shared import PEOPLE, option
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.data.people import PeopleData
    from pdpsgd.models.pretraining import Progress

DATA = "The data"
TRAINING = "The model and its training"


def _read_preset(ctx: Any, value: str | None) -> str | None:
    """Take defaults from a preset: the command line and --config come first."""
    if value is not None and not ctx.resilient_parsing:
        from pdpsgd.training.presets import preset

        made = preset(value)
        defaults = {**made.fit_options(), "model": made.model, "activation": made.activation}
        said = {name: option for name, option in defaults.items() if option is not None}
        ctx.default_map = {**said, **(ctx.default_map or {})}
    return value


Source = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="Your own .csv, .parquet or .npz file or folder of images; or digits, mnist, fashion-mnist "
        "or svhn.",
    ),
]
Label = Annotated[
    str | None, option("--label", help="The column to be predicted.", panel=DATA, show_default=False)
]
SchemaFile = Annotated[
    Path | None,
    option(
        "--schema",
        help="Public ranges and categories of a table's columns (`pdpsgd data schema` drafts it).",
        panel=DATA,
        show_default=False,
    ),
]
TestFile = Annotated[
    Path | None,
    option("--test-file", help="A table of other people, to test on.", panel=DATA, show_default=False),
]
TestShare = Annotated[
    float | None,
    option(
        "--test-share",
        help="Set this share of the people aside to test on; nothing is promised to them.",
        panel=DATA,
        show_default=False,
    ),
]
ImageSize = Annotated[int, option("--image-size", help="Height and width for folders of images.", panel=DATA)]
Grey = Annotated[bool, option("--grey", help="Read images in grey.", panel=DATA)]
PeopleFile = Annotated[
    Path | None,
    option(
        "--people-file",
        help="For folders of images: a table with the columns file and id.",
        panel=DATA,
        show_default=False,
    ),
]
DataFolder = Annotated[
    Path | None, option("--data-folder", help="Where benchmarks are.", panel=DATA, show_default=False)
]
BudgetsFile = Annotated[
    Path | None,
    option(
        "--budgets",
        help="The list of people and their budgets, if it is not the data file itself; people without a "
        "record are "
        "welcome on it.",
        panel=PEOPLE,
        show_default=False,
    ),
]
TiersSeed = Annotated[
    int, option("--tiers-seed", help="Public seed: who is in which of --tiers.", panel=PEOPLE)
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="A recipe with its network: mnist, fashion-mnist or svhn; one of these followed by -scattering, "
        "which is more accurate; mnist-drawn or svhn-drawn, whose networks start from drawn digits. Any of its options "
        "may still be given.",
        is_eager=True,
        callback=_read_preset,
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        help="mnist-cnn, svhn-cnn, digits, tabular, linear, or your own as module:function.",
        panel=TRAINING,
        show_default="what suits the data",
    ),
]
Activation = Annotated[
    str | None, option("--activation", help="relu or tanh.", panel=TRAINING, show_default="the network's own")
]
OptimizerName = Annotated[
    str, option("--optimizer", help="sgd, adam, adamw, rmsprop or adagrad.", panel=TRAINING)
]
LearningRate = Annotated[float, option("--learning-rate", "--lr", help="Of the optimizer.", panel=TRAINING)]
Momentum = Annotated[float, option("--momentum", help="For sgd and rmsprop.", panel=TRAINING)]
WeightDecay = Annotated[float, option("--weight-decay", help="Of the optimizer.", panel=TRAINING)]
ScheduleName = Annotated[
    str, option("--schedule", help="Of the learning rate: cosine, linear or constant.", panel=TRAINING)
]
WeightAverage = Annotated[
    float | None,
    option(
        "--weight-average",
        help="Decay of a moving average of the weights, as in 0.99.",
        panel=TRAINING,
        show_default=False,
    ),
]
LossName = Annotated[
    str, option("--loss", help="cross-entropy, binary-cross-entropy or squared-error.", panel=TRAINING)
]
PhysicalBatch = Annotated[
    int | None,
    option(
        "--max-physical-batch-size",
        help="At most so many records in memory at once; changes nothing else.",
        panel=TRAINING,
        show_default="512 on processors",
    ),
]


@dataclass(frozen=True, eq=False)
class Material:
    """The data, the list of people with their budgets, and the tier of each test person where it is known."""

    data: PeopleData
    budgets: Budgets
    test_tiers: list[str] | None


def read_material(
    source: str,
    *,
    label: str | None,
    id_column: str | None,
    epsilon_column: str,
    delta_column: str | None,
    delta: float,
    tiers: str | None,
    tiers_seed: int,
    budgets_file: Path | None,
    allow_infinite: bool,
    schema: Path | None,
    test_file: Path | None,
    test_share: float | None,
    image_size: int,
    grey: bool,
    people_file: Path | None,
    data_folder: Path | None,
) -> Material:
    """Records and budgets, from whichever files and names the user gave."""
    from pdpsgd.data.people import TABLES, hold_out, load_people

    in_data = Path(source).suffix.lower() in TABLES and budgets_file is None and tiers is None
    if not (in_data or tiers or budgets_file):
        fail(
            f"Expected what people allow: --tiers (as in 1:0.34,2:0.43,3:0.23) or --budgets FILE, with "
            f"{source!r}. Got neither."
        )
    data = load_people(
        source,
        label=label,
        id_column=id_column,
        leave_out=[name for name in (epsilon_column, delta_column) if name is not None] if in_data else [],
        schema=schema,
        test_file=test_file,
        data_folder=data_folder,
        image_size=(image_size, image_size),
        colour=not grey,
        people_file=people_file,
    )
    everybody = data.ids
    if test_share is not None:
        data = hold_out(data, test_share)
    if tiers is not None:
        return _with_tiers(data, shared.parse_tiers(tiers), delta, tiers_seed)

    def read_list(path: Path, names: str | None) -> Budgets:
        return Budgets.from_table(
            path,
            id_column=names,
            epsilon_column=epsilon_column,
            delta_column=delta_column,
            delta=delta,
            allow_infinite=allow_infinite,
        )

    id_column = id_column or (data.schema.id_column if data.schema is not None else None)
    if budgets_file is not None and (id_column is None or not data.named):
        where = f"{budgets_file} (--id-column)" if id_column is None else source
        fail(
            f"Expected an id for each person in {where}, to know whose budget is whose with --budgets. Got none: with "
            "a row more or less in either file, everybody would get the next person's budget."
        )
    listed = read_list(budgets_file or Path(source), id_column)
    if in_data and id_column is None:
        listed = Budgets(listed.epsilon, listed.delta, ids=everybody, allow_infinite=True).without_names()
    if test_share is not None and data.test_ids is not None:
        return _set_aside(data, listed, data.test_ids)
    if test_file is not None and in_data:
        return Material(data, listed, tier_names(read_list(test_file, None).epsilon))
    return Material(data, listed, None)


def with_features(data: PeopleData, preset: str | None, say: Callable[[str], None]) -> PeopleData:
    """The data with what the preset's network is given as inputs."""
    if preset is None:
        return data
    from pdpsgd.training.presets import preset as find

    made = find(preset)
    made.check_is_for(data.name)
    if made.features == "scattering":
        images = len(data.inputs) + (0 if data.test_inputs is None else len(data.test_inputs))
        say(f"Computing the {made.features} features of {images:,} images: a minute or two for 40,000.")
    test = None if data.test_inputs is None else made.features_of(data.test_inputs)
    return replace(data, inputs=made.features_of(data.inputs), test_inputs=test)


def make_network(
    data: PeopleData,
    model: str | None,
    activation: str | None,
    *,
    seed: int | None,
    preset: str | None = None,
    progress: Progress | None = None,
    resumed: bool = False,
) -> nn.Module:
    """The network by name, its first weights from the seed if there is one; a resumed run has its own already."""
    import torch

    from pdpsgd.models.networks import by_name, default_network
    from pdpsgd.training.presets import preset as find

    if seed is not None:
        torch.manual_seed(seed)
    if preset is not None:
        recipe = replace(find(preset), activation=activation)
        recipe = replace(recipe, model=model or recipe.model, start="random" if resumed else recipe.start)
        return recipe.make_model(data, progress=progress)
    return by_name(
        model or default_network(data.input_shape),
        input_shape=data.input_shape,
        classes=len(data.classes),
        activation=activation,
    )


def tier_names(epsilon: FloatArray, most: int = 6) -> list[str]:
    """The tier of each person by their epsilon: the value itself, or one of a few ranges if there are many.

    >>> tier_names(np.array([0.5, 1.0, 0.5]))
    ['0.5', '1', '0.5']
    """
    values = np.unique(epsilon)
    if values.size <= most:
        return [f"{value:g}" for value in epsilon]
    edges = np.unique(np.quantile(epsilon, np.linspace(0, 1, most + 1), method="lower"))
    place = np.clip(np.searchsorted(edges, epsilon, side="right") - 1, 0, edges.size - 2)
    return [f"{edges[i]:.3g} to {edges[i + 1]:.3g}" for i in place]


def _with_tiers(data: PeopleData, shares: dict[float, float], delta: float, seed: int) -> Material:
    """People in tiers at random, by a public seed; test people, too."""
    listed = Budgets.from_tiers(shares, len(data.ids), delta, shuffle=seed)
    budgets = Budgets(listed.epsilon, listed.delta, ids=data.ids)
    budgets = budgets if data.named else budgets.without_names()
    if data.test_inputs is None:
        return Material(data, budgets, None)
    test = Budgets.from_tiers(shares, len(data.test_inputs), delta, shuffle=seed + 1)
    note = "People were put into tiers at random: differences in accuracy between tiers are chance."
    return Material(replace(data, notes=(*data.notes, note)), budgets, tier_names(test.epsilon))


def _set_aside(data: PeopleData, listed: Budgets, test_ids: IdArray) -> Material:
    """Take the test people off the list, keeping their budgets to name their tiers."""
    aside = np.isin(listed.ids, test_ids)
    epsilon_of = dict(zip(listed.ids[aside].tolist(), listed.epsilon[aside].tolist(), strict=True))
    for name in test_ids.tolist():
        if name not in epsilon_of:
            fail(f"Expected every record's person to be on the list. Got {name!r}, who is not.")
    left = Budgets(listed.epsilon[~aside], listed.delta[~aside], ids=listed.ids[~aside], allow_infinite=True)
    left = left if listed.named else left.without_names()
    return Material(data, left, tier_names(np.array([epsilon_of[name] for name in test_ids.tolist()])))
