"""Frames and files in, arrays out: pandas, polars, CSV or Parquet."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import narwhals as nw
import numpy as np
import numpy.typing as npt

from pdpsgd.budgets.files import first_bytes, kind_of
from pdpsgd.errors import PdpsgdError, fail, is_it, shown

Frame = nw.DataFrame[Any]

KINDS = (".csv", ".parquet", ".pq")
CSV = "a table (CSV, in UTF-8)"
SNIFFED = 2**20
"""Bytes of a CSV file that tell how numbers are written in it."""


@dataclass(frozen=True)
class Source:
    """Where a table came from, to name a row in an error as its reader would count it."""

    name: str
    first_row: int = 0
    remark: str | None = None
    """How a file was read that is not as most are."""

    def row(self, index: int) -> str:
        """Name the row with this index, counted from 0."""
        return f"{self.name}, row {index + self.first_row}"


def open_table(table: Any, names: Sequence[str] | None = None) -> tuple[Frame, Source]:
    """Open a pandas or polars frame, or from the path of a `.csv` or `.parquet` file.

    Rows of a CSV file are counted as an editor counts lines: the header is line 1. Of a Parquet file only the columns
    with these `names` are read, where they are given and all there.
    """
    if not isinstance(table, (str, Path)):
        try:
            frame = nw.from_native(table, eager_only=True)
            _ = frame.columns  # pandas allows a name twice
            return frame, Source("the frame")
        except nw.exceptions.DuplicateError:
            twice = sorted({str(name) for name in table.columns if list(table.columns).count(name) > 1})
            fail(f"Expected each column of the frame once. Got {', '.join(map(repr, twice))} more than once.")
        except TypeError:
            fail(
                f"Expected a pandas or polars frame, or a path to a .csv or .parquet file. Got {type(table).__name__}."
            )
    path = Path(table)
    is_csv = _check_is_table(path)
    if not is_csv:
        return nw.from_native(_read_parquet(path, names), eager_only=True), Source(path.name)
    how = csv_format(path)
    source = Source(path.name, first_row=2, remark=how.remark(path.name))
    return nw.from_native(_read_csv(path, how), eager_only=True), source


def has_column(path: Path, name: str) -> bool:
    """Tell whether a table has a column of this name, of a Parquet file from its head alone."""
    import polars

    if _check_is_table(path):
        return name in open_table(path)[0].columns
    _check_parquet(path)
    return name in _read(polars.read_parquet_schema, path, "a Parquet file")


def count_rows(path: Path) -> int:
    """Count the rows of a table without holding them."""
    import polars

    return int(_scan(path).select(polars.len()).collect().item())


def table_batches(path: Path, rows: int) -> Iterator[tuple[Frame, Source]]:
    """Yield a `.csv` or `.parquet` file as frames of so many rows, in order; column types are those of the whole."""
    import polars

    is_csv = _check_is_table(path)
    first_row = begin = 2 if is_csv else 0
    try:
        for part in _scan(path).collect_batches(chunk_size=rows, maintain_order=True, lazy=True):
            for start in range(0, len(part), rows):
                piece = part.slice(start, rows)
                yield nw.from_native(piece, eager_only=True), Source(path.name, first_row)
                first_row += len(piece)
        if first_row == begin:
            yield nw.from_native(_scan(path).head(0).collect(), eager_only=True), Source(path.name, begin)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError) as error:
        _fail_to_read(path, CSV if is_csv else "a Parquet file", error)


def _scan(path: Path) -> Any:
    import polars

    if not _check_is_table(path):
        _check_parquet(path)
        return _read(polars.scan_parquet, path, "a Parquet file", glob=False)
    how = csv_format(path)
    if how.encoding != "utf8":  # polars decodes whole files only
        return _read_csv(path, how).lazy()
    found = _read(polars.scan_csv, path, CSV, **how.options, glob=False)
    return _with_points(found) if how.has_decimal_commas else found


def _check_is_table(path: Path) -> bool:
    """Refuse what is no table by its name, or not there; tell whether it is a CSV file."""
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        fail(f"Expected a file that ends in .csv or .parquet. Got {str(path)!r}.")
    if not _is_file(path):
        fail(f"Expected a .csv or .parquet file at {str(path)!r}. There is no such file.")
    return suffix == ".csv"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null character in it
        return False


NO_UTF8 = "no UTF-8"
"""In what is said of files with other letters: whose line it is shows somebody's record, so it is never published."""


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file is written: what stands between cells, and how letters are written."""

    separator: str = ","
    encoding: str = "utf8"

    @property
    def options(self) -> dict[str, Any]:
        """Options of polars; all rows are looked at for a column's type: a late odd value makes text, not an error."""
        return {
            "separator": self.separator,
            "infer_schema_length": None,
        }

    @property
    def has_decimal_commas(self) -> bool:
        """Whether 1,5 is a number: where commas stand between no cells, as the line of names tells."""
        return self.separator == ";"

    def remark(self, name: str) -> str | None:
        """Say what was guessed."""
        if self.encoding == "utf8":
            return None
        read = f"Lines of {name} that are {NO_UTF8} were read as {self.encoding} (Latin-1)."
        return f"{read} Look whether they came out right."


def csv_format(path: Path) -> CsvFormat:
    """Look at a CSV file: the line of names tells its separator, all bytes its letters."""
    _check_csv(path)
    start = first_bytes(path, "a table (CSV)", SNIFFED)
    names = re.sub(rb'"[^"]*"', b"", start.splitlines()[0])
    separator = max((b",", b";", b"\t"), key=names.count)
    return CsvFormat(separator.decode(), _encoding(path))


def _encoding(path: Path) -> str:
    """Tell UTF-8 from the older encodings of one byte per letter, of which Windows' own is the most common."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while part := file.read(2**22):
                decoder.decode(part)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf8"


def _check_csv(path: Path) -> None:
    start = first_bytes(path, "a table (CSV)")
    if not start.strip():
        fail(f"Expected a table (CSV) with a line of column names at {str(path)!r}. Got an empty file.")
    kind = kind_of(start)
    if kind is not None:
        remedy = (
            "Save it as CSV in UTF-8." if "text" in kind else "Unpack it, or give it the ending of its kind."
        )
        fail(f"Expected a table (CSV, in UTF-8) at {str(path)!r}. Got {kind}. {remedy}")


def _read_csv(path: Path, how: CsvFormat) -> Any:
    import polars

    if how.encoding == "utf8":
        found = _read(polars.read_csv, path, CSV, **how.options)
    else:
        found = _read(
            lambda place, **options: polars.read_csv(_line_by_line(place, how.encoding), **options),
            path,
            CSV,
            **how.options,
        )
    return _as_numbers(found) if how.has_decimal_commas else found


def _with_points(table: Any) -> Any:
    """Write decimal commas as points, cell by cell: how one is read must not depend on other rows."""
    import polars

    commas = r"^(\s*[+-]?\d+),(\d+(?:[eE][+-]?\d+)?\s*)$"
    return table.with_columns(polars.col(polars.String).str.replace(commas, "$1.$2"))


def _as_numbers(table: Any) -> Any:
    """Write decimal commas as points, and give columns that then hold nothing but numbers the type of numbers."""
    import polars

    found = _with_points(table)
    for name in [name for name, kind in table.schema.items() if kind == polars.String]:
        if not table[name].equals(found[name]):
            numbers = found[name].str.strip_chars().cast(polars.Float64, strict=False)
            if numbers.null_count() == found[name].null_count():
                found = found.with_columns(numbers)
    return found


def _line_by_line(path: Path, encoding: str) -> bytes:
    """Turn lines that are no UTF-8 into UTF-8, each by itself: how a row is read must not depend on other rows."""

    def in_utf8(line: bytes) -> bytes:
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            return line.decode(encoding, errors="replace").encode("utf-8")
        return line

    with open(path, "rb") as file:
        return b"".join(map(in_utf8, file))


def _check_parquet(path: Path) -> None:
    if not first_bytes(path, "a Parquet file").startswith(b"PAR1"):
        fail(f"Expected a Parquet file at {str(path)!r}. Got something else: it does not begin with PAR1.")


def _read_parquet(path: Path, names: Sequence[str] | None) -> Any:
    import polars

    _check_parquet(path)
    known = _read(polars.read_parquet_schema, path, "a Parquet file")
    columns = list(names) if names is not None and all(name in known for name in names) else None
    return _read(polars.read_parquet, path, "a Parquet file", glob=False, columns=columns)


def _read(reader: Callable[..., Any], path: Path, what: str, **options: Any) -> Any:
    import polars

    try:
        return reader(path, **options)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, ValueError) as error:
        _fail_to_read(path, what, error)


def _fail_to_read(path: Path, what: str, error: Exception) -> NoReturn:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    raise PdpsgdError(f"Expected {what} at {str(path)!r}. It cannot be read: {reason[0]}") from error


def read_columns(
    table: Any, names: Sequence[str], *, check: Callable[[Frame, Source], None] | None = None
) -> tuple[dict[str, npt.NDArray[Any]], Source]:
    """Return the named columns of a table as numpy arrays; a missing value is refused with its row.

    Args:
        table: A frame, or the path of a file.
        names: The columns.
        check: Called with the table before values are looked at; it may refuse.

    Returns:
        The columns by name, and where they are from.

    Raises:
        PdpsgdError: A column or a value is missing.
    """
    frame, source = open_table(table, names)
    for name in names:
        if name not in frame.columns:
            hint = is_it(name, frame.columns)
            fail(f"Expected a column {name!r} in {source.name}. Its columns are {column_names(frame)}.{hint}")
    if not len(frame):
        fail(f"Expected at least one row in {source.name}. Got none below the names of the columns.")
    if check is not None:
        check(frame, source)
    columns = {}
    for name in names:
        series = frame[name]
        missing = series.is_null()
        if missing.any():
            where = int(np.flatnonzero(missing.to_numpy())[0])
            fail(f"Expected a value in column {name!r} of {source.row(where)}. It is missing.")
        columns[name] = as_array(series)
    return columns, source


def as_array(series: nw.Series[Any]) -> npt.NDArray[Any]:
    """Return a column as an array; whole numbers of more than 64 bits, which numpy has no type for, as objects."""
    if str(series.dtype) in ("Int128", "UInt128"):
        return np.array(series.to_list(), dtype=object)
    return series.to_numpy()


def column_names(frame: Frame) -> str:
    """Name the columns of a table for an error message; not more than twenty."""
    known = ", ".join(map(shown, frame.columns[:20]))
    return known if len(frame.columns) <= 20 else f"{known} and {len(frame.columns) - 20} more"
