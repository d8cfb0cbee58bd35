"""What cannot be trained privately is refused, by name and with a remedy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    watched = ClippedGradients(module)
    module(torch.randint(9, (3, 6))).sum().backward()
    with pytest.raises(PdpsgdError, match=r"positions.*positions\[None\]"):
        watched.clipped_sum(torch.ones(3))


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
    watched = ClippedGradients(module)
    module(torch.randint(5, (2, 3))).sum().backward()
    with pytest.raises(PdpsgdError, match=r"embedding\.weight.*outside"):
        watched.clipped_sum(torch.ones(2))
    with pytest.raises(PdpsgdError, match="outside"):
        check_examples_do_not_mix(
            module, lambda outputs: outputs.square().sum((1, 2)).mean(), torch.randint(5, (2, 3))
        )


def test_an_input_overwritten_after_its_layer_is_refused() -> None:
    module = nn.Linear(3, 2)
    watched = ClippedGradients(module)
    inputs = torch.randn(2, 3)
    module(inputs).sum().backward()
    inputs.zero_()
    with pytest.raises(PdpsgdError, match="in place"):
        watched.clipped_sum(torch.ones(2))


def test_thawing_a_parameter_afterwards_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    watched = ClippedGradients(module)
    module[0].weight.requires_grad_(True)
    module(torch.randn(2, 3)).sum().backward()
    with pytest.raises(PdpsgdError, match=r"0\.weight"):
        watched.clipped_sum(torch.ones(2))


def test_an_image_without_a_batch_is_refused() -> None:
    module = nn.Conv2d(2, 3, 3)
    ClippedGradients(module)
    with pytest.raises(PdpsgdError, match="the first of them the batch"):
        module(torch.randn(2, 5, 5))


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(48, 4))


BATCH = (
    torch.linspace(-1, 1, 7 * 36).sin().mul(3).view(7, 1, 6, 6).flip(2),
    torch.tensor([0, 1, 2, 3, 0, 1, 2]),
)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=2),
        lambda outputs, targets: F.cross_entropy(outputs, targets) + 0.01 * (outputs @ outputs.T).mean(),
        lambda outputs, targets: F.cross_entropy(outputs - outputs.mean(0), targets),
        lambda outputs, targets: F.cross_entropy(outputs, targets) + outputs.var(0, correction=0).sum(),
        lambda outputs, targets: F.cross_entropy(outputs, targets).sqrt(),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none").max(),
    ],
    ids=[
        "class weights",
        "ignored targets",
        "contrastive",
        "centred",
        "batch penalty",
        "root of a mean",
        "maximum",
    ],
)
def test_a_loss_in_which_examples_mix_is_refused(loss: object) -> None:
    with pytest.raises(PdpsgdError, match="Examples mix"):
        check_examples_do_not_mix(classifier(), loss, *BATCH)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1), F.multi_margin_loss]
)
def test_an_ordinary_loss_passes(loss: object) -> None:
    assert check_examples_do_not_mix(classifier(), loss, *BATCH)  # type: ignore[arg-type]


def test_a_sum_called_a_mean_is_told_apart() -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    with pytest.raises(PdpsgdError, match='loss_reduction="sum"'):
        check_examples_do_not_mix(classifier(), total, *BATCH)
    assert check_examples_do_not_mix(classifier(), total, *BATCH, loss_reduction="sum")
    with pytest.raises(PdpsgdError, match='loss_reduction="mean"'):
        check_examples_do_not_mix(classifier(), F.cross_entropy, *BATCH, loss_reduction="sum")


@pytest.mark.parametrize("only_while_training", [True, False])
def test_a_model_in_which_examples_mix_is_refused(only_while_training: bool) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(36, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            if self.training or not only_while_training:
                x = 0.9 * x + 0.1 * x[torch.randperm(len(x))]
            result: Tensor = self.linear(x)
            return result

    with pytest.raises(PdpsgdError, match="Examples mix"):
        check_examples_do_not_mix(Mixes(), F.cross_entropy, *BATCH)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_model_that_mixes_in_its_first_calls_is_refused(calls: int) -> None:
    class Warm(nn.Module):
        """Centres by the batch at first, as an initialisation from data does."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(36, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            self.seen += 1
            result: Tensor = self.linear(x - x.mean(0) if self.seen <= calls else x)
            return result

    with pytest.raises(PdpsgdError, match="Examples mix"):
        check_examples_do_not_mix(Warm(), F.cross_entropy, *BATCH)


def test_mixing_by_chance_is_found_as_often_as_it_is_met() -> None:
    class Sometimes(nn.Module):
        met = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(36, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            if self.training and torch.rand(()) < 0.5:
                self.met, x = True, 0.7 * x + 0.3 * x.roll(1, 0)
            result: Tensor = self.linear(x)
            return result

    for seed in range(20):
        torch.manual_seed(seed)
        module, refused = Sometimes(), False
        before = module.linear.weight.detach().clone()
        try:
            check_examples_do_not_mix(module, F.cross_entropy, *BATCH)
        except PdpsgdError:
            refused = True
        assert refused == module.met
        assert torch.equal(module.linear.weight, before)


def test_a_tie_that_rounding_decides_is_no_mixing() -> None:
    class Tie(nn.Module):
        """At its first weight two numbers of a maximum are equal, and the size of the batch decides between them."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(36, 4, bias=False)
            self.first = self.linear.weight.detach().clone()

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.linear(x.flatten(1))
            if torch.equal(self.linear.weight, self.first) and len(x) > 1:
                outputs = outputs.flip(1)
            return outputs

    module = Tie()
    version = module.linear.weight._version
    state = torch.get_rng_state()
    assert check_examples_do_not_mix(module, F.cross_entropy, *BATCH)
    assert torch.equal(module.linear.weight, module.first)
    assert module.linear.weight._version == version
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_leaves_nothing_behind() -> None:
    module = classifier()
    module[3].eval()
    modes = [child.training for child in module.modules()]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    watched = ClippedGradients(module)
    state = torch.get_rng_state()
    assert check_examples_do_not_mix(module, F.cross_entropy, *BATCH)
    assert torch.equal(torch.get_rng_state(), state)
    assert [child.training for child in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert watched.recorded_batch_size is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(float(total.abs().sum()) == 0 for total in watched.sums.values())


def test_one_example_is_not_enough_for_the_probe() -> None:
    assert not check_examples_do_not_mix(classifier(), F.cross_entropy, BATCH[0][:1], BATCH[1][:1])


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
