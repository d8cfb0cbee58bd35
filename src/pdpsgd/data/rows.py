"""Rows to predict for, some at a time: of a frame, a table, image files or arrays; no labels, ids or budgets."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd.budgets.readers import Frame, Source, count_rows, open_table, table_batches
from pdpsgd.data.images import ENDINGS, Array, arranged, array_header, image_files, read_image
from pdpsgd.data.preprocessing import Pixels, Preprocessing
from pdpsgd.data.remarks import Remarks
from pdpsgd.data.tabular import encode_features
from pdpsgd.data.text import read_texts, text_column
from pdpsgd.errors import fail, warn

if TYPE_CHECKING:
    from torch import Tensor

    from pdpsgd.data.schema import Schema

Shape = tuple[int, ...] | None
SLACK = 1e-3
"""By which scaled pixels may miss their range, as they are rounded."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows: what the network is given of them, and the columns that name them in an answer."""

    inputs: Tensor
    columns: Frame | None = None
    texts: tuple[str, ...] = ()
    """Where rows are texts, which an encoder has to read: inputs are their numbers then."""

    def __len__(self) -> int:
        return len(self.inputs)


def read_rows(
    source: Any, how: Preprocessing, shape: Shape, *, at_once: int, remarks: Remarks
) -> Iterator[Rows]:
    """Read rows as the records were read that the model was trained on.

    Args:
        source: A frame, an array or tensor, or the path of a table, an image, a folder of images, or an `.npz` file.
        how: How records become inputs.
        shape: The shape of one input, before features are made of it.
        at_once: Rows that are held in memory together.
        remarks: Counts what is unusual in them.

    Yields:
        The rows, in order.

    Raises:
        PdpsgdError: If the rows are not such as the model was trained on.
    """
    read = READERS[how.kind]
    for rows in read(source, how, shape, at_once, remarks):
        if shape is not None and rows.inputs.shape[1:] != shape:
            fail(
                f"Expected inputs of shape {tuple(shape)}, as in training. Got {tuple(rows.inputs.shape[1:])}."
            )
        yield rows


def number_of_rows(source: Any) -> int | None:
    """Count the rows of a file beforehand, where that is cheap."""
    if not isinstance(source, (str, Path)):
        return len(source)
    path = Path(source)
    if path.suffix.lower() in (".csv", ".parquet", ".pq"):
        return count_rows(path)
    return sum(1 for _ in image_files(path)) if path.is_dir() else None


def _table_rows(
    source: Any, how: Preprocessing, shape: Shape, at_once: int, remarks: Remarks
) -> Iterator[Rows]:
    assert how.schema is not None
    if isinstance(source, (str, Path)):
        yield from (
            _encoded(frame, how.schema, at, remarks) for frame, at in table_batches(Path(source), at_once)
        )
        return
    if isinstance(source, np.ndarray) or type(source).__module__.partition(".")[0] == "torch":
        fail(
            f"Expected a frame with the columns {', '.join(map(repr, how.schema.features))}, or the path of such a "
            f"table: the model was trained on one. Got {type(source).__name__}."
        )
    frame, at = open_table(source)
    for start in range(0, max(1, len(frame)), at_once):
        part = frame[start : start + at_once]
        yield _encoded(part, how.schema, Source(at.name, at.first_row + start), remarks)


def _encoded(frame: Frame, schema: Schema, source: Source, remarks: Remarks) -> Rows:
    import torch

    remarks.rows += len(frame)
    known = {*schema.features, schema.label, schema.id_column}
    remarks.unused = tuple(name for name in frame.columns if name not in known)
    inputs = torch.from_numpy(encode_features(frame, schema, source, remarks))
    column = text_column(schema)
    return Rows(inputs, frame, () if column is None else read_texts(frame, column))


def _image_rows(
    source: Any, how: Preprocessing, shape: Shape, at_once: int, remarks: Remarks
) -> Iterator[Rows]:
    path = Path(source) if isinstance(source, (str, Path)) else None
    if path is None or path.suffix.lower() == ".npz":
        yield from _array_rows(source, how, shape, at_once, remarks)
        return
    if path.is_dir():
        files, root = list(image_files(path)), path
    elif path.suffix.lower() in ENDINGS:
        files, root = [path], path.parent
    else:
        fail(
            "Expected an image, a folder of images, or an .npz file: the model was trained on images. "
            f"Got {str(path)!r}."
        )
    if not files:
        fail(f"Expected at least one image in {str(path)!r}. Got none.")
    for start in range(0, len(files), at_once):
        part = files[start : start + at_once]
        remarks.rows += len(part)
        yield _images(part, root, how.pixels or Pixels(), shape)


def _images(files: list[Path], root: Path, pixels: Pixels, shape: Shape) -> Rows:
    import narwhals as nw
    import polars
    import torch

    if shape is None or len(shape) != 3:
        fail(f"Expected arrays: the model was trained on inputs of shape {shape}. Got image files.")
    channels, height, width = shape
    read = np.empty((len(files), *shape), dtype=np.float32)
    for place, file in enumerate(files):
        read[place] = read_image(file, (height, width), color=channels == 3)
    names = polars.DataFrame({"file": [file.relative_to(root).as_posix() for file in files]})
    return Rows(pixels.to_inputs(torch.from_numpy(read)), nw.from_native(names, eager_only=True))


def _array_rows(
    source: Any, how: Preprocessing, shape: Shape, at_once: int, remarks: Remarks
) -> Iterator[Rows]:
    if isinstance(source, (str, Path)):
        if Path(source).suffix.lower() != ".npz":
            fail(
                f"Expected an .npz file with an array 'inputs': the model was trained on arrays. Got {str(source)!r}."
            )
        place, parts = f"inputs in {source}", npz_batches(Path(source), "inputs", at_once)
    else:
        values = source.detach().cpu().numpy() if hasattr(source, "detach") else np.asarray(source)
        place = "the array"
        parts = (values[start : start + at_once] for start in range(0, max(1, len(values)), at_once))
    for part in parts:
        remarks.rows += len(part)
        inputs = _as_shaped(part, shape, place)
        if part.dtype == np.uint8 or (how.pixels is not None and part.dtype.kind in "ui"):
            yield Rows(_of_pixels(inputs, how.pixels or Pixels(), place))
            continue
        if how.pixels is not None:
            _check_scaled(inputs, how.pixels, place)
        yield Rows(inputs)


def _of_pixels(pixels: Tensor, how: Pixels, place: str) -> Tensor:
    """Turn whole numbers into inputs; whatever their type, they count as pixels."""
    low, high = _limits(pixels)
    if not 0 <= low <= high <= how.largest:
        fail(
            f"Expected pixels from 0 to {how.largest} in {place}: the model was trained on such. Got {low:g} to "
            f"{high:g}."
        )
    return how.to_inputs(pixels)


def _limits(numbers: Tensor) -> tuple[float, float]:
    return (float(numbers.min()), float(numbers.max())) if numbers.numel() else (0.0, 0.0)


def _check_scaled(inputs: Tensor, how: Pixels, place: str) -> None:
    """Refuse numbers that pixels do not become, and warn of those that look like another scale."""
    channels = list(zip(how.mean, how.std, strict=True))
    low, high = min((0 - m) / s for m, s in channels), max((1 - m) / s for m, s in channels)
    least, most = _limits(inputs)
    if least < low - SLACK or most > high + SLACK:
        fail(
            f"Expected pixels as whole numbers from 0 to {how.largest}, or scaled as in training to {low:.3g} to "
            f"{high:.3g}, in {place}. Got numbers from {least:.3g} to {most:.3g}."
        )
    if len(inputs) and least >= 0 > low:
        warn(
            f"Pixels were scaled to {low:.3g} to {high:.3g} in training. All numbers in {place} are from {least:.3g} "
            f"to {most:.3g}: give whole numbers from 0 to {how.largest}, unless these are scaled alike."
        )


def _as_shaped(values: Array, shape: Shape, place: str) -> Tensor:
    import torch

    if values.shape[1:] == shape and values.dtype.kind in "uif":
        inputs = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        if not bool(torch.isfinite(inputs).all()):
            fail(f"Expected finite numbers in {place}. Got something else.")
        return inputs
    return arranged(values, place)


def npz_batches(path: Path, name: str, rows: int) -> Iterator[Array]:
    """Yield an array of an `.npz` file some rows at a time, without holding all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{name}.npy" not in archive.namelist():
                known = ", ".join(repr(each.removesuffix(".npy")) for each in archive.namelist()) or "none"
                fail(f"Expected an array {name!r} in {path}. Its arrays are {known}.")
            with archive.open(f"{name}.npy") as file:
                shape, by_columns, dtype = array_header(file)
                if dtype.hasobject or not shape or by_columns:
                    fail(
                        f"Expected {name!r} in {path} to be an array of plain numbers, row after row. Got another."
                    )
                each = int(np.prod(shape[1:], dtype=np.int64))
                for start in range(0, shape[0], rows):
                    wanted = min(rows, shape[0] - start) * each
                    content = file.read(wanted * dtype.itemsize)
                    yield np.frombuffer(content, dtype=dtype, count=wanted).reshape(-1, *shape[1:])
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        if type(error).__module__.startswith("pdpsgd"):
            raise
        fail(f"Cannot read {str(path)!r} as .npz: {getattr(error, 'strerror', None) or error}.")


READERS = {"table": _table_rows, "images": _image_rows, "arrays": _array_rows}
"""How rows are read, by what a model was trained on; each gives inputs of one shape, some rows at a time."""
