"""What one step does: clip each person's gradient, add noise once, divide by a public constant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.source import RandomSource

# Noise so small that it can be ignored: for looking at sums.
QUIET = 1e-12


def gradients_one_by_one(module, inputs, targets):
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(module(x[None]), y[None])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]))
    return torch.stack(rows)


def released(run):
    return torch.cat([parameter.grad.reshape(-1) for parameter in run.module.parameters()])


def test_the_sum_of_clipped_gradients_is_divided_by_the_plans_expected_batch_size(private, helpers):
    run = private(plan=helpers.plan(noise=QUIET, max_grad_norm=0.3))
    reference = helpers.module()
    inputs, targets = next(iter(run.loader))
    supplied = run.engine.execution.current.records >= 0
    run.step(inputs, targets)
    rows = gradients_one_by_one(reference, inputs[supplied], targets[supplied])
    clipped = rows * torch.clamp(0.3 / rows.norm(dim=1, keepdim=True), max=1)
    assert supplied.sum() != run.plan.rounds[0].expected_batch_size
    torch.testing.assert_close(released(run), clipped.sum(0) / 20.0, rtol=2e-3, atol=1e-5)


def test_each_level_is_clipped_to_its_own_norm(private, helpers):
    plan = helpers.plan(
        people=(20, 20), rates=(1.0, 1.0), clip_scales=(1.0, 0.25), noise=QUIET, max_grad_norm=0.1
    )
    run = private(plan=plan)
    reference = helpers.module()
    inputs, targets = helpers.data(40)
    for batch in run.loader:
        run.step(*batch)
        break
    rows = gradients_one_by_one(reference, inputs, targets)
    norms = torch.cat([torch.full((20, 1), 0.1), torch.full((20, 1), 0.025)])
    limits = norms * (1 - 2**-11) - 0.1 * 2**-10  # with room for rounding
    clipped = rows * torch.clamp(limits / rows.norm(dim=1, keepdim=True), max=1)
    torch.testing.assert_close(released(run), clipped.sum(0) / 40.0, rtol=1e-3, atol=1e-6)


def test_the_noise_is_that_of_the_plan(private, helpers):
    """A chi-square test over 60 steps of 75 parameters; false alarm 1e-7 (5.3 standard deviations)."""
    plan = helpers.plan(noise=1.7, steps=60, max_grad_norm=0.2)
    quiet = helpers.plan(noise=QUIET, steps=60, max_grad_norm=0.2)
    frozen = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    loud, still = private(plan=plan, **frozen), private(plan=quiet, **frozen)
    noise = []
    for a, b in zip(loud.loader, still.loader, strict=True):
        loud.step(*a)
        still.step(*b)
        noise.append(released(loud) - released(still))
    deviations = torch.cat(noise) * 20.0 / (1.7 * 0.2)
    count = deviations.numel()
    assert abs(float((deviations**2).sum()) - count) < 5.3 * math.sqrt(2 * count)
    assert abs(float(deviations.sum())) < 5.3 * math.sqrt(count)


def test_noise_differs_from_step_to_step(private, helpers):
    run = private(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    seen = []
    for batch in run.loader:
        run.step(*batch)
        seen.append(released(run))
    assert len({tuple(gradient.tolist()) for gradient in seen}) == run.plan.steps


def test_an_empty_batch_still_gets_its_noise(private, helpers, flat):
    run = private(plan=helpers.plan(people=40, rates=(1e-9,), noise=1.0, steps=3))
    sizes, noise = [], []
    for inputs, targets in run.loader:
        sizes.append(len(inputs))
        assert inputs.shape[1:] == (5,)
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.int64
        run.step(inputs, targets)  # the mean over nothing is NaN, and so is what backward gives
        noise.append(released(run))
        assert run.optimizer.took_step
    assert sizes == [0, 0, 0]
    assert all(gradient.isfinite().all() and gradient.abs().min() > 0 for gradient in noise)
    assert flat(run.module).isfinite().all()
    assert run.engine.steps_left == 0


def test_an_empty_batch_that_the_loop_skips_gets_its_noise_all_the_same(private, helpers, flat):
    plan = helpers.plan(people=40, rates=(1e-9,), steps=3)
    stepped, skipping = private(plan=plan), private(plan=plan)
    stepped.train()
    for inputs, _ in skipping.loader:
        if len(inputs) == 0:
            continue
    assert skipping.engine.steps_left == 0
    torch.testing.assert_close(flat(skipping.module), flat(stepped.module), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_persons_nan_or_infinite_gradient_counts_as_zero(private, helpers, bad):
    inputs, targets = helpers.data(40)
    broken = inputs.clone()
    broken[5] = bad
    plan = helpers.plan(rates=(1.0,), noise=QUIET, steps=1)
    run = private(plan=plan, data=(broken, targets))
    reference = helpers.module()
    run.train()
    others = torch.arange(40) != 5
    rows = gradients_one_by_one(reference, inputs[others], targets[others])
    clipped = rows * torch.clamp(1 / rows.norm(dim=1, keepdim=True), max=1)
    torch.testing.assert_close(released(run), clipped.sum(0) / 40.0, rtol=2e-3, atol=1e-5)


def test_what_lies_in_grad_before_the_step_is_never_used(private, helpers, flat):
    clean, dirty = private(), private()
    for a, b in zip(clean.loader, dirty.loader, strict=True):
        clean.step(*a)
        dirty.optimizer.zero_grad()
        nn.functional.cross_entropy(dirty.module(b[0]), b[1]).backward()
        for parameter in dirty.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e6)
        dirty.optimizer.step()
    torch.testing.assert_close(flat(dirty.module), flat(clean.module), rtol=0, atol=0)


def test_a_sum_loss_trains_the_same_when_said_so(private, helpers, flat):
    mean, total = private(), private(loss_reduction="sum")
    mean.train()
    for inputs, targets in total.loader:
        total.optimizer.zero_grad()
        nn.functional.cross_entropy(total.module(inputs), targets, reduction="sum").backward()
        total.optimizer.step()
    torch.testing.assert_close(flat(total.module), flat(mean.module), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 3, 7, 1000])
def test_limited_physical_batches_give_the_same_result(private, helpers, flat, limit):
    whole, chunked = private(), private(max_physical_batch_size=limit)
    whole.train()
    true_steps, largest, sizes = 0, 0, {}
    for inputs, targets in chunked.loader:
        largest = max(largest, len(inputs))
        sizes.setdefault(true_steps, []).append(len(inputs))
        chunked.step(inputs, targets)
        true_steps += chunked.optimizer.took_step
    assert largest <= limit
    assert all(max(pieces) - min(pieces) < len(pieces) for pieces in sizes.values())
    assert true_steps == chunked.plan.steps
    torch.testing.assert_close(flat(chunked.module), flat(whole.module), rtol=1e-4, atol=1e-6)


def test_zeroing_gradients_in_place_between_chunks_loses_nothing(private, helpers, flat):
    whole, chunked = private(), private(max_physical_batch_size=3)
    whole.train()
    for inputs, targets in chunked.loader:
        chunked.optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(chunked.module(inputs), targets).backward()
        chunked.optimizer.step()
    torch.testing.assert_close(flat(chunked.module), flat(whole.module), rtol=1e-4, atol=1e-6)


def test_another_norm_than_the_plans_scales_the_noise_with_it(private, helpers):
    plan = helpers.plan(people=40, rates=(1e-9,), steps=1)
    one, eight = private(plan=plan), private(plan=plan, max_grad_norm=8.0)
    one.train()
    eight.train()
    torch.testing.assert_close(released(eight), released(one) * 8)


def test_bfloat16_models_get_their_noise_in_float64(private, helpers):
    inputs, targets = helpers.data(40)
    module = helpers.module().to(torch.bfloat16)
    run = private(module=module, data=(inputs.to(torch.bfloat16), targets), loss_reduction="sum")
    for batch in run.loader:
        nn.functional.cross_entropy(run.module(batch[0]), batch[1], reduction="sum").backward()
        run.optimizer.step()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in run.module.parameters())
    assert all(total.dtype == torch.float64 for total in run.engine.gradients.sums.values())


def test_without_a_seed_two_runs_differ_and_may_be_released(private, flat):
    one, other = private(seed=None), private(seed=None)
    one.train()
    other.train()
    assert not torch.equal(flat(one.module), flat(other.module))
    assert one.engine.release_note is None


def test_a_seed_makes_a_run_reproducible_and_marks_it_as_not_for_release(private, flat):
    one, other = private(seed=11), private(seed=11)
    one.train()
    other.train()
    assert torch.equal(flat(one.module), flat(other.module))
    assert "not for release" in one.engine.release_note


def test_a_run_is_cryptographic_unless_asked_otherwise_and_then_not_for_release(private, flat):
    run, other = private(seed=None), private(seed=None, secure=False)
    for one in (run, other):
        one.train()
        assert flat(one.module).isfinite().all()
    assert run.engine.source.cryptographic
    assert run.engine.release_note is None
    assert not other.engine.source.cryptographic
    assert "not for release" in other.engine.release_note


def test_a_source_can_be_given(private, flat):
    run = private(source=RandomSource.from_seed(11), seed=None)
    run.train()
    other = private(seed=11)
    other.train()
    assert torch.equal(flat(run.module), flat(other.module))


def test_dropout_repeats_with_the_step_not_with_the_process(private, helpers, flat):
    def run(noise_before):
        module = nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.1)
        made = private(module=module)
        for inputs, targets in made.loader:
            made.step(inputs, targets)
            torch.rand(noise_before)
        return flat(made.module)

    assert torch.equal(run(0), run(17))


def test_parameters_that_are_not_the_modules_are_refused(private):
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(PdpsgdError, match=r"trainable parameters of the private module only.*shape \(3,\)"):
        private(optimizer=lambda parameters: torch.optim.SGD([*parameters, stranger], lr=0.1))
    run = private()
    with pytest.raises(PdpsgdError, match="moved by a gradient without noise"):
        run.optimizer.add_param_group({"params": [stranger]})
    fresh = private()
    fresh.optimizer.original.add_param_group({"params": [stranger]})
    with pytest.raises(PdpsgdError, match="moved by a gradient without noise"):
        fresh.train()
