"""Convolutions: unfolded along the width only, one small matrix product per example and kernel row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdpsgd.errors import fail
from pdpsgd.gradients._torch import TRANSPOSED, apply_convolution, apply_transposed_convolution
from pdpsgd.gradients.compiled_kernels import CompiledKernels
from pdpsgd.gradients.geometry import Geometry, channels_last, geometry_of
from pdpsgd.gradients.groups import Groups, OverPeople, over_people
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.native.calls import is_channels_last
from pdpsgd.gradients.per_example import (
    LANES,
    Gradient,
    Materialized,
    OuterProducts,
    PerExample,
    accurate,
    detached,
    gram_is_cheaper,
    zero_rows,
)
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.registry import rule_for
from pdpsgd.gradients.sums import CACHE, position_sums, row_squared_norms, weighted_sum
from pdpsgd.gradients.workspace import Workspace

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
STRETCH = 1024  # positions that are added up at once


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(site: Site, module: Convolution, input: Tensor) -> Tensor:
    """Rule of nn.Conv1d, 2d and 3d, with any stride, padding, dilation and groups."""
    inputs = site.batched(input)
    site.require_dimensions(inputs, module.weight.dim())
    weight, bias = detached(module.weight), detached(module.bias)
    if site.recorder.channels_last and inputs.dim() == 4:
        inputs, weight = channels_last(inputs), channels_last(weight)
    if site.recorder.channels_last and native.has_convolution(module, inputs):
        outputs = native.convolve(cast(nn.Conv2d, module), inputs, weight, bias)
    else:
        outputs = apply_convolution(module, inputs, weight, bias)
    return _recorded(site, module, inputs, outputs)


@rule_for(*TRANSPOSED)
def transposed_convolution(
    site: Site, module: TransposedConvolution, input: Tensor, output_size: Any = None
) -> Tensor:
    """Rule of nn.ConvTranspose1d, 2d and 3d: a convolution's, with inputs and output gradients exchanged."""
    inputs = site.batched(input)
    site.require_dimensions(inputs, module.weight.dim())
    weight, bias = detached(module.weight), detached(module.bias)
    if site.recorder.channels_last and inputs.dim() == 4:
        inputs = channels_last(inputs)
    outputs = apply_transposed_convolution(module, inputs, weight, bias, output_size)
    return _recorded(site, module, inputs, outputs)


def _recorded(
    site: Site, module: Convolution | TransposedConvolution, inputs: Tensor, outputs: Tensor
) -> Tensor:
    settings, geometry = _settings(module), geometry_of(module)

    def check() -> None:
        if _settings(module) != settings:
            fail(
                f"The kernel size, stride, padding, dilation or groups of {site.name} were changed between its use and "
                f"optimizer.step(): from {settings} to {_settings(module)}. Change them after the step."
            )

    def gradients(output_gradient: Tensor) -> Gradient:
        given = accurate(output_gradient)
        if module.weight.requires_grad:
            both = accurate(inputs), given
            correlated = both[::-1] if isinstance(module, TRANSPOSED) else both
            yield module.weight, kernel_gradient(geometry, *correlated, site.recorder.workspace)
        if module.bias is not None and module.bias.requires_grad:
            yield module.bias, Materialized(bias_gradient(given), module.bias.shape)

    return site.record(outputs, inputs, gradients, check)


def _settings(module: Convolution | TransposedConvolution) -> tuple[object, ...]:
    kernel = module.kernel_size, module.stride, module.padding
    return *kernel, module.dilation, module.groups, module.padding_mode


def bias_gradient(images: Tensor) -> Tensor:
    """Return (examples, channels, ...) summed over all positions."""
    if images.dim() > 2 and is_channels_last(images):
        return position_sums(images.movedim(1, -1).flatten(1, -2))
    return images.sum(tuple(range(2, images.dim())))


def kernel_gradient(
    geometry: Geometry, inputs: Tensor, output_gradient: Tensor, workspace: Workspace
) -> PerExample:
    """Return the per-example gradients of the kernel, in the form that is cheaper for its size."""
    shape, out = geometry.shape, tuple(output_gradient.shape[2:])
    if geometry.groups == 1 and gram_is_cheaper(math.prod(out), shape[0], math.prod(shape[1:])):
        patches = _patches(geometry, geometry.padded(inputs, out), out)

        def arrange(values: Tensor) -> Tensor:
            by_place = values.view(*values.shape[:2], -1, shape[1])
            return by_place.transpose(2, 3).reshape(-1, *shape)

        left = output_gradient.flatten(2).transpose(1, 2)
        return OuterProducts(left, patches, torch.Size(shape), workspace, arrange)
    if not geometry.is_padded_with_zeros:
        inputs, geometry = geometry.padded(inputs, out), geometry.unpadded()
    if native.has_kernel_gradients(geometry, inputs, output_gradient):
        return CompiledKernels(geometry, inputs, output_gradient, workspace)
    return Kernels(geometry, inputs, output_gradient, workspace)


class Kernels(PerExample):
    """Gradients of a kernel, materialized row by row: (rows, examples, groups, out, columns).

    A column is a place in the kernel's row and a channel. Where the stride divides the kernel's height, the rows that
    one stride skips count as one, so that there are fewer and larger matrix products.
    """

    def __init__(
        self, geometry: Geometry, inputs: Tensor, output_gradient: Tensor, workspace: Workspace
    ) -> None:
        self.shape, self.batch_size, self.dtype = (
            torch.Size(geometry.shape),
            inputs.shape[0],
            inputs.dtype,
        )
        self._geometry, self._inputs, self._output_gradient = geometry, inputs, output_gradient
        self.workspace = workspace
        self._kept: Tensor | None = None
        # A line is an image of height one.
        out = output_gradient.shape[2:] if output_gradient.dim() > 3 else (1, output_gradient.shape[2])
        self._out = tuple(out)
        self._kernel, self._stride, self._dilation = (
            (1,) * (len(out) - len(size)) + tuple(size)
            for size in (geometry.kernel, geometry.stride, geometry.dilation)
        )
        height, stride = self._kernel[0], self._stride[0]
        joined = len(out) == 2 and geometry.groups == 1 and self._dilation[0] == 1 and height % stride == 0
        self._together = stride if joined else 1
        if joined:
            self._kernel, self._stride = (height // stride, self._kernel[1]), (1, self._stride[1])
        out_channels, in_channels = self.shape[0] // geometry.groups, self.shape[1]
        columns = self._together * self._kernel[-1] * in_channels
        self._layout = (math.prod(self._kernel[:-1]), geometry.groups, out_channels, columns)

    def squared_norms(self) -> Tensor:
        """Of the gradients, which are kept if there is room."""
        rows, groups, out, columns = self._layout
        self._kept = self.workspace.keep((rows, self.batch_size, groups * out, columns), self._inputs)
        if self._kept is None:
            return torch.cat([_squared_norms(self._rows(*chunk)) for chunk in self.in_chunks()])
        for chunk in self.in_chunks():
            self._rows(*chunk)
        return _squared_norms(self._kept)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Sum the same numbers."""
        chunks = self.in_chunks() if self._kept is None else [(0, self.batch_size)]
        for first, last in chunks:
            values = self._rows(first, last) if self._kept is None else self._kept
            summed = [weighted_sum(weights[first:last], row.flatten(1)) for row in values]
            arranged = self._arranged(torch.stack(summed)[:, None])[0]
            total.view(arranged.shape).add_(arranged)

    def materialize(self, first: int, last: int) -> Tensor:
        """Bring them into the parameter's order."""
        # A copy: the memory is used again.
        return self._arranged(self._rows(first, last).clone()).reshape(-1, *self.shape)

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite inputs and gradients, in copies."""
        inputs, gradient = zero_rows(self._inputs, examples), zero_rows(self._output_gradient, examples)
        return Kernels(self._geometry, inputs, gradient, self.workspace)

    def in_chunks(self) -> Iterator[tuple[int, int]]:
        """Return ranges of examples whose unfolded inputs fit into the cache."""
        unfolded = math.prod(self._inputs.shape[1:-1]) * self._out[-1] * self._kernel[-1]
        most = max(1, CACHE // max(1, unfolded, 0 if self._kept is not None else self.shape.numel()))
        step = -(-self.batch_size // -(-self.batch_size // most))  # pieces of about the same size
        step = -(-step // LANES) * LANES
        return ((first, min(first + step, self.batch_size)) for first in range(0, self.batch_size, step))

    def _arranged(self, values: Tensor) -> Tensor:
        """Return a view in the parameter's order: (examples, groups, out, in, rows, rows a stride, width)."""
        rows, groups, out, columns = self._layout
        split = (self._together, self._kernel[-1], columns // (self._together * self._kernel[-1]))
        return values.reshape(rows, -1, groups, out, *split).permute(1, 2, 3, 6, 0, 4, 5)

    def _rows(self, first: int, last: int) -> Tensor:
        """Return d^T x, for each kernel row: d the output gradient, x the inputs that row has met."""
        images = self._geometry.padded(self._inputs[first:last], tuple(self._output_gradient.shape[2:]))
        images = images.movedim(1, -1)
        gradient = self._output_gradient[first:last].movedim(1, -1)
        unfolded = self._unfolded(images if images.dim() > 3 else images[:, None])
        examples, (rows, groups, out, columns) = last - first, self._layout
        if self._kept is None:
            values = self.workspace.take("rows", (rows, examples, groups * out, columns), gradient)
        else:
            values = self._kept[:, first:last]
        if groups > 1:
            left = gradient.reshape(examples, -1, groups, out).permute(0, 2, 3, 1)
            for met, result in zip(self._met(unfolded), values.unbind(), strict=True):
                right = met.reshape(examples, -1, self._kernel[-1], groups, self.shape[1])
                _multiply(
                    left, right.permute(0, 3, 1, 2, 4).flatten(3), out=result.view(examples, groups, out, -1)
                )
        else:
            left = gradient.reshape(examples, -1, out).transpose(1, 2)
            for met, result in zip(self._met(unfolded), values.unbind(), strict=True):
                _multiply(left, met, out=result)
        return values

    def _met(self, unfolded: Tensor) -> Iterator[Tensor]:
        """Yield, for each row of the kernel, the unfolded inputs (examples, positions, columns) it has met."""
        *lead, width = self._out
        columns = math.prod(unfolded.shape[len(self._out) + 1 :])
        if len(lead) == 1 and self._stride[0] == 1:  # rows that follow one another
            flat = unfolded.view(unfolded.shape[0], -1, columns)
            for row in range(self._kernel[0]):
                yield flat.narrow(1, row * self._dilation[0] * width, lead[0] * width)
            return
        for offsets in itertools.product(*(range(size) for size in self._kernel[:-1])):
            met = unfolded
            for dim, offset in enumerate(offsets):
                start, stride = offset * self._dilation[dim], self._stride[dim]
                end = start + stride * (lead[dim] - 1) + 1
                met = met[(slice(None),) * (dim + 1) + (slice(start, end, stride),)]
            yield met.reshape(met.shape[0], -1, columns)

    def _unfolded(self, images: Tensor) -> Tensor:
        """Copy (examples, ..., width, channels) to (examples, ..., width out, columns)."""
        kernel, stride, dilation = self._kernel[-1], self._stride[-1], self._dilation[-1]
        view = images.unfold(-2, (kernel - 1) * dilation + 1, stride)[..., ::dilation].transpose(-1, -2)
        if self._together == 1:
            return self.workspace.take("unfolded", tuple(view.shape), images).copy_(view)
        height = images.shape[1] // self._together
        shape = (images.shape[0], height, self._out[-1], self._together, *view.shape[3:])
        unfolded = self.workspace.take("unfolded", shape, images)
        for row in range(self._together):  # one by one: short innermost dimensions make a copy slow
            unfolded[:, :, :, row] = view[:, row :: self._together][:, :height]
        return unfolded


@over_people.register
def _(gradient: Kernels, groups: Groups) -> PerExample:
    return OverPeople(gradient, groups, gradient.workspace)


def _multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Matrix products, with sums over many positions in stretches: some processors' libraries add up one by one."""
    positions = left.shape[-1]
    torch.matmul(left[..., :STRETCH], right[..., :STRETCH, :], out=out)
    for first in range(STRETCH, positions, STRETCH):
        last = min(first + STRETCH, positions)
        out.add_(left[..., first:last] @ right[..., first:last, :])


def _squared_norms(values: Tensor) -> Tensor:
    # Row by row: a reduction over two separate dimensions is several times slower.
    return row_squared_norms(values.flatten(0, 1)).view(values.shape[:2]).sum(0)


def _patches(geometry: Geometry, padded: Tensor, out: tuple[int, ...]) -> Tensor:
    """Return (examples, positions, kernel * channels)."""
    examples, channels, *_ = padded.shape
    batch_stride, channel_stride, *spatial = padded.stride()
    view = padded.as_strided(
        (examples, *out, *geometry.kernel, channels),
        (
            batch_stride,
            *(step * size for step, size in zip(geometry.stride, spatial, strict=True)),
            *(step * size for step, size in zip(geometry.dilation, spatial, strict=True)),
            channel_stride,
        ),
        padded.storage_offset(),
    )
    return view.reshape(examples, math.prod(out), -1)
