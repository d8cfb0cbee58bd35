"""A benchmark by name: found or downloaded, checked, normalized."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.data.benchmarks.catalog import CATALOG, Benchmark, IdxFile, MatFile, Normalization, benchmark
from pdpsgd.data.benchmarks.folders import data_folders, download_folder, find, locate
from pdpsgd.data.benchmarks.formats import Bytes, read
from pdpsgd.errors import PdpsgdError, fail

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID


NAMES = tuple(CATALOG)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set, ready for training: inputs float32 (people, channels, height, width), targets int64."""

    name: str
    train_inputs: torch.Tensor
    train_targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    classes: tuple[str, ...]
    normalization: Normalization
    source: str
    notes: tuple[str, ...] = ()
    largest_pixel: int = 255

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train_inputs.shape[1:])


def load(name: str, *, folder: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset:
    """Load a benchmark by name, from the first data folder that has it, else downloaded.

    Looked for in `folder`, then the environment variable PDPSGD_DATA, `./data`, the user's cache, and
    Debian's packages. A damaged file is refused, never skipped or replaced behind the user's back.
    """
    entry = benchmark(name)
    notes: tuple[str, ...] = ()
    if entry.built_in:
        arrays, source = _digits(), "scikit-learn"
    else:
        place = find(entry, folder) or (get(name, folder=folder) if download else _not_here(entry, folder))
        arrays, notes = _read_all(entry, place)
        source = str(place)
    inputs = [_normalized(images, entry) for images in arrays[0::2]]
    targets = [_targets(labels) for labels in arrays[1::2]]
    return Dataset(
        name,
        inputs[0],
        targets[0],
        inputs[1],
        targets[1],
        entry.classes,
        entry.normalization,
        source,
        notes,
        entry.largest_pixel,
    )


def get(name: str, *, folder: str | os.PathLike[str] | None = None) -> Path:
    """Download the files of a benchmark that are missing or damaged, check them all, say where they are."""
    entry = benchmark(name)
    if entry.built_in:
        fail(f"Expected a data set that is downloaded. {name!r} comes with scikit-learn and is always there.")
    place = download_folder(folder) / entry.subfolders[0]
    if wanted := [file for file in entry.files if not _intact(entry, file, place)]:
        _download_with_progress(entry, wanted, place)
    verify(name, place=place)
    return place


def verify(name: str, *, place: Path) -> tuple[str, ...]:
    """Check every file of a benchmark in its folder; the answer is remarks, and damage is an error."""
    entry = benchmark(name)
    return _read_all(entry, place)[1]


def _read_all(entry: Benchmark, place: Path) -> tuple[list[Bytes], tuple[str, ...]]:
    """Training images, training labels, test images, test labels; and the remarks on their files."""
    readings = []
    for file in entry.files:
        path = locate(file, place)
        if path is None:
            fail(f"Expected {file.name} in {place}. Run `pdpsgd data get {entry.name}`.")
        readings.append(read(file, path, name=entry.name))
    arrays = [array for reading in readings for array in reading.arrays]
    return arrays, tuple(reading.note for reading in readings if reading.note)


def _intact(entry: Benchmark, file: IdxFile | MatFile, place: Path) -> bool:
    path = locate(file, place)
    if path is None:
        return False
    try:
        read(file, path, name=entry.name)
    except PdpsgdError:
        return False
    return True


def _not_here(entry: Benchmark, folder: str | os.PathLike[str] | None) -> Path:
    places = ", ".join(str(root) for root in data_folders(folder))
    fail(
        f"Expected the files of {entry.name!r} ({', '.join(f.name for f in entry.files)}) in a folder "
        f"{entry.subfolders[0]!r} of one of {places}. Run `pdpsgd data get {entry.name}`."
    )


def _download_with_progress(entry: Benchmark, wanted: list[IdxFile | MatFile], place: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from pdpsgd.data.benchmarks.download import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for file in wanted:
            task = progress.add_task(file.name, total=None)
            download(
                [mirror + file.name for mirror in entry.mirrors],
                place / file.name,
                md5=file.md5,
                report=partial(_show, progress, task),
            )


def _show(progress: Progress, task: TaskID, done: int, total: int | None) -> None:
    progress.update(task, completed=done, total=total)


def _normalized(images: Bytes, entry: Benchmark) -> torch.Tensor:
    import torch

    pixels = torch.from_numpy(images.astype(np.float32)).reshape(-1, *entry.input_shape)
    return entry.normalization.normalize_(pixels.div_(entry.largest_pixel))


def _targets(labels: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(labels.astype(np.int64))


def _digits() -> list[Bytes]:
    """scikit-learn's digits, split by a fixed rule that no version of any library can change."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fail("Expected scikit-learn for the data set 'digits'. Install it: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, 8, 8).astype(np.uint8), labels.astype(np.uint8)
    order = sorted(range(len(labels)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    test, train = np.sort(order[:360]), np.sort(order[360:])
    return [images[train], labels[train], images[test], labels[test]]
