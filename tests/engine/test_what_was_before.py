"""What lies in the model and its optimizer before a run does not pass around the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import pdpsgd
from pdpsgd.accounting import Exposure

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def backward_on_private_data(module, helpers):
    inputs, targets = helpers.data(40)
    functional.cross_entropy(module(inputs), targets).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_left_in_a_frozen_parameter_does_not_move_it(private, helpers, name):
    module = helpers.module()
    backward_on_private_data(module, helpers)
    module[0].weight.requires_grad_(False)
    before = module[0].weight.clone()
    run = private(module=module, optimizer=OPTIMIZERS[name])
    for inputs, targets in run.loader:  # without zero_grad
        functional.cross_entropy(module(inputs), targets).backward()
        run.optimizer.step()
    assert torch.equal(module[0].weight, before)


def test_a_gradient_left_in_a_parameter_of_no_module_does_not_move_it(private, helpers):
    stranger = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    stranger.grad = torch.ones(3)
    run = private(optimizer=lambda p: torch.optim.SGD([*p, stranger], lr=0.5))
    for inputs, targets in run.loader:  # without zero_grad
        functional.cross_entropy(run.module(inputs), targets).backward()
        run.optimizer.step()
    assert torch.equal(stranger, torch.ones(3))


def test_a_parameter_that_is_frozen_during_the_run_stays_as_it_is(private, helpers):
    module = helpers.module()
    run = private(module=module)
    for inputs, targets in run.loader:
        if run.engine.steps_taken == 3:
            module[0].weight.requires_grad_(False)
            before = module[0].weight.clone()
            module[0].weight.grad = torch.ones_like(before)
        functional.cross_entropy(module(inputs), targets).backward()
        run.optimizer.step()
    assert torch.equal(module[0].weight, before)


@pytest.mark.parametrize("name", ["momentum and decay", "Adam"])
def test_an_optimizer_that_remembers_gradients_is_warned_of_by_name(private, helpers, name):
    module = helpers.module()
    optimizer = OPTIMIZERS[name](module.parameters())
    backward_on_private_data(module, helpers)
    optimizer.step()
    run = private(module=module, optimizer=lambda _: optimizer)
    with pytest.warns(
        UserWarning, match=r"state for 0\.weight, 0\.bias, 2\.weight and 1 more before the first"
    ):
        run.train()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Rprop],
    ids=lambda kind: kind.__name__,
)
def test_a_new_optimizer_remembers_nothing(private, optimizer):
    private(optimizer=optimizer).train()  # warnings are errors


def test_what_private_steps_left_in_an_optimizer_is_no_reason_to_warn(private, helpers, tmp_path):
    module = helpers.module()
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    first = private(module=module, optimizer=lambda _: optimizer)
    first.train()
    first.engine.close()
    private(module=module, optimizer=lambda _: optimizer, plan=counting(helpers.plan(), first.plan)).train()


def counting(plan, *earlier):
    """The plan as if it had been made with the earlier ones as history."""
    history = tuple(Exposure(1.0, 0.5, 1.0, before.steps) for before in earlier)
    return replace(
        plan, levels=tuple(replace(level, history=history) for level in plan.levels)
    ).remember_proof()


def test_a_module_that_is_trained_again_without_history_is_warned_of(private, helpers):
    module = helpers.module()
    first = private(module=module)
    first.train()
    first.engine.close()
    again = private(module=module)
    with pytest.warns(
        UserWarning, match="taken 6 private steps in this process before, and the plan counts 0"
    ) as warned:
        next(iter(again.loader))
    assert warned[0].filename == __file__, "it points to the loop, not into the package"


def test_a_plan_that_counts_the_earlier_runs_is_no_reason_to_warn(private, helpers):
    module = helpers.module()
    plan = helpers.plan()
    for earlier in ((), (plan,), (plan, plan)):
        run = private(module=module, plan=counting(plan, *earlier))
        run.train()
        run.engine.close()
    third = private(module=module, plan=counting(plan, plan))
    with pytest.warns(UserWarning, match="taken 18 private steps"):
        third.train()


def test_going_on_with_a_run_is_no_reason_to_warn(private, helpers, tmp_path):
    module = helpers.module()
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    broken = private(module=module, optimizer=lambda _: optimizer)
    for batch in broken.loader:
        broken.step(*batch)
        if broken.engine.steps_taken == 3:
            broken.engine.save(tmp_path / "run.safetensors")
            break
    broken.engine.gradients.remove()
    later = private(module=module, optimizer=lambda _: optimizer)
    later.engine.resume(tmp_path / "run.safetensors")
    later.train()
    assert later.engine.steps_left == 0


def test_fitting_the_same_model_twice_is_warned_of_and_a_copy_is_not(helpers):
    import copy

    plan, (inputs, targets), model = helpers.plan(), helpers.data(40), helpers.module()
    untouched = copy.deepcopy(model)
    for start in (model, untouched):
        pdpsgd.fit(start, (inputs, targets), plan=plan, progress=False)
    with pytest.warns(UserWarning, match=r"plan this run with history=\[the earlier plan\]"):
        pdpsgd.fit(model, (inputs, targets), plan=plan, progress=False)


def test_a_plan_s_file_says_on_whom_it_was_carried_out(private, helpers):
    plan = helpers.plan(people=(10, 30), rates=(0.5, 0.5))
    assert plan.people_digest is None
    assert private(plan=plan).engine.plan.people_digest.startswith("places:")
    named = pdpsgd.Budgets([1.0] * 10 + [2.0] * 30, ids=range(100, 140))
    assert private(plan=plan, budgets=named).engine.plan.people_digest.startswith("ids:")
