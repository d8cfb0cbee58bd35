"""A disk that fills up at any moment: a sentence, nothing that was saved is lost, and the run can be finished later."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch

from pdpsgd.engine.checkpoints import load
from pdpsgd.errors import PdpsgdError


class FullDisk:
    """Lets the first few writes through to the disk, and refuses all others."""

    def __init__(self, monkeypatch, room):
        self.room = room
        sync, write = os.fsync, os.write

        def full_sync(descriptor):
            self.use()
            return sync(descriptor)

        def full_write(descriptor, content):
            self.use()
            return write(descriptor, content)

        monkeypatch.setattr(os, "fsync", full_sync)
        monkeypatch.setattr(os, "write", full_write)

    def use(self):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1


@pytest.fixture
def fit(problem):
    plan = problem.plan(steps=(3, 3), fresh=True)
    return lambda folder: problem.fit(
        run_folder=folder,
        plan=plan,
        checkpoint_every=2,
        resume=True,
        test_data=problem.test,
        evaluate_every=3,
    )


def test_whenever_the_disk_fills_up_the_run_is_finished_later(fit, tmp_path, monkeypatch, flat):
    whole = fit(tmp_path / "whole")
    expected = flat(whole)
    for room in range(200):
        folder = tmp_path / "run"
        with monkeypatch.context() as patched:
            disk = FullDisk(patched, room)
            refused = None
            try:
                fit(folder)
            except PdpsgdError as error:
                refused = str(error)
        if refused is None:
            break
        assert "No space left" in refused or "disk that is full" in refused
        finished = (folder / "public" / "result.json").exists()
        if not finished:
            assert torch.equal(flat(fit(folder)), expected), f"with room for {room} writes"
        else:
            with pytest.raises(PdpsgdError, match="finished run"):
                fit(folder)
        assert load(folder / "private" / "checkpoint.safetensors").key is None
        assert not (folder / "private" / "checkpoint.journal").exists()
        assert (folder / "public" / "model.safetensors").exists()
        shutil.rmtree(folder)
    assert room > 15, "there were writes"
    assert disk.room == 0, "the run that got through used all the room"
