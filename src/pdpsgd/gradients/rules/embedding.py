"""Embeddings and bags of them: an example's gradient touches the rows it looked up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.errors import fail
from pdpsgd.gradients.lookups import Lookups, Passed, TableGradients, distinct_uses, distinct_uses_of
from pdpsgd.gradients.native.dispatch import AtOnce
from pdpsgd.gradients.per_example import Gradient, accurate, detached
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.registry import rule_for


@rule_for(nn.Embedding)
def embedding(site: Site, module: nn.Embedding, input: Tensor) -> Tensor:
    """Rule of nn.Embedding; options that depend on the rest of the batch were refused beforehand."""
    rows = site.batched(input)
    outputs = F.embedding(rows, detached(module.weight), module.padding_idx)

    def gradients(output_gradient: Tensor) -> Gradient:
        weight = module.weight
        lookups = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
        gradient = accurate(output_gradient).reshape(*lookups.shape, weight.shape[1])
        yield weight, TableGradients(Passed(lookups, gradient, None, module.padding_idx), weight.shape)

    def in_place(output_gradient: Tensor, at_once: AtOnce) -> bool:
        return at_once.take_lookups(rows, output_gradient, module.weight, module.padding_idx)

    return site.record(outputs, rows, gradients, in_place=in_place)


@rule_for(nn.EmbeddingBag)
def embedding_bag(
    site: Site,
    module: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Rule of nn.EmbeddingBag: bags of equal length (examples, length), or one after the other with offsets."""
    if module.mode == "max" and input.dim() == 1:
        fail(
            f"{site.name} takes the maximum over bags with offsets. Give it bags of equal length: (batch, length)."
        )
    rows = site.batched(input) if input.dim() == 2 else input
    outputs = F.embedding_bag(
        rows,
        detached(module.weight),
        offsets,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=module.padding_idx,
    )

    def gradients(output_gradient: Tensor) -> Gradient:
        gradient, shape = accurate(output_gradient), module.weight.shape
        if module.mode == "max":
            yield module.weight, _of_maxima(module, rows, gradient)
            return
        if offsets is None:
            passed = Passed(rows, gradient, _shares(module, rows, per_sample_weights, gradient), None)
            yield module.weight, TableGradients(passed, shape)
            return
        owner = _bag_of_each(rows, offsets)
        shares = torch.ones_like(owner, dtype=gradient.dtype)
        if per_sample_weights is not None:
            shares = per_sample_weights.detach().flatten().to(gradient.dtype)
        if module.padding_idx is not None:
            shares = shares.masked_fill(rows.flatten() == module.padding_idx, 0)
        if module.mode == "mean":
            sizes = shares.new_zeros(len(gradient)).index_add_(0, owner, shares)
            shares = shares / sizes.clamp(min=1)[owner]
        examples, used, use_of = distinct_uses_of(owner, rows, shape[0])
        factors = shares.new_zeros(len(used)).index_add_(0, use_of, shares)
        yield (
            module.weight,
            Lookups(examples, used, factors[:, None] * gradient[examples], shape, len(gradient)),
        )

    if (
        input.dim() != 2
        or module.mode == "max"
        or per_sample_weights is not None
        or module.padding_idx is not None
    ):
        return site.record(outputs, rows, gradients)

    def in_place(output_gradient: Tensor, at_once: AtOnce) -> bool:
        share = 1 / rows.shape[1] if module.mode == "mean" and rows.shape[1] else 1.0
        return at_once.take_lookups(rows, output_gradient, module.weight, None, share)

    return site.record(outputs, rows, gradients, in_place=in_place)


def _shares(module: nn.EmbeddingBag, rows: Tensor, given: Tensor | None, gradient: Tensor) -> Tensor:
    """Return what each lookup has in its bag, where bags are of equal length."""
    padding, length = module.padding_idx, rows.shape[1]
    if given is None and padding is None:
        return gradient.new_full(rows.shape, 1 / length if module.mode == "mean" and length else 1.0)
    shares = gradient.new_ones(rows.shape) if given is None else given.detach().to(gradient.dtype)
    if padding is not None:
        shares = shares.masked_fill(rows == padding, 0)
    return shares / shares.sum(1, keepdim=True).clamp(min=1) if module.mode == "mean" else shares


def _bag_of_each(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the bag of each lookup."""
    places = torch.arange(len(rows), device=rows.device)
    return torch.bucketize(places, offsets.to(places.dtype), right=True) - 1


def _of_maxima(module: nn.EmbeddingBag, rows: Tensor, gradient: Tensor) -> Lookups:
    """Return the gradients of rows whose numbers were the largest of their bag, number by number."""
    found = F.embedding(rows, detached(module.weight))
    if module.padding_idx is not None:
        found = found.masked_fill((rows == module.padding_idx)[..., None], -torch.inf)
    winners = rows.gather(1, found.argmax(1))  # (examples, width)
    examples, used, _ = distinct_uses(rows, module.num_embeddings)
    values = gradient[examples] * (winners[examples] == used[:, None])
    _clear_padding(module, used, values)
    return Lookups(examples, used, values, module.weight.shape, len(rows))


def _clear_padding(module: nn.Embedding | nn.EmbeddingBag, used: Tensor, values: Tensor) -> None:
    if module.padding_idx is not None:
        values[used == module.padding_idx] = 0
