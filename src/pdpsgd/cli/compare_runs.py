"""`pdpsgd compare RUN RUN --test-file FILE`: two finished models on the same test people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.cli import shared
from pdpsgd.cli.prose import cell
from pdpsgd.cli.training_options import DataOptions, ListOptions, tier_names, tiers_in
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.data.people import PeopleData
    from pdpsgd.training.model_comparison import ModelComparison
    from pdpsgd.training.predict import TrainedModel


def are_runs(sources: Sequence[str]) -> bool:
    """Tell whether what is to be compared are runs, rather than mechanisms on some data."""
    from pdpsgd.training.run_folder import RunFolder

    runs = [RunFolder(source).finished for source in sources]
    if len(sources) == 1 and not any(runs):
        return False
    if len(sources) != 2 or not all(runs):
        wrong = next((source for source, is_run in zip(sources, runs, strict=True) if not is_run), None)
        got = f"{len(sources)} arguments" if wrong is None else f"{wrong!r}, which has no finished run"
        fail(f"Expected data to compare mechanisms on, or two folders of finished runs. Got {got}.")
    return True


def compare_runs(
    runs: Sequence[str],
    records: DataOptions,
    people: ListOptions,
    *,
    by: str | None,
    page: Path | None,
    yes: bool,
    screen: shared.Screen,
) -> None:
    """Put two finished models side by side on the same test people.

    Args:
        runs: Their folders.
        records: With the test people's file.
        people: Names of columns with budgets.
        by: Columns of the file that name subgroups.
        page: The file of the report page; None for none.
        yes: Whether figures on people of the runs' lists are agreed to.
        screen: Where to say it.
    """
    from pdpsgd.training.model_comparison import METHOD
    from pdpsgd.training.predict import load_run

    if records.test_file is None:
        fail("Expected --test-file, the people to compare two runs on. Got none.")
    if page is not None:
        shared.check_output(page, "--page")
    models = [load_run(run) for run in runs]
    tasks = [model.description.task for model in models]
    if tasks[0] != tasks[1]:
        fail(f"Expected two models of one kind. Got one for {tasks[0]} and one for {tasks[1]}.")
    read = [_test_people(model, records, people) for model in models]
    tested = _with_ids(read)
    notes, on_lists = _check_outside(runs, read, yes=yes)
    more = {
        "people": tested.ids.tolist(),
        "groups": _groups(records.test_file, tested, people, by),
        "notes": notes,
        "on_lists": on_lists,
    }
    of_task = _numbers if tasks[0] == "regression" else _classes
    made = of_task(runs, models, read, more)
    _show(made, screen)
    screen.say(METHOD)
    if page is not None:
        from pdpsgd.reporting.models import models_page

        shared.write_file(page, models_page(made, runs, test_file=str(records.test_file)))
        screen.say(f"Report: {page}")
    screen.write_json(shared.dump(made.to_dict()))


def _classes(
    runs: Sequence[str], models: Sequence[TrainedModel], read: Sequence[PeopleData], more: dict[str, Any]
) -> ModelComparison:
    """Compare two models of classes."""
    from pdpsgd.training.model_comparison import compare_models

    names = [model.classes for model in models]
    if sorted(names[0]) != sorted(names[1]):
        fail(f"Expected two runs with the same classes. Got {list(names[0])} and {list(names[1])}.")
    order = [names[1].index(name) for name in names[0]]
    truth = read[0].targets.numpy().astype(np.int64)
    if not np.array_equal(np.array(order)[truth], read[1].targets.numpy()):
        labels = [model.description.label for model in models]
        fail(f"Expected two runs that predict the same label. Got {labels[0]!r} and {labels[1]!r}.")
    outputs = [_outputs(model, data) for model, data in zip(models, read, strict=True)]
    return compare_models(
        (str(runs[0]), str(runs[1])),
        (outputs[0], outputs[1] if outputs[1].shape[1] == 1 else outputs[1][:, order]),
        truth,
        class_names=names[0],
        **more,
    )


def _numbers(
    runs: Sequence[str], models: Sequence[TrainedModel], read: Sequence[PeopleData], more: dict[str, Any]
) -> ModelComparison:
    """Compare two models of numbers, in the unit of the label."""
    from pdpsgd.training.model_comparison import compare_numbers
    from pdpsgd.training.regression import in_range

    known = [model.description for model in models]
    if known[0].label != known[1].label:
        fail(f"Expected two runs that predict the same label. Got {known[0].label!r} and {known[1].label!r}.")
    limits = [each.label_range for each in known]
    if limits[0] != limits[1]:
        fail(
            f"Expected two runs with the same label range, to know what is right. Got {limits[0]} and {limits[1]}: "
            "labels outside of a run's range count as its nearer end."
        )
    answers = [
        in_range(_raw(model, data).reshape(len(data.targets)), limits[0]).double().numpy()
        for model, data in zip(models, read, strict=True)
    ]
    truth = in_range(read[0].targets, limits[0]).double().numpy().reshape(-1)
    return compare_numbers((str(runs[0]), str(runs[1])), (answers[0], answers[1]), truth, **more)


def _test_people(model: TrainedModel, records: DataOptions, people: ListOptions) -> PeopleData:
    from pdpsgd.data.people import others_like

    known = model.description
    columns = [name for name in (people.epsilon_column, people.delta_column) if name is not None]
    return others_like(
        str(records.test_file),
        known.preprocessing.schema,
        classes=known.classes,
        leave_out=columns,
        image_size=(records.image_size, records.image_size),
        color=not records.gray,
        people_file=records.people_file,
    )


def _raw(model: TrainedModel, data: PeopleData) -> Any:
    """Return what the network says of the records."""
    from pdpsgd.data.rows import Rows

    return model.outputs(model.inputs_of(Rows(data.inputs, texts=data.texts)))


def _outputs(model: TrainedModel, data: PeopleData) -> Any:
    """Return calibrated logits, in two dimensions."""
    known, outputs = model.description, _raw(model, data)
    if known.calibration is not None:
        outputs = known.calibration.apply(outputs)
    return outputs.reshape(len(outputs), -1).numpy()


def _with_ids(read: Sequence[PeopleData]) -> PeopleData:
    """Return the test people as a run read them that knows who they are; two that do have to agree on it."""
    named = [each for each in read if each.named] or [read[0]]
    if not np.array_equal(named[0].ids, named[-1].ids):
        columns = [None if each.schema is None else each.schema.id_column for each in named]
        fail(
            f"Expected two runs whose people have ids in the same column. Got {columns[0]!r} and {columns[1]!r}, which "
            "differ in the test file: who has several records in it depends on them."
        )
    return named[0]


def _check_outside(runs: Sequence[str], read: Sequence[PeopleData], *, yes: bool) -> tuple[list[str], bool]:
    """Refuse test people who are on a run's list, unless somebody agrees; say what it costs, and whether there are."""
    from pdpsgd.budgets.readers import read_columns
    from pdpsgd.training.run_folder import RunFolder

    notes, found = [], False
    for run, tested in zip(runs, read, strict=True):
        promises = RunFolder(run).promises
        if promises is None or not tested.named:
            why = "it has no list of people" if promises is None else "the test people have no ids"
            notes.append(f"Whether test people are on the list of {run} cannot be told: {why}.")
            continue
        listed = set(map(str, read_columns(promises, ["id"])[0]["id"]))
        both = sorted({str(each) for each in tested.ids.tolist()} & listed)
        if not both:
            continue
        cost = (
            f"{len(both):,} test people are on the list of {run}, such as {both[0]!r}: these figures are computed from "
            "their records without noise, so no epsilon bounds what they tell about them, and the promise made to "
            "them does not cover them; and a model does better on those whom it was trained on"
        )
        if not yes:
            fail(f"Expected test people outside both lists. Got others: {cost}. --yes goes on nevertheless.")
        found = True
        notes.append(f"{cost}. Do not publish these figures.")
    return notes, found


def _groups(file: Path, tested: PeopleData, people: ListOptions, by: str | None) -> dict[str, list[str]]:
    """Return the tier, and the subgroups asked for, of each test record."""
    from pdpsgd.budgets.readers import open_table

    groups = {}
    tiers = None if tested.schema is None else tiers_in(file, tested, people)
    if tiers is not None:
        groups["tier"] = tiers
    wanted = [name.strip() for name in (by or "").split(",") if name.strip()]
    if wanted and tested.schema is None:
        fail(f"Expected a table as --test-file, for subgroups by {wanted[0]!r}. Got {str(file)!r}.")
    for name in wanted:
        frame, source = open_table(file)
        column = name if name in frame.columns else name.removesuffix("-band")
        if column not in frame.columns:
            fail(f"Expected a column {name!r} in {source.name} for --by. Its columns are {frame.columns}.")
        values = frame[column]
        if values.dtype.is_numeric():
            groups[name] = tier_names(np.asarray(values.to_list(), dtype=np.float64))
        else:
            groups[name] = ["(missing)" if each is None else str(each) for each in values.to_list()]
    return groups


def _show(made: ModelComparison, screen: shared.Screen) -> None:
    from rich.table import Table

    table = Table("", "people", "figure", "1st", "2nd", "2nd less 1st (95 % interval)")
    for group in made.groups:
        named = "all" if group.kind == "all" else f"{group.kind} {group.name}"
        for index, figure in enumerate(group.figures):
            sure = "" if figure.verdict.startswith("no") else " *"
            table.add_row(
                cell(named) if index == 0 else "",
                f"{group.people:,}" if index == 0 else "",
                cell(figure.name.replace("balanced accuracy", "balanced")),
                figure.text(figure.first),
                figure.text(figure.second),
                f"{figure.change(figure.difference).removesuffix(' points')} ({figure.interval}){sure}",
                end_section=index == len(group.figures) - 1,
            )
    screen.say(f"1st: {made.names[0]}, 2nd: {made.names[1]}; * where the interval does not contain 0.")
    screen.table(table)
    screen.say(made.answer())
    for note in made.notes:
        screen.say(f"Note: {note}")
    if len(made.groups) > 8:
        screen.say(f"{len(made.groups)} groups: one in twenty intervals misses by chance alone.")
