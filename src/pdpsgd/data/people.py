"""One way in for all data: a benchmark, a table, a folder of images or an `.npz` file, as tensors with ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.data.preprocessing import Pixels, Preprocessing
from pdpsgd.errors import check_probability, fail
from pdpsgd.sampling.record_choice import HOW_TO_HAVE_MANY

if TYPE_CHECKING:
    import torch

    from pdpsgd.data.schema import Schema
    from pdpsgd.data.tabular import TabularData

TABLES = (".csv", ".parquet", ".pq")


@dataclass(frozen=True, eq=False)
class PeopleData:
    """Records with the id of their person, and, if there are any, records of other people to test on.

    `named` says whether ids are people's own, or only the places of their records in the data. `notes` are what a
    reader of any result must be told. `learned_from_data` says that ranges, categories or classes were read from the
    records, which no promise covers.
    Where records are `texts`, inputs are their numbers until an encoder (`models.encoders`) has read them.
    `test_ids` are None where test people are not known by name (a benchmark's own test set). `preprocessing` says how
    records became inputs.
    """

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor
    ids: npt.NDArray[Any]
    classes: tuple[str, ...]
    test_inputs: torch.Tensor | None = None
    test_targets: torch.Tensor | None = None
    test_ids: npt.NDArray[Any] | None = None
    schema: Schema | None = None
    notes: tuple[str, ...] = ()
    named: bool = True
    learned_from_data: bool = False
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    texts: tuple[str, ...] = ()
    mapped: bool = False
    """Whether records lie in a file, since they are too many for memory (`data.lazy_table`)."""

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The public range of a label that is a number; targets are then from -1 to 1."""
        return None if self.schema is None else self.schema.label_range

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.inputs.shape[1:])

    @property
    def test_data(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Inputs and targets of the test people."""
        if self.test_inputs is None or self.test_targets is None:
            return None
        return self.test_inputs, self.test_targets


def load_people(
    source: str | Path,
    *,
    label: str | None = None,
    id_column: str | None = None,
    leave_out: Sequence[str] = (),
    schema: str | Path | None = None,
    test_file: str | Path | None = None,
    data_folder: str | Path | None = None,
    image_size: tuple[int, int] = (32, 32),
    color: bool = True,
    people_file: str | Path | None = None,
    one_row_per_person: bool = False,
    repeated_ids: bool = False,
    text: str | None = None,
    task: str | None = None,
) -> PeopleData:
    """Read records from the name of a benchmark, or from the path of your own data.

    Without a `schema` the ranges and categories of a table are read from the data, and a note says that the promise
    does not cover them.

    Args:
        source: The name of a benchmark, a .csv, .parquet or .npz file, or a folder of images.
        label: The column of a table that is to be predicted.
        id_column: The column of a table with person ids.
        leave_out: Columns of a table that hold budgets.
        schema: A file with public ranges and categories.
        test_file: A table of other people, to test on.
        data_folder: The folder of the benchmarks.
        image_size: Height and width that images in folders are brought to.
        color: Whether images are read in color.
        people_file: A table with the columns `file` and `id`, for folders of images.
        one_row_per_person: Says that every row of a table is another person, where it has no ids.
        repeated_ids: Whether a person may have several records (`records_per_person`).
        text: The column of a table with free text, which is then the only feature.
        task: "regression" to predict a number, "classification" to predict a class; by default as the schema says, or
            a class, unless the label has many different numbers: then it has to be said.

    Returns:
        Tensors, with the id of each record's person.

    Raises:
        PdpsgdError: If the data cannot be read, or does not say whose record is whose.
    """
    from pdpsgd.data.benchmarks.catalog import CATALOG

    path = Path(source)
    check_other_file(path, test_file, "to test on")
    if str(source) in CATALOG and not path.exists() and task != "regression":
        return _benchmark(str(source), data_folder)
    if path.suffix.lower() in TABLES:
        declared = _declared(path, label, id_column, leave_out, schema, text, task)
        return _table(path, declared, leave_out, test_file, one_row_per_person, repeated_ids)
    if task == "regression":
        fail(f"Expected a table (.csv or .parquet), to predict numbers from. Got {str(source)!r}.")
    if text is not None:
        fail(f"Expected a table (.csv or .parquet) with texts in column {text!r}. Got {str(source)!r}.")
    if path.suffix.lower() == ".npz":
        return _images(path.name, _load_npz(path), repeated_ids=repeated_ids)
    if path.is_dir():
        from pdpsgd.data.images import load_folder

        loaded = load_folder(path, size=image_size, color=color, people=people_file)
        return _images(path.name, loaded, repeated_ids=repeated_ids)
    known = ", ".join(CATALOG)
    fail(
        f"Expected a .csv, .parquet or .npz file, a folder of images, or one of {known}. Got "
        f"{str(source)!r}, "
        f"which is {'of another kind' if path.exists() else 'not there'}."
    )


def check_other_file(source: str | Path, file: str | Path | None, purpose: str) -> None:
    """Refuse the file of the records as that of other people."""
    if file is not None and Path(source).exists() and Path(file).exists() and Path(file).samefile(source):
        fail(
            f"Expected other people {purpose}, in a file of their own. Got {str(file)!r}, which is trained on: what is "
            "published about its people would have no noise."
        )


def others_like(
    source: str | Path,
    schema: Schema | None,
    *,
    classes: Sequence[str],
    leave_out: Sequence[str] = (),
    image_size: tuple[int, int] = (32, 32),
    color: bool = True,
    people_file: str | Path | None = None,
) -> PeopleData:
    """Read other people's records as those of a run were read.

    Args:
        source: A table for the schema; else a folder of images or an .npz file.
        schema: The schema of the run's records, where they are a table.
        classes: The classes of the run's records.
        leave_out: Columns of a table that hold budgets.
        image_size: Height and width that images in folders are brought to.
        color: Whether images are read in color.
        people_file: A table with the columns `file` and `id`, for folders of images.

    Returns:
        Tensors, with the id of each record's person.

    Raises:
        PdpsgdError: If the records are of another kind, or have other classes.
    """
    path = Path(source)
    if schema is not None:
        if path.suffix.lower() not in TABLES:
            fail(f"Expected a .csv or .parquet file, as the records are. Got {str(source)!r}.")
        known = [name for name in leave_out if name not in schema.features]
        return _table(path, schema, known, None, one_row_per_person=True, repeated_ids=True)
    others = load_people(
        source, image_size=image_size, color=color, people_file=people_file, repeated_ids=True
    )
    if tuple(others.classes) != tuple(classes):
        fail(f"Expected the classes {list(classes)} in {str(source)!r}. Got {list(others.classes)}.")
    return others


def hold_out(data: PeopleData, budgets: Budgets, share: float) -> tuple[PeopleData, Budgets, Budgets]:
    """Set people of the list aside, to test on.

    Guarantee: who is set aside depends on ids and `share` alone, never on who supplied a record. Who allows nothing
    stays on the list, so that their record is not used for testing either.

    Args:
        data: Records, without test people of their own.
        budgets: The list of people, with or without a record.
        share: The share of those who allow something, to set aside.

    Returns:
        The data with test people, the list without them, and the list of them. Nothing is promised to them.

    Raises:
        PdpsgdError: If the data has test people already, or the share leaves nobody on one side.
    """
    from pdpsgd.data.lazy_table import taken

    if data.test_inputs is not None:
        fail("Expected data without test people, to hold some out. This data has its own.")
    staying, aside = part_list(budgets, share)
    tested = np.isin(data.ids, aside.ids)
    test, train = np.flatnonzero(tested), np.flatnonzero(~tested)
    note = "Some people were set aside, by their ids, to test on: nothing is promised to them."
    parted = replace(
        data,
        inputs=taken(data.inputs, train, mapped=data.mapped),
        targets=taken(data.targets, train, mapped=data.mapped),
        ids=data.ids[train],
        test_inputs=data.inputs[test],
        test_targets=data.targets[test],
        test_ids=data.ids[test],
        notes=(*data.notes, note),
    )
    return parted, staying, aside


def part_list(budgets: Budgets, share: float) -> tuple[Budgets, Budgets]:
    """Part a list of people as `hold_out` does, which needs no records: so a plan can be made for those who stay.

    Args:
        budgets: The list of people.
        share: The share of those who allow something, to set aside.

    Returns:
        Those who stay on the list, and those who are set aside to test on.

    Raises:
        PdpsgdError: If the share leaves nobody on one side.
    """
    check_probability(test_share=share)
    parts = (budgets.ids[start : start + 2**16].tolist() for start in range(0, len(budgets), 2**16))
    digests = (hashlib.sha256(f"test {name}".encode()).digest() for part in parts for name in part)
    numbers = np.fromiter(
        (int.from_bytes(digest[:8], "big") for digest in digests), dtype=np.uint64, count=len(budgets)
    )
    usable = (budgets.epsilon > 0) & (budgets.delta > 0)
    below = numbers < np.uint64(min(2**64 - 1, int(share * 2**64)))
    aside = below & usable
    if not aside.any() or not (usable & ~aside).any():
        fail(
            f"Expected a test share that leaves people on both sides. Got {share!r} of {int(usable.sum()):,} people "
            "who allow something."
        )
    return _part(budgets, ~aside), _part(budgets, aside)


def _part(budgets: Budgets, chosen: npt.NDArray[np.bool_]) -> Budgets:
    part = Budgets(
        budgets.epsilon[chosen], budgets.delta[chosen], ids=budgets.ids[chosen], allow_infinite=True
    )
    return part if budgets.named else part.without_names()


def _benchmark(name: str, folder: str | Path | None) -> PeopleData:
    from pdpsgd.data.benchmarks.loading import load

    loaded = load(name, folder=folder)
    return PeopleData(
        name=name,
        inputs=loaded.train_inputs,
        targets=loaded.train_targets,
        ids=np.arange(len(loaded.train_inputs)),
        classes=loaded.classes,
        test_inputs=loaded.test_inputs,
        test_targets=loaded.test_targets,
        notes=loaded.notes,
        preprocessing=Preprocessing(
            "images",
            pixels=Pixels(loaded.largest_pixel, loaded.normalization.mean, loaded.normalization.std),
        ),
    )


def _declared(
    path: Path,
    label: str | None,
    id_column: str | None,
    leave_out: Sequence[str],
    schema: str | Path | None,
    text: str | None,
    task: str | None,
) -> Schema:
    """Read the schema of a table, or draft one from it."""
    from pdpsgd.data.drafting import draft_schema
    from pdpsgd.data.schema import Schema
    from pdpsgd.data.text import text_column

    if schema is not None:
        declared = Schema.read(schema)
        if label not in (None, declared.label):
            fail(f"Expected the label of the schema, {declared.label!r}. Got {label!r}.")
        if id_column not in (None, declared.id_column):
            fail(f"Expected the id column of the schema, {declared.id_column!r}. Got {id_column!r}.")
        if text not in (None, text_column(declared)):
            fail(f"Expected column {text!r} to be of kind 'text' in {schema}. It is not.")
        if task not in (None, declared.task):
            has = "classes" if declared.task == "classification" else "a label_range"
            fail(f"Expected task {declared.task!r}: the label of {schema} has {has}. Got {task!r}.")
        return declared
    if label is None:
        fail(
            f"Expected the column to be predicted (--label), or a schema that names it, for {path.name}. "
            "Got neither."
        )
    return draft_schema(path, label=label, id_column=id_column, leave_out=leave_out, text=text, task=task)


def _table(
    path: Path,
    declared: Schema,
    leave_out: Sequence[str],
    test_file: str | Path | None,
    one_row_per_person: bool,
    repeated_ids: bool,
) -> PeopleData:
    from pdpsgd.data.lazy_table import encode_lazily, is_large
    from pdpsgd.data.tabular import encode
    from pdpsgd.data.text import read_texts, text_column

    if declared.id_column is None and not one_row_per_person:
        fail(
            f"Expected the column with person ids in {path.name} (--id-column, or id_column in the schema). Got none: "
            "rows of one person would be trained on, and protected, as several people. If every row is another person, "
            "say so with --one-row-per-person (one_row_per_person=True)."
        )
    options: dict[str, Any] = {"leave_out": leave_out, "repeated_ids": repeated_ids}
    lazily = text_column(declared) is None and is_large(path, declared)
    encoded = (encode_lazily if lazily else encode)(path, declared, **options)
    test = None if test_file is None else _test_people(test_file, declared, options)
    named = test is not None and test.named
    notes = (
        encoded.notes if named or test is None or declared.id_column is None else (*encoded.notes, UNCHECKED)
    )
    if test is not None and named:
        both = encoded.ids[np.isin(encoded.ids, test.ids)].tolist()
        if both:
            fail(
                f"Expected test people who are not trained on. Got {min(both, key=str)!r} in {path.name} "
                f"and {test_file}."
            )
    column = text_column(declared)
    texts: tuple[str, ...] = ()
    if column is not None:
        texts = read_texts(path, column) + (() if test_file is None else read_texts(test_file, column))
    return PeopleData(
        name=path.name,
        texts=texts,
        inputs=encoded.inputs,
        targets=encoded.targets,
        ids=encoded.ids,
        classes=encoded.classes,
        test_inputs=None if test is None else test.inputs + (len(encoded.inputs) if texts else 0),
        test_targets=None if test is None else test.targets,
        test_ids=test.ids if test is not None and named else None,
        schema=declared,
        notes=notes,
        named=declared.id_column is not None,
        learned_from_data=not declared.confirmed,
        preprocessing=Preprocessing("table", schema=declared),
        mapped=encoded.mapped,
    )


UNCHECKED = "The table of test people has no ids: that none of them is trained on was checked by rows alone."


def _test_people(file: str | Path, declared: Schema, options: dict[str, Any]) -> TabularData:
    """Encode a table of test people, who need no ids."""
    from pdpsgd.budgets.readers import open_table
    from pdpsgd.data.tabular import encode

    names = open_table(file)[0].columns
    known = declared if declared.id_column in names else replace(declared, id_column=None)
    return encode(file, known, **options)


def _load_npz(path: Path) -> Any:
    from pdpsgd.data.images import load_npz

    return load_npz(path)


def _images(name: str, loaded: Any, *, repeated_ids: bool) -> PeopleData:
    if not repeated_ids:
        first: dict[Any, int] = {}
        for row, person in enumerate(loaded.ids.tolist()):
            if first.setdefault(person, row) != row:
                fail(
                    f"Expected one record per person in {name}. Got {person!r} in rows {first[person]} and {row}. "
                    f"{HOW_TO_HAVE_MANY}"
                )
    return PeopleData(
        name=name,
        named=loaded.named,
        inputs=loaded.inputs,
        targets=loaded.targets,
        ids=loaded.ids,
        classes=loaded.classes,
        test_inputs=loaded.test_inputs,
        test_targets=loaded.test_targets,
        notes=loaded.notes,
        learned_from_data=not loaded.classes_declared,
        preprocessing=Preprocessing("images", pixels=Pixels()) if loaded.pixels else Preprocessing(),
    )
