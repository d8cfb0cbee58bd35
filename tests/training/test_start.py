"""An earlier model as the start: same weights, same reading of records, and its verdict goes on."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from pdpsgd import PdpsgdError
from pdpsgd.data.preprocessing import Preprocessing
from pdpsgd.training.inputs import inputs_of
from pdpsgd.training.start import find_start


@pytest.fixture
def earlier(problem, tmp_path):
    problem.fit(run_folder=tmp_path / "jan", seed=None)
    return tmp_path / "jan"


def test_a_run_begins_with_the_weights_it_is_started_from(problem, earlier, tmp_path):
    start, model = find_start(earlier), problem.model()
    wanted = safetensors.torch.load_file(earlier / "public" / "model.safetensors")
    start.load_into(model)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    moved = problem.fit(start=earlier, learning_rate=1e-12, run_folder=tmp_path / "feb", seed=None)
    for name, value in moved.model.state_dict().items():
        assert torch.allclose(value, wanted[name], atol=1e-6)


def test_the_lineage_is_in_the_settings_over_generations(problem, earlier, tmp_path):
    problem.fit(start=earlier, run_folder=tmp_path / "feb", seed=None)
    result = problem.fit(start=tmp_path / "feb", seed=None)
    origin = result.settings["started_from"]
    assert (origin["name"], origin["started_from"]["name"]) == ("feb", "jan")
    assert result.verdict.is_for_release


def test_what_starts_from_a_model_that_is_not_for_release_is_not_either(problem, tmp_path):
    problem.fit(run_folder=tmp_path / "guessable", seed=1)
    result = problem.fit(start=tmp_path / "guessable", seed=None)
    assert not result.verdict.is_for_release
    assert [reason.code for reason in result.verdict.reasons] == ["start"]
    again = problem.fit(start=tmp_path / "guessable", run_folder=tmp_path / "next", seed=None)
    assert not again.verdict.is_for_release
    last = problem.fit(start=tmp_path / "next", seed=None)
    assert [reason.code for reason in last.verdict.reasons] == ["start"]


@pytest.mark.parametrize("place", ["public", "public/model.safetensors", "copy", "copy/model.safetensors"])
def test_the_verdict_of_a_start_stays_with_its_weights(problem, tmp_path, place):
    for name, seed in (("guessable", 1), ("sound", None)):
        problem.fit(run_folder=tmp_path / name, seed=seed)
        shutil.copytree(tmp_path / name / "public", tmp_path / name / "copy")
        (tmp_path / name / "copy" / "result.json").unlink()
        found = problem.fit(start=tmp_path / name / place, seed=None).verdict
        assert [reason.code for reason in found.reasons] == (["start"] if seed else [])


def test_any_safetensors_file_will_do(problem, tmp_path):
    safetensors.torch.save_file(problem.model().state_dict(), tmp_path / "public.safetensors")
    result = problem.fit(start=tmp_path / "public.safetensors", seed=None)
    assert result.settings["started_from"]["name"] == "public.safetensors"
    assert result.verdict.is_for_release


def test_weights_of_another_network_are_refused(problem, tmp_path):
    safetensors.torch.save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(PdpsgdError, match=r"to fit the network, to start from them"):
        problem.fit(start=tmp_path / "other.safetensors")


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_model_is_refused(problem, tmp_path, there):
    if there:
        (tmp_path / "notes.txt").write_text("weights?")
    with pytest.raises(PdpsgdError, match="safetensors"):
        problem.fit(start=tmp_path / "notes.txt")


def test_records_that_are_read_otherwise_are_refused(problem, earlier):
    start, inputs = find_start(earlier), replace(inputs_of(problem.data, None), name="people.csv")
    start.check_fits(inputs)
    with pytest.raises(PdpsgdError, match=r"classes \[\].*Got \['no', 'yes'\]"):
        start.check_fits(replace(inputs, classes=("no", "yes")))
    scaled = replace(start, description=replace(start.description, preprocessing=Preprocessing()))
    scaled.check_fits(inputs)
