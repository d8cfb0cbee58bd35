"""Compiled code for what holds a private step up: small convolutions, their gradients per example, max pooling, sums.

`native.c` is compiled the first time it is needed, in a few seconds at most, if the machine has a C compiler (`cc`,
`gcc` or `clang`) and a processor with AVX2, and kept in the user's cache folder. Before it is used, its results are
compared with PyTorch's own. Without a compiler, with other results, or with PDPSGD_NATIVE=0, PyTorch's operations do
the same, more slowly.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from pdpsgd.layers import compiling

# Larger kernels are left to PyTorch, which is made for large matrices.
LARGEST_KERNEL = 1 << 16
LARGEST_KERNEL_TO_CONVOLVE = 1 << 13
# Sums over more positions are left to PyTorch, which adds up in a tree and loses fewer digits.
MOST_POSITIONS = 1 << 12
# Numbers in a vector register, or half of one: whatever runs along it is filled up to a multiple of this.
LANES = 16

Pair = tuple[int, int]

_CONV_FORWARD = nn.Conv2d._conv_forward


def library() -> ctypes.CDLL | None:
    """Return the compiled code, or None where there is none to be trusted."""
    return _library()[0]


def description() -> str | None:
    """Name the compiled code in use: the last bits of a result depend on it."""
    return _library()[1]


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("PDPSGD_NATIVE", "1") != "0" and os.name == "posix":
        try:
            code, digest = compiling.load()
            if _agrees_with_pytorch(code):
                return code, digest
        except Exception:  # whatever it is, training goes on without
            pass
    return None, None


# Sums --------------------------------------------------------------------------------------------------------------


def has_sums(values: Tensor) -> bool:
    """Whether the compiled code can add up these numbers."""
    return _has_numbers(values) and values.is_contiguous() and library() is not None


def row_squares(rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the sum of squares of each row, added up in float64, as float32 or float64."""
    return _row_squares(_trusted(), rows, dtype)


def outer_squares(left: Tensor, right: Tensor, smallest: float) -> Tensor:
    """Return the squared norm of the outer product of each two rows; a row of `left` counts as `smallest` at least."""
    return _outer_squares(_trusted(), left, right, smallest)


def position_sums(values: Tensor) -> Tensor:
    """Return the sums over the middle dimension of (examples, positions, width)."""
    return _position_sums(_trusted(), values)


def _row_squares(code: ctypes.CDLL, rows: Tensor, dtype: torch.dtype) -> Tensor:
    squares = torch.empty(rows.shape[0], dtype=dtype, device="cpu")
    places = (_address(squares), None) if dtype == torch.float32 else (None, _address(squares))
    code.row_squares(*map(ctypes.c_int64, rows.shape), _address(rows), *places)
    return squares


def _outer_squares(code: ctypes.CDLL, left: Tensor, right: Tensor, smallest: float) -> Tensor:
    squares = _empty(left.shape[0])
    sizes = map(ctypes.c_int64, (*left.shape, right.shape[1]))
    code.outer_squares(*sizes, _address(left), _address(right), ctypes.c_double(smallest), _address(squares))
    return squares


def _position_sums(code: ctypes.CDLL, values: Tensor) -> Tensor:
    sums = torch.empty(values.shape[0], values.shape[2], dtype=torch.float32, device="cpu")
    code.position_sums(*map(ctypes.c_int64, values.shape), _address(values), _address(sums))
    return sums


# Convolutions ------------------------------------------------------------------------------------------------------


def has_convolution(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the compiled code can do this convolution, and is the faster way.

    It is where PyTorch's own is slow: with strides, or a number of channels that does not fill vectors.
    """
    return (
        type(module) is nn.Conv2d
        and _is_plain_convolution(module, inputs)
        and (module.stride[1] > 1 or module.in_channels % LANES != 0)
        and module.out_channels % LANES == 0
        and 0 < module.weight.numel() <= LARGEST_KERNEL_TO_CONVOLVE
        and min(_outputs_of(module, inputs)) > 0
        and getattr(module._conv_forward, "__func__", None) is _CONV_FORWARD
        and not torch.is_autocast_enabled("cpu")
        and _only_run()
        and library() is not None
    )


def convolve(module: nn.Conv2d, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what the module does with this weight and bias, of which no gradient is taken."""
    described = _describe(module, inputs)
    weight = _channels_last(weight)
    if torch.is_grad_enabled() and inputs.requires_grad:
        outputs: Tensor = _Convolution.apply(inputs, weight, bias, described, _trusted())  # type: ignore[no-untyped-call]
        return outputs
    return _convolve(_trusted(), described, inputs, weight, bias)


def _convolve(
    code: ctypes.CDLL, described: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    outputs = _images(described[0], *described[4:7])
    inputs = _channels_last(inputs)
    biases = None if bias is None else _address(bias)
    _check_memory(code.convolve(described, _address(inputs), _address(weight), biases, _address(outputs)))
    return outputs


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, described: Any, code: ctypes.CDLL
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.described, ctx.code = described, code
        return _convolve(code, described, inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight, gradient = map(_channels_last, (*ctx.saved_tensors, gradients[0]))
        result = _images(*ctx.described[:4])
        failed = ctx.code.convolve_back(ctx.described, _address(gradient), _address(weight), _address(result))
        _check_memory(failed)
        return result, None, None, None, None


def has_kernel_gradients(module: nn.Module, inputs: Tensor, output_gradient: Tensor) -> bool:
    """Whether the compiled code can take this convolution's gradients per example, and is the faster way."""
    return (
        type(module) is nn.Conv2d
        and _suits(output_gradient)
        and _is_plain_convolution(module, inputs)
        and 0 < module.weight.numel() <= LARGEST_KERNEL
        and 0 < output_gradient.shape[2:].numel() <= MOST_POSITIONS
        and output_gradient.shape[1] == module.out_channels
        and output_gradient.shape[2:] == _outputs_of(module, inputs)
        and library() is not None
    )


def runs_along_columns(module: nn.Conv2d) -> bool:
    """Whether vectors run along the kernel's columns, not along the output channels: what fills them better."""
    out, columns = module.out_channels, module.kernel_size[1] * module.in_channels
    return -(-columns // LANES) * out < -(-out // LANES) * columns


def kernel_gradients(
    module: nn.Conv2d, inputs: Tensor, output_gradient: Tensor, results: Tensor, squares: Tensor
) -> None:
    """Write the gradients of the kernel per example, and their squared norms.

    `results` is (examples, kernel rows, out, columns) if vectors run along columns, else (examples, kernel rows,
    columns, out). A column is a place in the kernel's row and a channel.
    """
    _kernel_gradients(_trusted(), module, inputs, output_gradient, results, squares)


def in_kernel_order(module: nn.Conv2d, results: Tensor) -> Tensor:
    """Return results (examples, numbers) as a view in the parameter's order: (examples, out, in, height, width)."""
    (height, width), out, channels = module.kernel_size, module.out_channels, module.in_channels
    if runs_along_columns(module):
        return results.view(-1, height, out, width, channels).permute(0, 2, 4, 1, 3)
    return results.view(-1, height, width, channels, out).permute(0, 4, 3, 1, 2)


def _kernel_gradients(
    code: ctypes.CDLL, module: nn.Conv2d, inputs: Tensor, gradient: Tensor, results: Tensor, squares: Tensor
) -> None:
    described = _describe(module, inputs)
    inputs, gradient = _channels_last(inputs), _channels_last(gradient)
    layout = map(ctypes.c_int64, (runs_along_columns(module), results.stride(1), results.stride(0)))
    places = map(_address, (inputs, gradient, results, squares))
    _check_memory(code.kernel_gradients(described, *layout, *places))


def _is_plain_convolution(module: nn.Conv2d, inputs: Tensor) -> bool:
    """Whether it is what its attributes say, of images it is made for."""
    return (
        _suits(inputs)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and all(map(_is_pair, (module.kernel_size, module.stride, module.padding, module.dilation)))
        and min(*module.kernel_size, *module.stride, *module.dilation) > 0
        and all(
            0 <= cast(Pair, module.padding)[i] <= module.dilation[i] * (module.kernel_size[i] - 1)
            for i in range(2)
        )
        and module.dilation[1] == 1
        and _has_numbers(module.weight)
        and module.weight.shape == (module.out_channels, module.in_channels, *module.kernel_size)
        and (module.bias is None or _is_bias(module.bias, module.out_channels))
        and inputs.shape[1] == module.in_channels
    )


def _is_bias(bias: Tensor, out: int) -> bool:
    return _has_numbers(bias) and bias.shape == (out,) and bias.is_contiguous()


def _outputs_of(module: nn.Conv2d, inputs: Tensor) -> Pair:
    padding, image = cast(Pair, module.padding), tuple(inputs.shape[2:])
    return _size_after(module.kernel_size, module.stride, padding, module.dilation, image)


def _describe(module: nn.Conv2d, inputs: Tensor) -> Any:
    return _integers(
        *inputs.shape,
        module.out_channels,
        *_outputs_of(module, inputs),
        *module.kernel_size,
        *module.stride,
        module.dilation[0],
        *cast(Pair, module.padding),
    )


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("No memory for a convolution or its gradients. Use a smaller physical batch.")


# Max pooling -------------------------------------------------------------------------------------------------------


def has_max_pool(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the compiled code can do this pooling: of images that are laid out channels last."""
    return (
        type(module) is nn.MaxPool2d
        and _suits(inputs)
        and inputs.is_contiguous(memory_format=torch.channels_last)
        and _pool_geometry(module, inputs) is not None
        and _only_run()
        and library() is not None
    )


def max_pool(module: nn.MaxPool2d, inputs: Tensor, *, rectify: bool = False) -> Tensor:
    """Return what the module does, and a ReLU after it if `rectify`."""
    pooled: Tensor = _MaxPool.apply(inputs, module, rectify, _trusted())  # type: ignore[no-untyped-call]
    return pooled


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, module: nn.MaxPool2d, rectify: bool, code: ctypes.CDLL) -> Tensor:
        geometry = _pool_geometry(module, inputs)
        assert geometry is not None
        examples, channels, *size = inputs.shape
        out = geometry[:2]
        outputs = _images(examples, channels, *out)
        places = torch.empty(
            outputs.shape, dtype=torch.uint8, device=inputs.device, memory_format=torch.channels_last
        )
        described = _integers(examples, channels, *size, *geometry, rectify)
        code.max_pool(described, _address(inputs), _address(outputs), _address(places))
        ctx.save_for_backward(places)
        ctx.code, ctx.described, ctx.shape = code, described, inputs.shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        places, gradient = map(_channels_last, (*ctx.saved_tensors, gradients[0]))
        result = _images(*ctx.shape)
        ctx.code.max_pool_backward(ctx.described, _address(gradient), _address(places), _address(result))
        return result, None, None, None


# Checking ----------------------------------------------------------------------------------------------------------

# Channels, output channels, kernel, stride, padding, dilation; channels, pooling: every way through the code is taken.
_CONVOLUTIONS = (
    (3, 5, (3, 3), (2, 2), (1, 1), 1),
    (16, 17, (4, 4), (2, 2), (1, 1), 1),
    (1, 16, (8, 8), (2, 2), (1, 1), 1),
    (1, 19, (3, 3), (2, 2), (1, 1), 2),
    (4, 32, (2, 3), (1, 2), (0, 2), 1),
    (4, 70, (3, 2), (2, 1), (2, 1), 1),
)
_POOLINGS = (
    (3, (3, 2, 1)),
    (18, (3, 2, 1)),
    (16, (2, 2, 0)),
    (16, (2, 1, 0)),
    (16, (3, 2, 0)),
    (6, (2, 2, 0)),
)


def _agrees_with_pytorch(code: ctypes.CDLL) -> bool:
    """Compare the compiled code with PyTorch's operations, on numbers of its own that disturb no seed."""
    numbers = torch.Generator().manual_seed(0)
    intercepted = torch._C._len_torch_dispatch_stack() > 0
    with (
        _disable_current_modes() if intercepted else nullcontext(),  # the former takes a second to get ready
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        return (
            all(_same_sums(code, numbers, rows) for rows in (3, 200))
            and all(_same_convolution(code, numbers, *sizes) for sizes in _CONVOLUTIONS)
            and all(
                _same_outputs(code, numbers, out, width)
                for out in (16, 32, 48)
                for width in range(1, LANES // 2 + 1)
            )
            and all(
                _same_pooling(code, numbers, channels, nn.MaxPool2d(*sizes), rectify)
                for channels, sizes in _POOLINGS
                for rectify in (False, True)
            )
        )


def _same_sums(code: ctypes.CDLL, numbers: torch.Generator, count: int) -> bool:
    values = _random(numbers, count, 5, 37)
    rows, left = values.flatten(1), values[:, 0].contiguous()
    left[1] *= 1e-30
    left[2] = 0
    wanted = rows.double().square().sum(1)
    outer = left.double().square().sum(1).clamp(min=1e-20).mul_(wanted)
    if not (
        torch.allclose(_row_squares(code, rows, torch.float64), wanted, rtol=1e-12)
        and torch.allclose(_row_squares(code, rows, torch.float32), wanted.float(), rtol=1e-6)
        and torch.allclose(_outer_squares(code, left, rows, 1e-20), outer.float(), rtol=1e-6, atol=0)
        and torch.allclose(_position_sums(code, values), values.sum(1), atol=1e-5)
    ):
        return False
    left[0, -1], rows[1, 0] = float("nan"), float("inf")  # never a norm that seems to be one
    outer = _outer_squares(code, left, rows, 1e-20)
    return not bool(outer[:2].isfinite().any() or _row_squares(code, left, torch.float32)[0].isfinite())


def _same_convolution(
    code: ctypes.CDLL,
    numbers: torch.Generator,
    channels: int,
    out: int,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: int,
) -> bool:
    options: Any = {"stride": stride, "padding": padding, "dilation": (dilation, 1)}
    module = _convolution(channels, out, kernel, **options)
    examples = 2 * torch.get_num_threads() + 1  # so that a thread has several
    weight = _channels_last(_random(numbers, out, channels, *kernel)).requires_grad_()
    bias = _random(numbers, out) if channels > 1 else None
    inputs = _random(numbers, examples, channels, 13, 11).requires_grad_()
    outputs = F.conv2d(inputs, weight, bias, **options)
    gradient = _random(numbers, *outputs.shape)
    ours = _Convolution.apply(inputs, weight.detach(), bias, _describe(module, inputs), code)  # type: ignore[no-untyped-call]
    (back,), (wanted,) = (
        torch.autograd.grad(one, inputs, gradient, retain_graph=True) for one in (ours, outputs)
    )
    if not (_close(ours, outputs) and _close(back, wanted)):
        return False
    results, squares = _empty(examples, kernel[0], out * kernel[1] * channels), _empty(examples)
    _kernel_gradients(code, module, inputs, gradient, results, squares)
    found = in_kernel_order(module, results.flatten(1))
    for one in range(examples):
        (wanted,) = torch.autograd.grad(outputs[one], weight, gradient[one], retain_graph=True)
        if not (
            _close(found[one], wanted) and torch.allclose(squares[one], wanted.square().sum(), rtol=1e-4)
        ):
            return False
    return True


def _same_outputs(code: ctypes.CDLL, numbers: torch.Generator, out: int, width: int) -> bool:
    """So many positions side by side, and so many channels: each has code of its own."""
    module = _convolution(2, out, 2)
    inputs, weight = _random(numbers, 1, 2, 2, width + 1), _channels_last(_random(numbers, out, 2, 2, 2))
    return _close(_convolve(code, _describe(module, inputs), inputs, weight, None), F.conv2d(inputs, weight))


def _convolution(channels: int, out: int, kernel: Any, **options: Any) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        return nn.Conv2d(channels, out, kernel, **{**options, "dtype": torch.float32, "device": "cpu"})


def _close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def _same_pooling(
    code: ctypes.CDLL, numbers: torch.Generator, channels: int, module: nn.MaxPool2d, rectify: bool
) -> bool:
    values = _channels_last(_random(numbers, 2, channels, 9, 8))
    values[0, 0, 3, 3] = float("nan")
    inputs = values.requires_grad_()
    wanted = F.relu(module(inputs)) if rectify else module(inputs)
    found = _MaxPool.apply(inputs, module, rectify, code)  # type: ignore[no-untyped-call]
    gradient = _random(numbers, *wanted.shape)
    (one,), (other,) = (torch.autograd.grad(outputs, inputs, gradient) for outputs in (wanted, found))
    return torch.allclose(wanted, found, rtol=0, atol=0, equal_nan=True) and torch.allclose(
        one, other, rtol=1e-5, atol=1e-5
    )


def _images(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _trusted() -> ctypes.CDLL:
    code = library()
    assert code is not None
    return code


def _suits(images: Tensor) -> bool:
    return images.dim() == 4 and images.numel() > 0 and _has_numbers(images)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but float32 numbers in this process's memory."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_neg()
    )


def _only_run() -> bool:
    """Whether PyTorch's operations are just run: nothing traces, transforms or intercepts them."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and (
            torch._C._len_torch_function_stack() == 0
            or all(isinstance(mode, DeviceContext) for mode in _function_modes())  # type: ignore[no-untyped-call]
        )
    )


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _pool_geometry(module: nn.MaxPool2d, inputs: Tensor) -> tuple[int, ...] | None:
    """Return the sizes of output, kernel, stride and padding; None where PyTorch had better do it, or refuse it."""
    if module.ceil_mode or module.return_indices:
        return None
    written = (module.kernel_size, module.stride, module.padding, module.dilation)
    if not all(_is_plain(size) for size in written):
        return None
    return _checked_pool_geometry(*map(_pair, written), inputs.shape[2:])


@lru_cache
def _checked_pool_geometry(
    kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, image: tuple[int, ...]
) -> tuple[int, ...] | None:
    sound = (
        min(*kernel, *stride) > 0
        and min(padding) >= 0
        and all(2 * padding[i] <= kernel[i] for i in range(2))
        and dilation == (1, 1)
        and kernel[0] * kernel[1] < 255
        and image[0] * image[1] > 1
    )
    out = _size_after(kernel, stride, padding, dilation, image) if sound else (0, 0)
    return (*out, *kernel, *stride, *padding) if min(out) > 0 else None


@lru_cache
def _size_after(kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, image: tuple[int, ...]) -> Pair:
    """Return the height and width of what a convolution or a pooling gives."""
    height, width = (
        (image[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )
    return height, width


def _is_plain(size: Any) -> bool:
    """Whether a size is a number, or two: there are more ways to write it, which are left to PyTorch."""
    return type(size) is int or _is_pair(size)


def _is_pair(size: Any) -> bool:
    return type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int


def _pair(size: Any) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _integers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
