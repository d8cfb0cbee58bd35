"""Killed, interrupted and resumed runs end where an uninterrupted one does, or are refused."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pdpsgd.engine import checkpoints
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.errors import PdpsgdError

KILLED = Path(__file__).with_name("killed.py")


class Crash(Exception):
    pass


@pytest.fixture
def crash(monkeypatch):
    """Let the optimizer fail after so many calls of `step`, once."""

    def after(steps, action=None):
        original, calls = PrivateOptimizer.step, []

        def step(self, closure=None):
            calls.append(1)
            if len(calls) == steps + 1:
                if action is None:
                    raise Crash
                action()
            return original(self, closure)

        monkeypatch.setattr(PrivateOptimizer, "step", step)

    return after


@pytest.fixture
def crashed(problem, tmp_path, crash):
    """A run that crashed after step 17, with its last checkpoint at step 15."""
    crash(17)
    with pytest.raises(Crash):
        problem.fit(run_folder=tmp_path, checkpoint_every=5, test_data=problem.test, evaluate_every=4)
    return tmp_path


OPTIONS = {"checkpoint_every": 5, "evaluate_every": 4}


def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(problem, crashed, flat):
    whole = problem.fit(test_data=problem.test, evaluate_every=4)
    resumed = problem.fit(run_folder=crashed, resume=True, test_data=problem.test, **OPTIONS)
    assert torch.equal(flat(resumed), flat(whole))
    assert resumed.history == whole.history
    assert resumed.evaluation == whole.evaluation


@pytest.mark.parametrize("every", [1, 20])
def test_a_run_that_is_killed_at_random_moments_ends_where_an_uninterrupted_one_does(tmp_path, every):
    done = subprocess.run(
        [sys.executable, str(KILLED), str(tmp_path / "killed"), str(every)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0, "no child was killed"
    spec = importlib.util.spec_from_file_location("killed", KILLED)
    killed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(killed)
    killed.train(killed.load_problem(), tmp_path / "whole", every)
    one, other = (
        safetensors.torch.load_file(tmp_path / name / "public" / "model.safetensors")
        for name in ("killed", "whole")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name in ("public/history.jsonl", "public/plan.json", "people/promises.csv", "public/settings.json"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
    killed, whole = (
        {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("[!.]*")}
        for name in ("killed", "whole")
    )
    assert killed == whole


def test_a_run_with_fresh_models_resumes_in_its_second_round(problem, tmp_path, crash, flat):
    plan = problem.plan(steps=(10, 20), fresh=True)
    whole = problem.fit(plan=plan)
    crash(17)
    with pytest.raises(Crash):
        problem.fit(plan=plan, run_folder=tmp_path, checkpoint_every=5)
    resumed = problem.fit(plan=plan, run_folder=tmp_path, checkpoint_every=5, resume=True)
    assert torch.equal(flat(resumed), flat(whole))


def other_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def deeper(problem):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("plan", lambda problem: {"plan": problem.plan(noise=1.01)}),
        ("plan", lambda problem: {"plan": problem.plan(steps=(31,))}),
        ("data", lambda problem: {"data": (problem.inputs + 1e-3, problem.targets)}),
        ("data", lambda problem: {"data": (problem.inputs, problem.targets.flip(0))}),
        ("people", lambda problem: {"record_of_person": list(range(99, -1, -1))}),
        ("model", lambda problem: {"model": deeper(problem)}),
        ("optimizer kind", lambda problem: {"optimizer": "rmsprop"}),
        ("optimizer options lr", lambda problem: {"learning_rate": 0.31}),
        ("optimizer options momentum", lambda problem: {"momentum": 0.8}),
        ("schedule", lambda problem: {"schedule": "linear"}),
        ("loss", lambda problem: {"loss": other_loss}),
        ("weight_average", lambda problem: {"weight_average": 0.5}),
        ("max_physical_batch_size", lambda problem: {"max_physical_batch_size": 4}),
        ("seed", lambda problem: {"seed": 6}),
    ],
)
def test_a_run_is_not_resumed_with_anything_else(problem, crashed, what, change):
    before = (crashed / "private" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(PdpsgdError, match=f"Expected the .*{what}.*same noise on different gradients"):
        problem.fit(run_folder=crashed, resume=True, test_data=problem.test, **(OPTIONS | change(problem)))
    assert (crashed / "private" / "checkpoint.safetensors").read_bytes() == before


def test_code_that_changed_under_the_same_name_is_noticed_before_any_noise(
    problem, tmp_path, crash, monkeypatch
):
    """Between the checkpoint (step 15) and the crash (step 17) noise was given out for two steps."""
    behaviour = {"smoothing": 0.0}

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=behaviour["smoothing"])

    crash(17)
    with pytest.raises(Crash):
        problem.fit(run_folder=tmp_path, checkpoint_every=5, loss=loss)
    behaviour["smoothing"] = 0.3
    with pytest.raises(PdpsgdError, match="Expected step 15 to repeat what it did"):
        problem.fit(run_folder=tmp_path, checkpoint_every=5, loss=loss, resume=True)
    behaviour["smoothing"] = 0.0
    problem.fit(run_folder=tmp_path, checkpoint_every=5, loss=loss, resume=True)


def test_resuming_twice_from_the_same_checkpoint_repeats_the_same_run(
    problem, crashed, tmp_path_factory, flat
):
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(crashed, copy, dirs_exist_ok=True)
    one = problem.fit(run_folder=crashed, resume=True, test_data=problem.test, **OPTIONS)
    other = problem.fit(run_folder=copy, resume=True, test_data=problem.test, **OPTIONS)
    assert torch.equal(flat(one), flat(other))


def test_a_damaged_checkpoint_is_refused(problem, crashed):
    path = crashed / "private" / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(PdpsgdError, match="damaged"):
        problem.fit(run_folder=crashed, resume=True)


def test_a_checkpoint_is_its_owners_only_and_loses_its_key_at_the_end(problem, crashed):
    path = crashed / "private" / "checkpoint.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((crashed / "private" / "checkpoint.journal").stat().st_mode) == 0o600
    key = checkpoints.load(path).key
    assert key is not None
    problem.fit(run_folder=crashed, resume=True, test_data=problem.test, **OPTIONS)
    assert checkpoints.load(path).key is None
    assert not (crashed / "private" / "checkpoint.journal").exists()
    files = [path.read_bytes() for path in crashed.rglob("*") if path.is_file()]
    assert not any(key in content or key.hex().encode() in content for content in files)


def test_a_finished_run_is_not_gone_on_with(problem, tmp_path):
    problem.fit(run_folder=tmp_path)
    for resume in (False, True):
        with pytest.raises(PdpsgdError, match="without a finished run"):
            problem.fit(run_folder=tmp_path, resume=resume)


# Whatever comes after the last step, from the first thing to the last.
AFTER_THE_LAST_STEP = {
    "erasing the journal": "pdpsgd.engine.journal.Journal.close",
    "the last checkpoint's history": "pdpsgd.training.run_folder.RunFolder.write_history",
    "the last evaluation": "pdpsgd.training.trainer.Trainer._note",
    "the models": "pdpsgd.training.trainer.Trainer.models",
    "the evaluation": "pdpsgd.training.trainer.HeldOutPeople.evaluate",
    "leftovers": "pdpsgd.training.fitting.remove_leftovers",
    "the model's file": "pdpsgd.training.run_folder.RunFolder.write_model",
    "the promises": "pdpsgd.training.run_folder.RunFolder.write_promises",
    "the result": "pdpsgd.training.run_folder.RunFolder.write_result",
}


@pytest.mark.parametrize("target", list(AFTER_THE_LAST_STEP.values()), ids=list(AFTER_THE_LAST_STEP))
def test_what_fails_after_the_last_step_leaves_no_key_and_resuming_completes_it(
    problem, tmp_path, monkeypatch, flat, target
):
    options = {"test_data": problem.test, "evaluate_every": 30, "weight_average": 0.9}
    whole = problem.fit(run_folder=tmp_path / "whole", **options)
    keys = []
    honest = PrivateOptimizer._release_step

    def release(self, step):
        keys.append(self._execution.source.key_bytes())
        honest(self, step)

    def full(*arguments, **named):
        raise PdpsgdError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PrivateOptimizer, "_release_step", release)
        patch.setattr(target, full)
        with pytest.raises(PdpsgdError, match="No space left"):
            problem.fit(run_folder=tmp_path / "run", **options)
    assert len(keys) == 30
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(keys[0] in content or keys[0].hex().encode() in content for content in files)
    resumed = problem.fit(run_folder=tmp_path / "run", resume=True, **options)
    assert torch.equal(flat(resumed), flat(whole))
    assert (resumed.history, resumed.evaluation, resumed.spent) == (
        whole.history,
        whole.evaluation,
        whole.spent,
    )
    assert resumed.verdict == whole.verdict
    left, expected = (
        {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")}
        for name in ("run", "whole")
    )
    assert left == expected


def test_a_disk_that_is_full_at_the_last_step_keeps_the_run_resumable(problem, tmp_path, monkeypatch, flat):
    """The last model is nowhere yet: the key stays until the steps since the last checkpoint were repeated."""
    whole, honest = problem.fit(), checkpoints._replace

    def full(path, content):
        if b'\\"steps_done\\": 30' in content:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_replace", full)
        with pytest.raises(PdpsgdError, match="No space left on device"):
            problem.fit(run_folder=tmp_path, checkpoint_every=7)
    path = tmp_path / "private" / "checkpoint.safetensors"
    assert checkpoints.load(path).state["steps_done"] == 28
    assert torch.equal(flat(problem.fit(run_folder=tmp_path, checkpoint_every=7, resume=True)), flat(whole))
    assert checkpoints.load(path).key is None


def test_a_run_that_has_ended_is_completed_with_its_own_plan_and_settings_only(
    problem, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("pdpsgd.training.run_folder.RunFolder.write_model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            problem.fit(run_folder=tmp_path)
    for change in ({"plan": problem.plan(noise=2.0)}, {"learning_rate": 0.1}, {"weight_average": 0.5}):
        with pytest.raises(PdpsgdError, match=r"that the checkpoint .* was made with"):
            problem.fit(run_folder=tmp_path, resume=True, **change)
    problem.fit(run_folder=tmp_path, resume=True)


def test_a_begun_run_is_not_overwritten(problem, crashed):
    with pytest.raises(PdpsgdError, match="resume=True to continue"):
        problem.fit(run_folder=crashed)


def test_resuming_where_nothing_was_begun_begins(problem, tmp_path, flat):
    assert torch.equal(flat(problem.fit(run_folder=tmp_path / "new", resume=True)), flat(problem.fit()))


def test_without_a_seed_the_key_comes_from_the_checkpoint(problem, tmp_path, crash):
    crash(17)
    with pytest.raises(Crash):
        problem.fit(seed=None, run_folder=tmp_path, checkpoint_every=5)
    journal = (tmp_path / "private" / "checkpoint.journal").read_bytes()
    assert len(journal) == 17 * 40, "all steps are noted, also those before the last checkpoint"
    result = problem.fit(seed=None, run_folder=tmp_path, checkpoint_every=5, resume=True)
    assert result.release_note is None


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_resume(problem, tmp_path, crash, flat, capsys):
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell
    whole = problem.fit()
    crash(12, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"after step 13 of 30.*resume=True"):
        problem.fit(run_folder=tmp_path)
    assert "Stopping after this step" in capsys.readouterr().err
    assert checkpoints.load(tmp_path / "private" / "checkpoint.safetensors").state["steps_done"] == 13
    resumed = problem.fit(run_folder=tmp_path, resume=True)
    assert torch.equal(flat(resumed), flat(whole))
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_without_a_folder_says_that_nothing_was_saved(problem, crash, capsys):
    crash(12, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="Nothing was saved"):
        problem.fit()


def test_a_full_disk_loses_nothing_already_saved(problem, tmp_path, monkeypatch, flat):
    whole = problem.fit()
    saves = []
    original = checkpoints._replace

    def full(path, content):
        saves.append(path)
        if len(saves) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_replace", full)
        with pytest.raises(PdpsgdError, match="No space left on device"):
            problem.fit(run_folder=tmp_path, checkpoint_every=5)
    assert checkpoints.load(tmp_path / "private" / "checkpoint.safetensors").state["steps_done"] == 10
    assert torch.equal(flat(problem.fit(run_folder=tmp_path, checkpoint_every=5, resume=True)), flat(whole))


def test_settings_and_plan_are_there_before_the_first_step(problem, tmp_path, crash):
    crash(0)
    with pytest.raises(Crash):
        problem.fit(run_folder=tmp_path)
    assert json.loads((tmp_path / "public" / "settings.json").read_text())["momentum"] == 0.9
    assert checkpoints.load(tmp_path / "private" / "checkpoint.safetensors").state["steps_done"] == 0


class Augmented(Dataset):
    """A dataset that shakes its items with all the generators people use."""

    def __init__(self, problem):
        self.problem = problem

    def __len__(self):
        return 100

    def __getitem__(self, index):
        shake = 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
        return self.problem.inputs[index] + shake, self.problem.targets[index]


def shaken(items):
    inputs, targets = torch.utils.data.default_collate(items)
    shake = 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
    return inputs + shake, targets


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_collation_repeats_when_a_run_is_resumed(problem, tmp_path, crash, flat, workers):
    """Its random numbers were those of the process: a resumed run had other sums, and was stopped."""

    def data():
        return DataLoader(
            [*zip(problem.inputs, problem.targets, strict=True)], num_workers=workers, collate_fn=shaken
        )

    whole = problem.fit(data=data())
    torch.manual_seed(99)
    crash(17)
    with pytest.raises(Crash):
        problem.fit(data=data(), run_folder=tmp_path, checkpoint_every=5)
    resumed = problem.fit(data=data(), run_folder=tmp_path, checkpoint_every=5, resume=True)
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_in_a_dataset_repeats_when_a_run_is_resumed(
    problem, tmp_path, crash, flat, workers
):
    def data():
        return DataLoader(Augmented(problem), num_workers=workers)

    whole = problem.fit(data=data())
    crash(17)
    with pytest.raises(Crash):
        problem.fit(data=data(), run_folder=tmp_path, checkpoint_every=5)
    resumed = problem.fit(data=data(), run_folder=tmp_path, checkpoint_every=5, resume=True)
    assert torch.equal(flat(resumed), flat(whole))
