"""Lists and tables that cannot be meant are refused with the value and its place; their neighbors are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

from pdpsgd import Budgets, PdpsgdError
from pdpsgd.budgets.readers import open_table, table_batches


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budgets([1.0, 2.0], ids=["a"]), "Expected one id for each of the 2 people. Got 1."),
        (lambda: Budgets([1.0, 2.0], ids=np.array([1, "a"], dtype=object)), "all whole numbers or all text"),
        (
            lambda: Budgets([[1.0], [2.0, 3.0]]),
            "Expected epsilon to be one value per person. Got [[1.0], [2.0, 3.0]]",
        ),
        (lambda: Budgets.from_tiers({1: 0.5, 2: 0.6}, 10), "sum to 1. Got [0.5, 0.6], sum 1.1."),
        (
            lambda: Budgets.from_tiers({1: 1.5, 2: -0.5}, 10),
            "shares that are >= 0 and sum to 1. Got [1.5, -0.5]",
        ),
        (lambda: Budgets.exponential(100, k=5.0), "Expected k between about -0.2 and 0.2"),
        (
            lambda: Budgets.from_table(
                pandas.DataFrame([[1.0, 2.0]], columns=["epsilon", "epsilon"]), epsilon_column="epsilon"
            ),
            "Expected each column of the frame once. Got 'epsilon' more than once.",
        ),
        (lambda: Budgets.from_table([1.0, 2.0]), "path to a .csv or .parquet file. Got list."),
        (
            lambda: Budgets.from_table(polars.DataFrame({"epsilon": ["low"]}), epsilon_map={}),
            "Expected epsilon_map as {word: epsilon}. Got {}.",
        ),
        (
            lambda: Budgets.from_table(polars.DataFrame({"epsilon": [1.0, None]})),
            "Expected a value in column 'epsilon' of the frame, row 1. It is missing. 0 means that this person's "
            "record is never used.",
        ),
        (
            lambda: Budgets.from_table(
                polars.DataFrame({"id": ["a", "b", "a"], "epsilon": [1.0, 1.0, 2.0]}),
                id_column="id",
                repeated_ids=True,
            ),
            "Expected one budget per person, the same in all their rows. Got 1.0 for 'a' in column 'epsilon' of",
        ),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PdpsgdError) as caught:
        make()
    assert message in str(caught.value)


def test_their_neighbors_are_read() -> None:
    assert len(Budgets([1.0, 2.0], ids=np.array([1, 2], dtype=object))) == 2
    assert len(Budgets.from_tiers({1: 0.5, 2: 0.5, 3: 0.0}, 10)) == 10
    assert len(Budgets.exponential(100, k=0.1)) == 100
    words = Budgets.from_table(polars.DataFrame({"epsilon": ["low"]}), epsilon_map={"low": 0.5})
    assert words.epsilon.tolist() == [0.5]
    frame = polars.DataFrame({"id": ["a", "b", "a"], "epsilon": [1.0, 2.0, 1.0]})
    assert Budgets.from_table(frame, id_column="id", repeated_ids=True).epsilon.tolist() == [1.0, 2.0]


def whole(path: Path) -> None:
    open_table(path)


def in_parts(path: Path) -> None:
    for _ in table_batches(path, 100):
        pass


@pytest.mark.parametrize("read", [whole, in_parts])
def test_a_parquet_file_that_is_none_or_damaged_is_named(
    tmp_path: Path, read: Callable[[Path], None]
) -> None:
    path = tmp_path / "people.parquet"
    polars.DataFrame({"epsilon": np.arange(5000.0)}).write_parquet(path, compression="zstd")
    read(path)
    content = path.read_bytes()
    path.write_bytes(b"epsilon\n1\n")
    with pytest.raises(
        PdpsgdError, match=r"people\.parquet'\. Got something else: it does not begin with PAR1"
    ):
        read(path)
    path.write_bytes(content[:20] + bytes(2000) + content[2020:])
    with pytest.raises(
        PdpsgdError, match=r"Expected a Parquet file at .*people\.parquet'\. It cannot be read: "
    ):
        read(path)
    path.unlink()
    with pytest.raises(PdpsgdError, match=r"people\.parquet"):
        read(path)
