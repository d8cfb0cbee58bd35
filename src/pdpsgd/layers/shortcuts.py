"""Ways to compute the same with less work, where it is plain that nobody looks at what lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Never decreasing, so that the largest of the activations is the activation of the largest.
_MONOTONE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: Tensor.relu_,
    nn.Tanh: Tensor.tanh_,
    nn.Sigmoid: Tensor.sigmoid_,
}
# Layers that do not need their own output to compute a gradient, so that it may be overwritten.
_OUTPUT_IS_FREE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.MaxPool2d)


def sequence(container: nn.Sequential, inputs: Any) -> Any:
    """Run the modules of an nn.Sequential one after the other, with two shortcuts.

    An activation before a max pooling is applied after it, to fewer numbers; and an activation of what a layer has
    just computed is written over it. Neither changes what comes out. (A gradient may differ where an activation
    makes different numbers equal; it is zero there, or the numbers are equal to begin with.)
    """
    modules = tuple(container)
    index, previous = 0, None
    while index < len(modules):
        module = modules[index]
        following = modules[index + 1] if index + 1 < len(modules) else None
        activate = _MONOTONE.get(type(module))
        if activate is not None and not _untouched(module):
            activate = None
        if activate is not None and _is_plain_pooling(following):
            inputs, previous = following(inputs), following  # type: ignore[misc]
            index += 1
        if activate is not None and type(previous) in _OUTPUT_IS_FREE and _untouched(previous):
            inputs = activate(inputs)
        else:
            inputs = module(inputs)
        previous, index = module, index + 1
    return inputs


def _is_plain_pooling(module: nn.Module | None) -> bool:
    return type(module) is nn.MaxPool2d and not module.return_indices and _untouched(module)


def _untouched(module: nn.Module | None) -> bool:
    """Whether the module has no hooks, which might look at what it is given or gives."""
    if module is None:
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
