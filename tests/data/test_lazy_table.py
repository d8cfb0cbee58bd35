"""Tables larger than memory: encoded into a file, and the same to training as any other."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch

import pdpsgd
from pdpsgd.data import lazy_table
from pdpsgd.data.lazy_table import MappedRows, encode_lazily, is_large
from pdpsgd.data.people import hold_out, load_people
from pdpsgd.data.schema import Categorical, Numeric, Schema
from pdpsgd.data.tabular import encode
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.networks import by_name

SCHEMA = Schema(
    "y",
    ("a", "b"),
    {"x": Numeric(-1, 1), "job": Categorical(("nurse", "cook"))},
    id_column="person",
    confirmed=True,
)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table that counts as large and is read some rows at a time, in several row groups."""
    rng = np.random.default_rng(0)
    frame = polars.DataFrame(
        {
            "person": [f"p{i}" for i in rng.permutation(300)],
            "x": rng.normal(0, 1, 300),
            "job": rng.choice(["nurse", "cook", "pilot"], 300),
            "y": rng.choice(["a", "b"], 300),
            "epsilon": rng.choice([1.0, 4.0], 300),
        }
    )
    frame.write_parquet(tmp_path / "people.parquet", row_group_size=90)
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    monkeypatch.setenv("PDPSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lazy_table, "LARGE", 100)
    monkeypatch.setattr(lazy_table, "ROWS_AT_ONCE", 64)
    return tmp_path / "people.parquet"


def test_a_large_table_is_encoded_as_any_other_and_leaves_no_file(table: Path) -> None:
    lazily, at_once = (
        encode_lazily(table, SCHEMA, leave_out=["epsilon"]),
        encode(table, SCHEMA, leave_out=["epsilon"]),
    )
    assert torch.equal(lazily.inputs, at_once.inputs)
    assert torch.equal(lazily.targets, at_once.targets)
    assert lazily.ids.tolist() == at_once.ids.tolist()
    assert lazily.notes == at_once.notes
    assert [path for path in (table.parent / "cache").rglob("*") if path.is_file()] == []


def test_only_large_parquet_files_are(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_large(table, SCHEMA)
    monkeypatch.setattr(lazy_table, "LARGE", 300 * 4 * 4)
    assert not is_large(table, SCHEMA)


def test_training_on_it_gives_the_same_model(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for large in (100, 10**9):
        monkeypatch.setattr(lazy_table, "LARGE", large)
        data = load_people(table, schema=table.parent / "schema.toml", leave_out=["epsilon"])
        assert data.mapped == (large == 100)
        data, staying, _ = hold_out(data, pdpsgd.Budgets.from_table(table, id_column="person"), 0.3)
        torch.manual_seed(0)
        network = by_name("linear", input_shape=data.input_shape, classes=2)
        made = pdpsgd.fit(
            network, data, staying, steps=5, batch_size=20, seed=0, progress=False, accountant="rdp"
        )
        weights.append((made.evaluation.loss, *(each.clone() for each in made.model.parameters())))
    assert weights[0][0] == weights[1][0]
    assert all(torch.equal(a, b) for a, b in zip(weights[0][1:], weights[1][1:], strict=True))


@pytest.mark.parametrize("change", ["twice", "label", "missing"])
def test_what_is_wrong_with_a_row_is_said_with_its_place(table: Path, change: str) -> None:
    frame = polars.read_parquet(table)
    rows = polars.arange(0, 300, eager=True)
    changed: dict[str, Any] = {
        "twice": polars.when(rows == 200)
        .then(polars.lit(frame["person"][3]))
        .otherwise("person")
        .alias("person"),
        "label": (polars.when(rows == 200).then(polars.lit("c")).otherwise(polars.col("y")).alias("y")),
        "missing": (polars.when(rows == 200).then(None).otherwise(polars.col("person")).alias("person")),
    }
    frame.with_columns(changed[change]).write_parquet(table)
    with pytest.raises(PdpsgdError, match="row 200"):
        encode_lazily(table, SCHEMA, leave_out=["epsilon"])


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDPSGD_CACHE", str(tmp_path))

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Full())
    with (
        MappedRows() as rows,
        pytest.raises(PdpsgdError, match=r"Expected room for a large table.*No space left"),
    ):
        rows.add(np.zeros((2, 2), dtype=np.float32))


@pytest.mark.parametrize(
    "ids", [np.arange(6), np.array(list("abcdef")), np.array(list("abcdef"), dtype=object)]
)
def test_records_find_their_people_whatever_their_order(ids: Any) -> None:
    from pdpsgd.engine.records import match_records

    order = [4, 0, 2]
    found = match_records(people=6, records=3, ids=ids, record_ids=ids[order])
    assert found.tolist() == [1, -1, 2, -1, 0, -1]
    with pytest.raises(PdpsgdError, match="Got rows 1 and 2, both of"):
        match_records(people=6, records=3, ids=ids, record_ids=ids[[4, 0, 0]])
    other = np.array(["zz"]) if ids.dtype.kind != "i" else np.array([9])
    with pytest.raises(PdpsgdError, match=r"on the list. Got record 0"):
        match_records(people=6, records=1, ids=ids, record_ids=other)
