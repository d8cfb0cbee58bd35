"""A text encoder with small adapters (LoRA) and a linear head: what is trained instead of a head alone.

The encoder's own weights are public and stay as they are; they are not part of the model's state, which has the
adapters and the head. Texts come in as tokens, each filled up to one public length, so that a text's row depends on
that text alone.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pdpsgd.errors import check_positive, fail
from pdpsgd.models.encoders import NO_TOKEN, Encoder, load_encoder
from pdpsgd.models.last_layer import LastLayer, has_last_layer

RANK = 4
ALL_LAYERS, LAST_LAYER = "lora", "last-layer"
"""What a description says of adapters."""


class AdaptedEncoder(nn.Module):
    """A frozen encoder with adapters beside its attention's projections, and a linear head.

    At first it answers as the encoder with a head of zeros: an adapter begins as no change at all.

    Args:
        encoder: The encoder; adapters are put into its network, whose own weights stay as they are.
        classes: The number of outputs.
        rank: The rank of the adapters: how much they can change, and how many numbers get noise.
    """

    def __init__(self, encoder: Encoder, classes: int, *, rank: int = RANK) -> None:
        super().__init__()
        check_positive(classes=classes, rank=rank)
        self.pooling = encoder.pooling
        self.scale = math.sqrt(
            encoder.size
        )  # features of size 1, so that one learning rate suits head and adapters
        self.network = with_adapters(encoder.network, rank=rank)
        self.head = nn.Linear(encoder.size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_state_dict_post_hook(_leave_out_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_miss_no_frozen)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts, given as rows of tokens (see `Encoder.tokens`)."""
        tokens = tokens.long()
        there = tokens != NO_TOKEN
        states = self.network(input_ids=tokens.clamp(min=0), attention_mask=there.long()).last_hidden_state
        if self.pooling == "cls":
            pooled = states[:, 0]
        else:
            weights = there[:, :, None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits: Tensor = self.head(nn.functional.normalize(pooled, dim=1) * self.scale)
        return logits


def load_adapted(description: Mapping[str, Any], classes: int | None) -> AdaptedEncoder | LastLayer:
    """Make the network that an encoder's description stands for, with adapters that change nothing yet."""
    kind = LastLayer if description["finetune"] == LAST_LAYER else AdaptedEncoder
    return kind(encoder_of(description), classes or 1)


def finetuned(encoder: Encoder) -> dict[str, Any]:
    """Describe an encoder with adapters: in its last layer, or in all layers where it ends otherwise than BERT does."""
    return {**encoder.description(), "finetune": LAST_LAYER if has_last_layer(encoder) else ALL_LAYERS}


def encoder_of(description: Mapping[str, Any]) -> Encoder:
    """Load the encoder of a run's description, without adapters."""
    return load_encoder(**{name: value for name, value in description.items() if name != "finetune"})


def with_adapters(network: nn.Module, *, rank: int = RANK) -> nn.Module:
    """Put adapters beside the projections that PEFT adapts in networks of this kind; only these can be trained."""
    if importlib.util.find_spec("peft") is None:
        fail("Expected the package peft, for adapters. It is missing: pip install 'pdpsgd[transformers]'.")
    import peft

    kind = getattr(getattr(network, "config", None), "model_type", type(network).__name__)
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers 5 for an attribute by its older name.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            adapted: nn.Module = peft.get_peft_model(
                network.requires_grad_(False),
                peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0),
            )
    except ValueError as error:
        fail(
            f"Expected an encoder in which PEFT knows what to adapt. Got one of the kind {kind!r} ({error}): write a "
            "loop of your own, with pdpsgd.integrations.transformers and a peft.LoraConfig(target_modules=...)."
        )
    return adapted


def _frozen(module: nn.Module) -> set[str]:
    """Name the weights of the encoder itself: whatever is not trained."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    everything = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return everything - trained


def _leave_out_frozen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _frozen(module):
        state.pop(f"{prefix}{name}", None)


def _miss_no_frozen(module: nn.Module, incompatible: Any) -> None:
    frozen = _frozen(module)
    missing = [name for name in incompatible.missing_keys if name not in frozen]
    incompatible.missing_keys[:] = missing
