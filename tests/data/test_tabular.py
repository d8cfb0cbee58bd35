from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pandas
import polars
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdpsgd.data.tabular import Categorical, Date, Ignored, Numeric, Schema, draft_schema, encode
from pdpsgd.errors import PdpsgdError

SCHEMA = Schema(
    label="income",
    classes=("low", "high"),
    columns={
        "age": Numeric(0, 100),
        "job": Categorical(("nurse", "teacher")),
        "epsilon": Ignored(),
    },
    id_column="person",
    confirmed=True,
)

PEOPLE = {
    "person": ["a", "b", "c", "d"],
    "age": [25, 150, None, -3],
    "job": ["nurse", " teacher ", "pilot", None],
    "income": ["low", "high", "low", "high"],
    "epsilon": [0.5, 1.0, 1.0, 2.0],
}

ENCODED = [
    [-0.5, 1, 0, 0],
    [1.0, 0, 1, 0],  # above the range: its upper end; blanks around text do not count
    [0.0, 0, 0, 1],  # missing number: the middle; unknown category: other
    [-1.0, 0, 0, 1],  # below the range: its lower end; missing category: other
]


def written(folder: Path, kind: str) -> object:
    frame = polars.DataFrame(PEOPLE)
    if kind == "csv":
        frame.write_csv(folder / "people.csv")
        return folder / "people.csv"
    if kind == "parquet":
        frame.write_parquet(folder / "people.parquet")
        return str(folder / "people.parquet")
    return {
        "polars": frame,
        "pandas": pandas.DataFrame(PEOPLE),
        "pandas nullable": pandas.DataFrame(PEOPLE).convert_dtypes(),
        "arrow": frame.to_arrow(),
    }[kind]


@pytest.mark.parametrize("kind", ["csv", "parquet", "polars", "pandas", "pandas nullable", "arrow"])
def test_every_kind_of_table_is_encoded_alike(kind: str, tmp_path: Path) -> None:
    data = encode(written(tmp_path, kind), SCHEMA)
    assert data.inputs.tolist() == ENCODED
    assert data.inputs.dtype == torch.float32
    assert data.targets.tolist() == [0, 1, 0, 1]
    assert data.targets.dtype == torch.int64
    assert data.ids.tolist() == ["a", "b", "c", "d"]
    assert data.classes == ("low", "high")
    assert data.feature_names == ("age", "job=nurse", "job=teacher", "job=(other)")
    assert data.input_shape == (4,)
    assert data.notes == ()


rows = st.fixed_dictionaries(
    {
        "age": st.none() | st.floats(allow_nan=True, allow_infinity=True),
        "job": st.none() | st.sampled_from(["nurse", "teacher", "pilot", ""]),
        "income": st.sampled_from(["low", "high"]),
    }
)


@given(st.lists(rows, min_size=1, max_size=8), st.integers(0, 7))
def test_a_row_is_encoded_the_same_whoever_else_is_in_the_table(people: list[dict], which: int) -> None:
    which %= len(people)
    types = {"person": polars.Int64, "age": polars.Float64, "job": polars.String, "income": polars.String}
    table = [{"person": i, **person} for i, person in enumerate(people)]
    together = encode(polars.DataFrame(table, schema=types), SCHEMA)
    alone = encode(polars.DataFrame([table[which]], schema=types), SCHEMA)
    assert torch.equal(together.inputs[which], alone.inputs[0])
    assert torch.isfinite(together.inputs).all()
    assert together.inputs.abs().max() <= 1


def test_the_result_of_an_unconfirmed_schema_says_what_is_not_covered() -> None:
    frame = polars.DataFrame(PEOPLE)
    schema = draft_schema(frame, label="income", id_column="person", leave_out=["epsilon"])
    (note,) = encode(frame, schema, leave_out=["epsilon"]).notes
    assert "NOT covered by the privacy promise" in note


def test_columns_that_the_schema_does_not_know_are_left_out_and_named() -> None:
    frame = polars.DataFrame(PEOPLE).with_columns(polars.lit(1).alias("shoe size"))
    data = encode(frame, SCHEMA)
    assert data.inputs.tolist() == ENCODED
    assert data.notes == ("Columns that the schema does not declare are left out: 'shoe size'.",)


def test_budgets_cannot_be_features() -> None:
    schema = Schema("income", ("low", "high"), {"age": Numeric(0, 1), "epsilon": Numeric(0, 9)})
    with pytest.raises(PdpsgdError, match="ignore column 'epsilon', which holds budgets"):
        encode(polars.DataFrame(PEOPLE), schema, leave_out=["epsilon"])


def test_ids_of_more_than_64_bits_are_ids() -> None:
    wide = polars.Series("person", [2**70, 3, 4, 5], dtype=polars.Int128)
    assert encode(polars.DataFrame(PEOPLE).with_columns(wide), SCHEMA).ids.tolist() == [2**70, 3, 4, 5]


def test_without_an_id_column_people_are_known_by_their_row() -> None:
    schema = Schema("income", ("low", "high"), {"age": Numeric(0, 1)})
    assert encode(polars.DataFrame(PEOPLE), schema).ids.tolist() == [0, 1, 2, 3]


def test_a_table_without_rows_is_legal() -> None:
    data = encode(polars.DataFrame(PEOPLE).head(0), SCHEMA)
    assert data.inputs.shape == (0, 4)
    assert data.targets.shape == (0,)


def test_somebody_on_the_list_without_a_record_is_legal() -> None:
    data = encode(polars.DataFrame(PEOPLE), SCHEMA, people=np.array(["d", "c", "x", "b", "a"]))
    assert len(data.ids) == 4


def csv(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "people.csv"
    path.write_text("\n".join(["person,age,job,income", *lines]) + "\n")
    return path


@pytest.mark.parametrize("word", ["", "NA", "n/a", "?", "nan"])
def test_what_people_write_for_a_missing_number_counts_as_missing(word: str, tmp_path: Path) -> None:
    path = csv(tmp_path, "a,50,nurse,low", f"b,{word},nurse,low")
    assert encode(path, SCHEMA).inputs[:, 0].tolist() == [0, 0]


def test_a_word_far_down_a_column_of_numbers_is_found_with_its_line(tmp_path: Path) -> None:
    path = csv(tmp_path, *(f"p{i},{i},nurse,low" for i in range(200)), "q,forty,nurse,low")
    with pytest.raises(PdpsgdError, match=r"number in column 'age' of people.csv, row 202. Got 'forty'"):
        encode(path, SCHEMA)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b,30,nurse,middling", r"'low', 'high' in column 'income' of people.csv, row 3. Got 'middling'"),
        ("b,30,nurse,", r"column 'income' of people.csv, row 3. It is missing"),
        (",30,nurse,low", r"an id in column 'person' of people.csv, row 3. It is missing"),
        ("a,30,nurse,low", r"one record per person. Got 'a' in people.csv, row 3 and in row 2"),
        ("z,30,nurse,low", r"person to be on the list. Got 'z' in people.csv, row 3"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_file_row_column_and_value(line, message, tmp_path) -> None:
    with pytest.raises(PdpsgdError, match=message):
        encode(csv(tmp_path, "a,30,nurse,low", line), SCHEMA, people=["a", "b"])


def test_a_column_that_the_schema_needs_and_the_table_lacks_is_named() -> None:
    with pytest.raises(PdpsgdError, match=r"column 'job', as the schema says, in the frame"):
        encode(polars.DataFrame(PEOPLE).drop("job"), SCHEMA)


def test_a_schema_without_features_is_refused() -> None:
    with pytest.raises(PdpsgdError, match="at least one numeric or categorical column"):
        encode(polars.DataFrame(PEOPLE), Schema("income", ("low", "high")))


def test_nullable_types_of_pandas_are_read_as_others_are() -> None:
    plain = {
        "age": [20, None, 60],
        "tall": [True, None, False],
        "job": ["nurse", None, "cook"],
        "y": ["a", "b", "a"],
    }
    types = {"age": "Int64", "tall": "boolean", "job": "string", "y": "category"}
    schema = Schema(
        "y",
        ("a", "b"),
        {"age": Numeric(0, 100), "tall": Categorical(("true",)), "job": Categorical(("nurse",))},
    )
    nullable = pandas.DataFrame({name: pandas.array(v, dtype=types[name]) for name, v in plain.items()})
    found = encode(nullable, schema)
    assert torch.equal(found.inputs, encode(polars.DataFrame(plain), schema).inputs)
    assert found.targets.tolist() == [0, 1, 0]
    assert draft_schema(nullable, label="y").columns["age"] == Numeric(20, 60)


def test_dates_become_numbers_within_their_public_range() -> None:
    days = Date(datetime.date(2020, 1, 1), datetime.date(2020, 12, 31))
    schema = Schema("y", ("a", "b"), {"day": days})
    values = ["2020-01-01", "2020-07-01 12:00", "2031-01-01", None]
    frame = polars.DataFrame({"day": values, "y": ["a", "b", "a", "b"]})
    as_text = encode(frame, schema).inputs[:, 0].tolist()
    assert as_text == pytest.approx([-1, 2 * 182 / 365 - 1, 1, 0])
    typed = frame.with_columns(polars.col("day").str.slice(0, 10).str.to_date())
    assert encode(typed, schema).inputs[:, 0].tolist() == pytest.approx(as_text)
    assert encode(typed.to_pandas(), schema).inputs[:, 0].tolist() == pytest.approx(as_text)
    with pytest.raises(PdpsgdError, match=r"Expected a date, .* in column 'day' .*row 0. Got '1/7/2020'"):
        encode(polars.DataFrame({"day": ["1/7/2020"], "y": ["a"]}), schema)
