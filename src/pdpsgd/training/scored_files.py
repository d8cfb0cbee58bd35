"""Predictions as a CSV or Parquet file: some rows at a time, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets.readers import column_names
from pdpsgd.data.remarks import Remarks
from pdpsgd.errors import fail

if TYPE_CHECKING:
    import polars

    from pdpsgd.training.predict import Predictions, TrainedModel

DIGITS = 7
"""Digits of a predicted number: networks answer in single precision, which has no more."""
ENDINGS = (".csv", ".parquet", ".pq")


@dataclass(frozen=True)
class Scored:
    """What was written: how many rows, and what was unusual in them."""

    rows: int
    remarks: Remarks


def write_scored(
    model: TrainedModel,
    rows: Any,
    output: Path | None,
    *,
    columns: Sequence[str] | None = None,
    at_once: int,
    tell: Callable[[int], None] | None = None,
) -> Scored:
    """Predict for all rows of a file or frame, and write the answers beside their columns.

    Args:
        model: The model.
        rows: What `TrainedModel.predict` takes.
        output: A .csv or .parquet file; None for standard output, as CSV.
        columns: Columns of the rows to repeat; all of them by default.
        at_once: Rows that are held in memory together.
        tell: Told how many rows are done.

    Returns:
        The number of rows, and remarks on them.

    Raises:
        PdpsgdError: If rows cannot be read or the file cannot be written; then nothing of it is there.
    """
    remarks = Remarks()
    written = 0
    with _writer(output) as write:
        for part in model.batches(rows, at_once=at_once, remarks=remarks):
            write(_frame(model, part, columns))
            written += len(part.rows)
            if tell is not None:
                tell(written)
    return Scored(written, remarks)


def _frame(model: TrainedModel, part: Predictions, columns: Sequence[str] | None) -> polars.DataFrame:
    """Put the columns that name the rows, and the answers, beside each other."""
    import polars

    kept = polars.DataFrame() if part.rows.columns is None else part.rows.columns.to_polars()
    if columns is not None:
        for name in columns:
            if name not in kept.columns:
                known = "no columns" if part.rows.columns is None else column_names(part.rows.columns)
                fail(f"Expected columns of the rows to repeat. Got {name!r}; they have {known}.")
        kept = kept.select(list(columns))
    label = model.description.label
    prefix = "" if label is None else f"_{label}"
    answers: dict[str, Any] = {f"predicted{prefix}": part.values}
    if part.probabilities is not None:
        names = model.classes or tuple(map(str, range(part.probabilities.shape[1])))
        answers |= {f"probability_{name}": part.probabilities[:, place] for place, name in enumerate(names)}
    for name in answers:
        if name in kept.columns:
            fail(
                f"Expected rows without a column {name!r}, which is that of the answers. Name the columns to repeat "
                "(--columns), without it."
            )
    written = polars.DataFrame(answers)
    if part.probabilities is None:
        written = written.with_columns(polars.all().round_sig_figs(DIGITS))
    return polars.concat([kept, written], how="horizontal")


@contextlib.contextmanager
def _writer(output: Path | None) -> Iterator[Callable[[polars.DataFrame], None]]:
    """Yield what writes a frame after another; the file takes its name when all of it is there."""
    if output is None:
        yield _CsvParts(sys.stdout.buffer)
        return
    beside = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix.lower() == ".csv":
            with open(beside, "wb") as file:
                yield _CsvParts(file)
        else:
            with _parquet_parts(beside) as write:
                yield write
        os.replace(beside, output)
    except OSError as error:
        fail(f"Expected to be able to write {str(output)!r}. Got: {error.strerror or error}.")
    finally:
        beside.unlink(missing_ok=True)


class _CsvParts:
    """Writes frames below each other, with one line of names."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._first = True

    def __call__(self, frame: polars.DataFrame) -> None:
        frame.write_csv(self._file, include_header=self._first)
        self._first = False


@contextlib.contextmanager
def _parquet_parts(path: Path) -> Iterator[Callable[[polars.DataFrame], None]]:
    """Collect frames as files in a folder beside, and stream them into one file at the end."""
    import polars

    folder = path.with_name(path.name + ".parts")
    folder.mkdir()
    parts: list[Path] = []

    def write(frame: polars.DataFrame) -> None:
        parts.append(folder / f"{len(parts):08}.parquet")
        frame.write_parquet(parts[-1])

    try:
        yield write
        polars.scan_parquet(parts).sink_parquet(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
