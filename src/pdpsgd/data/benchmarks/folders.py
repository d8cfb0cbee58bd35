"""Where a benchmark's files are looked for, and where a download puts them."""

from __future__ import annotations

import os
from pathlib import Path

from pdpsgd._cache import cache_place
from pdpsgd.data.benchmarks.catalog import Benchmark, IdxFile, MatFile

ENVIRONMENT_VARIABLE = "PDPSGD_DATA"
DEBIAN = Path("/usr/share/datasets")  # where Debian's package dataset-fashion-mnist puts its files


def data_folders(folder: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the data folders in the order in which they are searched.

    The one given, then the environment variable PDPSGD_DATA, then `data` in the working directory, then the
    user's cache, then Debian's packages.
    """
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    candidates = [folder, from_environment, "data", cache_place(), DEBIAN]
    return tuple(dict.fromkeys(Path(c).expanduser() for c in candidates if c))


def download_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder that downloads go to: the one named, else `data` if it exists, else the cache."""
    if chosen := folder or os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen).expanduser()
    return Path("data") if Path("data").is_dir() else cache_place()


def find(benchmark: Benchmark, folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first folder that has all files of the benchmark, whether they are intact or not."""
    for root in data_folders(folder):
        for candidate in _candidates(benchmark, root):
            if all(locate(file, candidate) for file in benchmark.files):
                return candidate
    return None


def locate(file: IdxFile | MatFile, folder: Path) -> Path | None:
    """Return the file in this folder, under its published name or unpacked."""
    names = (file.name, file.name.removesuffix(".gz"))
    # Not Path.is_file, which fails in a folder that this user may not read.
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)


def _candidates(benchmark: Benchmark, root: Path) -> list[Path]:
    inside = [root / subfolder for subfolder in benchmark.subfolders]
    return [*inside, root] if root.name == benchmark.name else inside
