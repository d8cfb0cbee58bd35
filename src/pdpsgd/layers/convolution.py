"""Convolutions: unfolded along the width only, one small matrix product per example and kernel row."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.layers.forms import (
    WORKING_SET,
    Gradient,
    OuterProducts,
    PerExample,
    WrittenOut,
    accurate,
    detached,
    gram_is_cheaper,
    row_squared_norms,
    zero_rows,
)
from pdpsgd.layers.recording import Site
from pdpsgd.layers.registry import rule_for

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(site: Site, module: Convolution, input: Tensor) -> Tensor:
    """Rule of nn.Conv1d, 2d and 3d, with whatever stride, padding, dilation and groups."""
    inputs = site.batched(input)
    site.require_dimensions(inputs, module.weight.dim())
    weight, bias = detached(module.weight), detached(module.bias)
    if site.recorder.channels_last and inputs.dim() == 4:
        inputs, weight = channels_last(inputs), channels_last(weight)
    outputs = module._conv_forward(inputs, weight, bias)

    def gradients(output_gradient: Tensor) -> Gradient:
        if module.weight.requires_grad:
            yield module.weight, kernel_gradient(module, accurate(inputs), accurate(output_gradient))
        if module.bias is not None and module.bias.requires_grad:
            spatial = tuple(range(2, output_gradient.dim()))
            yield module.bias, WrittenOut(accurate(output_gradient).sum(spatial), module.bias.shape)

    return site.watch(outputs, inputs, gradients)


def channels_last(images: Tensor) -> Tensor:
    """Return (examples, channels, height, width) with the channels side by side in memory."""
    images = images.contiguous(memory_format=torch.channels_last)
    examples, channels, height, width = images.shape
    if channels == 1:  # both layouts are the same in memory; say which one is meant
        return images.as_strided(images.shape, (height * width, 1, width, 1))
    return images


def kernel_gradient(module: Convolution, inputs: Tensor, output_gradient: Tensor) -> PerExample:
    """Return the kernel's gradient per example, in the form that is cheaper for its size."""
    weight = module.weight
    positions = output_gradient[0, 0].numel() if output_gradient.shape[0] else 0
    if module.groups == 1 and gram_is_cheaper(positions, weight.shape[0], weight[0].numel()):
        patches = _patches(module, _padded(module, inputs), output_gradient.shape[2:])
        return OuterProducts(output_gradient.flatten(2).transpose(1, 2), patches, weight.shape)
    return Kernels(module, inputs, output_gradient)


class Kernels(PerExample):
    """Gradients of a kernel, (examples, kernel rows, groups, out, rows per stride, width, in) when written out."""

    def __init__(self, module: Convolution, inputs: Tensor, output_gradient: Tensor) -> None:
        self.shape, self.batch_size = module.weight.shape, inputs.shape[0]
        self._module, self._inputs, self._output_gradient = module, inputs, output_gradient
        self._values: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """Of the gradients, which are kept if they fit."""
        if self.batch_size * self.shape.numel() <= WORKING_SET:
            self._values = self._rows(0, self.batch_size)
            return row_squared_norms(self._values)
        return torch.cat([row_squared_norms(self._rows(*chunk)) for chunk in self.in_chunks()])

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Sum the same numbers."""
        for first, last in self.in_chunks():
            values = self._rows(first, last) if self._values is None else self._values[first:last]
            weighted = weights[first:last] @ values.flatten(1)
            total += self._arrange(weighted.view(1, *values.shape[1:]))[0]

    def written_out(self, first: int, last: int) -> Tensor:
        """Bring them into the parameter's order."""
        return self._arrange(self._rows(first, last))

    def zeroed(self, examples: Tensor) -> PerExample:
        """Overwrite inputs and gradients, in copies."""
        other = Kernels(
            self._module, zero_rows(self._inputs, examples), zero_rows(self._output_gradient, examples)
        )
        other._values = None if self._values is None else zero_rows(self._values, examples)
        return other

    def _arrange(self, values: Tensor) -> Tensor:
        return values.permute(0, 2, 3, 6, 1, 4, 5).reshape(values.shape[0], *self.shape)

    def _rows(self, first: int, last: int) -> Tensor:
        """Return d^T x, for each kernel row d the output gradient and x the inputs that row has met.

        Where the stride divides the kernel's height, the rows that one stride skips are met together, so that
        there are fewer and larger matrix products and the unfolded inputs need no further copy.
        """
        module = self._module
        images = _padded(module, self._inputs[first:last]).movedim(1, -1)
        gradient = self._output_gradient[first:last].movedim(1, -1)
        if images.dim() == 3:  # a line is an image of height one
            images, gradient = images[:, None], gradient[:, None]
        examples, *out, channels_out = gradient.shape
        kernel, stride, dilation = (
            (1,) * (len(out) - len(size)) + tuple(size)
            for size in (module.kernel_size, module.stride, module.dilation)
        )
        unfolded = _unfolded(images, out[-1], kernel[-1], stride[-1], dilation[-1])
        groups, together = module.groups, 1
        if len(out) == 2 and groups == 1 and dilation[0] == 1 and kernel[0] % stride[0] == 0:
            together = stride[0]
            unfolded = unfolded[:, : (unfolded.shape[1] // together) * together]
            unfolded = unfolded.unflatten(1, (-1, together)).movedim(2, 3)
            kernel, stride = (kernel[0] // together, kernel[1]), (1, stride[1])
        unfolded = unfolded.contiguous()

        steps = list(itertools.product(*(range(size) for size in kernel[:-1])))
        width, channels_in = kernel[-1], images.shape[-1] // groups
        columns = together * width * channels_in
        values = gradient.new_empty(examples, len(steps), groups, channels_out // groups, columns)
        if groups == 1:
            left = gradient.reshape(examples, -1, channels_out).transpose(1, 2)
        else:
            left = gradient.reshape(examples, -1, groups, channels_out // groups).permute(0, 2, 3, 1)
        for index, offsets in enumerate(steps):
            met = unfolded
            for dim, offset in enumerate(offsets):
                start = offset * dilation[dim]
                end = start + stride[dim] * (out[dim] - 1) + 1
                met = met[(slice(None),) * (dim + 1) + (slice(start, end, stride[dim]),)]
            if groups == 1:
                torch.bmm(left, met.reshape(examples, -1, columns), out=values[:, index, 0])
            else:
                right = met.reshape(examples, -1, width, groups, channels_in).permute(0, 3, 1, 2, 4)
                values[:, index] = left @ right.flatten(3)
        return values.view(*values.shape[:4], together, width, channels_in)


def _padded(module: Convolution, inputs: Tensor) -> Tensor:
    amounts = module._reversed_padding_repeated_twice
    if not any(amounts):
        return inputs
    return F.pad(inputs, amounts, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _unfolded(images: Tensor, out: int, kernel: int, stride: int, dilation: int) -> Tensor:
    """Return (..., width, channels) as a view (..., out, kernel, channels)."""
    *lead, across, along = images.stride()
    shape = (*images.shape[:-2], out, kernel, images.shape[-1])
    strides = (*lead, across * stride, across * dilation, along)
    return images.as_strided(shape, strides, images.storage_offset())


def _patches(module: Convolution, padded: Tensor, out: torch.Size) -> Tensor:
    """Return (examples, positions, channels * kernel)."""
    examples, channels, *_ = padded.shape
    batch_stride, channel_stride, *spatial = padded.stride()
    view = padded.as_strided(
        (examples, *out, channels, *module.kernel_size),
        (
            batch_stride,
            *(step * size for step, size in zip(module.stride, spatial, strict=True)),
            channel_stride,
            *(step * size for step, size in zip(module.dilation, spatial, strict=True)),
        ),
        padded.storage_offset(),
    )
    return view.reshape(examples, out.numel(), -1)
