"""Models and losses in which examples mix are refused by the probe; ordinary ones pass and nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdpsgd.engine.checks.probe import check_examples_do_not_mix, check_model
from pdpsgd.engine.checks.replay import CannotTellError
from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients


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

    torch.manual_seed(0)  # one permutation of four in 24 mixes nothing
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


class MixesBackward(nn.Module):
    """Gives the outputs of a classifier, and in training another gradient: less the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        centred = outputs - outputs.mean(0)
        return centred + (outputs - centred).detach() if self.training else outputs


def test_gradients_that_mix_in_training_alone_are_named_so() -> None:
    with pytest.raises(PdpsgdError, match="Examples mix in this model or loss while it trains"):
        check_examples_do_not_mix(MixesBackward(), F.cross_entropy, *BATCH)
    assert check_examples_do_not_mix(classifier(), F.cross_entropy, *BATCH)


class Sized(nn.Module):
    """Adds a number to the outputs in large batches."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.inner, self.most = nn.Linear(3, 2), most

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs + 1 if len(inputs) > self.most else outputs


def test_outputs_that_depend_on_the_size_are_refused_though_their_gradients_do_not() -> None:
    inputs = torch.linspace(-1, 1, 90).sin().view(30, 3)
    check_model(Sized(most=30), inputs, size=30, loss_reduction="mean")
    with pytest.raises(PdpsgdError, match="what the model gives an example among 12 examples is not"):
        check_model(Sized(most=29), inputs, size=30, loss_reduction="mean")


class Shared(nn.Module):
    """Gives one row of numbers for all examples, or one for each."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.inner, self.by_row = nn.Linear(3, 2), by_row

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs if self.by_row else outputs.sum(0)


def test_a_model_without_an_output_by_example_cannot_be_told() -> None:
    inputs = torch.linspace(-1, 1, 21).sin().view(7, 3)
    check_model(Shared(by_row=True), inputs, size=7, loss_reduction="mean")
    with pytest.raises(CannotTellError, match="it gives no tensor in which the examples can be told"):
        check_model(Shared(by_row=False), inputs, size=7, loss_reduction="mean")


class SizedGradients(Sized):
    """Doubles the gradients of its outputs in large batches, and not the outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs + (outputs - outputs.detach()) if len(inputs) > self.most else outputs


def test_gradients_that_depend_on_the_size_are_refused_though_the_outputs_do_not() -> None:
    inputs = torch.linspace(-1, 1, 90).sin().view(30, 3)
    check_model(SizedGradients(most=30), inputs, size=30, loss_reduction="mean")
    with pytest.raises(PdpsgdError, match="the gradient of the outputs of 12 examples changes"):
        check_model(SizedGradients(most=29), inputs, size=30, loss_reduction="mean")


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def only_of_true_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum that cannot be computed for made-up outputs, which are larger."""
    if outputs.abs().max() > 1:
        raise ValueError
    return summed(outputs, targets)


def drawing_for_few(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum that draws a number where examples are few, so that they cannot be tried one by one."""
    return summed(outputs, targets) + (0 * torch.rand(()) if len(outputs) < 13 else 0)


@pytest.mark.parametrize("loss", [only_of_true_outputs, drawing_for_few])
def test_a_sum_called_a_mean_is_told_apart_where_made_up_outputs_tell_nothing(loss: object) -> None:
    torch.manual_seed(0)
    batch = torch.linspace(-1, 1, 90).sin().view(30, 3), torch.arange(30) % 2
    with pytest.raises(PdpsgdError, match=r'Expected a loss .*="mean".*Got one that is a sum'):
        check_examples_do_not_mix(nn.Linear(3, 2), loss, *batch)  # type: ignore[arg-type]
    assert check_examples_do_not_mix(nn.Linear(3, 2), loss, *batch, loss_reduction="sum")  # type: ignore[arg-type]
