"""Embeddings: an example's gradient touches the rows it looked up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients.per_example import Gradient, Lookups, detached
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.registry import rule_for


@rule_for(nn.Embedding)
def embedding(site: Site, module: nn.Embedding, input: Tensor) -> Tensor:
    """Rule of nn.Embedding; options that depend on the rest of the batch were refused beforehand."""
    rows = site.batched(input)
    outputs = F.embedding(rows, detached(module.weight), module.padding_idx)

    def gradients(output_gradient: Tensor) -> Gradient:
        width = output_gradient.shape[-1]
        lookups = rows.reshape(rows.shape[0], max(1, rows[:1].numel()))
        per_lookup = output_gradient.reshape(*lookups.shape, width)
        yield module.weight, Lookups(lookups, per_lookup, module.weight.shape, module.padding_idx)

    return site.record(outputs, rows, gradients)
