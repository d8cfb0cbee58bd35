"""PyTorch's private APIs that per-example gradients need, in one place, as PyTorch 2.13 has them.

PyTorch promises nothing about names with a leading underscore. No other module of this package uses one;
`tests/gradients/test_torch_adapter.py` says by name which of them a release has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

WRITTEN_FOR = "2.13"  # the release of PyTorch whose private names these are

try:
    from torch.nn.modules.module import (
        _global_backward_hooks,
        _global_backward_pre_hooks,
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
    from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils import _pytree as pytree
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _disable_current_modes

    _precision_of = torch._C._get_fp32_precision_getter
    _MATRIX_PRODUCTS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"Expected PyTorch {WRITTEN_FOR} or one like it. Got {torch.__version__}, which lacks a name that "
        f"per-example gradients need: {missing}. Install torch=={WRITTEN_FOR}."
    ) from missing

__all__ = [
    "BATCH_NORMS",
    "INSTANCE_NORMS",
    "TRANSPOSED",
    "WRITTEN_FOR",
    "SpectralNorm",
    "apply_convolution",
    "apply_transposed_convolution",
    "backward_pass",
    "check_instance_norm_input",
    "full_precision",
    "has_hooks",
    "is_eager",
    "keeps_graph",
    "on_gradient",
    "padding_amounts",
    "parameters_replaced",
    "projects_at_once",
    "pytree",
    "runs_own_convolution",
    "version_of",
    "without_dispatch_modes",
    "without_hooks",
    "without_view",
    "without_view_in_graph",
]

# The base classes, lazily initialized kinds included.
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
INSTANCE_NORMS = (nn.modules.instancenorm._InstanceNorm,)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# Autograd ----------------------------------------------------------------------------------------------------------


def backward_pass() -> int:
    """Return the number of the backward pass that is running; -1 outside of one."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the graph of the backward pass that is running may be gone through again (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Do what `register_hook` does, in a third of the time, to a tensor that an operation has just computed."""
    if tensor.grad_fn is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    # Hooks of others that come later find a place for themselves beside it. Their numbers are not negative.
    tensor._backward_hooks = OrderedDict({-1: hook})
    tensor.grad_fn._register_hook_dict(tensor)


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place; -1 where nobody counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def without_view(tensor: Tensor) -> Tensor:
    """Return the tensor as one of its own where autograd takes it for a part of another (layers with 3-D inputs)."""
    return tensor.data if tensor._is_view() else tensor


def without_view_in_graph(tensor: Tensor) -> Tensor:
    """Return the same for a tensor that autograd has computed: the graph goes on through it."""
    if not tensor._is_view():
        return tensor
    own: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return own


# Modes -------------------------------------------------------------------------------------------------------------


def is_eager() -> bool:
    """Whether operations are simply executed: nothing traces, transforms or intercepts them."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and (
            torch._C._len_torch_function_stack() == 0
            or all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        )
    )


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode intercepts operations."""
    # Switching modes off takes a second to get ready: only where there is one.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


# Precision ---------------------------------------------------------------------------------------------------------


def full_precision() -> AbstractContextManager[Any]:
    """Return a context in tensors' own precision: no autocast, no TF32 or bfloat16 in products of float32."""
    if (
        _precision_of("cuda", "matmul") in _FULL
        and _precision_of("mkldnn", "matmul") in _FULL
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    ):
        return _NOTHING
    casting = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    return _full_precision(casting, [backend.fp32_precision for backend in _MATRIX_PRODUCTS])


@contextmanager
def _full_precision(casting: list[str], before: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in casting:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(_set_precision, before)
        _set_precision(["ieee"] * len(before))
        yield


_AUTOCAST_DEVICES = ("cpu", "cuda")
_FULL = ("none", "ieee")
_NOTHING = nullcontext()


def _set_precision(precisions: list[str]) -> None:
    for backend, precision in zip(_MATRIX_PRODUCTS, precisions, strict=True):
        backend.fp32_precision = precision


# Modules -----------------------------------------------------------------------------------------------------------


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks, of this module or of all modules, see its inputs, outputs or their gradients."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Let the model run unseen by hooks, of its modules or of all modules."""
    registered = [getattr(module, name) for module in model.modules() for name in _HOOKS]
    hooks = [hooks for hooks in (*registered, *_GLOBAL_HOOKS) if hooks]
    kept = [dict(of_place) for of_place in hooks]
    for of_place in hooks:
        of_place.clear()
    try:
        yield
    finally:
        for of_place, before in zip(hooks, kept, strict=True):
            of_place.update(before)


_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def parameters_replaced(places: Iterable[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Let modules have other tensors in the place of parameters."""
    before = [(module._parameters, name, module._parameters[name]) for module, name, _ in places]
    try:
        for (held, name, _), (*_, value) in zip(before, places, strict=True):
            held[name] = value  # type: ignore[assignment]
        yield
    finally:
        for held, name, parameter in before:
            held[name] = parameter


def apply_convolution(module: Convolution, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the module's own convolution with this weight and bias."""
    outputs: Tensor = module._conv_forward(inputs, weight, bias)
    return outputs


def apply_transposed_convolution(
    module: TransposedConvolution,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Any = None,
) -> Tensor:
    """Apply the module's own transposed convolution with this weight and bias."""
    stride, padding, dilation = module.stride, module.padding, module.dilation
    more = module._output_padding(
        inputs,
        output_size,
        stride,  # type: ignore[arg-type]
        padding,  # type: ignore[arg-type]
        module.kernel_size,  # type: ignore[arg-type]
        inputs.dim() - 2,
        dilation,  # type: ignore[arg-type]
    )
    apply: Any = _TRANSPOSE[inputs.dim() - 3]
    outputs: Tensor = apply(inputs, weight, bias, stride, padding, more, module.groups, dilation)
    return outputs


_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def runs_own_convolution(module: nn.Conv2d) -> bool:
    """Whether nobody has replaced the function by which the module convolves."""
    return getattr(module._conv_forward, "__func__", None) is _CONV_FORWARD


_CONV_FORWARD = nn.Conv2d._conv_forward


def padding_amounts(module: Convolution) -> list[int]:
    """Return the padding of a convolution as F.pad expects it: both ends, the last dimension first."""
    if module.padding_mode == "zeros" and isinstance(module.padding, tuple):
        return [size for size in reversed(module.padding) for _ in range(2)]
    return list(module._reversed_padding_repeated_twice)


def check_instance_norm_input(module: nn.Module, inputs: Tensor) -> int:
    """Check the input as the module itself does, and return how many dimensions a batch of examples has."""
    assert isinstance(module, INSTANCE_NORMS)
    module._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    return int(module._get_no_batch_dim()) + 1  # type: ignore[no-untyped-call]


def projects_at_once(module: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values share one projection matrix."""
    return bool(module._qkv_same_embed_dim)
