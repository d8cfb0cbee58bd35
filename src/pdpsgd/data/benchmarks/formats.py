"""Published files in, checked arrays out; what is damaged is refused by name."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdpsgd.data.benchmarks.catalog import CATALOG, IdxFile, MatFile
from pdpsgd.errors import fail

Bytes = npt.NDArray[np.uint8]

IDX_HEADER = {1: 8, 3: 16}  # bytes before the values, by number of dimensions


@dataclass(frozen=True)
class Reading:
    """The arrays of one file (images before labels), and a remark if it is not quite the published one."""

    arrays: tuple[Bytes, ...]
    note: str | None = None


def read(file: IdxFile | MatFile, path: Path, *, name: str) -> Reading:
    """Return the content of `path`, checked against what the catalog knows of this file of benchmark `name`."""
    try:
        return _read_idx(file, path) if isinstance(file, IdxFile) else _read_mat(file, path)
    except OSError as error:
        fail(f"Could not read {path}: {error.strerror or error}.")
    except _DamagedError as damage:
        beside = f"{_beside_the_published(file, path)} " if path.name == file.name else ""
        fail(
            f"{path} cannot be used for {name}: {damage}. {beside}"
            f"Delete it and run `pdpsgd data get {name}`, or put an intact copy there."
        )


def md5_of(path: Path) -> str:
    """Return the md5 of a whole file, as publishers of data give it: it guards against damage, not malice."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _beside_the_published(file: IdxFile | MatFile, path: Path) -> str:
    """Length and checksum of the file, and those that were published."""
    here = f"{path.stat().st_size:,} bytes and md5 {md5_of(path)}"
    return f"It has {here}, the published file {file.size:,} bytes and md5 {file.md5}."


class _DamagedError(Exception):
    """What is wrong with the file; `read` adds which file it is, and the way out."""


def _read_idx(file: IdxFile, path: Path) -> Reading:
    content = _decompressed(path) if path.suffix == ".gz" else path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.content_sha256:
        raise _DamagedError(_what_is_wrong(file, content, digest))
    values = np.frombuffer(content, np.uint8, offset=IDX_HEADER[len(file.shape)]).reshape(file.shape)
    return Reading((values,))


def _decompressed(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except EOFError:
        raise _DamagedError("it is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _DamagedError(f"it is not intact gzip data ({error})") from None


def _what_is_wrong(file: IdxFile, content: bytes, digest: str) -> str:
    for other in CATALOG.values():
        for known in other.files:
            if isinstance(known, IdxFile) and known.content_sha256 == digest:
                return f"its content is {other.name}'s {known.name}"
    expected = IDX_HEADER[len(file.shape)] + math.prod(file.shape)
    if len(content) != expected:
        return f"unpacked, it holds {len(content):,} bytes, the published file {expected:,}"
    return f"its content has sha256 {digest[:12]}..., not the published {file.content_sha256[:12]}..."


def _read_mat(file: MatFile, path: Path) -> Reading:
    import scipy.io

    published = md5_of(path) == file.md5
    try:
        content: dict[str, Any] = scipy.io.loadmat(path, variable_names=["X", "y"])
    except (
        Exception
    ) as error:  # scipy raises many kinds for a damaged file, OSError and zlib.error among them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _DamagedError(f"it is truncated or no MATLAB file ({reason})") from None
    images, labels = _checked_svhn(file, content)
    note = None
    if not published:
        note = (
            f"{path.name} is not the published file (its md5 differs), but has its shape and its number of "
            f"images of every class, and is accepted"
        )
    return Reading((np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels), note)


def _checked_svhn(file: MatFile, content: dict[str, Any]) -> tuple[Bytes, Bytes]:
    if missing := [name for name in ("X", "y") if name not in content]:
        raise _DamagedError(f"it has no array {missing[0]!r}")
    images, labels = np.asarray(content["X"]), np.asarray(content["y"]).ravel()
    if images.shape != file.shape or images.dtype != np.uint8:
        raise _DamagedError(
            f"X is {images.dtype} of shape {images.shape}, where uint8 of shape {file.shape} belongs"
        )
    if labels.shape != (file.shape[-1],):
        raise _DamagedError(f"y has {labels.size} labels for {file.shape[-1]} images")
    if labels.min() < 0 or labels.max() > 10:
        raise _DamagedError(f"y has labels from {labels.min()} to {labels.max()}, where 1 to 10 belong")
    digits = (labels % 10).astype(np.uint8)  # the file calls the digit 0 "10"
    counts = tuple(np.bincount(digits, minlength=10).tolist())
    if counts != file.class_counts:
        raise _DamagedError(f"it has {counts} images of the digits 0 to 9, where {file.class_counts} belong")
    return images, digits
