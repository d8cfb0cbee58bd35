"""Checkpoints and journals with a valid checksum that do not fit are refused with one sentence, before any step."""

from __future__ import annotations

import os

import pytest
import torch

from pdpsgd.engine import checkpoints
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.errors import PdpsgdError


class Crash(Exception):
    pass


@pytest.fixture
def fit(problem):
    plan = problem.plan(steps=(4, 6), fresh=True)
    return lambda folder: problem.fit(run_folder=folder, plan=plan, checkpoint_every=5, resume=True)


@pytest.fixture
def folder(fit, tmp_path, monkeypatch):
    """A run that crashed after step 7, with its last checkpoint at step 5, in the second round."""
    step, calls = PrivateOptimizer.step, []

    def crash(self, closure=None):
        calls.append(1)
        if len(calls) == 8:
            raise Crash
        return step(self, closure)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateOptimizer, "step", crash)
        with pytest.raises(Crash):
            fit(tmp_path)
    return tmp_path


def without(name):
    return lambda tensors, state: tensors.pop(min(key for key in tensors if key.startswith(name)))


def with_shape(name, *shape):
    return lambda tensors, state: tensors.update(
        {min(key for key in tensors if key.startswith(name)): torch.zeros(*shape)}
    )


def with_state(value, *path):
    def change(tensors, state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


CHANGES = {
    "a missing weight": (without("model."), r"model.* to be a tensor of shape .* Got nothing"),
    "a weight of another shape": (with_shape("model.", 2, 2), r"Got a tensor of shape \(2, 2\)"),
    "a weight of another type": (
        lambda tensors, state: tensors.update({"model.0.bias": tensors["model.0.bias"].double()}),
        "type float32. Got .* float64",
    ),
    "a weight too many": (
        lambda tensors, state: tensors.update({"model.9.bias": torch.zeros(3)}),
        "model.9.bias to be nothing",
    ),
    "a missing momentum": (without("optimizer."), "Expected what .tensor stands for"),
    "a momentum of another shape": (with_shape("optimizer.", 7), r"optimizer.momentum_buffer of shape"),
    "an average of another shape": (with_shape("training.average", 2), "training.average"),
    "an ended model of another shape": (with_shape("training.ended", 2), "training.ended"),
    "steps that are no number": (with_state("5", "steps_done"), "steps_done to be a whole number"),
    "more steps than there are": (with_state(11, "steps_done"), "steps_done up to the plan's 10 steps"),
    "no source": (with_state(None, "source"), "source to be an object"),
    "an unknown generator": (with_state("dice", "source", "algorithm"), "dice"),
    "a journal that is no name": (with_state(5, "journal"), "journal to be a text"),
    "nothing packed": (with_state({}, "packed"), "holds optimizer"),
    "an optimizer that is a list": (with_state([], "packed", "optimizer"), "fits PrivateOptimizer"),
    "a learning rate that is text": (
        with_state("much", "packed", "optimizer", "param_groups", 0, "lr"),
        "optimizer.lr to be a number",
    ),
    "a history of numbers": (with_state([1], "packed", "training", "history"), "history"),
    "no history": (with_state(None, "packed", "training", "history"), "history to be a list"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checkpoint_that_does_not_fit_is_refused(fit, folder, what):
    path = folder / "private" / "checkpoint.safetensors"
    change, said = CHANGES[what]
    saved = checkpoints.load(path)
    tensors, state = dict(saved.tensors), dict(saved.state)
    change(tensors, state)
    checkpoints.save(path, tensors, state, saved.key)
    before = (folder / "private" / "checkpoint.journal").read_bytes()
    with pytest.raises(PdpsgdError, match=said):
        fit(folder)
    assert (folder / "private" / "checkpoint.journal").read_bytes() == before


def test_an_unchanged_checkpoint_that_was_written_again_is_accepted(fit, folder, tmp_path_factory, flat):
    path = folder / "private" / "checkpoint.safetensors"
    saved = checkpoints.load(path)
    checkpoints.save(path, saved.tensors, saved.state, saved.key)
    whole = fit(tmp_path_factory.mktemp("whole"))
    assert torch.equal(flat(fit(folder)), flat(whole))


@pytest.mark.parametrize("kept", [0, 1, 4, 4.5])
def test_an_emptied_or_shortened_journal_is_refused(fit, folder, kept):
    journal = folder / "private" / "checkpoint.journal"
    os.truncate(journal, int(kept * 40))
    with pytest.raises(
        PdpsgdError, match=rf"Expected 5 entries .* Got {int(kept)}: it was emptied or cut off"
    ):
        fit(folder)


def test_a_journal_that_ends_after_the_checkpoint_is_whole(fit, folder):
    journal = folder / "private" / "checkpoint.journal"
    assert journal.stat().st_size >= 7 * 40
    os.truncate(journal, 5 * 40 + 13)  # a power failure: the noise of that step was never given out
    assert fit(folder).run_folder == folder


def test_a_checkpoint_that_is_nested_without_end_is_refused(fit, folder, monkeypatch):
    path = folder / "private" / "checkpoint.safetensors"
    saved = checkpoints.load(path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.json, "dumps", lambda *_, **__: "[" * 100_000)
        checkpoints.save(path, saved.tensors, saved.state, saved.key)
    with pytest.raises(PdpsgdError, match="nested at most"):
        fit(folder)
