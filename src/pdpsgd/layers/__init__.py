"""Per-layer rules: one function a layer.

A rule computes what the layer computes, with its parameters taken out of autograd, and says what an example's
gradient is once the gradient of the layer's output is known. A new layer is one function under `@rule_for`.
"""

from pdpsgd.layers import attention, convolution, embedding, linear, normalization
from pdpsgd.layers.recording import Recorder, Site
from pdpsgd.layers.registry import RULES, Rule, rule_for, rule_of
from pdpsgd.layers.watching import watch

__all__ = [
    "RULES",
    "Recorder",
    "Rule",
    "Site",
    "attention",
    "convolution",
    "embedding",
    "linear",
    "normalization",
    "rule_for",
    "rule_of",
    "watch",
]
