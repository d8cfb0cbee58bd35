"""A run folder belongs to one process at a time; whoever dies leaves no obstacle, and a refused run no folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdpsgd.engine.journal import Journal
from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@contextmanager
def another_process(hold) -> Iterator[int]:
    """A process that holds something until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with hold():
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_two_processes_are_kept_apart_and_a_killed_one_is_no_obstacle(problem, tmp_path, flat):
    folder = tmp_path / "run"
    with another_process(lambda: RunFolder(folder).in_use()) as other:
        with pytest.raises(PdpsgdError, match=rf"nobody else uses. Got .*run', in use by process {other} on"):
            problem.fit(run_folder=folder)
        assert not (folder / "public" / "plan.json").exists()
    assert (folder / "private" / "lock").exists()
    assert problem.fit(run_folder=folder).run_folder == folder
    assert not (folder / "private" / "lock").exists()


def test_a_folder_is_used_once_in_a_process_too(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.in_use(), pytest.raises(PdpsgdError, match="used by this process already"), folder.in_use():
        pass
    with folder.in_use():
        assert (folder.path / "private").is_dir()


def test_a_loop_of_one_s_own_does_not_go_on_with_a_run_that_another_process_goes_on_with(tmp_path):
    path = tmp_path / "journal"

    @contextmanager
    def hold():
        yield Journal(path, RandomSource.from_seed(1), max_grad_norm=1.0)

    with another_process(hold), pytest.raises(PdpsgdError, match="no other process goes on with"):
        Journal(path, RandomSource.from_seed(1), max_grad_norm=1.0)
    Journal(path, RandomSource.from_seed(1), max_grad_norm=1.0).close(remove=True)


def test_a_run_that_is_refused_leaves_no_folder(problem, tmp_path):
    for options in (
        {"optimizer": "unknown"},
        {"loss": "unknown"},
        {"momentum": -1.0},
        {"checkpoint_every": 0},
    ):
        with pytest.raises(PdpsgdError):
            problem.fit(run_folder=tmp_path / "runs" / "first", **options)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(PdpsgdError):
        problem.fit(run_folder=tmp_path / "mine", optimizer="unknown")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(problem, tmp_path):
    problem.fit(run_folder=tmp_path / "run")
    (tmp_path / "run" / "private").chmod(0o500)
    with pytest.raises(PdpsgdError, match=r"Expected a run folder that can be written to"):
        problem.fit(run_folder=tmp_path / "run", resume=True)


def test_a_read_only_file_system_is_said(problem, tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *more, **options)

    RunFolder(tmp_path / "run").make()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PdpsgdError, match=r"can be written to. Got .*run': Read-only file system"):
        problem.fit(run_folder=tmp_path / "run", resume=True)
