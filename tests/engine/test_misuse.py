"""What a loop may do wrong: each of these is refused or correctly accounted, never silently passed over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError


def test_two_backwards_without_a_step_are_refused(private):
    run = private()
    inputs, targets = next(iter(run.loader))
    functional.cross_entropy(run.module(inputs), targets).backward()
    with pytest.raises(PdpsgdError, match="Two backward passes"):
        functional.cross_entropy(run.module(inputs), targets).backward()


def test_a_backward_that_was_given_up_with_zero_grad_does_not_count(private, flat):
    usual, hesitant = private(), private()
    usual.train()
    for inputs, targets in hesitant.loader:
        functional.cross_entropy(hesitant.module(inputs) * 3, targets).backward()
        hesitant.step(inputs, targets)
    assert torch.equal(flat(hesitant.module), flat(usual.module))


def test_a_step_without_backward_is_refused(private):
    run = private()
    next(iter(run.loader))
    with pytest.raises(PdpsgdError, match="backward"):
        run.optimizer.step()


def test_a_step_without_a_batch_is_refused(private, helpers):
    run = private()
    inputs, targets = helpers.data(40)
    functional.cross_entropy(run.module(inputs), targets).backward()
    with pytest.raises(PdpsgdError, match="batch from the private loader"):
        run.optimizer.step()


def test_a_second_step_on_the_same_batch_is_refused(private):
    run = private()
    inputs, targets = next(iter(run.loader))
    run.step(inputs, targets)
    with pytest.raises(PdpsgdError, match=r"one optimizer\.step\(\) per batch"):
        run.step(inputs, targets)


@pytest.mark.parametrize(
    "change",
    [lambda x: x[1:], lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x[:1]])],
    ids=["cut", "doubled", "extended"],
)
def test_a_batch_that_was_changed_in_between_is_refused(private, change):
    run = private()
    inputs, targets = next(iter(run.loader))
    with pytest.raises(PdpsgdError, match="batch as the loader gave it"):
        run.step(change(inputs), change(targets))


def test_more_steps_than_planned_are_refused(private, flat):
    run = private()
    run.train()
    after = flat(run.module)
    with pytest.warns(UserWarning, match="this pass over the loader is empty"):
        assert list(run.loader) == []
    with pytest.raises(PdpsgdError, match="at most the plan's 6 steps"):
        run.optimizer.step()
    assert torch.equal(flat(run.module), after)


def test_a_batch_that_was_not_stepped_stops_the_loop(private):
    run = private()
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(PdpsgdError, match="must not be left out because of what is in it"):
        next(batches)


def test_a_step_that_was_forfeited_by_name_counts_as_taken(private):
    run = private()
    for index, (inputs, targets) in enumerate(run.loader):
        if index % 2:
            run.engine.forfeit_step()
        else:
            run.step(inputs, targets)
    assert run.engine.steps_left == 0
    assert run.engine.execution.forfeited == [1, 3, 5]


def test_there_has_to_be_a_step_to_forfeit(private):
    run = private()
    with pytest.raises(PdpsgdError, match="Expected a current batch that could be skipped"):
        run.engine.forfeit_step()
    next(iter(run.loader))
    run.engine.forfeit_step()
    assert run.engine.steps_taken == 1
    with pytest.raises(PdpsgdError, match="Expected a current batch that could be skipped"):
        run.engine.forfeit_step()
    assert run.engine.steps_taken == 1


def test_a_pass_that_was_overtaken_after_a_forfeited_step_is_not_gone_on_with(private):
    """Its next batch is of a step whose noise was given out."""
    run = private()
    first, second = iter(run.loader), iter(run.loader)
    next(first)
    run.engine.forfeit_step()
    run.step(*next(second))
    with pytest.raises(PdpsgdError, match="one pass over the private loader at a time"):
        next(first)


def test_a_step_forfeited_after_its_first_chunk_leaves_nothing_behind(private, flat):
    run = private(max_physical_batch_size=4)
    batches = iter(run.loader)
    run.step(*next(batches))
    run.engine.forfeit_step()
    run.step(*next(batches))
    assert run.engine.execution.current.step == 1
    assert run.engine.steps_taken == 1


def test_peeking_at_a_batch_costs_nothing_and_it_comes_again(private, flat):
    usual, curious = private(), private()
    usual.train()
    seen, _ = next(iter(curious.loader))
    again, _ = next(iter(curious.loader))
    assert torch.equal(seen, again)
    curious.train()
    assert torch.equal(flat(curious.module), flat(usual.module))


def test_starting_a_pass_anew_in_the_middle_of_a_step_begins_the_step_anew(private, flat):
    usual, restarted = private(max_physical_batch_size=5), private(max_physical_batch_size=5)
    usual.train()
    restarted.step(*next(iter(restarted.loader)))
    restarted.train()
    assert torch.equal(flat(restarted.module), flat(usual.module))


def test_two_passes_at_once_are_refused(private):
    run = private()
    first, second = iter(run.loader), iter(run.loader)
    next(first)
    run.step(*next(second))
    with pytest.raises(PdpsgdError, match="one pass over the private loader at a time"):
        next(first)


def test_stopping_in_the_middle_and_going_on_later_takes_each_step_once(private, flat):
    usual, broken = private(), private()
    usual.train()
    for batch in broken.loader:
        broken.step(*batch)
        if broken.engine.steps_taken == 2:
            break
    assert len(broken.loader) == 4
    broken.train()
    assert broken.engine.steps_left == 0
    assert torch.equal(flat(broken.module), flat(usual.module))


def test_evaluating_in_between_changes_nothing(private, helpers, flat):
    usual, watched = private(), private()
    usual.train()
    inputs, _ = helpers.data(40)
    for batch in watched.loader:
        watched.module.eval()
        watched.module(inputs)
        with torch.no_grad():
            watched.module(inputs)
        watched.module.train()
        watched.step(*batch)
        with torch.no_grad():
            watched.module(inputs)
    assert torch.equal(flat(watched.module), flat(usual.module))


def test_training_in_evaluation_mode_is_refused_with_a_hint(private):
    run = private()
    run.module.eval()
    with pytest.raises(PdpsgdError, match="evaluation mode"):
        run.step(*next(iter(run.loader)))


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs, targets: functional.cross_entropy(
            outputs, targets, weight=torch.tensor([1.0, 5.0, 9.0])
        ),
        lambda outputs, targets: functional.cross_entropy(outputs, targets) + outputs.std(),
        lambda outputs, targets: functional.cross_entropy(outputs - outputs.mean(0), targets),
        lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=0),
    ],
    ids=["class weights", "batch penalty", "centred outputs", "ignored targets"],
)
def test_a_criterion_in_which_examples_mix_is_refused_at_the_first_batch(private, criterion):
    run = private(criterion=criterion)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        next(iter(run.loader))


def test_an_honest_criterion_passes_the_probe_and_changes_nothing(private, flat):
    usual, probed = private(), private(criterion=functional.cross_entropy)
    usual.train()
    probed.train()
    assert torch.equal(flat(probed.module), flat(usual.module))


def test_a_criterion_needs_batches_of_inputs_and_targets(private, helpers):
    inputs, targets = helpers.data(40)
    run = private(data=(inputs, targets, targets), criterion=functional.cross_entropy)
    with pytest.raises(PdpsgdError, match=r"Expected batches of \(inputs, targets\), to try the criterion"):
        next(iter(run.loader))
    run.engine.close()


def test_the_engine_can_be_asked_to_check_a_loss(private, helpers):
    run = private()
    inputs, targets = helpers.data(8)
    assert run.engine.check(functional.cross_entropy, inputs, targets)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        run.engine.check(
            lambda outputs, y: functional.cross_entropy(outputs - outputs.mean(0), y), inputs, targets
        )


def test_batch_norm_is_refused_by_name(private):
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(PdpsgdError, match="BatchNorm1d"):
        private(module=module)


def test_one_engine_makes_one_run(private):
    run = private()
    with pytest.raises(PdpsgdError, match="new PrivacyEngine for every run"):
        private(engine=run.engine)


def test_an_optimizer_that_looks_twice_is_refused(private):
    with pytest.raises(PdpsgdError, match="LBFGS"):
        private(optimizer=torch.optim.LBFGS)


def test_a_private_optimizer_is_not_made_private_again(private):
    run = private()
    with pytest.raises(PdpsgdError, match="not private yet"):
        private(optimizer=lambda parameters: run.optimizer)


def test_a_module_inside_data_parallel_is_refused(private, helpers):
    with pytest.raises(PdpsgdError, match="bare module"):
        private(module=nn.DataParallel(helpers.module()))


@pytest.mark.parametrize("name", ["max_physical_batch_size", "steps_per_epoch"])
def test_nonsense_sizes_are_refused(private, name):
    for value in (0, -1, 1.5, True):
        with pytest.raises(PdpsgdError, match=f"Expected {name} to be a whole number"):
            private(**{name: value})


def test_a_closed_engine_gives_the_module_back_and_forgets_the_key(private, helpers):
    run = private()
    run.train()
    run.engine.close()
    assert "forward" not in run.module[0].__dict__
    with pytest.raises(PdpsgdError, match="erased"):
        run.engine.source.key_bytes()


def test_a_fresh_engine_says_that_nothing_was_made_private():
    with pytest.raises(PdpsgdError, match="make_private"):
        PrivacyEngine().spent()


def test_a_plan_with_fresh_models_needs_to_be_told_how(private, helpers):
    plan = helpers.plan(steps=(2, 2), fresh=True)
    with pytest.raises(PdpsgdError, match="on_fresh_model"):
        private(plan=plan)


def test_a_fresh_model_starts_without_the_old_ones_momentum(private, helpers, flat):
    start = {}
    told = []

    def reset(index):
        told.append(index)
        run.module.load_state_dict(start)

    run = private(
        plan=helpers.plan(steps=(2, 3), fresh=True),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        on_fresh_model=reset,
    )
    start = {name: value.clone() for name, value in run.module.state_dict().items()}
    lengths = []
    for _ in range(5):
        next(iter(run.loader))  # looking at a batch does not begin its round twice
        batch = next(iter(run.loader))
        lengths.append(len(run.optimizer.state))
        run.step(*batch)
    assert told == [1]
    assert lengths == [0, 4, 0, 4, 4]


def test_people_of_a_level_are_drawn_at_their_own_levels_rate(private, helpers):
    """Level 0 has rate 0 and level 1 rate 1: exactly the people of level 1 are in every batch."""
    plan = helpers.plan(people=(15, 25), rates=(0.0, 1.0), steps=3)
    run = private(plan=plan)
    inputs, _ = helpers.data(40)
    for batch in run.loader:
        supplied = run.engine.execution.current.records >= 0  # not a placeholder
        assert sorted(batch[0][supplied].tolist()) == sorted(inputs[15:].tolist())
        run.step(*batch)


def test_budgets_in_another_order_than_the_levels_find_their_own_level(private, helpers):
    plan = helpers.plan(people=(15, 25), rates=(0.0, 1.0), steps=1)
    order = np.random.default_rng(5).permutation(40)
    budgets = helpers.budgets(plan)
    shuffled = type(budgets)(budgets.epsilon[order], ids=order)
    run = private(plan=plan, budgets=shuffled)
    inputs, _ = helpers.data(40)
    batch, _ = next(iter(run.loader))
    batch = batch[run.engine.execution.current.records >= 0]
    assert sorted(batch.tolist()) == sorted(inputs[budgets.epsilon[order] == 2.0].tolist())


def test_a_module_in_shards_is_refused(private, tmp_path):
    """FSDP2 averages gradients over ranks as they arise, before anybody could clip them."""
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        with pytest.raises(PdpsgdError, match=r"0\.weight in shards"):
            private(module=fully_shard(module, mesh=mesh))
    finally:
        torch.distributed.destroy_process_group()
