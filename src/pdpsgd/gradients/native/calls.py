"""Calls of the compiled code, which is given each time: what it computes, on tensors that suit it.

Whether tensors do, and whether the code is to be trusted, is asked in `dispatch`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pdpsgd.gradients.geometry import Geometry, channels_last

# Numbers in a vector register, or half of one: whatever runs along it is filled up to a multiple of this.
LANES = 16

Pair = tuple[int, int]

# Sums --------------------------------------------------------------------------------------------------------------


def row_squares(code: ctypes.CDLL, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of squares of each row, added up in float64, as float32 or float64."""
    squares = torch.empty(rows.shape[0], dtype=dtype, device="cpu")
    places = (_address(squares), None) if dtype == torch.float32 else (None, _address(squares))
    code.row_squares(*map(ctypes.c_int64, rows.shape), _address(rows), *places)
    return squares


def outer_squares(code: ctypes.CDLL, left: Tensor, right: Tensor, smallest: float) -> Tensor:
    """Return the squared norm of the outer product of each two rows; a row of `left` counts as `smallest` at least."""
    squares = empty(left.shape[0])
    sizes = map(ctypes.c_int64, (*left.shape, right.shape[1]))
    code.outer_squares(*sizes, _address(left), _address(right), ctypes.c_double(smallest), _address(squares))
    return squares


def add_weighted_rows(code: ctypes.CDLL, weights: Tensor, rows: Tensor, total: Tensor) -> None:
    """Add the sum of weight times row to the total; weights and total are float64."""
    code.add_weighted_rows(*map(ctypes.c_int64, rows.shape), *map(_address, (weights, rows, total)))


def position_sums(code: ctypes.CDLL, values: Tensor) -> Tensor:
    """Return the sums over the middle dimension of (examples, positions, width)."""
    sums = torch.empty(values.shape[0], values.shape[2], dtype=torch.float32, device="cpu")
    code.position_sums(*map(ctypes.c_int64, values.shape), _address(values), _address(sums))
    return sums


def group_squares(code: ctypes.CDLL, left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """Return the squared norm of the sum of outer products over rows starts[i] to starts[i + 1], never too small."""
    squares, starts = empty(len(starts) - 1), starts.contiguous()
    sizes = map(ctypes.c_int64, (left.shape[1], right.shape[1]))
    groups = ctypes.c_int64(len(squares))
    code.group_squares(groups, _address(starts), *sizes, *map(_address, (left, right, squares)))
    return squares


def segment_sums(code: ctypes.CDLL, rows: Tensor, starts: Tensor) -> Tensor:
    """Return the sums over rows starts[i] to starts[i + 1]."""
    sums, starts = empty(len(starts) - 1, rows.shape[1]), starts.contiguous()
    groups, width = ctypes.c_int64(len(sums)), ctypes.c_int64(rows.shape[1])
    code.segment_sums(groups, _address(starts), width, _address(rows), _address(sums))
    return sums


# Rows that are looked up, gradients, shares, and the row that gets none: see `lookups.Passed`.
Lookups = tuple[Tensor, Tensor, Tensor | None, int | None]

# Many layers at once -----------------------------------------------------------------------------------------------

FIELDS = 8  # of a layer: positions, widths, addresses of factors, total and rows, and padding


class Layers:
    """The gradients of layers for each example: rows of numbers, or sums over positions of outer products."""

    def __init__(
        self,
        code: ctypes.CDLL,
        parts: list[tuple[Tensor, Tensor | None, Tensor]],
        examples: int,
        starts: Tensor | None = None,
        whose: Tensor | None = None,
        blocks: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
        tables: Sequence[tuple[Lookups, Tensor]] = (),
        more: Sequence[int] = (),
    ) -> None:
        """A part has factors (examples, positions, width) and a total; or rows, None and a total.

        Factors of one position may be matrices. Blocks are many parts, their factors and totals side by side. A table
        has what lookups pass back to it, and a total.

        With `starts`, an example is a person, who has rows starts[i] to starts[i + 1], of one position each; and
        `whose` they are, below 0 for nobody.

        `more` are fields of further layers, as the code reads them; whoever gives them keeps what they point to.
        """
        self._code, self._examples = code, examples
        self._starts = None if starts is None else starts.contiguous()
        self._whose = None if whose is None else whose.contiguous()
        self._in_use: list[Tensor] = []  # as long as their addresses are
        fields: list[int] = [*more]
        for left, right, total in parts:
            left = left.contiguous()
            self._in_use += [left, total]
            if right is None:
                fields += (0, total.numel(), 1, left.data_ptr(), 0, total.data_ptr(), 0, 0)
                continue
            right = right.contiguous()
            self._in_use.append(right)
            *_, width = left.shape
            positions = left.shape[1] if left.dim() == 3 else 1
            places = left.data_ptr(), right.data_ptr(), total.data_ptr()
            fields += (positions, width, right.shape[-1], *places, 0, 0)
        for left, right, total in blocks:
            fields += self._fields_of_blocks(left.contiguous(), right.contiguous(), total)
        for lookups, total in tables:
            fields += self._fields_of_table(*lookups, total)
        self._fields = array("q", fields)
        self._count = len(fields) // FIELDS
        self._ratios: Tensor | None = None  # what `squares` leaves for `add`

    def _fields_of_blocks(self, left: Tensor, right: Tensor, total: Tensor) -> list[int]:
        self._in_use += [left, right, total]
        count, out, into = total.shape
        positions = left.shape[2] if left.dim() == 4 else 1
        places = [tensor.data_ptr() for tensor in (left, right, total)]
        sizes = [tensor.numel() // count * tensor.element_size() for tensor in (left, right, total)]
        fields: list[int] = []
        for _ in range(count):
            fields += (positions, out, into, *places, 0, 0)
            places = [place + size for place, size in zip(places, sizes, strict=True)]
        return fields

    def _fields_of_table(
        self, rows: Tensor, gradient: Tensor, shares: Tensor | None, padding: int | None, total: Tensor
    ) -> tuple[int, ...]:
        rows, gradient = rows.to(torch.int64).contiguous(), gradient.contiguous()
        self._in_use += [rows, gradient, total]
        of_shares = 0
        if shares is not None:
            self._in_use.append(shares := shares.contiguous())
            of_shares = shares.data_ptr()
        table, width = total.shape
        nothing = -1 if padding is None else padding
        places = gradient.data_ptr(), of_shares, total.data_ptr(), rows.data_ptr()
        return rows.shape[1], width, table, *places, nothing

    def squares(self, smallest: float) -> Tensor:
        """Return squared norms over all layers; a left factor of one position counts as `smallest` at least."""
        squares = torch.empty(self._examples, dtype=torch.float64, device="cpu")
        self._ratios = torch.empty(self._count, self._examples, dtype=torch.float64, device="cpu")
        places = _address(self._ratios), _address(squares)
        _succeed(self._code.layer_squares(*self._counts(), ctypes.c_double(smallest), *places))
        return squares

    def add(self, weights: Tensor, fine: Tensor | None = None) -> None:
        """Add the sums weighted by float32 numbers to the totals; after `squares`. People have float64 ones as well."""
        assert self._ratios is not None
        weights = weights.contiguous()
        places = _address(weights), None if fine is None else _address(fine)
        whose = None if self._whose is None else _address(self._whose)
        _succeed(self._code.add_layers(*self._counts(), whose, *places, _address(self._ratios)))

    def add_clipped(
        self,
        clip_norms: Tensor,
        figures: tuple[float, ...],
        *,
        smallest: float,
        largest: float,
        others: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Do all of it, `squares`, `weigh` and `add`, in one call.

        `others` are squared norms of what else there is, which is not added. Returns scaled weights, in float64 and in
        float32. None if nothing was added: a norm is not finite, a clipping norm above the largest, a row of a table
        not there, or there was no memory. Who takes the steps one by one gets to know which.
        """
        assert len(clip_norms) == self._examples
        scaled = torch.empty(self._examples, dtype=torch.float64, device="cpu")
        narrow = empty(self._examples)
        failed = self._code.add_clipped(
            *self._counts(),
            None if self._whose is None else _address(self._whose),
            ctypes.c_double(smallest),
            None if others is None else _address(others),
            *_places(clip_norms),
            ctypes.c_double(largest),
            (ctypes.c_double * len(figures))(*figures),
            _address(scaled),
            _address(narrow),
        )
        return None if failed else (scaled, narrow)

    def _counts(self) -> tuple[Any, ...]:
        starts = None if self._starts is None else _address(self._starts)
        fields = ctypes.c_void_p(self._fields.buffer_info()[0])
        return ctypes.c_int64(self._count), fields, ctypes.c_int64(self._examples), starts


def _succeed(failed: int) -> None:
    if failed == 2:
        raise RuntimeError("lookups of rows that a table does not have")
    if failed:
        raise MemoryError("Expected memory for the gradients of a batch. Got none.")


def weigh(
    code: ctypes.CDLL,
    squares: Tensor,
    clip_norms: Tensor,
    figures: tuple[float, ...],
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return norms, weights, scaled weights in float64 and in float32, and how many norms are not finite.

    The figures are the scale (for people with rows starts[i] to starts[i + 1], over how many these are), what is kept
    of a clipping norm, the room that is taken off it, and the smallest norm and weight.
    """
    many = len(squares)
    norms, weights, scaled = torch.empty(3, many, dtype=torch.float64, device="cpu").unbind()
    narrow = empty(many)
    places = _places(clip_norms)
    results = map(_address, (norms, weights, scaled, narrow))
    by = (ctypes.c_double * len(figures))(*figures)
    factors = _address(squares), None if starts is None else _address(starts)
    non_finite: int = code.clip(ctypes.c_int64(many), *factors, *places, by, *results)
    return norms, weights, scaled, narrow, non_finite


# Convolutions ------------------------------------------------------------------------------------------------------


def convolve(
    code: ctypes.CDLL, described: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the outputs; the weight is laid out channels last."""
    outputs = _images(described[0], *described[4:7])
    inputs = channels_last(inputs)
    biases = None if bias is None else _address(bias)
    _check_memory(code.convolve(described, _address(inputs), _address(weight), biases, _address(outputs)))
    return outputs


class Convolution(torch.autograd.Function):
    """The same, with a gradient of the inputs and of nothing else."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, described: Any, code: ctypes.CDLL
    ) -> Tensor:
        """Return the outputs."""
        ctx.save_for_backward(weight)
        ctx.described, ctx.code = described, code
        return convolve(code, described, inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the inputs."""
        weight, gradient = map(channels_last, (*ctx.saved_tensors, gradients[0]))
        result = _images(*ctx.described[:4])
        failed = ctx.code.convolve_back(ctx.described, _address(gradient), _address(weight), _address(result))
        _check_memory(failed)
        return result, None, None, None, None


def kernel_gradients(
    code: ctypes.CDLL,
    geometry: Geometry,
    inputs: Tensor,
    gradient: Tensor,
    by_columns: bool,
    results: Tensor,
    squares: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Write the gradients of the kernel per example, and their squared norms.

    `results` is (examples, numbers), in the order of the code (`in_kernel_order`). With `starts`, those of examples
    starts[i] to starts[i + 1], at least one, are added up.
    """
    (inputs, first), (gradient, out_first) = map(_laid_out, (inputs, gradient))
    described = _integers(
        geometry.in_channels,
        geometry.out_channels,
        geometry.groups,
        *_volume(inputs.shape[2:], 1),
        *_volume(gradient.shape[2:], 1),
        *_volume(geometry.kernel, 1),
        *_volume(geometry.stride, 1),
        *_volume(geometry.dilation, 1),
        *_volume(geometry.padding, 0),
        first,
        out_first,
        by_columns,
    )
    starts = None if starts is None else starts.contiguous()
    groups = ctypes.c_int64(len(squares)), None if starts is None else _address(starts)
    _check_memory(
        code.kernel_gradients(described, *groups, *map(_address, (inputs, gradient, results, squares)))
    )


def runs_along_columns(geometry: Geometry, gradient: Tensor) -> bool:
    """Whether vectors run along the kernel's columns, not along the output channels: what fills them better."""
    out, columns = geometry.out_channels // geometry.groups, _columns(geometry) * geometry.shape[1]
    filled_by_columns, filled_by_outputs = -(-columns // LANES) * out, -(-out // LANES) * columns
    if filled_by_columns == filled_by_outputs:
        return not is_channels_last(gradient)  # then numbers are read where they are
    return filled_by_columns < filled_by_outputs


def _columns(geometry: Geometry) -> int:
    """Return how many places in a row of the kernel the code takes as one."""
    return geometry.kernel[-1] if geometry.dilation[-1] == 1 else 1


def in_kernel_order(geometry: Geometry, results: Tensor, by_columns: bool) -> Tensor:
    """Return results (examples, numbers) in the parameter's order."""
    depth, height, width = _volume(geometry.kernel, 1)
    if geometry.is_depthwise:
        ordered = results.view(-1, depth * height * width, geometry.out_channels).transpose(1, 2)
        return ordered.reshape(-1, *geometry.shape)
    columns, out = _columns(geometry), geometry.out_channels // geometry.groups
    rows = (-1, geometry.groups, depth * height, width // columns)
    if by_columns:
        ordered = results.view(*rows, out, columns, geometry.shape[1]).permute(0, 1, 4, 6, 2, 3, 5)
    else:
        ordered = results.view(*rows, columns, geometry.shape[1], out).permute(0, 1, 6, 5, 2, 3, 4)
    return ordered.reshape(-1, *geometry.shape)


def is_channels_last(values: Tensor) -> bool:
    """Whether the channels of (examples, channels, ...) lie side by side in memory, and nothing in between."""
    return values.movedim(1, -1).is_contiguous()


def _laid_out(values: Tensor) -> tuple[Tensor, bool]:
    """Return the values as they are, or in one piece; and whether channels come first."""
    if is_channels_last(values):
        return values, False
    return values.contiguous(), True


def _volume(sizes: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Return depth, height and width: a line is an image of height one."""
    return (missing,) * (3 - len(sizes)) + tuple(sizes)


# Normalizations ----------------------------------------------------------------------------------------------------


def last_scales(
    code: ctypes.CDLL, inputs: Tensor, gradient: Tensor, *, centered: bool, eps: float, shifts: bool
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of scales and shifts of what is normalized over the last of (examples, positions, width)."""
    inputs, gradient = inputs.contiguous(), gradient.contiguous()
    examples, positions, width = inputs.shape
    found = empty(examples, width), empty(examples, width) if shifts else None
    code.last_scales(
        *map(ctypes.c_int64, (examples, positions, width, centered)),
        ctypes.c_double(eps),
        *map(_address, (inputs, gradient, found[0])),
        None if found[1] is None else _address(found[1]),
    )
    return found


def group_scales(
    code: ctypes.CDLL, inputs: Tensor, gradient: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of scales and shifts of (examples, channels, ...) that is normalized over groups of channels."""
    inputs, first = _laid_out(inputs)
    gradient = gradient.contiguous() if first else gradient.movedim(1, -1).contiguous()
    examples, channels = inputs.shape[:2]
    scales, shifts = empty(examples, channels), empty(examples, channels)
    sizes = examples, inputs[:1, :1].numel(), channels, groups, first
    _check_memory(
        code.group_scales(
            *map(ctypes.c_int64, sizes),
            ctypes.c_double(eps),
            *map(_address, (inputs, gradient, scales, shifts)),
        )
    )
    return scales, shifts


# Lookups -----------------------------------------------------------------------------------------------------------


def distinct_uses(code: ctypes.CDLL, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return examples and rows of distinct uses of a table by (examples, length), and which use each lookup is of."""
    rows = rows.to(torch.int64).contiguous()
    use_of, owners, used = (torch.empty(rows.numel(), dtype=torch.int64, device="cpu") for _ in range(3))
    sizes = map(ctypes.c_int64, rows.shape)
    code.distinct_uses.restype = ctypes.c_int64
    count = code.distinct_uses(*sizes, *map(_address, (rows, use_of, owners, used)))
    _succeed(count < 0)
    return owners[:count], used[:count], use_of


def add_uses(
    code: ctypes.CDLL, owners: Tensor, used: Tensor, weights: Tensor, values: Tensor, total: Tensor
) -> None:
    """Add the sum over uses of a table of weight (float64, of its example) times row to a table in float64."""
    places = map(_address, (owners, used, weights, values, total))
    code.add_uses(*map(ctypes.c_int64, values.shape), *places)


# LSTM layers -------------------------------------------------------------------------------------------------------


def lstm(
    code: ctypes.CDLL, gates: Tensor, weight: Tensor, states: Tensor, cells: Tensor, bent: Tensor
) -> None:
    """Run a layer over time, time first: gates hold what inputs and biases add to them, and get their values.

    `weight` is (4 width, width), by which states are multiplied; `states` and `cells` hold the first of each.
    """
    sizes = map(ctypes.c_int64, bent.shape)
    turned = weight.t().contiguous()
    places = map(_address, (turned, gates, states, cells, bent))
    _check_memory(code.lstm_layer(*sizes, *places, None, None, None, None))


def lstm_backward(
    code: ctypes.CDLL,
    kept: tuple[Tensor, ...],
    weight: Tensor,
    outputs: Tensor,
    last: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the gates' sums, and those of the first state and cell.

    Args:
        code: The compiled code.
        kept: States, cells, gates and bent cells, as `lstm` left them.
        weight: (4 width, width).
        outputs: The gradients of the states after each time.
        last: More gradients of the last state and cell.
    """
    states, cells, gates, bent = kept
    found, weight, outputs = empty(*gates.shape), weight.contiguous(), outputs.contiguous()
    first = [gradient.clone(memory_format=torch.contiguous_format) for gradient in last]
    places = map(_address, (weight, gates, states, cells, bent, outputs, found, *first))
    _check_memory(code.lstm_layer(*map(ctypes.c_int64, bent.shape), *places))
    return found, first


# Sizes -------------------------------------------------------------------------------------------------------------


def outputs_of(module: nn.Conv2d, inputs: Tensor) -> Pair:
    """Return the height and width of what a convolution gives."""
    padding, image = cast(Pair, module.padding), tuple(inputs.shape[2:])
    return _size_after(module.kernel_size, module.stride, padding, module.dilation, image)


def describe(module: nn.Conv2d, inputs: Tensor) -> Any:
    """Return the sizes of a convolution, as the code wants them."""
    return _integers(
        *inputs.shape,
        module.out_channels,
        *outputs_of(module, inputs),
        *module.kernel_size,
        *module.stride,
        module.dilation[0],
        *cast(Pair, module.padding),
    )


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("No memory for a convolution or its gradients. Use a smaller physical batch.")


# Max pooling -------------------------------------------------------------------------------------------------------


class MaxPool(torch.autograd.Function):
    """Max pooling of images that are laid out channels last, and a ReLU after it if asked for."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, module: nn.MaxPool2d, rectify: bool, code: ctypes.CDLL) -> Tensor:
        """Return the largest of each window."""
        geometry = pool_geometry(module, inputs)
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
        """Return the gradient of the inputs."""
        places, gradient = map(channels_last, (*ctx.saved_tensors, gradients[0]))
        result = _images(*ctx.shape)
        ctx.code.max_pool_backward(ctx.described, _address(gradient), _address(places), _address(result))
        return result, None, None, None


def pool_geometry(module: nn.MaxPool2d, inputs: Tensor) -> tuple[int, ...] | None:
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
    return type(size) is int or is_pair(size)


def is_pair(size: Any) -> bool:
    """Whether a size is two numbers."""
    return type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int


def _pair(size: Any) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


# Memory ------------------------------------------------------------------------------------------------------------


def _images(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def empty(*shape: int) -> Tensor:
    """Return memory for numbers."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _places(numbers: Tensor) -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None]:
    """Return the address of single precision, and that of double precision."""
    address = _address(numbers)
    return (address, None) if numbers.dtype == torch.float32 else (None, address)


def _integers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
