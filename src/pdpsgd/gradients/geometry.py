"""The sizes of a convolution, and what its kernels meet: of lines, images or volumes, transposed or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients._torch import TRANSPOSED, padding_amounts


@dataclass(frozen=True)
class Geometry:
    """A convolution as its kernel's gradient sees it: inputs are correlated with gradients of outputs.

    A transposed convolution is one from its outputs to its inputs: here its outputs' gradients are the inputs.
    """

    shape: tuple[int, ...]  # of the kernel: outputs, channels of a group, and its size
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    amounts: tuple[int, ...]  # of padding at both ends, the last dimension first
    mode: str = "zeros"

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel's size."""
        return self.shape[2:]

    @property
    def out_channels(self) -> int:
        """Channels of the outputs, all groups together."""
        return self.shape[0]

    @property
    def in_channels(self) -> int:
        """Channels of the inputs, all groups together."""
        return self.shape[1] * self.groups

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has kernels of its own."""
        return self.groups > 1 and self.shape[1] == 1

    @property
    def padding(self) -> tuple[int, ...]:
        """What is added before the first input, in each dimension."""
        return self.amounts[-2::-2]

    @property
    def is_padded_with_zeros(self) -> bool:
        """Whether what lies around the inputs is zero."""
        return self.mode == "zeros" or not any(self.amounts)

    def met(self, out: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the padded inputs that the kernels of so many outputs meet."""
        sizes = zip(out, self.stride, self.dilation, self.kernel, strict=True)
        return tuple((length - 1) * step + far * (size - 1) + 1 for length, step, far, size in sizes)

    def padded(self, inputs: Tensor, out: tuple[int, ...]) -> Tensor:
        """Return the inputs with what lies around them, as far as the kernels of so many outputs meet them."""
        if any(self.amounts):
            mode = "constant" if self.mode == "zeros" else self.mode
            inputs = F.pad(inputs, self.amounts, mode=mode)
        for dim, length in enumerate(self.met(out), 2):
            inputs = inputs.narrow(dim, 0, length)
        return inputs

    def unpadded(self) -> Geometry:
        """Return the same for inputs that are padded already."""
        return replace(self, amounts=(0,) * len(self.amounts), mode="zeros")


def geometry_of(module: nn.Module) -> Geometry:
    """Return the geometry of a convolution, transposed or not."""
    layer = cast(Any, module)
    shape = tuple(layer.weight.shape)
    stride, dilation = (_sizes(size, len(shape) - 2) for size in (layer.stride, layer.dilation))
    if isinstance(module, TRANSPOSED):
        padding = _sizes(layer.padding, len(shape) - 2)
        amounts = [size for size in reversed(padding) for _ in range(2)]
    else:
        amounts = padding_amounts(layer)
    return Geometry(shape, stride, dilation, layer.groups, tuple(amounts), layer.padding_mode)


def _sizes(size: Any, dimensions: int) -> tuple[int, ...]:
    return (size,) * dimensions if isinstance(size, int) else tuple(size)


def channels_last(inputs: Tensor) -> Tensor:
    """Return (examples, channels, height, width) with the channels side by side in memory."""
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = inputs.shape
    if channels == 1:  # both layouts are the same in memory; say which one is meant
        return inputs.as_strided(inputs.shape, (height * width, 1, width, 1))
    return inputs
