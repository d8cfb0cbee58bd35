"""Each private name of torch that the engine uses still does what it did: a failure here names torch's release."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pdpsgd.engine import _torch


@contextmanager
def told_plainly(what):
    try:
        yield
    except Exception as error:
        raise AssertionError(
            f"torch {torch.__version__} changed {what}, which pdpsgd/engine/_torch.py uses as it was in torch "
            f"{_torch.CHECKED_WITH}: {type(error).__name__}: {error}"
        ) from error


class Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_the_stack_of_function_modes():
    with told_plainly("torch.overrides._push_mode, _pop_mode or torch._C._len_torch_function_stack"):
        _torch.pop_function_modes()  # of a loop that an earlier test has left in the middle of a step
        lower, upper = Counts(), Counts()
        _torch.push_function_mode(lower)
        _torch.push_function_mode(upper)
        try:
            torch.zeros(1)
        finally:
            modes = _torch.pop_function_modes()
        torch.zeros(1)
        assert modes == [upper, lower]
        assert (lower.calls, upper.calls) == (1, 1)


def test_the_count_of_writes():
    with told_plainly("Tensor._version or _unsafe_preserve_version_counter"):
        tensor = torch.zeros(2)
        before = _torch.version(tensor)
        tensor.add_(1)
        assert _torch.version(tensor) == before + 1
        with _torch.keep_version(tensor):
            tensor.add_(1)
        assert _torch.version(tensor) == before + 1
        with torch.inference_mode():
            assert _torch.version(torch.zeros(2)) == 0


def test_the_dictionaries_of_a_module():
    with told_plainly("Module._buffers or Module._parameters"):
        module = nn.BatchNorm1d(3)
        assert set(_torch.own_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked"}
        assert set(_torch.own_parameters(module)) == {"weight", "bias"}
        assert _torch.own_parameters(module)["weight"] is module.weight


def test_the_hooks_of_an_optimizer():
    with told_plainly("Optimizer._optimizer_step_pre_hooks or _optimizer_step_post_hooks"):
        wrapped = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        wrapper = torch.optim.SGD.__new__(torch.optim.SGD)
        _torch.share_step_hooks(wrapper, wrapped)
        wrapper.register_step_pre_hook(lambda *args: None)
        wrapper.register_step_post_hook(lambda *args: None)
        assert len(wrapped._optimizer_step_pre_hooks) == len(wrapped._optimizer_step_post_hooks) == 1
