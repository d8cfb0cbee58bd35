"""Options that `train` and `compare` share, and the data, people and network that they name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.cli import shared
from pdpsgd.cli.shared import PEOPLE, BudgetOptions
from pdpsgd.errors import check_one_of, fail
from pdpsgd.training.options import TRAINING, Options, TrainingOptions, option
from pdpsgd.training.presets import preset as find_preset

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.data.people import PeopleData
    from pdpsgd.models.encoders import Encoder
    from pdpsgd.models.pretraining import Progress
    from pdpsgd.training.inputs import TrainingInputs

DATA = "Data"
LORA = "lora"


Source = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help=".csv, .parquet or .npz file, folder of images, or a benchmark's name",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """How to read the records, and who is tested on."""

    label: str | None = option(None, "column to be predicted", panel=DATA)
    task: str | None = option(
        None, "classification, or regression to predict a number", panel=DATA, shown="by the label"
    )
    text: str | None = option(None, "column of free text, read by a frozen encoder", panel=DATA)
    encoder: str = option("minilm", "encoder of texts: minilm, a folder, or a name on the hub", panel=DATA)
    finetune: str | None = option(None, "lora: adapters in the encoder are trained, too", panel=DATA)
    max_tokens: int | None = option(
        None, "tokens of a text that are read", panel=DATA, kind=int, shown="the encoder's own; 64 for lora"
    )
    schema: Path | None = option(
        None, "public ranges and categories (draft: pdpsgd data schema)", panel=DATA, kind=Path
    )
    test_file: Path | None = option(None, "table of other people, to test on", panel=DATA, kind=Path)
    test_share: float | None = option(
        None, "share of people set aside to test on, without a promise", panel=DATA, kind=float
    )
    image_size: int = option(32, "height and width of images in folders, pixels", panel=DATA, kind=int)
    gray: bool = option(
        False, "one channel for images", panel=DATA, kind=bool, names=("--gray", "--grey"), shown=False
    )
    one_row_per_person: bool = option(
        False, "statement that every row is another person", panel=DATA, kind=bool, shown=False
    )
    people_file: Path | None = option(
        None, "table with columns file and id, for folders of images", panel=DATA, kind=Path
    )
    data_folder: Path | None = option(None, "folder of the benchmarks", panel=DATA, kind=Path)
    cache_folder: Path | None = option(
        None,
        "folder for what is kept for later runs (pdpsgd data cache)",
        panel=DATA,
        kind=Path,
        shown="$PDPSGD_CACHE",
    )

    def __post_init__(self, from_file: Collection[str]) -> None:
        super().__post_init__(from_file)
        expected = "Expected --test-file (other people) or --test-share (a part of the list)."
        self._only_one_of("test_file", "test_share", expected)


@dataclass(frozen=True, kw_only=True)
class ListOptions(BudgetOptions):
    """Budgets of people whose records are known, too."""

    tiers_seed: int = option(0, "public seed of who is in which tier", panel=PEOPLE, kind=int)
    budgets: Path | None = option(
        None, "list of people and budgets, apart from the data file", panel=PEOPLE, kind=Path
    )


@dataclass(frozen=True, kw_only=True)
class CommandOptions(TrainingOptions):
    """Options of a run whose network goes by a name."""

    model: str | None = option(
        None,
        "mnist-cnn, svhn-cnn, digits, tabular, linear, or module:function",
        panel=TRAINING,
        shown="by the shape of the data",
    )
    activation: str | None = option(None, "relu or tanh", panel=TRAINING, shown="the network's own")

    def description(self) -> dict[str, Any]:
        """Describe network and preset, and where its weights begin."""
        start = None if self.preset is None else find_preset(self.preset).start
        known = {
            "model": self.model,
            "activation": self.activation,
            "preset": self.preset,
            "start": None if start == "random" else start,
        }
        return {**super().description(), **{name: value for name, value in known.items() if value}}

    def _recommended(self) -> Mapping[str, Any]:
        known = super()._recommended()
        if not known:
            return known
        made = find_preset(str(self.preset))
        return {**known, "model": made.model, "activation": made.activation}


def with_task_of(records: DataOptions, options: TrainingOptions) -> DataOptions:
    """Take a squared error for a regression, where nothing else says what is predicted."""
    if records.task is None and records.schema is None and options.loss == "squared-error":
        return records.changed(task="regression")
    return records


def is_own_data(source: str) -> bool:
    """Tell whether records are somebody's own, rather than a benchmark's."""
    from pdpsgd.data.benchmarks.catalog import CATALOG

    return source not in CATALOG or Path(source).exists()


def read_inputs(
    source: str,
    how: DataOptions,
    whose: ListOptions,
    *,
    listed: Callable[[], Budgets] | None = None,
    records_per_person: int | None = None,
) -> TrainingInputs:
    """Read records and budgets, from whichever files and names the user gave.

    Args:
        source: The data.
        how: How to read the records, and who is tested on.
        whose: Where budgets are.
        listed: Reads the list of a ledger, for data that comes without budgets.
        records_per_person: K, with which people may have many records.

    Returns:
        The inputs of a run.
    """
    from pdpsgd._cache import use_cache_folder
    from pdpsgd.data.people import TABLES, hold_out, load_people
    from pdpsgd.training.inputs import TrainingInputs

    use_cache_folder(how.cache_folder)

    in_data = Path(source).suffix.lower() in TABLES and whose.budgets is None and whose.tiers is None
    if (
        listed is not None
        and not (whose.tiers or whose.budgets)
        and not (in_data and _has_budgets(source, whose))
    ):
        in_data, of_ledger = False, listed()
    else:
        of_ledger = None
    if not (in_data or whose.tiers or whose.budgets or of_ledger):
        fail(
            f"Expected what people allow: --tiers (as in 1:0.34,2:0.43,3:0.23) or --budgets FILE, with "
            f"{source!r}. Got neither."
        )
    columns = (whose.epsilon_column, whose.delta_column)
    many = records_per_person is not None
    data = load_people(
        source,
        label=how.label,
        id_column=whose.id_column,
        leave_out=[name for name in columns if name is not None] if in_data else [],
        schema=how.schema,
        test_file=how.test_file,
        data_folder=how.data_folder,
        image_size=(how.image_size, how.image_size),
        color=not how.gray,
        people_file=how.people_file,
        one_row_per_person=how.one_row_per_person,
        repeated_ids=many,
        text=how.text,
        task=how.task,
    )
    people = of_ledger or _list_of(data, source, whose, in_data=in_data, many=many)
    tiers: list[str] | None = None
    without_promise = 0
    if how.test_share is not None:
        data, people, tested = hold_out(data, people, how.test_share)
        without_promise = len(tested)
        epsilon_of = dict(zip(tested.ids.tolist(), tested.epsilon.tolist(), strict=True))
        assert data.test_ids is not None  # those of the list who were set aside
        tiers = tier_names(np.array([epsilon_of[name] for name in data.test_ids.tolist()]))
    elif whose.tiers is not None and data.test_inputs is not None:
        made_up = Budgets.from_tiers(
            shared.parse_tiers(whose.tiers), len(data.test_inputs), whose.delta, shuffle=whose.tiers_seed + 1
        )
        tiers = tier_names(made_up.epsilon)
    elif how.test_file is not None and in_data and _has_column(how.test_file, whose.epsilon_column):
        whose_test = whose if data.test_ids is not None else replace(whose, id_column=None)
        tested = whose_test.read(how.test_file, repeated_ids=many)
        _check_allowed(tested, how.test_file)
        without_promise, tiers = len(tested), _tiers_of_records(tested, data)
    if whose.epsilon_map is not None:
        note = f"What people allow is given in words, which stand for these epsilons: {whose.epsilon_map}."
        data = replace(data, notes=(*data.notes, note))
    if whose.tiers is not None and tiers is not None:
        note = "People were put into tiers at random: differences in accuracy between tiers are chance."
        data = replace(data, notes=(*data.notes, note))
    inputs = TrainingInputs.from_people(data, people, tiers)
    return replace(inputs, without_promise=without_promise)


def with_calibration(
    inputs: TrainingInputs, calibrate: str | None, source: str, how: DataOptions, whose: ListOptions
) -> TrainingInputs:
    """Read the people whom probabilities are calibrated on; they must be outside the list.

    Args:
        inputs: The records of the run, before features are made of them.
        calibrate: What `--calibrate` says: a file, or the plan's last steps.
        source: Where the records of the run are from.
        how: How records are read.
        whose: Names of columns with budgets.

    Returns:
        The inputs with these people, who are promised nothing.
    """
    if calibrate is None or calibrate == "steps":
        return inputs
    from pdpsgd.data.people import check_other_file, others_like

    file = Path(calibrate)
    check_other_file(source, file, "to calibrate on")
    columns = [name for name in (whose.epsilon_column, whose.delta_column) if name is not None]
    others = others_like(
        file,
        inputs.schema,
        classes=inputs.classes,
        leave_out=columns,
        image_size=(how.image_size, how.image_size),
        color=not how.gray,
        people_file=how.people_file,
    )
    named = inputs.budgets is not None and inputs.budgets.named
    known = set(map(str, inputs.budgets.ids.tolist())) if named and inputs.budgets is not None else set()
    both = known & set(map(str, others.ids.tolist()))  # as text: one odd id makes all ids of a file text
    if others.named and both:
        fail(
            f"Expected people outside the list, to calibrate on. Got {min(both, key=str)!r} in {calibrate} and on the "
            "list: their record would be used beyond what they allow."
        )
    texts = (*inputs.texts, *others.texts)
    numbers = others.inputs + (len(inputs.texts) if others.texts else 0)
    asked = 0
    if others.schema is not None and _has_budgets(calibrate, whose):
        allowed = whose.read(file, id_column=others.schema.id_column, repeated_ids=True)
        _check_allowed(allowed, file)
        asked = len(allowed)
    return replace(
        inputs,
        calibration_data=(numbers, others.targets),
        texts=texts,
        without_promise=inputs.without_promise + asked,
    )


def _has_budgets(source: str, whose: ListOptions) -> bool:
    """Tell whether a table has a column of budgets, or is said to have one."""
    return whose.said("epsilon_column") or _has_column(Path(source), whose.epsilon_column)


def _has_column(table: Path, name: str) -> bool:
    from pdpsgd.budgets.readers import has_column

    return has_column(table, name)


def _tiers_of_records(tested: Budgets, data: PeopleData) -> list[str]:
    """Return the tier of each test record: that of its person."""
    names = tier_names(tested.epsilon)
    if not tested.named or data.test_ids is None:
        return names
    tier_of = dict(zip(tested.ids.tolist(), names, strict=True))
    return [tier_of[person] for person in data.test_ids.tolist()]


def _list_of(data: PeopleData, source: str, whose: ListOptions, *, in_data: bool, many: bool) -> Budgets:
    """Read the list of people, or put people into tiers by a public seed."""
    if whose.tiers is not None:
        return in_tiers(data.ids, whose, named=data.named, many=many)
    id_column = whose.id_column or (data.schema.id_column if data.schema is not None else None)
    if whose.budgets is not None and (id_column is None or not data.named):
        where = f"{whose.budgets} (--id-column)" if id_column is None else source
        fail(
            f"Expected an id for each person in {where}, to know whose budget is whose with --budgets. Got none: with "
            "a row more or less in either file, everybody would get the next person's budget."
        )
    listed = whose.read(whose.budgets or Path(source), id_column=id_column, repeated_ids=many and in_data)
    if in_data and id_column is None:
        return Budgets(listed.epsilon, listed.delta, ids=data.ids, allow_infinite=True).without_names()
    return listed


def in_tiers(ids: npt.NDArray[Any], whose: ListOptions, *, named: bool, many: bool) -> Budgets:
    """Put people into the tiers of `--tiers` by a public seed.

    Args:
        ids: The id of each record's person.
        whose: The tiers.
        named: Whether ids are people's own.
        many: Whether a person may have several records.
    """
    people = np.unique(ids) if many else ids
    tiers = shared.parse_tiers(str(whose.tiers))
    made_up = Budgets.from_tiers(tiers, len(people), whose.delta, shuffle=whose.tiers_seed)
    listed = Budgets(made_up.epsilon, made_up.delta, ids=people)
    return listed if named else listed.without_names()


def _check_allowed(tested: Budgets, file: Path) -> None:
    """Refuse test people who allow nothing: their record is not to be used, for testing either."""
    refused = int(((tested.epsilon == 0) | (tested.delta == 0)).sum())
    if refused:
        fail(
            f"Expected test people who allow something in {str(file)!r}. Got {refused} at epsilon or delta 0, whose "
            "record is never to be used: leave their rows out."
        )


def with_features(inputs: TrainingInputs, preset: str | None, say: Callable[[str], None]) -> TrainingInputs:
    """Replace inputs by the features that the preset's network is given."""
    if preset is None:
        return inputs
    made = find_preset(preset)
    made.check_is_for(str(inputs.name))
    if made.features == "scattering":
        images = len(inputs.records[0]) + (0 if inputs.test_data is None else len(inputs.test_data[0]))
        say(f"Computing the {made.features} features of {images:,} images: a minute or two for 40,000.")
    return inputs.with_features(made.features, made.features_of)


def with_embeddings(inputs: TrainingInputs, how: DataOptions, screen: shared.Screen) -> TrainingInputs:
    """Replace texts, if there are any, by their embeddings, which are computed once and kept in the cache folder.

    For adapters (`--finetune lora`) they are replaced by what those are given, which is not kept.
    """
    if how.finetune is not None:
        check_one_of((LORA,), finetune=how.finetune)
        if not inputs.texts:
            fail("Expected texts (--text COLUMN) with --finetune. Got data without.")
    if not inputs.texts:
        return inputs
    from pdpsgd._cache import size_text
    from pdpsgd.models.embedding_cache import EmbeddingCache
    from pdpsgd.models.encoders import load_encoder

    name = how.encoder
    if how.finetune is not None:
        return _for_adapters(inputs, load_encoder(name, max_tokens=how.max_tokens or LORA_TOKENS), screen)
    encoder, cache = load_encoder(name, max_tokens=how.max_tokens), EmbeddingCache.of_user()
    kept = (
        ""
        if cache is None
        else (f" Embeddings are kept in {cache.file} ({size_text(cache.size)} now): as private as the texts.")
    )
    screen.say(
        f"Reading {len(inputs.texts):,} texts with {name} (public weights, frozen: costs no privacy).{kept}"
    )
    with screen.bars() as progress:
        try:
            return inputs.with_embeddings(
                lambda texts: encoder.embed(texts, cache=cache, progress=progress), encoder.description()
            )
        except KeyboardInterrupt as error:
            if cache is None:
                raise
            message = (
                "Texts embedded so far are kept: the same command goes on from there. Nothing was spent."
            )
            raise KeyboardInterrupt(message) from error


def _for_adapters(inputs: TrainingInputs, encoder: Encoder, screen: shared.Screen) -> TrainingInputs:
    """Replace texts by what adapters are given: states of the last layer, or tokens where all layers are adapted."""
    from pdpsgd.models.adapters import LAST_LAYER, finetuned
    from pdpsgd.models.last_layer import states

    description = finetuned(encoder)
    last = description["finetune"] == LAST_LAYER
    screen.say(
        f"Reading {len(inputs.texts):,} texts as {encoder.max_tokens} tokens each, for "
        f"{'an adapter in the last layer' if last else 'adapters'} of {encoder.name} "
        "(public weights, which stay as they are). Up to large epsilon the frozen encoder alone may be as good."
    )
    if not last:
        return inputs.with_tokens(encoder.tokens, description)
    with screen.bars() as progress:
        return inputs.with_tokens(lambda texts: states(encoder, texts, progress=progress), description)


TEXT_DEFAULTS = {"model": "linear", "steps": 200, "learning_rate": 100.0, "max_grad_norm": 0.1}
"""Options of a linear model on embeddings of length 1: the best on mails (docs/results/texts.md)."""
LORA_TOKENS = 64
LORA_DEFAULTS = {
    "model": LORA,
    "steps": 200,
    "optimizer": "adam",
    "learning_rate": 0.1,
    "max_grad_norm": 0.5,
    "max_physical_batch_size": 32,
}
"""Options of an adapter in the last layer: the best on mails at large budgets (docs/results/texts.md)."""
ALL_LAYERS_DEFAULTS = {**LORA_DEFAULTS, "steps": 100, "learning_rate": 3e-3, "max_grad_norm": 10.0}
"""Options of adapters in all layers: gradients are larger, as features are not of length 1."""
DEFAULTS_OF_TEXTS = {None: TEXT_DEFAULTS, "last-layer": LORA_DEFAULTS, "lora": ALL_LAYERS_DEFAULTS}
"""Options by what the encoder's description says of adapters in it."""


def make_network(
    inputs: TrainingInputs,
    options: CommandOptions,
    *,
    progress: Progress | None = None,
    resumed: bool = False,
) -> nn.Module:
    """Make the network by name, its first weights from the seed if there is one; a resumed run has its own already."""
    import torch

    from pdpsgd.models.networks import by_name, default_network
    from pdpsgd.models.pretraining import start_at_zero

    name = options.model or default_network(inputs.input_shape)
    if options.seed is not None:
        torch.manual_seed(options.seed % 2**63)  # torch takes no larger one; a negative one is refused later
    tuned = inputs.encoder is not None and inputs.encoder.get("finetune")
    if bool(tuned) != (name == LORA):
        fail(f"Expected --model {LORA} with --finetune {LORA}, and only there. Got {name!r}.")
    if inputs.encoder is not None and tuned:
        from pdpsgd.models.adapters import load_adapted

        return load_adapted(inputs.encoder, inputs.outputs)
    if options.preset is None:
        made = by_name(
            name, input_shape=inputs.input_shape, classes=inputs.outputs, activation=options.activation
        )
        if inputs.encoder is not None and name == "linear":
            start_at_zero(made)
        return made
    recipe = replace(find_preset(options.preset), model=name, activation=options.activation)
    recipe = replace(recipe, start="random") if resumed else recipe
    return recipe.make_model(inputs, progress=progress)


def tiers_in(file: Path, tested: PeopleData, whose: ListOptions) -> list[str] | None:
    """Return the tier of each test record by the budgets in its file; None where the file has none."""
    if not _has_budgets(str(file), whose):
        return None
    id_column = None if tested.schema is None else tested.schema.id_column
    allowed = whose.read(file, id_column=id_column, repeated_ids=True)
    _check_allowed(allowed, file)
    names = tier_names(allowed.epsilon)
    if not allowed.named:
        return names
    tier_of = dict(zip(allowed.ids.tolist(), names, strict=True))
    return [tier_of[person] for person in tested.ids.tolist()]


def tier_names(epsilon: FloatArray, most: int = 6) -> list[str]:
    """Return the tier of each person by their epsilon: the value itself, or one of a few ranges if there are many.

    >>> tier_names(np.array([0.5, 1.0, 0.5]))
    ['0.5', '1', '0.5']
    """
    values = np.unique(epsilon)
    if values.size <= most:
        return [f"{value:g}" for value in epsilon]
    edges = np.unique(np.quantile(epsilon, np.linspace(0, 1, most + 1), method="lower"))
    place = np.clip(np.searchsorted(edges, epsilon, side="right") - 1, 0, edges.size - 2)
    return [f"{edges[i]:.3g} to {edges[i + 1]:.3g}" for i in place]
