"""Compiled code for the slowest parts of a step: small convolutions, their per-example gradients, pooling, sums.

`kernels.c` is compiled the first time it is needed, in a few seconds at most, if the machine has a C compiler (`cc`,
`gcc` or `clang`) and a processor with AVX2, and kept in the user's cache folder. Before it is used, its results are
compared with PyTorch's own (`self_check`). Without a compiler, with other results, or with PDPSGD_NATIVE=0,
PyTorch's operations do the same, more slowly.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from pdpsgd.gradients._torch import is_eager, runs_own_convolution
from pdpsgd.gradients.geometry import Geometry, channels_last
from pdpsgd.gradients.native import build as compiling
from pdpsgd.gradients.native import calls
from pdpsgd.gradients.native.self_check import agrees_with_pytorch

# Larger kernels are left to PyTorch, which is made for large matrices.
LARGEST_KERNEL = 1 << 16
LARGEST_KERNEL_TO_CONVOLVE = 1 << 13
LARGEST_RECURRENT = 1 << 18
# Sums over more positions are left to PyTorch, which adds up in a tree and loses fewer digits.
MOST_POSITIONS = 1 << 12
# Sums of products over so few positions are computed twice, for norms and for sums, and never kept.
FEW_POSITIONS = 48
# With more positions, operations of a sum of products that an inner product of positions takes the time of.
GRAM = 3
# Each lookup of an example is compared with all before it.
MOST_LOOKUPS = 1 << 10


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
            is_eager()  # asks torch for what an old one may not know
            if agrees_with_pytorch(code):
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
    return calls.row_squares(_trusted(), rows, dtype)


def outer_squares(left: Tensor, right: Tensor, smallest: float) -> Tensor:
    """Return the squared norm of the outer product of each two rows; a row of `left` counts as `smallest` at least."""
    return calls.outer_squares(_trusted(), left, right, smallest)


def has_weighted_sums(rows: Tensor, total: Tensor) -> bool:
    """Whether the compiled code can add these rows to this total."""
    return (
        has_sums(rows)
        and type(total) is Tensor
        and total.dtype == torch.float64
        and total.device.type == "cpu"
        and total.is_contiguous()
    )


def add_weighted_rows(weights: Tensor, rows: Tensor, total: Tensor) -> None:
    """Add the sum over the rows of weight times row to the total, in float64 throughout."""
    calls.add_weighted_rows(_trusted(), weights.to(torch.float64).contiguous(), rows, total)


def position_sums(values: Tensor) -> Tensor:
    """Return the sums over the middle dimension of (examples, positions, width)."""
    return calls.position_sums(_trusted(), values)


def group_squares(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """Return the squared norm of the sum of outer products over rows starts[i] to starts[i + 1], never too small."""
    return calls.group_squares(_trusted(), left, right, starts)


def segment_sums(rows: Tensor, starts: Tensor) -> Tensor:
    """Return the sums over rows starts[i] to starts[i + 1]."""
    return calls.segment_sums(_trusted(), rows, starts)


# Many layers at once -----------------------------------------------------------------------------------------------


def has_numbers(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but float32 numbers that compiled code can read, and there is some."""
    return _has_numbers(tensor) and library() is not None


def has_layer(total: Tensor, *values: Tensor) -> bool:
    """Whether the compiled code can add what these numbers say to this total."""
    for some in values:  # a generator would take as long as the questions
        if not _has_numbers(some):
            return False
    return (
        type(total) is Tensor
        and total.dtype == torch.float64
        and total.is_cpu
        and total.is_contiguous()
        and library() is not None
    )


def takes_products(positions: int, rows: int, columns: int) -> bool:
    """Whether the compiled code takes sums over so many positions with other layers at once, from where factors lie.

    Where they are smaller than the factors, and have many positions, it is better to materialize and keep them.
    """
    factors, products = positions * (rows + columns), rows * columns
    return (
        positions <= FEW_POSITIONS
        or GRAM * factors <= products
        or (products > LARGEST_KERNEL and factors <= products)
    )


def has_table(
    total: Tensor, rows: Tensor, gradient: Tensor, shares: Tensor | None, padding: int | None
) -> bool:
    """Whether the compiled code can add what lookups of rows of a table pass back to this total."""
    return (
        has_lookups(rows)
        and 0 < rows.shape[1] <= MOST_LOOKUPS
        and has_layer(total, gradient, *(() if shares is None else (shares,)))
    )


class AtOnce:
    """What compiled code is told of layers whose gradients it reads where they lie, each parameter used once."""

    def __init__(self, totals: Mapping[int, tuple[int, torch.Size]], *, by_row: bool = True) -> None:
        """`totals` are addresses and shapes, by the identity of parameters: see `place_of_total`.

        Unless examples are rows, tables and what has several positions are left to others: people's are added up first.
        """
        self._totals, self._by_row = totals, by_row
        self._copied: list[Tensor] = []  # as long as their addresses are in use
        self.fields: list[int] = []
        self.parameters: list[int] = []

    def take_linear(self, inputs: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Take a linear layer, of one position for each example or of several; tells whether it suits."""
        place = self._totals.get(id(weight))
        if (
            place is None
            or not weight.requires_grad
            or not _has_numbers(inputs)
            or not _has_numbers(gradient)
        ):
            return False
        total, (out, into) = place
        *before, width = gradient.shape
        positions = 1 if len(before) == 1 else math.prod(before[1:])
        if (
            width != out
            or inputs.shape != (*before, into)
            or (positions != 1 and not (self._by_row and 0 < positions <= MOST_POSITIONS))
        ):
            return False
        if not inputs.is_contiguous():
            self._copied.append(inputs := inputs.contiguous())
        if not gradient.is_contiguous():
            self._copied.append(gradient := gradient.contiguous())
        left = gradient.data_ptr()
        fields: tuple[int, ...] = (positions, out, into, left, inputs.data_ptr(), total, 0, 0)
        if bias is not None and bias.requires_grad:
            place = self._totals.get(id(bias))
            if place is None or place[1] != (out,):
                return False
            # Of several positions, the sum is taken first.
            fields += (0 if positions == 1 else positions, out, 1, left, 0, place[0], 0, 0)
            self.parameters.append(id(bias))
        self.parameters.append(id(weight))
        self.fields += fields
        return True

    def take_lookups(
        self, rows: Tensor, gradient: Tensor, table: Tensor, padding: int | None, share: float | None = None
    ) -> bool:
        """Take a table of which each example looks up some rows, (examples,) or (examples, length).

        With a share, the gradient is that of an example's bag, in which every lookup has that share.
        """
        place = self._totals.get(id(table))
        if place is None or not self._by_row or not table.requires_grad:
            return False
        if type(rows) is not Tensor or not _has_numbers(gradient):
            return False
        total, (height, width) = place
        length = rows.shape[1] if rows.dim() == 2 else 1
        of_gradient = rows.shape if share is None else rows.shape[:1]
        if (
            rows.dtype is not torch.int64
            or not rows.is_cpu
            or rows.dim() not in (1, 2)
            or not 0 < length <= MOST_LOOKUPS
            or gradient.shape != (*of_gradient, width)
        ):
            return False
        rows, gradient = rows.contiguous(), gradient.contiguous()
        self._copied += (rows, gradient)
        shares = 0
        if share is not None:
            self._copied.append(of_lookups := gradient.new_full(rows.shape, share))
            shares = of_lookups.data_ptr()
        nothing = -1 if padding is None else padding
        self.fields += (length, width, height, gradient.data_ptr(), shares, total, rows.data_ptr(), nothing)
        self.parameters.append(id(table))
        return True


def place_of_total(total: Tensor) -> tuple[int, torch.Size] | None:
    """Return address and shape of a total that compiled code can add to; None for any other."""
    return (total.data_ptr(), total.shape) if has_layer(total) else None


def layers(
    parts: list[tuple[Tensor, Tensor | None, Tensor]],
    tables: Sequence[tuple[calls.Lookups, Tensor]],
    examples: int,
    starts: Tensor | None = None,
    whose: Tensor | None = None,
    at_once: AtOnce | None = None,
    blocks: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
) -> calls.Layers:
    """Return the gradients of layers, as factors and total, or rows, None and total; and of tables, with totals.

    Blocks have their factors and totals side by side.
    """
    fields = () if at_once is None else at_once.fields
    return calls.Layers(_trusted(), parts, examples, starts, whose, blocks, tables, fields)


def has_clipping(squares: Tensor, clip_norms: Tensor) -> bool:
    """Whether the compiled code can turn these squared norms (float64) into weights."""
    return has_squares(squares) and has_clip_norms(clip_norms)


def has_squares(squares: Tensor) -> bool:
    """Whether the compiled code can read these squared norms (float64)."""
    return squares.is_cpu and squares.is_contiguous()


def has_clip_norms(clip_norms: Tensor) -> bool:
    """Whether the compiled code can read these clipping norms."""
    return (
        library() is not None
        and clip_norms.is_cpu
        and type(clip_norms) is Tensor
        and clip_norms.dtype in (torch.float32, torch.float64)
        and clip_norms.is_contiguous()
    )


def weigh(
    squares: Tensor, clip_norms: Tensor, figures: tuple[float, ...], starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return norms, weights, scaled weights in float64 and in float32, and how many norms are not finite."""
    return calls.weigh(_trusted(), squares, clip_norms, figures, starts)


# Convolutions ------------------------------------------------------------------------------------------------------


def has_convolution(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the compiled code can do this convolution, and is the faster way.

    It is where PyTorch's own is slow: with strides, or a number of channels that does not fill vectors.
    """
    return (
        type(module) is nn.Conv2d
        and _is_plain_convolution(module, inputs)
        and (module.stride[1] > 1 or module.in_channels % calls.LANES != 0)
        and module.out_channels % calls.LANES == 0
        and 0 < module.weight.numel() <= LARGEST_KERNEL_TO_CONVOLVE
        and min(calls.outputs_of(module, inputs)) > 0
        and runs_own_convolution(module)
        and not torch.is_autocast_enabled("cpu")
        and library() is not None
        and is_eager()
    )


def convolve(module: nn.Conv2d, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what the module does with this weight and bias, of which no gradient is taken."""
    described = calls.describe(module, inputs)
    weight = channels_last(weight)
    if torch.is_grad_enabled() and inputs.requires_grad:
        outputs: Tensor = calls.Convolution.apply(inputs, weight, bias, described, _trusted())  # type: ignore[no-untyped-call]
        return outputs
    return calls.convolve(_trusted(), described, inputs, weight, bias)


def has_kernel_gradients(geometry: Geometry, inputs: Tensor, output_gradient: Tensor) -> bool:
    """Whether the compiled code can take a convolution's gradients per example, and is the faster way."""
    out = tuple(output_gradient.shape[2:])
    room = [
        size + sum(geometry.amounts[2 * place : 2 * place + 2])
        for place, size in enumerate(reversed(inputs.shape[2:]))
    ]
    return (
        0 < math.prod(geometry.shape) <= LARGEST_KERNEL
        and geometry.is_padded_with_zeros
        and min(*geometry.amounts, *geometry.stride, *geometry.dilation) >= 0
        and inputs.dim() == output_gradient.dim() == len(geometry.shape) <= 5
        and inputs.shape[:2] == (output_gradient.shape[0], geometry.in_channels)
        and output_gradient.shape[1] == geometry.out_channels
        and 0 < math.prod(out) <= MOST_POSITIONS
        and all(met <= size for met, size in zip(geometry.met(out), reversed(room), strict=True))
        and min(inputs.shape) > 0
        and _has_numbers(inputs)
        and _has_numbers(output_gradient)
        and library() is not None
    )


def has_products(left: Tensor, right: Tensor) -> bool:
    """Whether the compiled code can add up products over positions: (examples, positions, width) each."""
    return (
        left.dim() == right.dim() == 3
        and left.shape[:2] == right.shape[:2]
        and min(*left.shape, *right.shape) > 0
        and left.shape[1] <= MOST_POSITIONS
        and _has_numbers(left)
        and _has_numbers(right)
        and library() is not None
    )


def kernel_gradients(
    geometry: Geometry,
    inputs: Tensor,
    output_gradient: Tensor,
    by_columns: bool,
    results: Tensor,
    squares: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Write the gradients of the kernel per example, and their squared norms, in an order of the code's own.

    With `starts`, those of examples starts[i] to starts[i + 1] are added up before.
    """
    calls.kernel_gradients(
        _trusted(), geometry, inputs, output_gradient, by_columns, results, squares, starts
    )


# Normalizations ----------------------------------------------------------------------------------------------------


def has_scales(inputs: Tensor, gradient: Tensor, positions: int) -> bool:
    """Whether the compiled code can take gradients of the scales and shifts after a normalization."""
    return (
        0 < positions <= MOST_POSITIONS
        and inputs.shape == gradient.shape
        and inputs.numel() > 0
        and _has_numbers(inputs)
        and _has_numbers(gradient)
        and library() is not None
    )


def last_scales(
    inputs: Tensor, gradient: Tensor, *, centered: bool, eps: float, shifts: bool
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of scales and shifts of what is normalized over the last of (examples, positions, width)."""
    return calls.last_scales(_trusted(), inputs, gradient, centered=centered, eps=eps, shifts=shifts)


def group_scales(inputs: Tensor, gradient: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return gradients of scales and shifts of (examples, channels, ...) that is normalized over groups of channels."""
    return calls.group_scales(_trusted(), inputs, gradient, groups, eps)


# Lookups -----------------------------------------------------------------------------------------------------------


def has_lookups(rows: Tensor) -> bool:
    """Whether the compiled code can find the distinct rows of each example's lookups (examples, length)."""
    return (
        type(rows) is Tensor
        and rows.dim() == 2
        and rows.dtype in (torch.int32, torch.int64)
        and rows.device.type == "cpu"
        and library() is not None
    )


def distinct_uses(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return examples and rows of distinct uses of a table by (examples, length), and which use each lookup is of."""
    return calls.distinct_uses(_trusted(), rows)


def add_uses(owners: Tensor, used: Tensor, weights: Tensor, values: Tensor, total: Tensor) -> None:
    """Add the sum over uses of a table of weight (of its example) times row to a table, in float64 throughout."""
    weights = weights.to(torch.float64).contiguous()
    calls.add_uses(_trusted(), owners.contiguous(), used.contiguous(), weights, values, total)


# LSTM layers -------------------------------------------------------------------------------------------------------


def has_lstm(gates: Tensor, weight: Tensor, *states: Tensor) -> bool:
    """Whether the compiled code can run a layer over time, and is the faster way."""
    return (
        0 < weight.numel() <= LARGEST_RECURRENT
        and min(gates.shape) > 0
        and all(_has_numbers(tensor) for tensor in (gates, weight, *states))
        and gates.is_contiguous()
        and library() is not None
    )


def lstm(gates: Tensor, weight: Tensor, states: Tensor, cells: Tensor, bent: Tensor) -> None:
    """Run a layer over time, time first: gates hold what inputs and biases add to them, and get their values."""
    calls.lstm(_trusted(), gates, weight, states, cells, bent)


def lstm_backward(
    kept: tuple[Tensor, ...], weight: Tensor, outputs: Tensor, last: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the gates' sums, and those of the first state and cell."""
    return calls.lstm_backward(_trusted(), kept, weight, outputs, last)


# Which convolutions ------------------------------------------------------------------------------------------------


def _is_plain_convolution(module: nn.Conv2d, inputs: Tensor) -> bool:
    """Whether it is what its attributes say, of images it is made for."""
    return (
        _suits(inputs)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and all(map(calls.is_pair, (module.kernel_size, module.stride, module.padding, module.dilation)))
        and min(*module.kernel_size, *module.stride, *module.dilation) > 0
        and all(
            0 <= cast(calls.Pair, module.padding)[i] <= module.dilation[i] * (module.kernel_size[i] - 1)
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


# Max pooling -------------------------------------------------------------------------------------------------------


def has_max_pool(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the compiled code can do this pooling: of images that are laid out channels last."""
    return (
        type(module) is nn.MaxPool2d
        and _suits(inputs)
        and inputs.is_contiguous(memory_format=torch.channels_last)
        and calls.pool_geometry(module, inputs) is not None
        and library() is not None
        and is_eager()
    )


def max_pool(module: nn.MaxPool2d, inputs: Tensor, *, rectify: bool = False) -> Tensor:
    """Return what the module does, and a ReLU after it if `rectify`."""
    pooled: Tensor = calls.MaxPool.apply(inputs, module, rectify, _trusted())  # type: ignore[no-untyped-call]
    return pooled


# Which tensors, and when -------------------------------------------------------------------------------------------


def _trusted() -> ctypes.CDLL:
    code = library()
    assert code is not None
    return code


def _suits(images: Tensor) -> bool:
    return images.dim() == 4 and images.numel() > 0 and _has_numbers(images)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but float32 numbers in this process's memory."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
    )
