"""Examples that mix between the loader and the model are found, and honest preparation of a batch is let through."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError


def mixup(inputs):
    share = np.random.default_rng(0).beta(0.4, 0.4)
    return share * inputs + (1 - share) * inputs[torch.randperm(len(inputs))]


def centred_in_place(inputs):
    inputs -= inputs.mean(0)
    return inputs


def first_row_everywhere(inputs):
    inputs[1:] = 0.9 * inputs[1:] + 0.1 * inputs[:1]
    return inputs


def written_into_another(inputs):
    held = torch.zeros_like(inputs)
    held[:] = inputs
    held[0] += inputs[-1]
    return held


def out_of_place(inputs):
    held = torch.empty(len(inputs), inputs.shape[1])
    torch.sub(inputs, inputs.mean(0), out=held)
    return held


MIXING = {
    "standardised": lambda inputs: (inputs - inputs.mean(0)) / inputs.std(0),
    "largest of the batch": lambda inputs: inputs / inputs.abs().max(),
    "mixup": mixup,
    "the next one": lambda inputs: inputs + inputs.roll(1, 0),
    "sorted": lambda inputs: inputs.sort(0).values,
    "centred in place": centred_in_place,
    "by index": first_row_everywhere,
    "into another": written_into_another,
    "out": out_of_place,
    "batch normalization": lambda inputs: functional.batch_norm(inputs, None, None, training=True),
}


def by_a_mask(inputs):
    inputs = inputs.clone()
    inputs[inputs < 0] = 0.0
    return inputs


def scaled_in_place(inputs):
    inputs.mul_(0.5).add_(1.0)
    return inputs


def with_noise(inputs):
    inputs = inputs + 0.1 * torch.randn_like(inputs)
    return torch.where(torch.rand(len(inputs), 1) < 0.5, inputs, -inputs)


HONEST = {
    "nothing": lambda inputs: inputs,
    "constants": lambda inputs: (inputs - 0.3) / 2.0,
    "moved and cast": lambda inputs: inputs.to("cpu").double().float(),
    "in place": scaled_in_place,
    "by a mask": by_a_mask,
    "its own norm": lambda inputs: inputs / inputs.norm(dim=1, keepdim=True),
    "random, one by one": with_noise,
    "dropout": lambda inputs: functional.dropout(inputs, 0.2),
    "stacked again": lambda inputs: torch.stack([row * 2 for row in inputs]),
}


def loop(run, prepare):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        functional.cross_entropy(run.module(prepare(inputs)), targets).backward()
        run.optimizer.step()


CRITERIA = {"watched": {}, "with a criterion": {"criterion": functional.cross_entropy}}


@pytest.mark.parametrize("options", CRITERIA.values(), ids=CRITERIA)
@pytest.mark.parametrize("name", MIXING)
def test_a_loop_that_mixes_examples_before_the_model_is_refused(private, flat, name, options):
    run = private(**options)
    before = flat(run.module).clone()
    with pytest.raises(PdpsgdError, match="Examples mix before the model in this loop"):
        loop(run, MIXING[name])
    assert run.engine.steps_taken == 0
    assert torch.equal(flat(run.module), before)
    run.engine.close()


@pytest.mark.parametrize("options", CRITERIA.values(), ids=CRITERIA)
@pytest.mark.parametrize("name", HONEST)
def test_preparing_examples_one_by_one_passes_and_changes_nothing(private, helpers, flat, name, options):
    data = helpers.data(40)
    watched, unwatched = (
        private(data=tuple(part.clone() for part in data), engine=PrivacyEngine(watch_loop=watch), **options)
        for watch in (True, False)
    )
    loop(watched, HONEST[name])
    loop(unwatched, HONEST[name])
    assert watched.engine.steps_left == 0
    assert torch.equal(flat(watched.module), flat(unwatched.module))


@dataclass
class Held:
    inputs: Tensor
    targets: Tensor
    note: str = ""


def columns(items):
    return torch.stack([inputs for inputs, _ in items]), torch.stack([targets for _, targets in items])


FORMS = {
    "dict": lambda items: dict(zip(("inputs", "targets"), columns(items), strict=True)),
    "user's dict": lambda items: UserDict(zip(("inputs", "targets"), columns(items), strict=True)),
    "dataclass": lambda items: Held(*columns(items)),
    "nested": lambda items: [{"inputs": columns(items)[0]}, (columns(items)[1], "note")],
}


def taken_apart(batch):
    if isinstance(batch, Held):
        return batch.inputs, batch.targets
    if isinstance(batch, list):
        return batch[0]["inputs"], batch[1][0]
    return batch["inputs"], batch["targets"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mixing", [False, True], ids=["honest", "mixing"])
def test_batches_of_any_form_are_watched(private, helpers, form, mixing):
    loader = DataLoader(helpers.Rows(helpers.data(40)), collate_fn=FORMS[form])
    run = private(data=loader)

    def train():
        for batch in run.loader:
            inputs, targets = taken_apart(batch)
            run.step(inputs - inputs.mean(0) if mixing else inputs - 1.0, targets)

    if not mixing:
        train()
        assert run.engine.steps_left == 0
        return
    with pytest.raises(PdpsgdError, match="Examples mix before the model"):
        train()
    run.engine.close()


def test_mixed_targets_are_refused_though_the_loss_cannot_be_done_for_one_example(private):
    run = private()

    def train():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            mixed = 0.7 * functional.one_hot(targets, 3) + 0.3 * functional.one_hot(
                targets[torch.randperm(len(targets))], 3
            )
            functional.cross_entropy(run.module(inputs), mixed).backward()
            run.optimizer.step()

    with pytest.raises(PdpsgdError, match="Examples mix in the loss of this loop"):
        train()
    run.engine.close()


@pytest.mark.parametrize(
    "prepare",
    [
        lambda inputs: inputs - float(inputs.mean()),
        lambda inputs: torch.from_numpy(inputs.numpy() - inputs.numpy().mean(0)),
        lambda inputs: inputs - torch.tensor(inputs.mean(0).tolist()),
    ],
    ids=["a number", "numpy", "a list"],
)
def test_what_leaves_torch_before_the_model_cannot_be_followed_and_a_warning_says_so(private, prepare):
    run = private()
    with pytest.warns(UserWarning, match="before the model could not be checked"):
        loop(run, prepare)


def test_a_branch_that_depends_on_the_examples_is_warned_of(private):
    run = private()
    with pytest.warns(UserWarning, match="could not be checked") as found:
        loop(run, lambda inputs: inputs / 255 if inputs[0].sum() > 0 else inputs / 2)
    assert any("before the model could not be checked" in str(warning.message) for warning in found)


def test_looking_at_a_batch_or_at_the_loss_needs_no_warning(private):
    run = private()
    seen = []
    for inputs, targets in run.loader:
        seen.append(inputs.tolist())
        run.optimizer.zero_grad()
        loss = functional.cross_entropy(run.module(inputs), targets)
        seen.append(loss.item())
        loss.backward()
        run.optimizer.step()
    assert run.engine.steps_left == 0


@pytest.mark.parametrize("tiled", [False, True])
def test_views_of_an_example_stand_one_after_the_other(private, tiled):
    run = private(views=2, criterion=functional.cross_entropy)

    def train():
        for inputs, targets in run.loader:
            twice = [
                part.repeat(2, *[1] * (part.dim() - 1)) if tiled else part.repeat_interleave(2, 0)
                for part in (inputs, targets)
            ]
            run.step(*twice)

    if not tiled:
        train()
        assert run.engine.steps_left == 0
        return
    with pytest.raises(PdpsgdError, match="repeat_interleave"):
        train()
    run.engine.close()


class LearnedTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))

    def forward(self, outputs, targets):
        return functional.cross_entropy(outputs * self.logarithm.exp(), targets)


def test_a_criterion_with_parameters_of_its_own_is_refused(private):
    with pytest.raises(PdpsgdError, match=r"without trainable parameters of its own.*Got logarithm"):
        private(criterion=LearnedTemperature())
    frozen = LearnedTemperature().requires_grad_(False)
    run = private(criterion=frozen)
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        frozen(run.module(inputs), targets).backward()
        run.optimizer.step()
    assert run.engine.steps_left == 0


@pytest.mark.parametrize("options", CRITERIA.values(), ids=CRITERIA)
@pytest.mark.parametrize("place", ["before the model", "after it"])
def test_trainable_parameters_beside_the_module_are_refused(private, place, options):
    run, beside = private(**options), nn.Linear(5, 5) if place == "before the model" else nn.Linear(3, 3)
    order = (beside, run.module) if place == "before the model" else (run.module, beside)

    def train():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            functional.cross_entropy(order[1](order[0](inputs)), targets).backward()
            run.optimizer.step()

    with pytest.raises(PdpsgdError, match=r"of the private module only\. Got one of shape"):
        train()
    assert run.engine.steps_taken == 0
    run.engine.close()


def test_a_frozen_network_beside_the_module_is_fine(private, helpers):
    run, features = private(), nn.Linear(5, 5).requires_grad_(False)
    for inputs, targets in run.loader:
        run.step(features(inputs), targets)
    assert run.engine.steps_left == 0


def test_a_data_loader_of_tensors_is_watched_too(private, helpers):
    run = private(data=DataLoader(TensorDataset(*helpers.data(40)), pin_memory=False))
    with pytest.raises(PdpsgdError, match="Examples mix before the model"):
        loop(run, MIXING["standardised"])
    run.engine.close()
