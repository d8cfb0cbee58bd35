"""The same on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none was found here")


def test_a_model_on_a_gpu_trains_on_data_from_the_cpu(private, helpers):
    run = private(module=helpers.module().cuda(), criterion=functional.cross_entropy)
    for inputs, targets in run.loader:
        run.step(inputs.cuda(), targets.cuda())
    assert all(parameter.is_cuda and parameter.isfinite().all() for parameter in run.module.parameters())


def test_data_on_a_gpu_is_indexed_there(private, helpers):
    inputs, targets = helpers.data(40)
    run = private(module=helpers.module().cuda(), data=(inputs.cuda(), targets.cuda()))
    run.train()
    assert run.engine.steps_left == 0


def test_runs_on_a_gpu_repeat_by_their_seed(private, helpers, flat):
    one, other = (private(module=helpers.module().cuda()) for _ in range(2))
    for run in (one, other):
        for inputs, targets in run.loader:
            run.step(inputs.cuda(), targets.cuda())
    torch.testing.assert_close(flat(one.module), flat(other.module), rtol=1e-4, atol=1e-6)
