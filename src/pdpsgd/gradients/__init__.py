"""The sum of clipped per-example gradients.

`ClippedGradients` instruments a model; `rule_for` registers the rule of a further layer.
"""

from pdpsgd.gradients.clipping import ClippedGradients, leaves_of_graph, of_module
from pdpsgd.gradients.rules import rule_for
from pdpsgd.gradients.weights import clip_limits, clip_weights

__all__ = ["ClippedGradients", "clip_limits", "clip_weights", "leaves_of_graph", "of_module", "rule_for"]
