"""The same outputs with less work, where nobody sees what lies between: fused activations and poolings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor, nn

from pdpsgd.gradients._torch import has_hooks
from pdpsgd.gradients.native.dispatch import has_max_pool, max_pool
from pdpsgd.gradients.rules.registry import runs_its_own_forward

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
    index = 0
    previous: nn.Module | None = None
    while index < len(modules):
        module = modules[index]
        activate = _MONOTONE.get(type(module))
        if activate is None or not _untouched(module):
            inputs, previous, index = module(inputs), module, index + 1
            continue
        free = type(previous) in _OUTPUT_IS_FREE and _untouched(previous)
        following, *after = modules[index + 1 : index + 3] or (None,)
        if _is_plain_pooling(following) and (free or not _in_place(module)):
            if type(module) is nn.ReLU and has_max_pool(following, inputs):
                inputs, previous, index = max_pool(following, inputs, rectify=True), None, index + 2
                continue
            # The activation's output, unlike the pooling's, must not be overwritten afterwards.
            if after and not _in_place(after[0]):
                inputs, previous, index = following(inputs), following, index + 1
                free = True
        inputs = activate(inputs) if free else module(inputs)
        previous, index = module, index + 1
    return inputs


def pool(module: nn.MaxPool2d, original: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Run a max pooling, by compiled code where there is some."""
    return max_pool(module, inputs) if has_max_pool(module, inputs) else original(inputs)


def _is_plain_pooling(module: nn.Module | None) -> TypeGuard[nn.MaxPool2d]:
    return type(module) is nn.MaxPool2d and not module.return_indices and _untouched(module)


def _in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


def _untouched(module: nn.Module | None) -> bool:
    """Whether the module runs its class's forward, and no hooks see its inputs or outputs."""
    if module is None:
        return False
    stand_in = module.__dict__.get("forward")
    own = runs_its_own_forward(module) or getattr(stand_in, "stands_in_for_own", False)
    return own and not has_hooks(module)
