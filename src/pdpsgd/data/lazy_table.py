"""Tables larger than memory: encoded once, some rows at a time, into a file from which rows are drawn by number.

The file is as private as the table. It has no name, or is removed with the process, so that nothing of it stays behind.
Its rows are tensors as any others (memory-mapped), so that training sees no difference; what is resident of them are
pages that the system takes back when it needs memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdpsgd._cache import cache_folder
from pdpsgd.budgets.readers import Frame, Source, count_rows, table_batches
from pdpsgd.data.schema import Schema
from pdpsgd.data.tabular import (
    TabularData,
    check_ids,
    check_left_out,
    encode_features,
    encode_label,
    feature_names,
    notes_on,
    raw_ids,
)
from pdpsgd.errors import fail

if TYPE_CHECKING:
    import torch

LARGE = 2**28
"""Bytes of encoded features above which a table is kept in a file."""
ROWS_AT_ONCE = 2**17


def is_large(path: Path, schema: Schema) -> bool:
    """Tell whether a Parquet file is better not held in memory; its head says how many rows it has."""
    return path.suffix.lower() != ".csv" and count_rows(path) * schema.width * 4 > LARGE


def encode_lazily(
    path: Path, schema: Schema, *, leave_out: Collection[str] = (), repeated_ids: bool = False
) -> TabularData:
    """Encode a file as `encode` does, without ever holding more than some of its rows.

    Guarantee: each row of the result is a function of the schema and of that row alone.

    Args:
        path: The table.
        schema: Its public declaration.
        leave_out: Columns that must not be features (budgets).
        repeated_ids: Whether a person may have several rows.

    Returns:
        The same as `encode`, with tensors that lie in a file.

    Raises:
        PdpsgdError: What `encode` refuses, or no room on the disk.
    """
    check_left_out(schema, leave_out)
    ids: list[npt.NDArray[Any]] = []
    notes: tuple[str, ...] = ()
    with MappedRows() as inputs, MappedRows() as targets:
        for frame, source in table_batches(path, ROWS_AT_ONCE):
            inputs.add(encode_features(frame, schema, source))
            targets.add(encode_label(frame, schema, source))
            ids.append(_places(frame, source) if schema.id_column is None else raw_ids(frame, schema, source))
            notes = notes_on(frame, schema, leave_out)
        joined = np.concatenate(ids)
        check_ids(joined, Source(path.name), people=None, repeated_ids=repeated_ids)
        return TabularData(
            inputs=inputs.tensor(),
            targets=targets.tensor(),
            ids=joined,
            classes=schema.classes,
            feature_names=feature_names(schema),
            notes=notes,
            named=schema.id_column is not None,
            mapped=True,
        )


def taken(values: torch.Tensor, rows: npt.NDArray[np.int64], *, mapped: bool) -> torch.Tensor:
    """Take some rows of a tensor: into memory, or, if it lies in a file, into another file."""
    if not mapped:
        return values[rows]
    with MappedRows() as made:
        for part in _parts(rows):
            made.add(values[part].numpy())
        return made.tensor()


class MappedRows:
    """Rows that are written to a file one after the other, and then mapped into memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115  # until all rows are written
        self._rows = 0
        self._kind: tuple[np.dtype[Any], tuple[int, ...]] | None = None
        self.bytes = 0

    def __enter__(self) -> MappedRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()  # what is mapped stays

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Write some rows, of the same shape and type as those before."""
        self._kind = self._kind or (rows.dtype, rows.shape[1:])
        try:
            self._file.write(np.ascontiguousarray(rows).data)
        except OSError as error:
            fail(
                "Expected room for a large table in the cache folder (PDPSGD_CACHE names another). "
                f"Got: {error.strerror}."
            )
        self._rows += len(rows)
        self.bytes += rows.nbytes

    def tensor(self) -> torch.Tensor:
        """Return all rows as a tensor whose pages are read from the file when they are needed."""
        import torch

        assert self._kind is not None  # a row was added
        dtype, shape = self._kind
        self._file.flush()
        if not self.bytes:
            return torch.from_numpy(np.empty((self._rows, *shape), dtype=dtype))
        mapped = np.memmap(self._file, dtype=dtype, mode="c", shape=(self._rows, *shape))
        return torch.from_numpy(mapped)


def _places(frame: Frame, source: Source) -> npt.NDArray[np.int64]:
    return np.arange(source.first_row, source.first_row + len(frame))


def _parts(rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    starts: Iterable[int] = range(0, max(1, len(rows)), ROWS_AT_ONCE)
    return (rows[start : start + ROWS_AT_ONCE] for start in starts)
