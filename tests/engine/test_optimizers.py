"""Any torch optimizer and scheduler, the ways of Opacus, and a model that loads without pdpsgd."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from pdpsgd import PrivacyEngine

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 * i} for i, q in enumerate(p)], lr=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_sees_the_noisy_gradient_and_nothing_else(private, helpers, flat, name):
    """A plain optimizer that is fed the released gradients ends at the same weights."""
    run = private(optimizer=OPTIMIZERS[name])
    twin = helpers.module()
    plain = OPTIMIZERS[name](twin.parameters())
    for batch in run.loader:
        run.step(*batch)
        for parameter, private_parameter in zip(twin.parameters(), run.module.parameters(), strict=True):
            parameter.grad = private_parameter.grad.clone()
        plain.step()
    assert torch.equal(flat(twin), flat(run.module))


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, factor=0.1), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("built_on", ["original", "private"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_on_either_optimizer(private, name, built_on):
    made = []

    def optimizer(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.5, momentum=0.5))
        return made[-1]

    run = private(optimizer=optimizer)
    scheduler = SCHEDULERS[name](made[0] if built_on == "original" else run.optimizer)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.5)
    expected = SCHEDULERS[name](plain)
    for batch in run.loader:
        run.step(*batch)
        scheduler.step()
        plain.step()
        expected.step()
        assert run.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_scheduler_built_before_make_private_works(helpers):
    module, data, plan = helpers.module(), helpers.data(40), helpers.plan()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    module, private_optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=data, plan=plan, seed=1
    )
    for inputs, targets in loader:
        private_optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        private_optimizer.step()
        scheduler.step()
    assert private_optimizer.param_groups[0]["lr"] == 0.5**6


def test_with_limited_batches_a_scheduler_can_ask_whether_the_step_was_a_true_one(private):
    run = private(max_physical_batch_size=4)
    scheduler = lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    for batch in run.loader:
        run.step(*batch)
        if run.optimizer.took_step:
            scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**6


def test_step_hooks_and_closures_work(private, flat):
    usual, run = private(), private()
    usual.train()
    seen = []
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for inputs, targets in run.loader:

        def closure(inputs=inputs, targets=targets):
            run.optimizer.zero_grad()
            loss = functional.cross_entropy(run.module(inputs), targets)
            loss.backward()
            return loss

        assert run.optimizer.step(closure) is not None
    assert len(seen) == 6
    assert torch.equal(flat(run.module), flat(usual.module))


def test_the_optimizers_state_loads_into_a_plain_one(private, helpers):
    run = private(optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    run.train()
    plain = torch.optim.Adam(helpers.module().parameters())
    plain.load_state_dict(run.optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.01
    assert "Adam" in repr(run.optimizer)


def test_a_loop_in_the_ways_of_opacus_runs_unchanged(helpers):
    torch.manual_seed(0)
    inputs, targets = helpers.data(400)
    plan = helpers.plan(people=400, rates=(0.25,), steps=100, noise=1.0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_loader = DataLoader(TensorDataset(inputs, targets), batch_size=100, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, plan=plan, max_grad_norm=1.0, seed=0
    )
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()

    assert (model(inputs).argmax(1) == targets).float().mean() > 0.85


def test_the_trained_model_loads_without_pdpsgd(private, helpers, flat):
    bare = helpers.module()
    run = private()
    assert list(run.module.state_dict()) == list(bare.state_dict())
    run.train()
    bare.load_state_dict(run.module.state_dict())
    assert torch.equal(flat(bare), flat(run.module))
    run.engine.close()
    assert b"pdpsgd" not in pickle.dumps(run.module)


def test_frozen_parameters_stay_as_they_are(private, helpers):
    module = helpers.module()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.clone()
    run = private(module=module)
    run.train()
    assert torch.equal(module[0].weight, before)
    assert module[0].weight.grad is None


def test_parameters_outside_the_optimizer_stay_as_they_are(private, helpers):
    module = helpers.module()
    before = module[0].weight.clone()
    run = private(module=module, optimizer=lambda _: torch.optim.SGD(module[2].parameters(), lr=0.5))
    run.train()
    assert torch.equal(module[0].weight, before)
