"""What a model keeps of a batch in plain attributes, or in extra state, reaches neither later steps nor a file."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from pdpsgd.errors import PdpsgdError
from tests.engine.conftest import make_data, make_plan


class Keeps(nn.Module):
    """Keeps something of every training batch, in one of several ways."""

    def __init__(self, way=None):
        super().__init__()
        self.way, self.linear = way, nn.Linear(5, 3)
        self.nothing = None
        self.bank: list[torch.Tensor] = []
        self.by_name: dict[str, list[torch.Tensor]] = {"seen": []}
        self.queue: deque[torch.Tensor] = deque(maxlen=3)
        self.plain = torch.zeros(5)
        self.state = 0.0

    def forward(self, inputs):
        if self.training and self.way is not None and len(inputs):
            self.keep(inputs.detach().clone())
        return self.linear(inputs)

    def keep(self, inputs):
        if self.way == "a new attribute":
            self.last_batch = inputs
        elif self.way == "an attribute that was None":
            self.nothing = inputs
        elif self.way == "a list":
            self.bank.append(inputs)
        elif self.way == "a list in a dictionary":
            self.by_name["seen"].append(inputs)
        elif self.way == "a queue":
            self.queue.append(inputs)
        elif self.way == "another tensor":
            self.plain = inputs.mean(0)
        elif self.way == "in place":
            self.plain.copy_(inputs.mean(0))
        elif self.way == "extra state":
            self.state = float(inputs.sum())

    def get_extra_state(self):
        return {"state": self.state}

    def set_extra_state(self, state):
        self.state = state["state"]


FORGOTTEN = [
    "a new attribute",
    "an attribute that was None",
    "a list",
    "a list in a dictionary",
    "a queue",
    "another tensor",
]


def kept(module):
    held = [getattr(module, "last_batch", None), module.nothing, *module.bank, *module.by_name["seen"]]
    found = [value for value in [*held, *module.queue] if value is not None]
    return found if torch.equal(module.plain, torch.zeros(5)) else [*found, module.plain]


@pytest.mark.parametrize("way", FORGOTTEN)
def test_a_model_forgets_a_batch_before_the_next_one_and_when_the_run_is_closed(private, way):
    module = Keeps(way)
    run = private(module=module)
    for batch in run.loader:
        assert kept(module) == []
        run.step(*batch)
        assert kept(module) != []
    run.engine.close()
    assert kept(module) == []


def test_what_a_hook_keeps_on_a_layer_is_forgotten_too(private):
    module = nn.Sequential(nn.Linear(5, 3))
    module[0].register_forward_hook(lambda layer, inputs, outputs: setattr(layer, "seen", inputs[0].detach()))
    run = private(module=module)
    for batch in run.loader:
        assert not hasattr(module[0], "seen")
        run.step(*batch)
        assert hasattr(module[0], "seen")
    run.engine.close()
    assert not hasattr(module[0], "seen")


def test_what_the_loop_sets_between_steps_stays(private):
    run = private(module=Keeps())
    for step, batch in enumerate(run.loader):
        run.step(*batch)
        run.module.temperature = torch.tensor(float(step))
        run.module.bank.append(run.module.temperature)
    run.engine.close()
    assert float(run.module.temperature) == run.plan.steps - 1
    assert len(run.module.bank) == run.plan.steps


@pytest.mark.parametrize(
    ("way", "name"), [("in place", r"0\.plain"), ("extra state", r"0\.get_extra_state\(\)")]
)
@pytest.mark.parametrize("criterion", [None, nn.functional.cross_entropy], ids=["watched", "criterion"])
def test_a_model_that_writes_a_batch_where_it_stays_is_refused(private, way, name, criterion):
    run = private(module=nn.Sequential(Keeps(way)), criterion=criterion)
    with pytest.raises(PdpsgdError, match=rf"Got a change of {name}: .*without noise"):
        run.train()
    assert run.engine.steps_taken == 0
    run.engine.close()


class ThroughData(nn.Module):
    """Writes to a frozen parameter or a buffer through `.data`."""

    def __init__(self, name, *, size):
        super().__init__()
        self.name, self.linear = name, nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled() and self.name is not None:
            getattr(self, self.name).data[-1] += inputs.detach().sum()
        return self.linear(inputs)


@pytest.mark.parametrize("size", [5, 2**18], ids=["small", "large"])
@pytest.mark.parametrize("name", ["frozen", "seen"])
def test_a_write_through_data_is_refused(private, name, size):
    run = private(module=ThroughData(name, size=size), criterion=nn.functional.cross_entropy)
    with pytest.raises(PdpsgdError, match=f"Got a change of {name}: "):
        run.train()
    assert run.engine.steps_taken == 0
    run.engine.close()


def test_a_write_through_data_is_refused_at_any_batch_of_a_model_with_few_numbers(private):
    run = private(module=ThroughData(None, size=5), criterion=nn.functional.cross_entropy)
    for batch in run.loader:
        if run.engine.steps_taken == 4:
            run.module.name = "seen"
            with pytest.raises(PdpsgdError, match="Got a change of seen: "):
                run.step(*batch)
            break
        run.step(*batch)
    assert run.engine.steps_taken == 4
    run.engine.close()


@pytest.mark.parametrize("size", [5, 2**18], ids=["small", "large"])
def test_a_model_that_writes_nothing_trains_without_a_word(private, size):
    run = private(module=ThroughData(None, size=size))
    run.train()
    assert run.engine.steps_left == 0


def test_fit_gives_back_a_model_without_the_last_batch():
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.training.fitting import fit

    plan = make_plan()
    module = Keeps("a new attribute")
    budgets = Budgets([1.0] * 40)
    result = fit(module, make_data(40), budgets, plan=plan, seed=1, progress=False)
    assert kept(result.model) == []
