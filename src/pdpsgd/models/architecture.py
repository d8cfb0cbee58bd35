"""A network as plain data: its layers, if they stand in a row, or the name of the function that makes it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pdpsgd.errors import fail, shown

_POOL = ("kernel_size", "stride", "padding")
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
LAYERS: dict[str, tuple[str, ...]] = {
    "Linear": ("in_features", "out_features"),
    "Conv1d": _CONVOLUTION,
    "Conv2d": _CONVOLUTION,
    "Embedding": ("num_embeddings", "embedding_dim", "padding_idx"),
    "MaxPool1d": (*_POOL, "dilation"),
    "MaxPool2d": (*_POOL, "dilation"),
    "AvgPool1d": _POOL,
    "AvgPool2d": _POOL,
    "AdaptiveAvgPool1d": ("output_size",),
    "AdaptiveAvgPool2d": ("output_size",),
    "Flatten": ("start_dim", "end_dim"),
    "GroupNorm": ("num_groups", "num_channels", "eps", "affine"),
    "LayerNorm": ("normalized_shape", "eps", "elementwise_affine"),
    "Dropout": ("p",),
    "Dropout2d": ("p",),
    "LeakyReLU": ("negative_slope",),
    "ELU": ("alpha",),
    "GELU": ("approximate",),
    **dict.fromkeys(("ReLU", "Tanh", "Sigmoid", "SiLU", "Softplus", "Identity", "Hardtanh"), ()),
}
"""Layers of torch that are written down by name, and the arguments that make them again."""
WITH_BIAS = ("Linear", "Conv1d", "Conv2d", "LayerNorm")

Layers = list[list[Any]]


def layers_of(module: nn.Module) -> Layers | None:
    """Write down the layers of a `Sequential`: for each its name, its class in `torch.nn`, and its arguments.

    Returns:
        The layers; None if there is something in the module that cannot be made again from its name.
    """
    if type(module) is not nn.Sequential:
        return None
    layers: Layers = []
    for name, layer in module.named_children():
        kind = type(layer).__name__
        if getattr(nn, kind, None) is not type(layer) or kind not in LAYERS or _is_special(layer):
            return None
        options = {each: _plain(getattr(layer, each)) for each in LAYERS[kind]}
        if kind in WITH_BIAS:
            options["bias"] = layer.bias is not None
        layers.append([name, kind, options])
    made = make_layers(layers, place="the network")
    same = {k: v.shape for k, v in made.state_dict().items()} == {
        k: v.shape for k, v in module.state_dict().items()
    }
    return layers if same else None


def make_layers(layers: Sequence[Sequence[Any]], *, place: str) -> nn.Sequential:
    """Make the network of these layers, without memory for its weights: they have to be loaded with `assign=True`."""
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        if len(layer) != 3 or layer[1] not in LAYERS or not isinstance(layer[2], dict):
            fail(f"Expected layers as [name, class in torch.nn, arguments] in {place}. Got {shown(layer)}.")
        name, kind, options = layer
        known = {*LAYERS[kind], *(("bias",) if kind in WITH_BIAS else ())}
        try:
            if not options.keys() <= known:
                raise TypeError(f"{kind} is written down with {', '.join(sorted(known)) or 'no arguments'}")
            with torch.device("meta"):
                made[str(name)] = getattr(nn, kind)(**{key: _tupled(value) for key, value in options.items()})
        except (TypeError, ValueError, RuntimeError, OverflowError, ZeroDivisionError) as error:
            reason = str(error).splitlines()[0]
            fail(f"Expected arguments of torch.nn.{kind} in {place}. Got {shown(options)} ({reason}).")
    return nn.Sequential(made)


def importable_name(module: nn.Module) -> str | None:
    """Name the class of a network as module:name, if that name leads to it from another process."""
    kind = type(module)
    if kind.__module__ in ("__main__", "builtins") or kind.__module__.startswith("torch."):
        return None
    found = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    return f"{kind.__module__}:{kind.__qualname__}" if found is kind else None


def _is_special(layer: nn.Module) -> bool:
    """Tell whether a layer is more than its arguments say: padded otherwise, parametrized, with children."""
    padding_mode = getattr(layer, "padding_mode", "zeros")
    return bool(list(layer.children())) or padding_mode != "zeros" or bool(getattr(layer, "ceil_mode", False))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
