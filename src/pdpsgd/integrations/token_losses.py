"""Losses over tokens for models of transformers: each example's mean over its own tokens, then over examples."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn

from pdpsgd.integrations._transformers import unwrapped

CAUSAL = "ForCausalLM"
SEQUENCE = "ForConditionalGeneration"
PER_TOKEN = (CAUSAL, "ForMaskedLM", "ForTokenClassification")
"""Losses that transformers averages over all tokens of a batch, whosever they are."""
IGNORED = -100  # the label of tokens that count nowhere, for transformers as for torch


def token_loss_of(model: nn.Module) -> str | None:
    """Name the loss over tokens that a model has; None for models with another loss, or one of their own."""
    own = unwrapped(model)
    if not isinstance(own, transformers.PreTrainedModel):
        return None
    if own.config.is_encoder_decoder:
        head: Any = own.get_output_embeddings  # transformers does not say what it returns
        writes = hasattr(own, "prepare_decoder_input_ids_from_labels") and head() is not None
        return SEQUENCE if writes else None
    kind = own.loss_type or CAUSAL  # what transformers takes where a model names none
    return kind if kind in PER_TOKEN else None


def mean_over_own_tokens(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """Average the losses of tokens within each example, and those over examples.

    Args:
        logits: (examples, tokens, words).
        labels: (examples, tokens), -100 where a token does not count.
        shifted: Whether the logits at a token are about the next one.

    Returns:
        The mean loss of examples, in which no example's share depends on how long the others are.
    """
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), labels, ignore_index=IGNORED, reduction="none"
    )
    counted = (labels != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / counted).mean()
