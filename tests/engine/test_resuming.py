"""A run goes on from its own checkpoint only, whole, and from where nothing has been released otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdpsgd.engine import checkpoints
from pdpsgd.errors import PdpsgdError


@pytest.fixture
def path(private, tmp_path) -> Path:
    """The checkpoint of a run that stopped after its second step."""
    run, path = private(), tmp_path / "checkpoint"
    for batch in run.loader:
        run.step(*batch)
        if run.engine.steps_taken == 2:
            break
    run.engine.save(path)
    return path


def change(path: Path, state_changes: Callable[[dict[str, Any]], object]) -> None:
    """Write a checkpoint again with something else in it, and a checksum that fits."""
    saved = checkpoints.load(path)
    state = dict(saved.state)
    state_changes(state)
    checkpoints.save(path, saved.tensors, state, saved.key)


def test_a_run_that_has_begun_takes_up_no_other(private, path):
    """Its own steps would not be counted."""
    begun, fresh = private(), private()
    begun.step(*next(iter(begun.loader)))
    with pytest.raises(
        PdpsgdError, match=r"a run that has not begun, to resume another one. Got one at step 1"
    ):
        begun.engine.resume(path)
    fresh.engine.resume(path)
    assert fresh.engine.steps_taken == 2


def test_a_run_that_was_closed_is_over(private, tmp_path):
    run, path = private(), tmp_path / "checkpoint"
    run.engine.save(path)
    private().engine.resume(path)
    run.engine.close()
    with pytest.raises(
        PdpsgdError, match=r"was closed after 0 steps, and its key was erased. Begin a new run"
    ):
        private().engine.resume(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda state: state.update(journal=None), "Expected the name of the run's journal"),
        (
            lambda state: state.update(journal="."),
            r"Expected the name of a file in the checkpoint .* Got '\.'",
        ),
        (lambda state: state.update(checkpoints=["\0"]), "Expected the name of a file in the checkpoint"),
        (lambda state: state.update(steps_done=7), "steps_done up to the plan's 6 steps. Got 7"),
        (lambda state: state["packed"].clear(), "Expected a checkpoint that holds optimizer"),
        (
            lambda state: state["packed"]["optimizer"]["param_groups"][0].update(momentum=0.5),
            "optimizer to have the settings that the run was begun with. Got others",
        ),
    ],
    ids=["no journal", "a folder", "no name", "too many steps", "no optimizer", "other settings"],
)
def test_a_checkpoint_that_was_changed_is_not_gone_on_from(private, path, changes, message):
    change(path, lambda state: None)
    private().engine.resume(path)
    change(path, changes)
    with pytest.raises(PdpsgdError, match=message):
        private().engine.resume(path)
