"""Embeddings kept from run to run, in one file of the user's cache folder that only its owner may read."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdpsgd._cache import EMBEDDINGS, cache_folder, cache_limit

SECONDS_BETWEEN_WRITES = 2.0
_AT_ONCE = 500  # keys per question: SQLite limits their number


class EmbeddingCache:
    """A table from the digest of an encoder and a text to the text's embedding.

    As private as the texts: an embedding tells much of what its text says. The file is its owner's alone, and may be
    deleted at any time; embeddings are then computed again. Above the limit of the cache, the older half goes.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        self._connection = sqlite3.connect(file, timeout=60)
        self._connection.execute("CREATE TABLE IF NOT EXISTS embeddings (key BLOB PRIMARY KEY, value BLOB)")
        self._connection.commit()
        self._written = time.monotonic()
        self._keep_to_limit()

    @classmethod
    def of_user(cls) -> EmbeddingCache | None:
        """Open the cache in the user's cache folder; None if there is no folder that is the user's alone."""
        folder = cache_folder()
        return None if folder is None else cls(folder / EMBEDDINGS)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Tensor]:
        """Return what is known of these keys."""
        found: dict[bytes, Tensor] = {}
        for first in range(0, len(keys), _AT_ONCE):
            some = list(keys[first : first + _AT_ONCE])
            marks = ", ".join("?" * len(some))
            rows = self._connection.execute(f"SELECT key, value FROM embeddings WHERE key IN ({marks})", some)
            found |= {key: torch.from_numpy(np.frombuffer(value, np.float32).copy()) for key, value in rows}
        return found

    def add(self, key: bytes, embedding: Tensor) -> None:
        """Keep an embedding; it is on disk within seconds, also if the program is stopped."""
        self._connection.execute(
            "INSERT OR REPLACE INTO embeddings VALUES (?, ?)", (key, embedding.numpy().tobytes())
        )
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        self._connection.commit()
        self._written = time.monotonic()
        self._keep_to_limit()

    @property
    def size(self) -> int:
        """The bytes on disk."""
        return self.file.stat().st_size

    def _keep_to_limit(self) -> None:
        """Forget the older half of what is kept, as often as the file is too large."""
        while self.size > cache_limit():
            (count,) = self._connection.execute("SELECT COUNT(*) FROM embeddings").fetchone()
            if count == 0:
                return
            oldest = "SELECT rowid FROM embeddings ORDER BY rowid LIMIT ?"
            self._connection.execute(
                f"DELETE FROM embeddings WHERE rowid IN ({oldest})", (count - count // 2,)
            )
            self._connection.commit()
            self._connection.execute("VACUUM")
