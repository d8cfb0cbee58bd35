"""`check` finds what was edited, deleted, or put back."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger

from .conftest import everybody_in_every_step, people

EDITS = [
    ("UPDATE people SET kappa = 0.9 WHERE number = 1", "People of entry 2"),
    ("UPDATE people SET id = 'eve' WHERE number = 1", "People of entry 2"),
    ("DELETE FROM people WHERE number = 2", "People of entry 2"),
    ("UPDATE consents SET epsilon = 9 WHERE person = 1", "Consents of entry 2"),
    ("UPDATE consents SET allowed_b = 2 * allowed_b WHERE person = 1", "consents allow more than epsilon and delta do"),
    ("DELETE FROM consents WHERE entry = 5", "Consents of entry 5"),
    ("INSERT INTO consents VALUES (0, 4, 9, 1e-5, 1, 1, 0)", "name entry 4, which did not write them"),
    ("UPDATE charges SET b = b / 2 WHERE run = 1", "Run 1"),
    ("UPDATE charges SET mu = mu / 2, b = b / 4 WHERE run = 1", "Run 1"),
    ("UPDATE run_people SET levels = x'ffffffffffff' WHERE run = 1", "Run 1"),
    ("UPDATE run_people SET chunk = 1 WHERE run = 1", "Run 1"),  # nobody's charge then
    ("UPDATE runs SET entry = 2 WHERE number = 1", "Run 1"),
    ("UPDATE ledger SET ids = ''", "of the kind '', which is none"),
    ("UPDATE runs SET state = 'cancelled' WHERE number = 1", "Run 1 is cancelled"),
    ("UPDATE runs SET attempt = 0 WHERE number = 1", "attempt 0, but finished, attempt 1"),
    ("UPDATE runs SET plan = '' WHERE number = 1", "Run 1"),
    ("DELETE FROM runs WHERE number = 1; DELETE FROM charges WHERE run = 1; DELETE FROM run_people WHERE run = 1",
     "Run 1 was deleted"),
    ("DELETE FROM runs WHERE number = 1", "name run 1, which there is not"),
    ("DELETE FROM log WHERE entry = 4", "entries were deleted"),
    ("UPDATE log SET time = '2020-01-01T00:00:00+00:00' WHERE entry = 3", "Entry 3 of the log"),
    ("UPDATE log SET payload = 'x' WHERE entry = 3", "Entry 3 of the log cannot be read"),
    ("UPDATE ledger SET entries = 3", "The ledger says 3 entries"),
    ("DELETE FROM log WHERE entry = 6; UPDATE ledger SET entries = 5", "The ledger says 5 entries"),
]  # fmt: skip


def filled(path: Path) -> Ledger:
    """Entries: 1 create, 2 enroll, 3 reserve, 4 start, 5 consent, 6 finish."""
    ledger = Ledger.create(path)
    ledger.enroll(people(1.0, 2.0, 3.0))
    run = ledger.reserve(everybody_in_every_step(["p0", "p1", "p2"], 0.2)).number
    attempt = ledger.start(run)
    ledger.consent(people(1.5))
    ledger.finish(run, attempt)
    return ledger


@pytest.mark.parametrize(("edit", "found"), EDITS)
def test_an_edit_is_found(edit: str, found: str, tmp_path: Path) -> None:
    ledger = filled(tmp_path / "a.ledger")
    assert ledger.check().problems == ()
    with closing(sqlite3.connect(tmp_path / "a.ledger")) as connection:
        connection.executescript(edit)
    problems = ledger.check().problems
    assert any(found in problem for problem in problems), problems


def test_what_is_checked_is_told_from_the_first_to_the_last(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    filled(tmp_path / "a.ledger").check(
        progress=lambda name, done, total: told.setdefault(name, []).append((done, total))
    )
    assert list(told) == ["rows by the log", "sums at each start", "certificates"]
    assert [steps[-1] for steps in told.values()] == [(6, 6), (6, 6), (1, 1)]
    assert all([done for done, _ in steps] == list(range(len(steps))) for steps in told.values())


def test_an_older_copy_lacks_the_head(tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    ledger = filled(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(path, tmp_path / "old")
    ledger.reserve(everybody_in_every_step(["p2"], 0.1))
    noted = ledger.head
    assert ledger.check(head=noted).passed
    for leftover in tmp_path.glob("a.ledger*"):
        leftover.unlink()
    shutil.copy(tmp_path / "old", path)
    restored = Ledger(path)
    assert restored.check().passed  # by itself it is a fine ledger
    assert "older copy" in restored.check(head=noted).problems[0]


def test_an_earlier_head_is_known(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "a.ledger")
    noted = ledger.head
    ledger.reserve(everybody_in_every_step(["p2"], 0.1))
    assert ledger.check(head=noted).passed
    assert "cannot" not in " ".join(ledger.check().problems)
    assert "second ledger" in ledger.check().cannot_tell


def test_a_charge_that_never_covered_its_run_is_found(tmp_path: Path) -> None:
    """Also if somebody has computed all digests again."""
    from pdpsgd.ledger.charges import is_confirmed

    exposures = "[[1.0,0.02,1.5,200]]"
    assert is_confirmed("gaussian", 0.2516, int(0.2516**2 * 1e15) + 1, 10**11, 0, exposures)
    assert not is_confirmed("gaussian", 0.2, int(0.2**2 * 1e15) + 1, 10**11, 0, exposures)
    assert not is_confirmed("gaussian", 0.2516, int(0.2**2 * 1e15) + 1, 10**11, 0, exposures)
    stated = '{"delta":0.0,"epsilon":1.0,"set_aside":false}'
    assert is_confirmed("declared", 1.2321, int(1.2321**2 * 1e15) + 1, 0, 0, stated)
    assert not is_confirmed("declared", 1.0, 10**15, 0, 0, stated)


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a.ledger")
    with closing(sqlite3.connect(tmp_path / "a.ledger")) as connection:
        connection.executescript("UPDATE ledger SET schema_version = 2")
    with pytest.raises(PdpsgdError, match=r"Expected a ledger of version 1. .* has version 2"):
        Ledger(tmp_path / "a.ledger")


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="There is none: make one with pdpsgd ledger init"):
        Ledger(tmp_path / "missing.ledger")
    assert not (tmp_path / "missing.ledger").exists()
    sqlite3.connect(tmp_path / "other.db").close()
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE x (y)")
    with pytest.raises(PdpsgdError, match="The database has none"):
        Ledger(tmp_path / "other.db")
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 10)
    with pytest.raises(PdpsgdError, match="cannot be used"):
        Ledger(tmp_path / "text")
    with pytest.raises(PdpsgdError, match="is there already"):
        Ledger.create(tmp_path / "text")
    with pytest.raises(PdpsgdError, match="Expected a file for SQLite"):
        Ledger("mysql://somewhere/ledger")


def test_a_ledger_is_private_to_its_owner(tmp_path: Path) -> None:
    filled(tmp_path / "a.ledger")
    assert (tmp_path / "a.ledger").stat().st_mode & 0o077 == 0
