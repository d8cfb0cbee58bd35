from __future__ import annotations

import datetime
import json
from pathlib import Path

import pandas
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdpsgd.data.drafting import draft_schema
from pdpsgd.data.schema import Categorical, Date, Ignored, Numeric, Schema
from pdpsgd.errors import PdpsgdError

PEOPLE = {
    "person": ["a", "b", "c", "d"],
    "age": [23, 47, 35, None],
    "height": [1.612, 1.85, 1.701, 1.999],
    "job": ["nurse", " teacher", "nurse", None],
    "smokes": [True, False, None, True],
    "born": [datetime.date(1990, 1, 1)] * 4,
    "income": ["low", "high", "low", "high"],
    "epsilon": [0.5, 1.0, 1.0, 2.0],
}

COLUMNS = {
    "age": Numeric(23, 47),
    "height": Numeric(1.6, 2),
    "job": Categorical(("nurse", "teacher")),
    "smokes": Categorical(("false", "true")),
    "born": Date(datetime.date(1990, 1, 1), datetime.date(1990, 12, 31)),
    "epsilon": Ignored(),
}


@pytest.mark.parametrize("frame", [polars.DataFrame(PEOPLE), pandas.DataFrame(PEOPLE)])
def test_a_draft_guesses_kinds_ranges_and_categories(frame) -> None:
    schema = draft_schema(frame, label="income", id_column="person", leave_out=["epsilon"])
    assert schema.classes == ("high", "low")
    assert schema.id_column == "person"
    assert schema.columns == COLUMNS
    assert schema.features == ("age", "height", "job", "smokes", "born")


def test_a_draft_is_unconfirmed_and_its_file_says_so_at_the_top() -> None:
    schema = draft_schema(polars.DataFrame(PEOPLE), label="income")
    assert not schema.confirmed
    first, second, *_ = schema.to_toml().splitlines()
    assert "READ FROM THE DATA" in first
    assert "NOT PRIVATE" in second
    assert "confirmed = false" in schema.to_toml()


def test_a_confirmed_schema_has_no_such_notice() -> None:
    text = Schema("y", ("a", "b"), {"x": Numeric(0, 1)}, confirmed=True).to_toml()
    assert "PRIVATE" not in text
    assert "confirmed = true" in text


def test_text_that_differs_for_nearly_everybody_is_drafted_as_ignored() -> None:
    frame = polars.DataFrame({"name": [f"somebody {i}" for i in range(60)], "y": ["a", "b"] * 30})
    assert draft_schema(frame, label="y").columns == {"name": Ignored()}


def test_a_column_of_one_number_gets_a_range_all_the_same() -> None:
    frame = polars.DataFrame({"x": [5, 5], "y": ["a", "b"]})
    assert draft_schema(frame, label="y").columns == {"x": Numeric(5, 10)}


def test_an_empty_column_is_drafted_as_ignored() -> None:
    frame = polars.DataFrame({"x": [None, None], "z": [float("nan")] * 2, "y": ["a", "b"]})
    assert draft_schema(frame, label="y").columns == {"x": Ignored(), "z": Ignored()}


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20))
def test_a_drafted_range_covers_the_data(values: list[float]) -> None:
    frame = polars.DataFrame({"x": values * 2, "y": ["a", "b"] * len(values)})
    column = draft_schema(frame, label="y").columns["x"]
    assert isinstance(column, Numeric)
    assert column.low <= min(values)
    assert column.high >= max(values)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda s: s.strip() == s
)


@given(
    label=names,
    classes=st.lists(names, min_size=2, max_size=4, unique=True),
    columns=st.dictionaries(
        names,
        st.one_of(
            st.builds(lambda low, width: Numeric(low, low + width), st.integers(-9, 9), st.integers(1, 9)),
            st.builds(Numeric, st.floats(-2, -1), st.floats(1, 2)),
            st.lists(names, min_size=1, max_size=4, unique=True).map(lambda c: Categorical(tuple(c))),
            st.just(Ignored()),
        ),
        max_size=4,
    ),
    confirmed=st.booleans(),
)
def test_a_schema_survives_its_file(label, classes, columns, confirmed) -> None:
    columns.pop(label, None)
    schema = Schema(label, tuple(classes), columns, confirmed=confirmed)
    assert Schema.from_toml(schema.to_toml()) == schema


HEAD = 'label = "y"\nclasses = ["a", "b"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label = ", "Expected TOML in people.toml"),
        ('classes = ["a", "b"]', "Expected 'label' in people.toml. Its entries are 'classes'"),
        ('label = "y"\nclasses = ["a"]', r"at least two classes of label 'y'. Got \['a'\]"),
        ('label = "y"\nclasses = ["a", "a"]', "distinct classes of label 'y'. Got 'a' twice"),
        (HEAD + "color = 3", "Got 'color'"),
        (HEAD + "confirmed = 1", "'confirmed' in people.toml. Got 1"),
        (HEAD + "columns = 3", r"\[columns.NAME\]"),
        (HEAD + "columns.x = 3", r"\[columns.x\] of people.toml. Got 3"),
        (HEAD + "[columns.x]\nlow = 1", r"Expected 'kind' in \[columns.x\]"),
        (HEAD + '[columns.x]\nkind = "number"', r"'numeric', 'date', 'categorical', .*'ignored'.*'number'"),
        (HEAD + '[columns.x]\nkind = "numeric"\nlow = 1', r"Expected 'high' in \[columns.x\]"),
        (HEAD + '[columns.x]\nkind = "numeric"\nlow = "1"\nhigh = 2', r"'low' in \[columns.x\].*Got '1'"),
        (
            HEAD + '[columns.x]\nkind = "numeric"\nlow = 3\nhigh = 2',
            r"low < high for column 'x'.*low=3, high=2",
        ),
        (HEAD + '[columns.x]\nkind = "numeric"\nlow = 0\nhigh = inf', "high=inf"),
        (HEAD + '[columns.x]\nkind = "categorical"\ncategories = []', "at least one category for column 'x'"),
        (HEAD + '[columns.x]\nkind = "categorical"\ncategories = ["u", "u"]', "Got 'u' twice"),
        (HEAD + '[columns.y]\nkind = "numeric"\nlow = 0\nhigh = 1', "label 'y' not to be a feature"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        Schema.from_toml(text, source="people.toml")


def test_categories_and_classes_may_be_written_as_numbers() -> None:
    schema = Schema.from_toml(
        'label = "y"\nclasses = [0, 1]\n[columns.x]\nkind = "categorical"\ncategories = [1, 2.0]'
    )
    assert schema.classes == ("0", "1")
    assert schema.columns["x"] == Categorical(("1", "2"))


def test_a_schema_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"nowhere.toml.*No such file"):
        Schema.read(tmp_path / "nowhere.toml")


def test_a_missing_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(PdpsgdError, match=r"column 'wage' in the frame. Its columns are 'person', 'age'"):
        draft_schema(polars.DataFrame(PEOPLE), label="wage")


def test_a_label_with_too_many_values_is_no_label() -> None:
    with pytest.raises(PdpsgdError, match=r"at most 50 classes in column 'y'.*Got 60"):
        draft_schema(polars.DataFrame({"y": [f"t{i}" for i in range(60)]}), label="y")
    with pytest.raises(PdpsgdError, match=r"at most 50 classes in column 'y'.*Got 60"):
        draft_schema(polars.DataFrame({"y": list(range(60))}), label="y", task="classification")


@pytest.mark.parametrize("different", [21, 60])
def test_a_label_of_many_numbers_is_asked_about_not_turned_into_classes(different: int) -> None:
    frame = polars.DataFrame({"x": [0.5] * different, "y": [i / 4 for i in range(different)]})
    with pytest.raises(
        PdpsgdError, match=rf"{different} distinct numbers.*--task regression.*classes, say --task"
    ):
        draft_schema(frame, label="y")
    schema = draft_schema(frame, label="y", task="regression")
    assert (schema.task, schema.classes, schema.outputs) == ("regression", (), 1)
    assert schema.label_range == {21: (0, 5), 60: (0, 15)}[different]  # two digits, away from the data


def test_a_label_of_few_numbers_is_classes_unless_said_otherwise() -> None:
    frame = polars.DataFrame({"x": [0.5] * 20, "y": list(range(20))})
    assert len(draft_schema(frame, label="y").classes) == 20
    assert draft_schema(frame, label="y", task="regression").label_range == (0, 19)
    more = polars.DataFrame({"x": [0.5] * 30, "y": list(range(30))})
    assert len(draft_schema(more, label="y", task="classification").classes) == 30


def test_numbers_and_days_written_as_text_are_numbers_and_days_but_codes_are_not() -> None:
    frame = polars.DataFrame(
        {
            "x": ["1.5", " 3", "?", None],
            "day": ["2024-05-31", "2021-01-02T10:00:00", None, "2022-02-02"],
            "dotted": ["31.5.2024", "02.01.2021", None, "2.2.2022"],
            "slashed": ["5/31/2024", "1/2/2021", None, "2/2/2022"],
            "code": ["00501", "10001", "00501", "10001"],
            "word": ["a", "1", "a", "a"],
            "y": ["u", "v", "u", "v"],
        }
    )
    assert draft_schema(frame, label="y").columns == {
        "x": Numeric(1.5, 3),
        "day": Date(datetime.date(2021, 1, 1), datetime.date(2024, 12, 31)),
        "dotted": Date(datetime.date(2021, 1, 1), datetime.date(2024, 12, 31)),
        "slashed": Categorical(("1/2/2021", "2/2/2022", "5/31/2024")),  # day or month first? nobody knows
        "code": Categorical(("00501", "10001")),
        "word": Categorical(("1", "a")),
    }


def test_a_range_of_labels_and_of_days_is_read_back_from_the_file_and_from_plain_values() -> None:
    days = Date(datetime.date(2020, 1, 1), datetime.date(2020, 12, 31))
    schema = Schema("y", columns={"day": days, "x": Numeric(0, 1)}, label_range=(0, 2.5))
    assert Schema.from_toml(schema.to_toml()) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label_range = [1]", r"label_range = \[low, high\] of label 'y'. Got \[1\]"),
        ("label_range = [2, 1]", "low < high for label 'y'"),
        ('label_range = ["a", 1]', "low of label 'y' to be a number. Got 'a'"),
        ('label_range = [0, 1]\nclasses = ["a", "b"]', "Got 'classes'"),
        ('classes = ["a", "b"]\n[columns.d]\nkind = "date"\nlow = "soon"\nhigh = 2024-01-01', "a day, as in"),
        (
            'classes = ["a", "b"]\n[columns.d]\nkind = "date"\nlow = 2024-01-01\nhigh = 2024-01-01',
            "low < high",
        ),
    ],
)
def test_what_is_wrong_with_a_range_is_said(text: str, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        Schema.from_toml(f'label = "y"\n{text}')
