"""Multi-head attention, which keeps its projections as raw parameters: taken apart into linear layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.errors import fail
from pdpsgd.gradients._torch import projects_at_once
from pdpsgd.gradients.per_example import Gradient, Materialized, accurate, detached
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.linear import project
from pdpsgd.gradients.rules.registry import rule_for

_PARAMETERS = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "out_proj.weight",
    "out_proj.bias",
)


@rule_for(nn.MultiheadAttention, parameters=_PARAMETERS)
def multihead_attention(
    site: Site,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rule of nn.MultiheadAttention with batch_first=True (otherwise it was refused beforehand)."""
    if query.dim() != 3:
        fail(f"{site.name} needs a batch: query of shape (batch, time, features). Got {tuple(query.shape)}.")
    if is_causal and attn_mask is None:
        fail(f"{site.name}: is_causal=True needs attn_mask, as in PyTorch.")
    queries, keys, values = _projections(site, module, query, key, value)
    batch, heads = query.shape[0], module.num_heads
    if module.bias_k is not None and module.bias_v is not None:
        keys = torch.cat([keys, _one_more(site, module.bias_k, batch)], 1)
        values = torch.cat([values, _one_more(site, module.bias_v, batch)], 1)
    if module.add_zero_attn:
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
    mask = _merged_mask(query, keys, attn_mask, key_padding_mask, heads)

    queries, keys, values = (
        part.view(*part.shape[:2], heads, module.head_dim).transpose(1, 2) for part in (queries, keys, values)
    )
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (queries * math.sqrt(1.0 / module.head_dim)) @ keys.transpose(2, 3)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ values
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    joined = mixed.transpose(1, 2).flatten(2)
    return project(site, joined, module.out_proj.weight, module.out_proj.bias), weights


def _projections(
    site: Site, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    width, bias = module.embed_dim, module.in_proj_bias
    parts = (slice(0, width), slice(width, 2 * width), slice(2 * width, 3 * width))
    if not projects_at_once(module):
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        queries, keys, values = (
            project(site, inputs, weight, None) + _bias_part(site, bias, part, inputs)
            for inputs, weight, part in zip((query, key, value), separate, parts, strict=True)
        )
        return queries, keys, values
    if query is key and key is value:
        queries, keys, values = project(site, query, module.in_proj_weight, bias).chunk(3, -1)
        return queries, keys, values
    queries, keys, values = (
        project(site, inputs, module.in_proj_weight, bias, part)
        for inputs, part in zip((query, key, value), parts, strict=True)
    )
    return queries, keys, values


def _merged_mask(
    query: Tensor, keys: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int
) -> Tensor | None:
    """Return what is added to the scores (batch, heads, time, keys), from PyTorch's two masks."""
    merged = None
    if attn_mask is not None:
        merged = _additive(attn_mask, query.dtype)
        merged = merged if merged.dim() == 2 else merged.view(query.shape[0], heads, *merged.shape[1:])
        merged = F.pad(merged, (0, keys.shape[1] - merged.shape[-1]))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query.dtype)
        padding = F.pad(padding, (0, keys.shape[1] - padding.shape[-1]))[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _one_more(site: Site, parameter: Tensor, batch: int) -> Tensor:
    """Return a raw parameter (1, 1, features) once per example."""
    return _raw(site, parameter, detached(parameter).expand(batch, 1, -1), slice(None))


def _bias_part(site: Site, bias: Tensor | None, rows: slice, inputs: Tensor) -> Tensor | float:
    if bias is None:
        return 0.0
    return _raw(site, bias, detached(bias)[rows].expand(inputs.shape[0], 1, -1), rows)


def _raw(site: Site, parameter: Tensor, value: Tensor, rows: slice) -> Tensor:
    if not parameter.requires_grad:
        return value
    shape = parameter.shape if rows == slice(None) else value.shape[2:]

    def gradients(output_gradient: Tensor) -> Gradient:
        materialized = Materialized(accurate(output_gradient).flatten(1), shape)
        yield parameter, materialized.within(parameter.shape, rows)

    return site.record(value, value, gradients)
