"""Frames and files in, arrays out: pandas, polars, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import numpy.typing as npt

from pdpsgd.errors import PdpsgdError, fail

Frame = nw.DataFrame[Any]


@dataclass(frozen=True)
class Source:
    """Where a table came from, to name a row in an error as its reader would count it."""

    name: str
    first_row: int = 0

    def row(self, index: int) -> str:
        """Name the row with this index, counted from 0."""
        return f"{self.name}, row {index + self.first_row}"


def open_table(table: Any) -> tuple[Frame, Source]:
    """Open a pandas or polars frame, or from the path of a `.csv` or `.parquet` file.

    Rows of a CSV file are counted as an editor counts lines: the header is line 1.
    """
    if not isinstance(table, (str, Path)):
        try:
            return nw.from_native(table, eager_only=True), Source("the frame")
        except TypeError:
            fail(
                f"Expected a pandas or polars frame, or a path to a .csv or .parquet file. Got {type(table).__name__}."
            )
    path = Path(table)
    if not path.is_file():
        fail(f"Expected a .csv or .parquet file at {str(path)!r}. There is no such file.")
    import polars

    suffix = path.suffix.lower()
    try:
        if suffix == ".csv":
            frame = polars.read_csv(
                path, infer_schema_length=None
            )  # a late odd value makes text, not an error
            return nw.from_native(frame, eager_only=True), Source(path.name, first_row=2)
        if suffix in (".parquet", ".pq"):
            return nw.from_native(polars.read_parquet(path), eager_only=True), Source(path.name)
    except polars.exceptions.PolarsError as error:
        raise PdpsgdError(
            f"Cannot read {str(path)!r} as {suffix[1:]}: {str(error).splitlines()[0]}"
        ) from error
    fail(f"Expected a file that ends in .csv or .parquet. Got {str(path)!r}.")


def read_columns(table: Any, names: Sequence[str]) -> tuple[dict[str, npt.NDArray[Any]], Source]:
    """Return the named columns of a table as numpy arrays; a missing value is refused with its row."""
    frame, source = open_table(table)
    columns = {}
    for name in names:
        if name not in frame.columns:
            fail(
                f"Expected a column {name!r} in {source.name}. Its columns are {', '.join(map(repr, frame.columns))}."
            )
        series = frame[name]
        missing = series.is_null()
        if missing.any():
            where = int(np.flatnonzero(missing.to_numpy())[0])
            fail(f"Expected a value in column {name!r} of {source.row(where)}. It is missing.")
        columns[name] = series.to_numpy()
    return columns, source
