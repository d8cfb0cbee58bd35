"""A small adapter (LoRA) in a text encoder's last layer, and a linear head: what lies before it is computed once.

The adapter is beside the last projection of the last layer. Everything that it is given comes from public weights, so
it is computed once for each text, as its states, like an embedding; a step then takes a hundredth of the time that
adapters in all layers take. Fewer numbers are trained, too, and get noise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import check_positive, fail
from pdpsgd.models.encoders import Encoder, Progress

RANK = 1
STRENGTH = 0.012
KEPT_AS = torch.float16
"""How states are kept: half of what they would take as single precision."""
MOST_BYTES = 4 * 2**30
"""What states may take in memory; while they are put in the order of people it is twice that."""


class LastLayer(nn.Module):
    """The end of an encoder: an adapter beside its last projection, pooling over tokens, and a linear head.

    It is given the states of texts (see `states`). At first it answers as the encoder with a head of zeros: the adapter
    begins as no change at all.

    Args:
        encoder: The encoder; its own weights stay as they are, and are no part of this network, but for the
            normalization at its end.
        classes: The number of outputs.
        rank: The rank of the adapter: how much it can change, and how many numbers get noise.
        strength: What the adapter's part is multiplied by: the larger, the larger its share of a gradient.
    """

    def __init__(
        self, encoder: Encoder, classes: int, *, rank: int = RANK, strength: float = STRENGTH
    ) -> None:
        super().__init__()
        check_positive(classes=classes, rank=rank, strength=strength)
        end = _end_of(encoder)
        projection, normalization = end.dense, end.LayerNorm
        self.inner, self.strength = projection.in_features, strength
        self.pooling = encoder.pooling
        self.down = nn.Linear(projection.in_features, rank, bias=False)
        self.up = nn.Linear(rank, projection.out_features, bias=False)
        self.head = nn.Linear(projection.out_features, classes)
        nn.init.zeros_(self.down.weight)
        nn.init.normal_(self.up.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.normalization = nn.LayerNorm(projection.out_features, eps=normalization.eps)
        self.normalization.load_state_dict(normalization.state_dict())
        self.normalization.requires_grad_(False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits of texts, given as their states."""
        states = states.to(self.head.weight.dtype)
        inner, sums = states[..., : self.inner], states[..., self.inner :]
        there = (sums != 0).any(-1, keepdim=True).to(sums.dtype)
        last = self.normalization(sums + self.strength * self.up(self.down(inner)))
        pooled = last[:, 0] if self.pooling == "cls" else (last * there).sum(1) / there.sum(1).clamp(min=1)
        logits: Tensor = self.head(nn.functional.normalize(pooled, dim=1))
        return logits


def has_last_layer(encoder: Encoder) -> bool:
    """Tell whether the encoder ends as BERT does: a projection, what came before it added, a normalization."""
    return _found_end(encoder) is not None


def states(encoder: Encoder, texts: Sequence[str], *, progress: Progress | None = None) -> Tensor:
    """Return what `LastLayer` is given of texts, (texts, max_tokens, numbers); zeros after the end of a text.

    Guarantee: a text's states are a fixed function of that text alone, so training on states gives every person the
    same promise as training on texts.

    Args:
        encoder: The encoder; each text is cut after its `max_tokens` tokens, a public length.
        texts: The texts.
        progress: Told how many are done.

    Returns:
        For each token what the last projection is given, and what the normalization after it is given.

    Raises:
        PdpsgdError: If the states would not fit into memory, or the encoder ends otherwise.
    """
    made = no_states(encoder, len(texts))
    found = _end_of(encoder)
    local = threading.local()  # texts are read in several threads

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        local.given = given

    def read(text: str) -> Tensor:
        ids = torch.tensor([encoder.token_ids(text)])
        encoder.network(input_ids=ids, attention_mask=torch.ones_like(ids))
        inner, before = (part[0].to(KEPT_AS) for part in local.given)
        summed = found.dense(inner.float()) + before.float()
        return torch.cat([inner, summed.to(KEPT_AS)], dim=1)

    hook = found.register_forward_pre_hook(keep)
    try:
        for number, (row, one) in enumerate(zip(made, encoder.each(texts, read), strict=True), 1):
            row[: len(one)] = one
            if progress is not None:
                progress("Texts read", number, len(texts))
    finally:
        hook.remove()
    return made


def no_states(encoder: Encoder, count: int) -> Tensor:
    """Return room for the states of a number of texts, if there is enough."""
    dense = _end_of(encoder).dense
    shape = (count, encoder.max_tokens, dense.in_features + dense.out_features)
    if math.prod(shape) * KEPT_AS.itemsize > MOST_BYTES:
        fail(
            f"Expected texts whose states fit into {MOST_BYTES / 2**30:g} GiB of memory. Got {count:,} of "
            f"{encoder.max_tokens} tokens each: read fewer of them (--max-tokens), or freeze the encoder."
        )
    return torch.zeros(shape, dtype=KEPT_AS)


def _end_of(encoder: Encoder) -> Any:
    found = _found_end(encoder)
    if found is None:
        fail(
            "Expected an encoder that ends as BERT does (a projection, a sum, a normalization). Got "
            f"{encoder.name!r}, a {type(encoder.network).__name__}: see pdpsgd.models.adapters for adapters in others."
        )
    return found


def _found_end(encoder: Encoder) -> Any:
    """Find the module at the encoder's end, with `dense` and `LayerNorm`, if what it says is the encoder's answer."""
    layers = getattr(getattr(encoder.network, "encoder", None), "layer", None)
    end: Any = (
        getattr(layers[-1], "output", None) if isinstance(layers, nn.ModuleList) and len(layers) else None
    )
    dense, normalization = getattr(end, "dense", None), getattr(end, "LayerNorm", None)
    if not isinstance(dense, nn.Linear) or not isinstance(normalization, nn.LayerNorm):
        return None
    given: list[Any] = []
    hook = end.register_forward_pre_hook(lambda module, parts: given.append(parts))
    try:
        ids = torch.tensor([encoder.token_ids("a")])
        with torch.no_grad():
            answer = encoder.network(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    finally:
        hook.remove()
    if len(given) != 1 or len(given[0]) != 2:
        return None
    inner, before = given[0]
    same = torch.allclose(normalization(dense(inner) + before), answer, atol=1e-4)
    return end if same else None
