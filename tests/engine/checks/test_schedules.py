"""A schedule may look like the size of the batch for a while; only what turns when sizes do is refused."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from pdpsgd.engine.checks.sizes import Course
from pdpsgd.errors import PdpsgdError

cross_entropy = functional.cross_entropy

SCHEDULES = {
    "linear": lambda t, steps: 1 - t / steps,
    "linear to a tenth": lambda t, steps: 1 - 0.9 * t / steps,
    "warm-up": lambda t, steps: min(1.0, 0.1 * (t + 1)),
    "warm-up over all steps": lambda t, steps: (t + 1) / steps,
    "cosine": lambda t, steps: (1 + math.cos(math.pi * t / steps)) / 2,
    "exponential": lambda t, steps: 0.9**t,
    "halved": lambda t, steps: 0.5**t,
    "halved at times": lambda t, steps: 0.5 ** (t // 3),
    "a tenth at times": lambda t, steps: 0.1 ** (t // 5),
    "inverse": lambda t, steps: 1 / (1 + t),
    "inverse root": lambda t, steps: (t + 1) ** -0.5,
    "polynomial": lambda t, steps: (1 - t / steps) ** 2,
    "whole numbers": lambda t, steps: float(t + 1),
}
SIZES = st.lists(st.integers(4, 32).map(lambda size: 4 * size), min_size=2, max_size=12)


def told(sizes, numbers):
    """What is said at each batch of another size than the first, until it is settled."""
    batches = zip(sizes, numbers, strict=True)
    size, number = next(batches)
    course = Course(size, [("mul", [number])])
    for later, other in batches:
        if course.waits or later != size:
            goes = course.goes_with_size(later, [("mul", [other])])
            if goes is not None:
                return goes
    return None


def turns(sizes):
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    return min(steps, default=0) < 0 < max(steps, default=0)


@given(
    sizes=SIZES, unit=st.sampled_from([4, 8, 32, 64]), first=st.integers(0, 20), steps=st.integers(32, 200)
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_is_taken_for_the_size(name, sizes, unit, first, steps):
    numbers = [0.7 * SCHEDULES[name](first + t, steps) for t in range(len(sizes))]
    assert told([unit * size // 4 for size in sizes], numbers) is not True


@given(sizes=SIZES, data=st.data())
def test_no_numbers_that_go_one_way_are_taken_for_the_size_though_they_keep_to_it_for_a_while(sizes, data):
    power = data.draw(st.sampled_from([1, -1, 0.5, -0.5, 2, -2]))
    kept = data.draw(st.integers(1, len(sizes)))
    numbers = [0.7 * size**power for size in sizes[:kept]]
    while turns(numbers):
        numbers.pop()
    down = numbers[-1] < numbers[0]
    numbers += [numbers[-1] * (0.9 if down else 1.1) ** t for t in range(1, 1 + len(sizes) - len(numbers))]
    assert told(sizes, numbers) is not True


LAWS = {
    "a share": lambda size: size / 40,
    "its root": lambda size: 0.3 * size**0.5,
    "an inverse": lambda size: 5 / size,
    "an inverse square": lambda size: 7 / size**2,
    "and a constant": lambda size: size + 10.5,
    "over it and a constant": lambda size: 1 / (size + 10),
}


@given(sizes=SIZES)
@pytest.mark.parametrize("name", LAWS)
def test_what_follows_the_size_is_told_once_sizes_have_turned(name, sizes):
    differ = turns(sizes)
    assert told(sizes, [LAWS[name](size) for size in sizes]) is (True if differ else None)


@given(sizes=SIZES.filter(lambda sizes: len(set(sizes)) > 1), power=st.sampled_from([1, -1]))
def test_a_number_that_is_the_size_is_told_at_once(sizes, power):
    assert told(sizes, [size**power for size in sizes]) is True


def share(targets):
    return len(targets) / 64  # computed outside torch


PROPORTIONAL = {
    "mean times a share": ("mean", lambda m, x, y: cross_entropy(m(x), y) * share(y)),
    "mean times the root of a share": ("mean", lambda m, x, y: cross_entropy(m(x), y) * share(y) ** 0.5),
    "sum over more than the size": (
        "sum",
        lambda m, x, y: cross_entropy(m(x), y, reduction="sum") / (len(x) + 10),
    ),
    "inputs times a share": ("mean", lambda m, x, y: cross_entropy(m(x * share(y)), y)),
    "inputs and loss": ("mean", lambda m, x, y: cross_entropy(m(x * share(y)), y) * share(y)),
}


def train(run, loss):
    """Train, and note the sizes of batches."""
    sizes = []
    for step, (inputs, targets) in enumerate(run.loader):
        sizes.append(run.engine.execution.current.size)  # the loop itself does not ask
        run.optimizer.zero_grad()
        loss(run.module, inputs, targets, step).backward()
        run.optimizer.step()
    return sizes


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 20}], ids=["whole", "cut"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROPORTIONAL)
def test_a_loop_in_proportion_to_the_size_is_refused_when_sizes_have_turned(
    private, helpers, name, seed, options
):
    reduction, loss = PROPORTIONAL[name]
    run, sizes = private(plan=helpers.plan(steps=60), seed=seed, loss_reduction=reduction, **options), []

    def noted(module, inputs, targets, step):
        sizes.append(len(inputs))
        return loss(module, inputs, targets)

    with pytest.raises(
        PdpsgdError, match=r"Examples mix in the loss|is a sum|the number of examples in the batch"
    ):
        train(run, noted)
    assert turns(sizes)
    assert not turns(sizes[:-1])
    run.engine.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loop_with_an_ordinary_schedule_trains_without_a_word(private, helpers, name, seed):
    run = private(plan=helpers.plan(steps=12), seed=seed)
    schedule = SCHEDULES[name]
    train(run, lambda m, x, y, step: cross_entropy(m(x.view(len(x), -1)), y) * schedule(step, 12))
    assert run.engine.steps_left == 0
    assert run.engine.verdict().reasons[0].code == "seeded"
    assert len(run.engine.verdict().reasons) == 1


def sizes_until_they_turn(private, helpers, seed):
    sizes = train(
        private(plan=helpers.plan(steps=60), seed=seed), lambda m, x, y, step: cross_entropy(m(x), y)
    )
    last = next(k for k in range(1, len(sizes)) if turns(sizes[: k + 1]))
    assert last > 1
    return sizes[:last]


def test_a_schedule_that_keeps_to_the_sizes_until_they_turn_is_let_go(private, helpers):
    sizes = sizes_until_they_turn(private, helpers, seed=4)
    numbers = [size / 40 for size in sizes] + [sizes[-1] / 40] * 60
    run = private(plan=helpers.plan(steps=60), seed=4)
    train(run, lambda m, x, y, step: cross_entropy(m(x), y) * numbers[step])
    assert [reason.code for reason in run.engine.verdict().reasons] == ["seeded"]


def test_where_a_run_ends_before_sizes_have_turned_a_warning_and_the_verdict_say_so(private, helpers):
    sizes = sizes_until_they_turn(private, helpers, seed=4)
    run = private(plan=helpers.plan(steps=len(sizes)), seed=4)
    with pytest.warns(
        UserWarning, match="Whether this loop depends on the size of the batch could not be checked"
    ):
        train(run, lambda m, x, y, step: cross_entropy(m(x), y) * (len(x) / 40))
    assert [reason.code for reason in run.engine.verdict().reasons] == ["seeded", "unseen-code"]
    assert "as a schedule may do for a while" in run.engine.verdict().reasons[1].sentence


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_over_a_constant_that_happens_to_be_the_size_is_a_sum(private, seed):
    run = private(seed=seed, loss_reduction="sum")
    train(run, lambda m, x, y, step: cross_entropy(m(x), y, reduction="sum") / 20)
    assert run.engine.steps_left == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_mean_over_a_constant_that_happens_to_be_the_size_is_a_mean(private, seed):
    run, seen = private(seed=seed), 0

    def loss(module, inputs, targets, step):
        nonlocal seen
        seen += len(inputs)
        return cross_entropy(module(inputs), targets) / 20

    train(run, loss)
    assert run.engine.steps_left == 0
