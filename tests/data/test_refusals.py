"""Files and frames that cannot be read as the model's records are refused by name; the ordinary one beside is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from PIL import Image

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.data import benchmarks
from pdpsgd.data.benchmarks.catalog import CATALOG
from pdpsgd.data.benchmarks.formats import read
from pdpsgd.data.benchmarks.loading import verify
from pdpsgd.data.drafting import draft_schema
from pdpsgd.data.images import load_npz, npz_declares, read_image
from pdpsgd.data.people import hold_out, load_people, others_like
from pdpsgd.data.preprocessing import Pixels, Preprocessing
from pdpsgd.data.remarks import Remarks
from pdpsgd.data.rows import npz_batches, read_rows
from pdpsgd.data.schema import Categorical, Numeric, Schema, Text
from pdpsgd.data.tabular import encode
from pdpsgd.data.text import read_texts, text_column
from pdpsgd.errors import PdpsgdError

SCHEMA = Schema("kind", ("0", "1"), {"age": Numeric(0, 100), "size": Numeric(0, 9)}, confirmed=True)
RANGED = Schema("kind", (), {"age": Numeric(0, 100)}, label_range=(0.0, 10.0), confirmed=True)
NAMED = Schema("kind", ("0", "1"), {"age": Numeric(0, 100)}, id_column="person", confirmed=True)
FRAME = {"age": [1.0, 2.0], "size": [1, 2], "kind": [0, 1]}
IMAGES = {"inputs": np.zeros((4, 2, 2), np.uint8), "targets": np.arange(4) % 2}


def npz(folder: Path, **arrays: Any) -> Path:
    path = folder / "i.npz"
    np.savez(path, **arrays)
    return path


def rows_of(
    source: Any, how: Preprocessing | None = None, shape: tuple[int, ...] | None = (2,)
) -> list[torch.Tensor]:
    read = read_rows(source, how or Preprocessing(), shape, at_once=3, remarks=Remarks())
    return [rows.inputs for rows in read]


# --- arrays of people ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": np.arange(4) / 2}, r"ids in .* that are whole numbers or text. Got float64"),
        ({"ids": np.arange(3)}, r"one id for each of the 4 inputs.*Got shape \(3,\)"),
        (
            {"targets": np.array([0, 1, 2**63, 0], dtype=np.uint64)},
            "counted from 0, at most 9223372036854775807",
        ),
        ({"targets": np.array([0, 1, 5000, 0])}, "below 1,000, or an array 'classes'.*Got 5,000"),
        ({"classes": np.array([["a", "b"]])}, r"classes in .* to be a list of names.*shape \(1, 2\)"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    assert len(load_npz(npz(tmp_path, **IMAGES)).inputs) == 4
    with pytest.raises(PdpsgdError, match=message):
        load_npz(npz(tmp_path, **{**IMAGES, **changed}))


def test_a_single_array_is_no_npz_file(tmp_path: Path) -> None:
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(PdpsgdError, match=r"an \.npz file with several arrays.*Got a single array"):
        load_npz(tmp_path / "one.npz")


def test_what_a_file_declares_is_read_of_its_header_and_its_names_of_classes(tmp_path: Path) -> None:
    shape, are_pixels, classes = npz_declares(npz(tmp_path, **IMAGES, classes=np.array(["a", "b"])))
    assert (shape, are_pixels, classes) == ((1, 2, 2), True, ("a", "b"))
    with pytest.raises(
        PdpsgdError, match=r"an array 'classes' with the names.*read from the targets of people"
    ):
        npz_declares(npz(tmp_path, **IMAGES))
    with pytest.raises(PdpsgdError, match=r"an array 'inputs' in .*whose shape can be read"):
        npz_declares(npz(tmp_path, targets=np.arange(4)))
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(PdpsgdError, match="whose shape can be read"):
        npz_declares(tmp_path / "text.npz")


def test_an_image_of_more_than_16_bits_is_refused(tmp_path: Path) -> None:
    for largest in (65_535, 65_536):
        Image.fromarray(np.array([[0, largest]], dtype=np.int32)).save(tmp_path / f"{largest}.tif")
    assert read_image(tmp_path / "65535.tif", (1, 2), color=False).tolist() == [[[0, 255]]]
    with pytest.raises(PdpsgdError, match=r"at most 16 bits.*Got values up to 65536"):
        read_image(tmp_path / "65536.tif", (1, 2), color=False)


@pytest.mark.parametrize(
    ("package", "read", "message"),
    [
        ("PIL", lambda folder: read_image(folder / "a.png", (1, 1), False), "Pillow to read images"),
        ("sklearn.datasets", lambda _: benchmarks.load("digits"), "scikit-learn for the data set 'digits'"),
    ],
)
def test_a_package_that_is_missing_is_named(
    package: str,
    read: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Image.new("L", (1, 1)).save(tmp_path / "a.png")
    read(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PdpsgdError, match=f"Expected {message}.*pip install"):
        read(tmp_path)


# --- tables of people ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "changed", "message"),
    [
        (SCHEMA, {"age": None, "size": None}, "the columns 'age', 'size', as the schema says"),
        (
            RANGED,
            {"kind": [1.0, None]},
            r"a number in column 'kind' of the frame, row 1, to learn from\. It is missing",
        ),
        (NAMED, {"person": ["a", None]}, r"an id in column 'person' of the frame, row 1\. It is missing"),
    ],
)
def test_tables_without_what_a_record_needs_are_refused(
    schema: Schema, changed: dict[str, Any], message: str
) -> None:
    whole = {**FRAME, "person": ["a", "b"]}
    assert len(encode(polars.DataFrame(whole), schema).inputs) == 2
    rest = {name: values for name, values in {**whole, **changed}.items() if values is not None}
    with pytest.raises(PdpsgdError, match=message):
        encode(polars.DataFrame(rest), schema)


def test_a_label_has_classes_or_a_range() -> None:
    with pytest.raises(PdpsgdError, match="classes or a label_range of label 'kind', not both"):
        Schema("kind", ("0", "1"), {"age": Numeric(0, 1)}, label_range=(0.0, 1.0))


def test_numbers_are_predicted_where_there_are_numbers() -> None:
    assert draft_schema(polars.DataFrame(FRAME), label="age", task="regression").label_range is not None
    nothing = polars.DataFrame({**FRAME, "age": [None, None]}, schema_overrides={"age": polars.Float64})
    with pytest.raises(PdpsgdError, match=r"numbers in column 'age' of .*, to predict them"):
        draft_schema(nothing, label="age", task="regression")


def test_a_text_is_the_only_feature() -> None:
    text: dict[str, Any] = {"body": Text()}
    assert text_column(Schema("kind", ("0", "1"), text)) == "body"
    more = Schema("kind", ("0", "1"), {**text, "age": Numeric(0, 1), "job": Categorical(("a", "b"))})
    with pytest.raises(
        PdpsgdError, match=r"'body' to be the only column that is a feature. Got 'age', 'job'"
    ):
        text_column(more)


def test_texts_are_read_from_a_column_of_texts() -> None:
    assert read_texts(polars.DataFrame({"body": ["a", None]}), "body") == ("a", "")
    with pytest.raises(PdpsgdError, match=r"a column 'body' with texts in .*'other'"):
        read_texts(polars.DataFrame({"other": ["a"]}), "body")
    with pytest.raises(PdpsgdError, match=r"text in column 'body' of the frame, row 1\. Got 7"):
        read_texts(polars.DataFrame({"body": [None, 7]}), "body")


# --- people to test on --------------------------------------------------------------------------------------


def test_test_people_are_read_as_the_runs_records_were(tmp_path: Path) -> None:
    source = npz(tmp_path, **IMAGES)
    assert len(others_like(source, None, classes=("0", "1")).inputs) == 4
    with pytest.raises(PdpsgdError, match=r"the classes \['a', 'b'\] in .*Got \['0', '1'\]"):
        others_like(source, None, classes=("a", "b"))
    with pytest.raises(PdpsgdError, match=r"a \.csv or \.parquet file, as the records are"):
        others_like(source, SCHEMA, classes=("0", "1"))


@pytest.mark.parametrize("share", [1e-12, 1 - 1e-12])
def test_a_share_that_leaves_nobody_on_one_side_is_refused(tmp_path: Path, share: float) -> None:
    data = load_people(npz(tmp_path, **IMAGES))
    people = Budgets([1.0] * 4, ids=[0, 1, 2, 3])
    _, kept, aside = hold_out(data, people, 0.5)
    assert len(kept) + len(aside) == 4
    with pytest.raises(
        PdpsgdError, match=r"a test share that leaves people on both sides. Got .* of 4 people"
    ):
        hold_out(data, people, share)


# --- rows to predict ----------------------------------------------------------------------------------------

TABLE = Preprocessing("table", schema=SCHEMA)
PICTURES = Preprocessing("images", pixels=Pixels())


def test_how_records_of_a_table_were_read_has_a_schema() -> None:
    assert Preprocessing.from_dict(TABLE.to_dict(), place="model.json").schema is not None
    with pytest.raises(PdpsgdError, match=r"the schema of a table in model\.json"):
        Preprocessing.from_dict({"kind": "table"}, place="model.json")


def test_rows_of_another_shape_are_refused() -> None:
    assert rows_of(np.zeros((4, 2)))[0].shape == (3, 2)
    with pytest.raises(PdpsgdError, match=r"inputs of shape \(2,\), as in training\. Got \(3,\)"):
        rows_of(np.zeros((4, 3)))


def test_an_array_is_no_table() -> None:
    assert rows_of(polars.DataFrame(FRAME), TABLE)[0].shape == (2, 2)
    for array in (np.zeros((4, 2)), torch.zeros(4, 2)):
        with pytest.raises(PdpsgdError, match="a frame with the columns 'age', 'size'"):
            rows_of(array, TABLE)


def test_images_are_read_for_models_of_images(tmp_path: Path) -> None:
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    shape = (1, 2, 2)
    for source in (tmp_path, tmp_path / "a.png"):
        assert rows_of(source, PICTURES, shape)[0].shape == (1, 1, 2, 2)
    with pytest.raises(PdpsgdError, match=r"an image, a folder of images, or an \.npz file"):
        rows_of(tmp_path / "a.txt", PICTURES, shape)
    with pytest.raises(PdpsgdError, match=r"at least one image in .*empty"):
        rows_of(tmp_path / "empty", PICTURES, shape)
    with pytest.raises(PdpsgdError, match=r"trained on inputs of shape \(4,\)\. Got image files"):
        rows_of(tmp_path, PICTURES, (4,))


def test_arrays_of_finite_numbers_are_read_for_models_of_arrays(tmp_path: Path) -> None:
    assert rows_of(npz(tmp_path, inputs=np.zeros((4, 2))))[0].shape == (3, 2)
    with pytest.raises(PdpsgdError, match=r"an \.npz file with an array 'inputs'.*t\.csv"):
        rows_of(tmp_path / "t.csv")
    with pytest.raises(PdpsgdError, match="finite numbers in the array"):
        rows_of(np.array([[0.0, np.nan]]))


def test_arrays_that_cannot_be_read_in_parts_are_refused(tmp_path: Path) -> None:
    by_rows = np.arange(8.0).reshape(4, 2)
    path = npz(tmp_path, inputs=by_rows, columns=np.asfortranarray(by_rows), one=np.float64(1.0))
    assert np.array_equal(np.concatenate(list(npz_batches(path, "inputs", 3))), by_rows)
    with pytest.raises(PdpsgdError, match=r"an array 'other' in .*'inputs', 'columns', 'one'"):
        list(npz_batches(path, "other", 3))
    for name in ("columns", "one"):
        with pytest.raises(PdpsgdError, match=f"'{name}' in .* an array of plain numbers, row after row"):
            list(npz_batches(path, name, 3))
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(PdpsgdError, match=r"Cannot read .*text\.npz' as \.npz"):
        list(npz_batches(tmp_path / "text.npz", "inputs", 3))


def test_an_id_is_something_that_somebody_can_be_known_by() -> None:
    frame = polars.DataFrame({"age": [1.0, 2.0], "kind": [0, 1], "person": [["a"], ["b"]]})
    with pytest.raises(PdpsgdError, match=r"whole number or text in column 'person' of .*row 0.*Got "):
        encode(frame, NAMED)
    assert encode(frame.with_columns(person=polars.Series(["a", "b"])), NAMED).ids.tolist() == ["a", "b"]


def test_files_of_a_benchmark_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    entry = CATALOG["mnist"]
    with pytest.raises(PdpsgdError, match=rf"Expected {entry.files[0].name} in .*pdpsgd data get mnist"):
        verify("mnist", place=tmp_path)
    (tmp_path / entry.files[0].name).mkdir()
    with pytest.raises(PdpsgdError, match=rf"Could not read .*{entry.files[0].name}: Is a directory"):
        read(entry.files[0], tmp_path / entry.files[0].name, name="mnist")
