"""Whoever watches a run is told of every step, in order, and may refuse."""

from __future__ import annotations

import pytest
import torch

from pdpsgd.engine import PrivacyEngine, StepObserver
from pdpsgd.errors import PdpsgdError


class Notes(StepObserver):
    def __init__(self):
        self.seen = []

    def step_begins(self, step, round):
        self.seen.append(("begins", step, round))

    def batch_yielded(self, batch):
        self.seen.append(("yielded", batch.step))
        batch.when_stepped.append(lambda: self.seen.append(("stepped", batch.step)))

    def step_releases(self, step, sums):
        self.seen.append(("releases", step, sum(total.numel() for total in sums)))


def test_observers_are_told_of_every_step_in_order(private, helpers):
    notes = Notes()
    run = private(plan=helpers.plan(steps=(1, 1)), engine=PrivacyEngine(observers=[notes]))
    run.train()
    size = sum(parameter.numel() for parameter in run.module.parameters())
    expected = [
        [("begins", step, step), ("yielded", step), ("stepped", step), ("releases", step, size)]
        for step in range(2)
    ]
    assert notes.seen == expected[0] + expected[1]


def test_a_step_in_physical_batches_begins_and_releases_once(private, helpers):
    notes = Notes()
    plan = helpers.plan(rates=(1.0,), steps=1)
    run = private(plan=plan, engine=PrivacyEngine(observers=[notes]), max_physical_batch_size=15)
    run.train()
    seen = [what for what, *_ in notes.seen]
    batches = seen.count("yielded")
    assert batches >= 3
    assert seen == ["begins", *["yielded", "stepped"] * batches, "releases"]


def test_a_batch_that_is_yielded_again_begins_its_step_again(private):
    notes = Notes()
    run = private(engine=PrivacyEngine(observers=[notes]))
    next(iter(run.loader))
    next(iter(run.loader))
    assert notes.seen == [("begins", 0, 0), ("yielded", 0)] * 2


def test_a_class_of_three_methods_is_enough(private):
    class Plain:
        def __init__(self):
            self.releases = 0

        def step_begins(self, step, round):
            pass

        def batch_yielded(self, batch):
            pass

        def step_releases(self, step, sums):
            self.releases += 1

    plain = Plain()
    private(engine=PrivacyEngine(observers=[plain])).train()
    assert plain.releases == 6


def test_an_observer_changes_nothing(private, flat):
    watched, plain = private(engine=PrivacyEngine(observers=[Notes()])), private()
    watched.train()
    plain.train()
    assert torch.equal(flat(watched.module), flat(plain.module))


@pytest.mark.parametrize("method", ["step_begins", "batch_yielded", "step_releases"])
def test_an_observer_that_refuses_keeps_the_step_from_being_released(private, flat, method):
    class Refuses(StepObserver):
        pass

    def refuse(self, *args):
        raise PdpsgdError("Expected nothing. Got a step.")

    setattr(Refuses, method, refuse)
    run = private(engine=PrivacyEngine(observers=[Refuses()]))
    before = flat(run.module)
    with pytest.raises(PdpsgdError, match="Expected nothing"):
        run.train()
    assert torch.equal(flat(run.module), before)
    assert run.engine.steps_taken == 0


USES = {
    "close": lambda engine: engine.close(),
    "save": lambda engine: engine.save("nowhere"),
    "resume": lambda engine: engine.resume("nowhere"),
    "release_note": lambda engine: engine.release_note,
    "steps_taken": lambda engine: engine.steps_taken,
    "steps_left": lambda engine: engine.steps_left,
    "spent": lambda engine: engine.spent(),
    "keep_journal": lambda engine: engine.keep_journal("nowhere"),
    "forfeit_step": lambda engine: engine.forfeit_step(),
    "check": lambda engine: engine.check(torch.nn.functional.mse_loss, torch.zeros(2, 1), torch.zeros(2, 1)),
    **{
        name: lambda engine, name=name: getattr(engine, name)
        for name in ("plan", "module", "optimizer", "loader", "execution", "gradients", "ranks", "source")
    },
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_before_make_private_everything_gives_the_same_ordinary_error(use):
    with pytest.raises(PdpsgdError, match="Expected make_private to have been called on this engine"):
        use(PrivacyEngine())
