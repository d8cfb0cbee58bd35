"""The same noise never meets different gradients, in a loop of one's own either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from pdpsgd.engine import journal as journals
from pdpsgd.engine.journal import Journal
from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.source import RandomSource


def take_step(run, *, label_smoothing=0.0):
    inputs, targets = next(iter(run.loader))
    run.optimizer.zero_grad()
    nn.functional.cross_entropy(run.module(inputs), targets, label_smoothing=label_smoothing).backward()
    run.optimizer.step()


def test_another_loss_after_resuming_is_noticed_before_any_noise(private, tmp_path, flat):
    private().engine.save(tmp_path / "checkpoint")
    first = private()
    first.engine.resume(tmp_path / "checkpoint")
    take_step(first)
    other = private()
    other.engine.resume(tmp_path / "checkpoint")
    with pytest.raises(PdpsgdError, match="Expected step 0 to repeat what it did"):
        take_step(other, label_smoothing=0.5)
    same = private()
    same.engine.resume(tmp_path / "checkpoint")
    take_step(same)
    assert torch.equal(flat(same.module), flat(first.module))


def test_two_runs_of_one_process_that_go_on_from_one_checkpoint_see_what_the_other_has_met(
    private, tmp_path, flat
):
    """Locks are between processes. In a notebook, the first run may go on while the second one does."""
    first = private()
    take_step(first)
    first.engine.save(tmp_path / "checkpoint")
    second = private()
    second.engine.resume(tmp_path / "checkpoint")
    take_step(first)
    with pytest.raises(PdpsgdError, match="Expected step 1 to repeat what it did"):
        take_step(second, label_smoothing=0.5)
    take_step(second)
    assert torch.equal(flat(first.module), flat(second.module))
    take_step(second)
    with pytest.raises(PdpsgdError, match="Expected step 2 to repeat what it did"):
        take_step(first, label_smoothing=0.5)


def test_saving_again_forgets_nothing_that_an_older_checkpoint_could_repeat(private, tmp_path):
    run = private()
    run.engine.save(tmp_path / "older")
    take_step(run)
    run.engine.save(tmp_path / "newer")
    other = private()
    other.engine.resume(tmp_path / "older")
    with pytest.raises(PdpsgdError, match="Expected step 0 to repeat what it did"):
        take_step(other, label_smoothing=0.5)


def test_a_run_is_not_resumed_without_its_journal(private, tmp_path):
    private().engine.save(tmp_path / "checkpoint")
    Path(f"{tmp_path / 'checkpoint'}.journal").unlink()
    with pytest.raises(PdpsgdError, match="Expected the run's journal"):
        private().engine.resume(tmp_path / "checkpoint")


def test_a_new_run_does_not_go_on_with_another_ones_journal(private, tmp_path):
    for seed in (1, 2):
        run = private(seed=seed)
        run.engine.save(tmp_path / "checkpoint")
        take_step(run)


def test_one_persons_change_is_noticed_in_the_sum_of_thousands(tmp_path):
    # A change by a tenth of the clipping norm goes unnoticed with a chance of (0.008)^4 = 4e-9.
    source = RandomSource.from_seed(3)
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(500, generator=generator)
    total *= 5000 / total.norm()
    one = torch.randn(500, generator=generator)
    one *= 0.1 / one.norm()
    Journal(tmp_path / "journal", source, max_grad_norm=1.0).meet(0, [total])
    later = Journal(tmp_path / "journal", source, max_grad_norm=1.0)
    later.meet(0, [total])
    with pytest.raises(PdpsgdError, match="Expected step 0 to repeat"):
        later.meet(0, [total + one])


@pytest.mark.parametrize("torn", [3, 33])
def test_what_is_written_after_a_torn_entry_is_read_again(torn, tmp_path):
    source, path = RandomSource.from_seed(3), tmp_path / "journal"
    total = torch.ones(50)
    Journal(path, source, max_grad_norm=1.0).meet(0, [total])
    path.write_bytes(path.read_bytes() + bytes(range(torn)))
    after = Journal(path, source, max_grad_norm=1.0)
    after.meet(0, [total])
    after.meet(1, [total])
    later = Journal(path, source, max_grad_norm=1.0)
    later.meet(1, [total])
    for step in (0, 1):
        with pytest.raises(PdpsgdError, match=f"Expected step {step} to repeat"):
            later.meet(step, [-total])


def test_an_entry_that_finds_no_room_stops_the_step_and_leaves_nothing_torn(tmp_path, monkeypatch):
    source, path = RandomSource.from_seed(3), tmp_path / "journal"
    journal = Journal(path, source, max_grad_norm=1.0)
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        with pytest.raises(PdpsgdError, match="disk that is full"):
            journal.meet(0, [torch.ones(5)])
    assert path.stat().st_size == 0
    journal.meet(0, [torch.ones(5)])
    assert path.stat().st_size == 40


def test_a_journal_that_another_process_keeps_or_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """Two processes that went on with one run would use its noise twice."""
    source = RandomSource.from_seed(3)
    with pytest.raises(PdpsgdError, match=r"journal that can be written at .*No such file"):
        Journal(tmp_path / "none" / "journal", source, max_grad_norm=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "lock", lambda file: False)
        with pytest.raises(PdpsgdError, match="a run that no other process goes on with"):
            Journal(tmp_path / "journal", source, max_grad_norm=1.0)
    Journal(tmp_path / "journal", source, max_grad_norm=1.0).meet(0, [torch.ones(5)])


def test_no_checkpoint_counts_entries_that_are_not_on_the_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal", RandomSource.from_seed(3), max_grad_norm=1.0)
    journal.meet(0, [torch.ones(5)])
    assert journal.entries == 1

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PdpsgdError, match=r"to get to the disk, before a checkpoint. Got: No space left"):
        journal.entries  # noqa: B018
