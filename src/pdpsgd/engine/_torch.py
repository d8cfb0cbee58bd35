"""Every private name of torch that the engine uses, in one place; checked with torch 2.13.

torch may change what has a leading underscore in any release. `tests/engine/test_torch_private.py` says which of
these a release has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode

CHECKED_WITH = "2.13"

__all__ = [
    "CHECKED_WITH",
    "TorchDispatchMode",
    "is_compiled",
    "keep_version",
    "own_buffers",
    "own_parameters",
    "pop_function_modes",
    "push_function_mode",
    "share_step_hooks",
    "version",
    "versions",
]


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Put a mode on top of torch's stack, as entering it does."""
    _push_mode(mode)  # type: ignore[no-untyped-call]


def pop_function_modes() -> list[TorchFunctionMode]:
    """Take all modes off torch's stack, the top one first."""
    count = torch._C._len_torch_function_stack()
    return [_pop_mode() for _ in range(count)]  # type: ignore[no-untyped-call]


def keep_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Let writes to the tensor inside the context go uncounted."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)


def version(tensor: Tensor) -> int:
    """Return how many writes torch has counted; inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: list[Tensor | None]) -> list[int]:
    """Return the same for many tensors, in little time; -1 for None."""
    try:
        return list(map(_counted, tensors))
    except (AttributeError, RuntimeError):  # there is None, or an inference tensor, which has no count
        return [-1 if tensor is None else version(tensor) for tensor in tensors]


_counted: Callable[[Tensor | None], int] = attrgetter("_version")


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of a module's own buffers: `named_buffers()` takes too long for every step."""
    return module._buffers


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters."""
    return module._parameters


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module comes from `torch.compile`, or was compiled in place (without loading the compiler)."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def share_step_hooks(wrapper: Optimizer, wrapped: Optimizer) -> None:
    """Let a wrapper that never called `Optimizer.__init__` have the hooks of the optimizer in it."""
    wrapper._optimizer_step_pre_hooks = wrapped._optimizer_step_pre_hooks
    wrapper._optimizer_step_post_hooks = wrapped._optimizer_step_post_hooks
