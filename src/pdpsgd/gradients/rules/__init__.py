"""Per-layer rules: one function a layer.

A rule computes what the layer computes, with its parameters taken out of autograd, and says what an example's
gradient is once the gradient of the layer's output is known. A new layer is one function under `@rule_for`.
"""

from pdpsgd.gradients.rules import attention, convolution, embedding, linear, normalization
from pdpsgd.gradients.rules.registry import RULES, Rule, rule_for, rule_of

__all__ = [
    "RULES",
    "Rule",
    "attention",
    "convolution",
    "embedding",
    "linear",
    "normalization",
    "rule_for",
    "rule_of",
]
