"""What `load_people` cannot read, or must not, is refused by name; its ordinary neighbor is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.data.people import hold_out, load_people
from pdpsgd.errors import PdpsgdError

SCHEMA = """confirmed = true
label = "kind"
id_column = "person"
classes = ["0", "1"]
[columns.age]
kind = "numeric"
low = 0
high = 100
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.toml").write_text(SCHEMA)
    for name, first in (("t", 0), ("other", 40)):
        rows = "".join(f"p{i},{i % 90},{i % 2}\n" for i in range(first, first + 30))
        (tmp_path / f"{name}.csv").write_text("person,age,kind\n" + rows)
    (tmp_path / "shared.csv").write_text("person,age,kind\np7,3,1\nq1,4,0\n")
    images = np.zeros((4, 2, 2), np.uint8)
    np.savez(tmp_path / "i.npz", inputs=images, targets=np.arange(4) % 2, ids=np.array([1, 2, 3, 1]))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nothing.xyz", {}, "which is not there"),
        ("i.npz", {"task": "regression"}, "to predict numbers from"),
        ("i.npz", {"text": "words"}, "with texts in column 'words'"),
        ("i.npz", {}, "Expected one record per person in i.npz. Got 1 in rows 0 and 3"),
        ("t.csv", {}, "Expected the column to be predicted"),
        ("t.csv", {"schema": "s.toml", "label": "age"}, "Expected the label of the schema, 'kind'"),
        ("t.csv", {"schema": "s.toml", "id_column": "age"}, "Expected the id column of the schema, 'person'"),
        ("t.csv", {"schema": "s.toml", "text": "age"}, "to be of kind 'text'"),
        ("t.csv", {"schema": "s.toml", "task": "regression"}, "Expected task 'classification'"),
        ("t.csv", {"label": "kind"}, "Expected the column with person ids in t.csv"),
        ("t.csv", {"schema": "s.toml", "test_file": "t.csv"}, "in a file of their own"),
        ("t.csv", {"schema": "s.toml", "test_file": "shared.csv"}, "Got 'p7' in t.csv and"),
    ],
)
def test_what_cannot_be_read_or_tested_on_is_refused(folder, source, options, message) -> None:
    given = {name: folder / value if value.count(".") else value for name, value in options.items()}
    with pytest.raises(PdpsgdError, match=message.replace(".", r"\.")):
        load_people(folder / source, **given)


def test_the_ordinary_neighbors_are_read(folder) -> None:
    read = load_people(
        folder / "t.csv", schema=folder / "s.toml", label="kind", id_column="person", task="classification",
        test_file=folder / "other.csv",
    )  # fmt: skip
    assert (len(read.inputs), len(read.test_inputs)) == (30, 30)
    assert len(load_people(folder / "i.npz", repeated_ids=True).inputs) == 4
    people = Budgets(np.ones(30), ids=read.ids)
    with pytest.raises(PdpsgdError, match="Expected data without test people"):
        hold_out(read, people, 0.5)
    parted, _, aside = hold_out(load_people(folder / "t.csv", schema=folder / "s.toml"), people, 0.5)
    assert len(parted.test_inputs) == len(aside)
