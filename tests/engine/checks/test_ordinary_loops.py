"""Loops as people write them train without a word and as if nobody watched; faults among ordinary things are found."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError

cross_entropy = functional.cross_entropy


class TwoOutputs(nn.Module):
    """Gives logits and what they came from; with `twice`, the same tensor under two names."""

    def __init__(self, *, twice=False):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.twice = nn.Linear(5, 8), nn.Linear(8, 3), twice

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        logits = self.second(hidden)
        return {"last": logits, "all": (logits,)} if self.twice else (logits, hidden)


class OwnLoss(TwoOutputs):
    def forward(self, inputs, labels):
        logits = self.second(self.first(inputs).tanh())
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Autoencoder(nn.Module):
    """A variational one: draws random numbers also when it is evaluated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.mean, self.deviation, self.decode = nn.Linear(5, 2), nn.Linear(5, 2), nn.Linear(2, 5)

    def forward(self, inputs):
        mean, deviation = self.mean(inputs), self.deviation(inputs)
        return self.decode(mean + torch.randn_like(mean) * (deviation / 2).exp()), mean, deviation


class Recurrent(nn.Module):
    """Gives its hidden state too, in which examples are the second dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.last = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, inputs):
        outputs, hidden = self.layer(inputs[..., None])
        return self.last(outputs[:, -1]), hidden


def weighted_by_confidence(module, inputs, targets):
    outputs = module(inputs)
    with torch.no_grad():
        weights = outputs.softmax(1).max(1).values
    return (cross_entropy(outputs, targets, reduction="none") * weights).mean()


def evidence(module, inputs, targets):
    outputs, mean, deviation = module(inputs)
    divergence = -0.5 * (1 + deviation - mean**2 - deviation.exp()).sum(1).mean()
    return functional.mse_loss(outputs, inputs) + divergence


def asserted(module, inputs, targets):
    assert inputs.isfinite().all()
    return cross_entropy(module((inputs - 0.5) / 0.5), targets)


def counted_first(module, inputs, targets):
    outputs = module(inputs)
    assert 0 <= (outputs.argmax(1) == targets).sum().item() <= len(targets)
    return cross_entropy(outputs, targets)


def copied(module, inputs, targets):
    copy.deepcopy(module)
    return cross_entropy(module(inputs * 2), targets)


def on_a_device(module, inputs, targets):
    with torch.device("cpu"):
        return cross_entropy(module(inputs), targets)


ORDINARY = {
    "logits and hidden": (TwoOutputs, lambda m, x, y: cross_entropy(m(x)[0], y)),
    "the same output twice": (lambda: TwoOutputs(twice=True), lambda m, x, y: cross_entropy(m(x)["last"], y)),
    "its own loss": (OwnLoss, lambda m, x, y: m(x, labels=y)["loss"]),
    "outputs changed in place": (None, lambda m, x, y: cross_entropy(m(x).div_(2.0), y)),
    "weights without gradient": (None, weighted_by_confidence),
    "a variational autoencoder": (Autoencoder, evidence),
    "a recurrent network": (Recurrent, lambda m, x, y: cross_entropy(m(x)[0], y)),
    "an assertion on values": (None, asserted),
    "a metric before the loss": (None, counted_first),
    "a copy of the module": (None, copied),
    "a device's context": (None, on_a_device),
    "mean over all numbers": (
        None,
        lambda m, x, y: (m(x) - functional.one_hot(y, 3)).square().sum() / (3 * len(y)),
    ),
}


def train(run, loss):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        loss(run.module, inputs, targets).backward()
        run.optimizer.step()


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loop_trains_without_a_word_and_as_if_unwatched(private, flat, name):
    module, loss = ORDINARY[name]
    watched, unwatched = (
        private(module=module and module(), engine=PrivacyEngine(watch_loop=watch)) for watch in (True, False)
    )
    train(watched, loss)
    train(unwatched, loss)
    assert watched.engine.steps_left == 0
    assert torch.equal(flat(watched.module), flat(unwatched.module))


def test_gradients_that_the_loop_keeps_are_its_own(private):
    run, seen = private(), []

    def loss(module, inputs, targets):
        outputs = module(inputs)
        outputs.register_hook(lambda gradient: seen.append(float(gradient.norm())))
        seen.append(
            float((outputs.detach().softmax(1) - functional.one_hot(targets, 3)).norm() / len(targets))
        )
        return cross_entropy(outputs, targets)

    train(run, loss)
    assert len(seen) == 2 * 6
    assert seen[::2] == pytest.approx(seen[1::2], rel=1e-5)


def test_a_loop_that_was_refused_is_refused_again(private):
    run = private()
    for _ in range(2):
        with pytest.raises(PdpsgdError, match="Examples mix in the loss"):
            train(run, lambda m, x, y: cross_entropy((outputs := m(x)) - outputs.mean(0), y))
    assert run.engine.steps_taken == 0
    run.engine.close()


class Scaled(nn.Module):
    """Mixes examples, and is called with an argument by keyword."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs, scale):
        return self.linear((inputs - inputs.mean(0)) * scale)


class WithContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 3)

    def forward(self, inputs, context):
        return self.linear(torch.cat([inputs, context.expand_as(inputs)], 1))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, inputs):
        return self.linear(inputs.mean(1, keepdim=True))


def trimmed(module, inputs, targets):
    inputs = inputs * (torch.arange(5) < (1 + targets)[:, None])
    longest = (inputs != 0).sum(1).max()
    return cross_entropy(module(inputs[:, :longest]), targets)


FAULTY = {
    "keyword": (Scaled, lambda m, x, y: cross_entropy(m(x, scale=torch.ones(1)), y), "mix in this model"),
    "context": (
        WithContext,
        lambda m, x, y: cross_entropy(m(x, x.mean(0, keepdim=True)), y),
        "before the model",
    ),
    "trimmed": (Pooled, trimmed, "before the model"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_among_ordinary_things_is_found(private, name):
    module, loss, message = FAULTY[name]
    run = private(module=module())
    with pytest.raises(PdpsgdError, match=message):
        train(run, loss)
    run.engine.close()


def test_a_statistic_that_one_example_decides_is_found_in_large_batches(private, helpers):
    run = private(plan=helpers.plan(people=2000), data=helpers.data(2000))
    with pytest.raises(PdpsgdError, match="mix before the model"):
        train(run, lambda m, x, y: cross_entropy(m(x / x.abs().max()), y))
    run.engine.close()


def test_a_criterion_does_not_hide_what_the_loop_does_to_targets_or_outputs(private, helpers):
    inputs, _ = helpers.data(40)
    numbers = torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    run = private(module=nn.Linear(5, 1), data=(inputs, numbers), criterion=functional.mse_loss)
    with pytest.raises(PdpsgdError, match="mix in the loss"):
        train(run, lambda m, x, y: functional.mse_loss(m(x), (y - y.mean()) / y.std()))
    run.engine.close()
    run = private(criterion=cross_entropy)
    with pytest.raises(PdpsgdError, match="mix in the loss"):
        train(run, lambda m, x, y: cross_entropy((outputs := m(x)) - outputs.mean(0), y))
    run.engine.close()


def test_a_model_that_is_not_called_as_such_cannot_be_watched_and_a_warning_says_so(private):
    run = private(criterion=cross_entropy)
    with pytest.warns(UserWarning, match="the module itself was not called"):
        train(run, lambda m, x, y: cross_entropy(m.forward(x - 1.0), y))


def test_trainable_numbers_beside_the_module_are_refused_though_they_are_no_parameters(private):
    run, weights = private(), torch.zeros(2, requires_grad=True)

    def loss(module, inputs, targets):
        outputs = module(inputs)
        return cross_entropy(outputs, targets) * weights[0].exp() + outputs.square().mean() * weights[1].exp()

    with pytest.raises(PdpsgdError, match=r"Got one of shape \(2,\) beside it"):
        train(run, loss)
    run.engine.close()


def balanced(module, inputs, targets):
    outputs = module(inputs)
    fit, size = cross_entropy(outputs, targets), outputs.square().mean()
    return fit + size * (fit.item() / size.item())


def test_numbers_taken_out_of_torch_for_the_loss_are_warned_of(private):
    with pytest.warns(UserWarning, match="takes numbers out of torch that depend on the examples"):
        train(private(), balanced)


def test_an_interrupted_first_batch_leaves_no_device_behind(private):
    run = private()
    with torch.device("meta"):
        next(iter(run.loader))
    assert torch.zeros(1).device.type == "cpu"
    run.train()
    assert run.engine.steps_left == 0


def with_the_mean(items):
    inputs = torch.stack([row for row, _ in items])
    return inputs, torch.stack([target for _, target in items]), inputs.mean(0)


def with_random_words(items):
    rows = [row[: 1 + int(target)] * (torch.rand(1 + int(target)) < 0.9) for row, target in items]
    return torch.stack([functional.pad(row, (0, 5 - len(row))) for row in rows]), torch.stack(
        [t for _, t in items]
    )


def test_a_collation_that_hands_out_a_statistic_is_refused(private, helpers):
    with pytest.raises(PdpsgdError, match="or what all of them share"):
        private(data=DataLoader(helpers.Rows(helpers.data(40)), collate_fn=with_the_mean))


def test_a_collation_whose_random_numbers_depend_on_records_is_warned_of(private, helpers):
    with pytest.warns(UserWarning, match="how many random numbers it draws depends on the records"):
        private(data=DataLoader(helpers.Rows(helpers.data(40)), collate_fn=with_random_words))


REDUCED_BY_HAND = {
    "one by one": lambda o, y: torch.stack(
        [cross_entropy(o[k : k + 1], y[k : k + 1]) for k in range(len(o))]
    ).mean(),
    "zipped": lambda o, y: torch.stack([cross_entropy(a, b) for a, b in zip(o, y, strict=True)]).mean(),
}


@pytest.mark.parametrize("name", REDUCED_BY_HAND)
@pytest.mark.parametrize("said", ["mean", "sum"])
def test_a_mean_over_examples_one_by_one_is_never_called_a_sum(private, name, said):
    run = private(loss_reduction=said)
    # A second batch, of another size, shows what the first one does not.
    refused = pytest.raises(PdpsgdError, match="is a mean") if said == "sum" else nullcontext()
    with pytest.warns(UserWarning, match="a mean or a sum over the batch could not be checked"), refused:
        train(run, lambda m, x, y: REDUCED_BY_HAND[name](m(x), y))
    run.engine.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_constant_that_happens_to_be_the_batch_size_decides_nothing(private, seed):
    sizes = []

    def loss(module, inputs, targets):
        sizes.append(len(inputs))
        constant = 20.0  # some first batches have 20 people
        return cross_entropy(module(inputs), targets, reduction="sum") / constant

    run = private(seed=seed, loss_reduction="mean")
    with pytest.raises(PdpsgdError, match="is a sum"):
        train(run, loss)
    assert len(sizes) == 1 or sizes[0] == 20
    run.engine.close()


def imputed(inputs):
    return inputs.nan_to_num(nan=inputs.mean().item())


@pytest.mark.parametrize(
    "prepare",
    [imputed, lambda x: functional.threshold(x, x.median().item(), 0.0)],
    ids=["imputed", "threshold"],
)
def test_numbers_of_the_batch_are_noticed_wherever_they_come_back(private, prepare):
    with pytest.warns(UserWarning, match="takes numbers out of torch that depend on the examples"):
        train(private(), lambda m, x, y: cross_entropy(m(prepare(x)), y))


def test_a_metric_between_model_and_loss_does_not_stop_the_check(private):
    def loss(module, inputs, targets):
        outputs = module(inputs)
        (outputs.argmax(1) == targets).float().mean().item()
        return 0.5 * cross_entropy(outputs, targets) + 0.01 * outputs.square().mean()

    run = private()
    train(run, loss)
    assert run.engine.steps_left == 0


class TimeFirst(nn.Module):
    """Outputs with examples second, as for a loss over sequences."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, inputs):
        return self.linear(inputs).view(-1, 2, 3).transpose(0, 1)


def test_outputs_with_examples_second_are_no_mixing(private):
    run = private(module=TimeFirst())
    with pytest.warns(UserWarning, match="first dimension of the model's outputs is not the batch"):
        train(run, lambda m, x, y: cross_entropy(m(x)[-1], y))
    assert run.engine.steps_left == 0


class Skips(nn.Module):
    """Leaves its second layer out by Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return hidden if self.training and random.random() < 0.5 else hidden + self.second(hidden).tanh()


def test_a_model_may_draw_from_pythons_random_numbers(private):
    random.seed(1)
    state = random.getstate()
    run = private(module=Skips(), criterion=cross_entropy)
    next(iter(run.loader))  # the criterion is tried
    assert random.getstate() == state
    run.train()
    assert run.engine.steps_left == 0


def test_a_layer_may_be_frozen_after_the_module_was_made_private(private):
    run = private(criterion=cross_entropy)
    run.module[0].requires_grad_(False)
    run.train()
    assert run.engine.steps_left == 0


def emptied(items):
    held = [[row, target] for row, target in items]
    targets = torch.stack([pair.pop() for pair in held])
    return torch.stack([pair[0] for pair in held], 1).t(), targets


def changed_in_place(items):
    return torch.stack([row.sub_(0.0) for row, _ in items]), torch.stack([target for _, target in items])


@pytest.mark.parametrize("collate", [emptied, changed_in_place])
def test_collations_may_use_up_their_items(private, helpers, collate):
    run = private(data=DataLoader(helpers.Rows(helpers.data(40)), collate_fn=collate))
    run.train()
    assert run.engine.steps_left == 0


def test_a_collation_that_cannot_be_tried_is_warned_of(private, helpers):
    def of_many(items):
        if len(items) == 16:
            raise ArithmeticError("sixteen")
        return torch.stack([row for row, _ in items]), torch.stack([target for _, target in items])

    with pytest.warns(UserWarning, match="cannot be tried on a few records"):
        private(data=DataLoader(helpers.Rows(helpers.data(40)), collate_fn=of_many))


class Positioned(nn.Module):
    """A transformer with positions of its own, which the general rule runs as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 8)
        self.positions = nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.encoder(self.embedding(inputs)[:, None] + self.positions).mean(1))


def test_a_transformer_with_parameters_of_its_own_trains_and_is_evaluated_in_between(private):
    run = private(module=Positioned(), criterion=nn.CrossEntropyLoss())
    for inputs, targets in run.loader:
        run.step(inputs, targets)
        run.module.eval()
        with torch.no_grad():
            run.module(inputs)
        run.module.train()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_left_in_evaluation_mode_is_named_as_the_reason(private):
    run = private(module=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.Linear(8, 3)))
    batches = iter(run.loader)
    run.step(*next(batches))
    run.module.eval()
    with pytest.raises(PdpsgdError, match="evaluation mode"):
        run.step(*next(batches))
