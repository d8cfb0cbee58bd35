"""Rules for the per-example gradients of layers: one function per kind of layer.

A rule computes what the layer computes, with its parameters taken out of autograd, and says what the per-example
gradients are once the gradient of the layer's output is known. A new layer is one function under `@rule_for`.
"""

from pdpsgd.gradients.rules import (
    attention,
    convolution,
    embedding,
    hugging_face,
    linear,
    normalization,
    recurrent,
)
from pdpsgd.gradients.rules.registry import rule_for

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "hugging_face",
    "linear",
    "normalization",
    "recurrent",
    "rule_for",
]
