"""Processes at once, killed processes, a full disk, a locked file, a lost connection: nothing is half-done."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from pdpsgd.ledger import Ledger, LedgerUnavailable

from .conftest import everybody_in_every_step, people

PROCESSES = 8

# One interpreter that forks: eight would take long to start.
RESERVE_AT_ONCE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.ledger.conftest import everybody_in_every_step
from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger
ledger = Ledger(sys.argv[1])
begin = time.time() + 0.5
children = []
for child in range(8):
    pid = os.fork()
    if pid == 0:
        done = 0
        time.sleep(max(0, begin - time.time()))
        for _ in range(4):
            try:
                ledger.reserve(everybody_in_every_step(["p0", "p1"], 0.1))
                done += 1
            except PdpsgdError as error:
                if "no longer allow it" not in str(error):
                    os.write(2, str(error).encode())
                    os._exit(99)
        os._exit(done)
    children.append(pid)
print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def test_eight_processes_at_once_overspend_nobody(place: str) -> None:
    ledger = Ledger.create(place)
    ledger.enroll(people(1.0, 3.0))  # p0 allows mu^2 = 0.071: seven runs of 0.01, of the 32 that are tried
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", RESERVE_AT_ONCE, place, root],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.stdout.strip(), done.stderr) == ("7", "")
    assert len(ledger.runs()) == 7
    assert ledger.check().passed


def _work(place: str, seed: int) -> None:
    """Reserve, start, resume and end runs for ever."""
    choose = random.Random(seed)
    ledger = Ledger(place)
    while True:
        run = ledger.reserve(everybody_in_every_step(["p0"], 0.01)).number
        if choose.random() < 0.3:
            ledger.cancel(run)
            continue
        attempt = ledger.start(run)
        if choose.random() < 0.5:
            attempt = ledger.resume(run)
        (ledger.finish if choose.random() < 0.7 else ledger.kill)(run, attempt)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_moment(place: str) -> None:
    """KILLS=1000 in the environment for the long version."""
    ledger = Ledger.create(place)
    ledger.enroll(people(50.0))
    choose = random.Random(7)
    for round_ in range(int(os.environ.get("KILLS", "12"))):
        child = os.fork()
        if child == 0:
            try:
                _work(place, round_)
            finally:
                os._exit(1)
        time.sleep(choose.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = ledger.check(certificates=False)
        assert found.passed, found.problems
    runs = ledger.runs()
    charged = [run for run in runs if run.state != "cancelled"]
    assert len(ledger.person("p0").charges) == len(charged)  # each once, none lost
    for run in runs:
        if run.state in ("running", "killed"):
            ledger.finish(run.number, ledger.resume(run.number))
    assert len(ledger.person("p0").charges) == len(charged)
    assert ledger.check(certificates=False).passed


def test_a_locked_file_ends_in_a_clear_error(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "a.ledger").enroll(people(1.0))
    impatient = Ledger(tmp_path / "a.ledger", timeout=0.2)
    with closing(sqlite3.connect(tmp_path / "a.ledger", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            LedgerUnavailable, match=r"another process has been writing to it for 0\.2 seconds; nothing"
        ):
            impatient.reserve(everybody_in_every_step(["p0"], 0.1))
        assert impatient.person("p0").charges == ()  # reading goes on
    impatient.reserve(everybody_in_every_step(["p0"], 0.1))
    assert impatient.check().passed


def test_a_full_disk_leaves_nothing_half_done(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.ledger")
    ledger.enroll(people(*[1.0] * 50))
    before = ledger.check()

    def no_more(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    event.listen(ledger._database.engine, "connect", no_more)
    with pytest.raises(LedgerUnavailable, match="the disk is full; nothing was written"):
        ledger.enroll(people(*[1.0] * 5000, first=50))
    event.remove(ledger._database.engine, "connect", no_more)
    after = ledger.check()
    assert after.passed
    assert (after.entries, after.people, after.head) == (before.entries, before.people, before.head)
    ledger.enroll(people(*[1.0] * 5000, first=50))
    assert ledger.check().people == 5050


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    from pdpsgd.errors import PdpsgdError

    with pytest.raises(PdpsgdError, match="cannot be written"):
        Ledger.create(tmp_path / "file" / "a.ledger")


def test_a_lost_connection_leaves_nothing_half_done(postgresql: str) -> None:
    import uuid

    import psycopg

    name = f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(f"{postgresql}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    place = f"{postgresql}/{name}"
    ledger = Ledger.create(place)
    ledger.enroll(people(1.0))

    def cut(*_: Any) -> None:
        with psycopg.connect(f"{postgresql}/postgres", autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                (name,),
            )

    from pdpsgd.ledger import reservations

    real = reservations.append
    reservations.append = lambda *given: (cut(), real(*given))[1]  # type: ignore[assignment]
    try:
        with pytest.raises(LedgerUnavailable, match="the connection to the database was lost"):
            ledger.reserve(everybody_in_every_step(["p0"], 0.1))
    finally:
        reservations.append = real
    assert ledger.runs() == []
    assert ledger.check().passed
    ledger.reserve(everybody_in_every_step(["p0"], 0.1))


@pytest.mark.parametrize(("set_up", "used"), [("off", "on"), ("on", "on"), ("remote_apply", "remote_apply")])
def test_a_charge_is_on_disk_before_its_run_begins_however_the_server_is_set_up(
    postgresql: str, set_up: str, used: str
) -> None:
    """With synchronous_commit = off a crash of the server takes back what it had said was committed."""
    import uuid

    import psycopg

    name = f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(f"{postgresql}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = {set_up}")  # type: ignore[call-overload]
    ledger = Ledger.create(f"{postgresql}/{name}")
    with ledger._database.writing() as writing:
        assert writing.exec_driver_sql("SHOW synchronous_commit").scalar() == used
    with ledger._database.reading() as reading:
        assert reading.exec_driver_sql("SHOW synchronous_commit").scalar() == set_up


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(LedgerUnavailable, match=r"tester:\*\*\*@127\.0\.0\.1:1/") as raised:
        Ledger("postgresql://tester:secret@127.0.0.1:1/ledger")
    assert "secret" not in str(raised.value)
