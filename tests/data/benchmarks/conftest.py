from __future__ import annotations

import gzip
import hashlib
import io
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from pdpsgd.data.benchmarks import download as download_module
from pdpsgd.data.benchmarks.catalog import CATALOG, Benchmark, IdxFile, MatFile


@dataclass
class Server:
    """A web server on this machine that can be told to misbehave."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    break_after: list[int] = field(default_factory=list)  # one entry for each transfer to cut short
    ranges: bool = True

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.requests.append((request.path, wanted))
        content = self.files.get(request.path)
        if content is None:
            request.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start and start >= len(content):
            request.send_response(416)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        stop = start + self.break_after.pop(0) if self.break_after else len(content)
        request.wfile.write(content[start:stop])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.serve(self)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        told = Server(f"http://127.0.0.1:{http_server.server_address[1]}/")
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(download_module, "PAUSE", 0.0)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield told
        http_server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_data_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the data folders of whoever runs it."""
    elsewhere = tmp_path / "nothing here"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("PDPSGD_DATA", raising=False)
    monkeypatch.setattr("pdpsgd.data.benchmarks.folders.cache_place", lambda: elsewhere / "cache")
    monkeypatch.setattr("pdpsgd.data.benchmarks.folders.DEBIAN", elsewhere / "debian")


def idx_bytes(values: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Miniature:
    """A benchmark like a published one but small, with its files' bytes."""

    benchmark: Benchmark
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Miniature]:
    """Puts a small stand-in for a published benchmark into the catalogue."""

    def make(name: str) -> Miniature:
        miniature = _small_svhn() if name == "svhn" else _small_idx(name)
        monkeypatch.setitem(CATALOG, name, miniature.benchmark)
        return miniature

    return make


def _small_idx(name: str) -> Miniature:
    random = np.random.default_rng(len(name))
    files, known = {}, []
    for file, shape in zip(CATALOG[name].files, [(30, 28, 28), (30,), (10, 28, 28), (10,)], strict=True):
        content = idx_bytes(random.integers(0, 256 if len(shape) > 1 else 10, shape))
        packed = gzip.compress(content, mtime=1)
        files[file.name] = packed
        known.append(
            IdxFile(
                file.name,
                hashlib.md5(packed).hexdigest(),
                hashlib.sha256(content).hexdigest(),
                shape,
                len(packed),
            )
        )
    return Miniature(replace(CATALOG[name], files=tuple(known), train_people=30, test_people=10), files)


def _small_svhn() -> Miniature:
    random = np.random.default_rng(5)
    files, known = {}, []
    for file, people in zip(CATALOG["svhn"].files, (40, 20), strict=True):
        labels = np.arange(people) % 10
        images = random.integers(0, 256, (32, 32, 3, people), dtype=np.uint8)
        packed = mat_bytes(images, labels)
        files[file.name] = packed
        counts = (people // 10,) * 10
        known.append(MatFile(file.name, hashlib.md5(packed).hexdigest(), images.shape, counts, len(packed)))
    return Miniature(replace(CATALOG["svhn"], files=tuple(known)), files)


def mat_bytes(images: np.ndarray, digits: np.ndarray) -> bytes:
    labels = np.where(digits == 0, 10, digits).reshape(-1, 1)
    stream = io.BytesIO()
    scipy.io.savemat(stream, {"X": images, "y": labels}, do_compression=True)
    return stream.getvalue()
