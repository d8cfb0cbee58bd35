"""Ledgers in a file and in PostgreSQL; the tests start a server of their own on loopback, where there is one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.ledger import Ledger
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round


def postgres_program(name: str) -> str | None:
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(places[-1]) if places else shutil.which(name)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """A server on loopback; its URL without a database."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    initdb, server = postgres_program("initdb"), postgres_program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    is_root = os.getuid() == 0
    if is_root and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    before = ["runuser", "-u", "postgres", "--"] if is_root else []
    if is_root:
        shutil.chown(folder, "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": str(folder)}
    data = str(folder / "data")
    subprocess.run([*before, initdb, "-D", data, "-U", "tester", "-A", "trust", "-N"], check=True, **quiet)  # type: ignore[call-overload]
    options = ["-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", str(folder), "-F"]
    process = subprocess.Popen([*before, server, *options], **quiet)  # type: ignore[call-overload]
    try:
        url = f"postgresql://tester@127.0.0.1:{port}"
        _wait_for(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str) -> None:
    import time

    import psycopg

    for _ in range(200):
        with suppress(psycopg.OperationalError):
            psycopg.connect(f"{url}/postgres", connect_timeout=2).close()
            return
        time.sleep(0.1)
    pytest.fail("PostgreSQL did not start")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new ledger can be made."""
    if request.param == "sqlite":
        return str(tmp_path / "people.ledger")
    import psycopg

    url, name = request.getfixturevalue("postgresql"), f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(f"{url}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    return f"{url}/{name}"


@pytest.fixture
def ledger(place: str) -> Ledger:
    return Ledger.create(place)


@pytest.fixture
def in_file(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "people.ledger")


def people(*epsilons: float, delta: float = 1e-5, first: int = 0, **options: object) -> Budgets:
    ids = [f"p{first + i}" for i in range(len(epsilons))]
    return Budgets(list(epsilons), delta, ids=ids, allow_infinite=True, **options)  # type: ignore[arg-type]


def everybody_in_every_step(ids: list[str], mu: float, *, delta: float = 1e-5) -> Plan:
    """A plan whose certificate is exactly mu, with d = 0."""
    level = Level(50.0, delta, len(ids))
    round_ = Round(1, 1 / mu, float(len(ids)), (1.0,), (1.0,), (1.0,))
    roster = Roster(np.array(ids), np.zeros(len(ids), dtype=np.int64))
    return Plan("pdp-sgd-exact", (level,), (round_,), "certificate", roster=roster)
