"""What cannot be trained privately is refused, by name and with a remedy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.engine.checks.probe import check_examples_do_not_mix
from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (nn.BatchNorm1d(3), "GroupNorm"),
        (nn.BatchNorm2d(3).requires_grad_(False), "GroupNorm"),
        (nn.SyncBatchNorm(3), "GroupNorm"),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm=None"),
        (nn.EmbeddingBag(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (nn.MultiheadAttention(4, 2), "batch_first=True"),
        (nn.TransformerEncoderLayer(4, 2), "batch_first=True"),
        (nn.LSTM(3, 3), "batch_first=True"),
        (nn.LazyLinear(3), "one batch"),
    ],
)
def test_a_module_that_mixes_examples_is_refused_by_name(module: nn.Module, remedy: str) -> None:
    model = nn.ModuleDict({"head": nn.ModuleDict({"bad": module})})
    with pytest.raises(PdpsgdError, match=rf"head\.bad.*{remedy}"):
        ClippedGradients(model)
    assert all("forward" not in child.__dict__ for child in model.modules())


def test_parameters_that_no_module_uses_are_refused() -> None:
    with pytest.raises(PdpsgdError, match="no forward"):
        ClippedGradients(nn.ModuleDict({"lost": nn.ParameterList([nn.Parameter(torch.ones(2))])}))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return result


def test_something_shared_without_a_batch_dimension_is_refused() -> None:
    module = Positions()
    clipped = ClippedGradients(module)
    module(torch.randint(9, (3, 6))).sum().backward()
    with pytest.raises(PdpsgdError, match=r"positions.*positions\[None\]"):
        clipped.clipped_sum(torch.ones(3))


def test_positions_as_many_as_examples_do_not_slip_through_the_probe() -> None:
    with pytest.raises(PdpsgdError):
        check_examples_do_not_mix(
            Positions(), lambda outputs: outputs.square().sum((1, 2)).mean(), torch.randint(9, (4, 4))
        )


class UsesWeightDirectly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) @ self.embedding.weight.T


def test_a_weight_used_outside_its_module_is_refused() -> None:
    module = UsesWeightDirectly()
    clipped = ClippedGradients(module)
    module(torch.randint(5, (2, 3))).sum().backward()
    with pytest.raises(PdpsgdError, match=r"embedding\.weight.*outside"):
        clipped.clipped_sum(torch.ones(2))
    with pytest.raises(PdpsgdError, match="outside"):
        check_examples_do_not_mix(
            module, lambda outputs: outputs.square().sum((1, 2)).mean(), torch.randint(5, (2, 3))
        )


def test_an_input_overwritten_after_its_layer_is_refused() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    inputs = torch.randn(2, 3)
    module(inputs).sum().backward()
    inputs.zero_()
    with pytest.raises(PdpsgdError, match="in place"):
        clipped.clipped_sum(torch.ones(2))


def test_thawing_a_parameter_afterwards_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    clipped = ClippedGradients(module)
    module[0].weight.requires_grad_(True)
    module(torch.randn(2, 3)).sum().backward()
    with pytest.raises(PdpsgdError, match=r"0\.weight"):
        clipped.clipped_sum(torch.ones(2))


def test_an_image_without_a_batch_is_refused() -> None:
    module = nn.Conv2d(2, 3, 3)
    ClippedGradients(module)
    with pytest.raises(PdpsgdError, match="the first of them the batch"):
        module(torch.randn(2, 5, 5))


class Packed(nn.Module):
    """Runs a recurrent layer on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 4, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(1, len(inputs) + 1)
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1][-1]


class Inside(nn.Module):
    """Takes what it is given in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, pair: tuple[nn.utils.rnn.PackedSequence, float]) -> Tensor:
        return pair[0].data * self.scale


class PackedInside(nn.Module):
    """Hands packed sequences on in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inside()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner((nn.utils.rnn.pack_sequence(list(inputs)), 1.0))


@pytest.mark.parametrize(
    ("model", "where"), [(Packed(), r"recurrent \(GRU\)"), (PackedInside(), r"inner \(Inside\)")]
)
def test_packed_sequences_are_refused_with_the_remedy(model: nn.Module, where: str) -> None:
    ClippedGradients(model)
    with pytest.raises(PdpsgdError, match=rf"{where} is given a PackedSequence.*padded sequences"):
        model(torch.randn(3, 5, 3))


def test_a_table_that_nobody_looks_anything_up_in_is_refused_and_one_lookup_is_not() -> None:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.LazyLinear(2))
    module(torch.zeros(8, 1, dtype=torch.long))
    gradients = ClippedGradients(module)
    module(torch.zeros(8, 1, dtype=torch.long)).sum().backward()
    assert gradients.clipped_sum(torch.ones(8), loss_reduction="sum") == 0
    gradients.remove()
    table = nn.Embedding(10, 4)
    gradients = ClippedGradients(table)
    table(torch.zeros(8, 0, dtype=torch.long)).sum().backward()
    with pytest.raises(PdpsgdError):
        gradients.clipped_sum(torch.ones(8), loss_reduction="sum")
