"""Nothing in a loop may depend on the size of a batch: two batches of different sizes show what does."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd.engine.checks.replay import CannotTellError, Replay
from pdpsgd.engine.checks.sizes import Course, Recorded, in_this_size
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError

cross_entropy = functional.cross_entropy


def train(run, loss):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        loss(run.module, inputs, targets).backward()
        run.optimizer.step()


def summed(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


GENERATOR = np.random.default_rng(0)
SCHEDULE = (min(1.0, 0.1 * step) for step in itertools.count(1))


LOSSES = {
    "mean times size over a constant": lambda m, x, y: cross_entropy(m(x), y) * len(x) / 64,
    "mean times the root of the size": lambda m, x, y: cross_entropy(m(x), y) * len(x) ** 0.5,
    "a penalty of the size": lambda m, x, y: (
        cross_entropy(outputs := m(x), y) + outputs.square().mean() * len(x)
    ),
    "a tensor of the size": lambda m, x, y: summed(m(x), y) * torch.full((), float(len(x))) / 4096,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_depends_on_the_size_is_refused_by_the_second_size(private, name):
    run = private(seed=3)
    with pytest.raises(PdpsgdError, match=r"Examples mix in the loss of this loop|is a sum"):
        train(run, LOSSES[name])
    assert run.engine.steps_taken <= 1
    run.engine.close()


def test_a_mean_times_its_size_is_refused_before_anything_is_released(private):
    run = private()
    with pytest.raises(PdpsgdError, match="is a sum"):
        train(run, LOSSES["mean times size over a constant"])
    assert run.engine.steps_taken == 0
    run.engine.close()


INPUTS = {
    "divided by the size": lambda x: x / len(x),
    "times the size": lambda x: x * x.shape[0],
}


@pytest.mark.parametrize("options", [{}, {"criterion": cross_entropy}], ids=["watched", "criterion"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_depend_on_the_size_are_refused_by_the_second_size(private, name, options):
    run = private(seed=3, **options)
    with pytest.raises(PdpsgdError, match="the number of examples in the batch changes what the model"):
        train(run, lambda m, x, y: cross_entropy(m(INPUTS[name](x)), y))
    assert run.engine.steps_taken == 1
    run.engine.close()


ORDINARY = {
    "mean": ("mean", lambda m, x, y: cross_entropy(m(x), y)),
    "half a mean": ("mean", lambda m, x, y: 0.5 * cross_entropy(m(x), y)),
    "sum over the size": ("mean", lambda m, x, y: summed(m(x), y) / len(x)),
    "sum over the shape": ("mean", lambda m, x, y: summed(m(x), y) / x.shape[0]),
    "mean of a flat batch": ("mean", lambda m, x, y: cross_entropy(m(x.view(x.shape[0], -1)), y)),
    "sum": ("sum", lambda m, x, y: summed(m(x), y)),
    "sum over a constant": ("sum", lambda m, x, y: summed(m(x), y) / 64),
    "weighted sum": (
        "sum",
        lambda m, x, y: cross_entropy(m(x), y, weight=torch.tensor([1.0, 5, 9]), reduction="sum"),
    ),
    "ignored sum": ("sum", lambda m, x, y: cross_entropy(m(x), y, ignore_index=0, reduction="sum")),
    "ones of the size": ("mean", lambda m, x, y: cross_entropy(m(x * torch.ones(len(x), 1)), y)),
    "noise of the size": ("mean", lambda m, x, y: cross_entropy(m(x + torch.randn(len(x), 1)), y)),
    "random for the batch": ("mean", lambda m, x, y: cross_entropy(m(x * (1 + torch.rand(1))), y)),
    "Python's random": ("mean", lambda m, x, y: cross_entropy(m(x * random.random()), y)),
    "NumPy's random": ("mean", lambda m, x, y: cross_entropy(m(x * GENERATOR.uniform(0.5, 1)), y)),
    "a schedule": ("mean", lambda m, x, y: cross_entropy(m(x.view(len(x), -1)), y) * next(SCHEDULE)),
    "annealing": (
        "mean",
        lambda m, x, y: cross_entropy(outputs := m(x), y) + next(SCHEDULE) * outputs.square().mean(),
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_loops_in_which_the_size_has_its_place_train_without_a_word(private, name):
    reduction, loss = ORDINARY[name]
    run = private(loss_reduction=reduction)
    train(run, loss)
    assert run.engine.steps_left == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: cross_entropy(m(x), y) * (1 + 5 * len(x) % 11 / 10),
        lambda m, x, y: cross_entropy(m(x + 5 * len(x) % 11 / 10), y),
    ],
    ids=["loss", "inputs"],
)
def test_what_changes_with_the_size_or_by_a_schedule_is_warned_of_where_the_size_was_asked_for(private, loss):
    with pytest.warns(UserWarning, match="A schedule may do that, the size must not"):
        train(private(seed=3), loss)


def test_batches_of_one_size_end_the_watch_as_well(private, helpers):
    run = private(plan=helpers.plan(people=10, rates=(1.0,), steps=12), data=helpers.data(10))
    train(run, ORDINARY["mean"][1])
    assert run.engine.steps_left == 0


HOOKS = {
    "centred": lambda gradient: gradient - gradient.mean(0),
    "normalized": lambda gradient: gradient / gradient.norm(),
    "times its size": lambda gradient: gradient * len(gradient),
    "in place": lambda gradient: gradient.sub_(gradient.mean(0)),
}


@pytest.mark.parametrize("where", ["outputs", "scaled outputs"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_changes_gradients_is_refused(private, name, where):
    run = private()

    def loss(module, inputs, targets):
        outputs = module(inputs)
        scaled = outputs * 2
        (outputs if where == "outputs" else scaled).register_hook(HOOKS[name])
        return cross_entropy(scaled, targets)

    with pytest.raises(PdpsgdError, match=r"a hook \(register_hook\)"):
        train(run, loss)
    assert run.engine.steps_taken == 0
    run.engine.close()


class OwnLoss(nn.Module):
    """Computes its own loss, as the models of Transformers do, beside logits that swamp it."""

    def __init__(self, reduce):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.reduce = nn.Linear(5, 8), nn.Linear(8, 3), reduce

    def forward(self, inputs, labels):
        logits = self.second(self.first(inputs).tanh())
        return {"loss": self.reduce(logits, labels), "logits": 1000 * logits}


HEAVY = torch.tensor([1.0, 1.0, 50.0])
MIXING_MODELS = {
    "class weights": lambda o, y: cross_entropy(o, y, weight=HEAVY),
    "ignored": lambda o, y: cross_entropy(o, y, ignore_index=2),
    "root": lambda o, y: cross_entropy(o, y).sqrt(),
}
AFTERWARDS = {
    "itself": lambda outputs: outputs["loss"],
    "half": lambda outputs: outputs["loss"] / 2,
    "with a penalty": lambda outputs: outputs["loss"] + 1e-9 * outputs["logits"].square().mean(),
}


def imbalanced(helpers):
    inputs, targets = helpers.data(40)
    return inputs, torch.where(torch.arange(40) % 13 == 12, 2, targets % 2)


@pytest.mark.parametrize("after", AFTERWARDS)
@pytest.mark.parametrize("name", MIXING_MODELS)
def test_a_models_own_loss_that_mixes_is_refused(private, helpers, name, after):
    run = private(module=OwnLoss(MIXING_MODELS[name]), data=imbalanced(helpers))
    with pytest.raises(PdpsgdError, match="Examples mix in this model or loss"):
        train(run, lambda m, x, y: AFTERWARDS[after](m(x, labels=y)))
    assert run.engine.steps_taken == 0
    run.engine.close()


@pytest.mark.parametrize("after", AFTERWARDS)
def test_a_models_own_loss_may_be_any_mean_and_is_left_as_it_is(private, helpers, flat, after):
    watched, unwatched = (
        private(
            module=OwnLoss(cross_entropy), data=imbalanced(helpers), engine=PrivacyEngine(watch_loop=watch)
        )
        for watch in (True, False)
    )
    for run in (watched, unwatched):
        train(run, lambda m, x, y: AFTERWARDS[after](m(x, labels=y)))
    assert torch.equal(flat(watched.module), flat(unwatched.module))


def test_a_models_own_sum_is_told_from_a_mean(private):
    run = private(module=OwnLoss(summed))
    with pytest.raises(PdpsgdError, match="is a sum"):
        train(run, lambda m, x, y: m(x, labels=y)["loss"])
    assert run.engine.steps_taken == 0
    run.engine.close()
    run = private(module=OwnLoss(summed))
    train(run, lambda m, x, y: m(x, labels=y)["loss"] / len(x))
    assert run.engine.steps_left == 0


def test_a_models_own_loss_of_two_calls_cannot_be_told(private):
    with pytest.warns(UserWarning, match="the model computes it, and is called more than once"):
        train(
            private(module=OwnLoss(cross_entropy)),
            lambda m, x, y: m(x, labels=y)["loss"] + m(-x, labels=y)["loss"],
        )


class OnlyMany(nn.Module):
    """Expects as many examples as a batch has, not the few that are tried."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, inputs):
        if len(inputs) < 13:
            raise ValueError("too few")
        return self.inner(inputs)


def test_a_model_that_cannot_be_tried_on_a_few_examples_is_warned_of(private):
    run = private(module=OnlyMany(), seed=3)
    inputs, targets = next(iter(run.loader))
    with pytest.warns(
        UserWarning, match=r"could not be checked: it cannot be tried on a few examples \(ValueError\)"
    ):
        run.step(inputs, targets)
    assert run.engine.steps_taken == 1
    run.engine.close()


def test_batches_of_other_parts_are_not_compared():
    """By their places, some would be taken for others."""
    rows = torch.linspace(-1, 1, 12).view(4, 3)
    course = Course(4, [])
    earlier = Recorded(4, [rows], [], [], rows, [], None, course, course, {})
    (alike,) = in_this_size(Replay((-rows,), 4), earlier).values()
    assert torch.equal(alike, rows)
    with pytest.raises(CannotTellError, match="batches are not alike"):
        in_this_size(Replay((rows, -rows), 4), earlier)


@pytest.mark.parametrize(
    "after",
    [
        lambda outputs, x: outputs["loss"] * len(x) / 64,
        lambda outputs, x: outputs["loss"].sqrt(),
        lambda outputs, x: outputs["loss"] * outputs["logits"].square().mean(),
    ],
    ids=["times its size", "root", "times a penalty"],
)
def test_what_the_loop_makes_of_a_models_own_loss_is_looked_at(private, after):
    run = private(module=OwnLoss(cross_entropy), seed=3)
    with pytest.raises(PdpsgdError, match=r"Examples mix in the loss of this loop|is a sum"):
        train(run, lambda m, x, y: after(m(x, labels=y), x))
    run.engine.close()


def test_a_class_that_the_first_batch_lacks_is_made_up(private, helpers):
    inputs, targets = helpers.data(40)
    run = private(data=(inputs, torch.where(targets == 2, 1, targets)))
    with pytest.raises(PdpsgdError, match="Examples mix in the loss of this loop"):
        train(run, lambda m, x, y: cross_entropy(m(x), y, weight=HEAVY))
    assert run.engine.steps_taken == 0
    run.engine.close()


def keeps_a_tensor():
    kept = {"mean": torch.zeros(5)}

    def loss(module, inputs, targets):
        outputs = module(inputs + kept["mean"])
        kept["mean"] = inputs.mean(0)
        return cross_entropy(outputs, targets)

    return loss


def keeps_a_loss():
    kept = {"loss": torch.ones(())}

    def loss(module, inputs, targets):
        outputs = module(inputs)
        now = cross_entropy(outputs, targets)
        whole = now + kept["loss"] * outputs.square().mean()
        kept["loss"] = now.detach()
        return whole

    return loss


@pytest.mark.parametrize("make", [keeps_a_tensor, keeps_a_loss])
def test_what_is_kept_of_an_earlier_batch_is_refused_where_it_is_used(private, make):
    run = private()
    with pytest.raises(PdpsgdError, match="computed from an earlier batch and is used for this one"):
        train(run, make())
    assert run.engine.steps_taken == 1
    run.engine.close()


def test_metrics_may_be_kept_from_batch_to_batch(private):
    run, total = private(), torch.zeros(())

    def loss(module, inputs, targets):
        nonlocal total
        outputs = module(inputs)
        now = cross_entropy(outputs, targets)
        total = total + now.detach()
        total += (outputs.argmax(1) == targets).sum()
        return now

    train(run, loss)
    assert run.engine.steps_left == 0


WEAK = {
    "a little of the mean": lambda x: x + 1e-6 * x.mean(0),
    "nothing where somebody is large": lambda x: torch.where((x > 1e3).any(), 0 * x, x),
}


@pytest.mark.parametrize("name", WEAK)
def test_what_mixes_weakly_or_rarely_before_the_model_is_refused(private, name):
    run = private()
    with pytest.raises(PdpsgdError, match="mix before the model"):
        train(run, lambda m, x, y: cross_entropy(m(WEAK[name](x)), y))
    run.engine.close()


def test_what_mixes_weakly_in_the_loss_is_refused(private):
    run = private()
    with pytest.raises(PdpsgdError, match="mix in the loss"):
        train(run, lambda m, x, y: cross_entropy(outputs := m(x), y) + 1e-5 * outputs.std())
    run.engine.close()
