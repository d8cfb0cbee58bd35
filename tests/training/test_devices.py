"""The device of a run is a name; what this machine does not have, or what has no float64, is refused."""

from __future__ import annotations

import pytest
import torch

from pdpsgd.errors import PdpsgdError
from pdpsgd.training.devices import device_of


def test_auto_takes_a_gpu_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == torch.device("cuda")


def test_a_run_on_the_cpu_by_name_is_the_run_without_a_name(problem, flat):
    assert torch.equal(flat(problem.fit()), flat(problem.fit(device="cpu")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mps", "float64"),
        ("cuda:99", "Got 'cuda:99', with"),
        ("tpu", "Expected device to be cpu"),
        ("meta", "Expected device to be cpu"),
        ("", "Expected device to be cpu"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_written(problem, tmp_path, name, message):
    with pytest.raises(PdpsgdError, match=message):
        problem.fit(device=name, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
