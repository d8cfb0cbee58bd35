"""An optimizer's or a scheduler's state is exactly what it was, without pickle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedules

from pdpsgd.engine import checkpoints
from pdpsgd.engine.checkpoints import pack_optimizer, unpack_optimizer
from pdpsgd.errors import PdpsgdError


class Anything:
    """Something with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)  # which tells 0.0 from -0.0, and NaN is NaN
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def through_a_file(original: Any, restored: Any, path: Path) -> None:
    tensors, packed = pack_optimizer(original, prefix="it")
    checkpoints.save(path, tensors, {"packed": packed}, None)
    loaded = checkpoints.load(path)
    unpack_optimizer(restored, loaded.tensors, loaded.state["packed"])


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.integers() | st.sampled_from(["a", "$tuple", "$dict", "$float", "", "$"]) | st.tuples(st.integers())
values = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_every_nest_of_plain_values_comes_back_as_it_was(value: Any) -> None:
    tensors, packed = pack_optimizer(Anything(value))
    restored = Anything()
    unpack_optimizer(restored, tensors, packed)
    assert same(restored.state, value)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam with a tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def take_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(torch.ones(2, 3) * step).square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_it_had_never_been_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    take_steps(model, optimizer, range(1, 4))
    resumed_model = copy.deepcopy(model)
    resumed = OPTIMIZERS[name](resumed_model.parameters())
    through_a_file(optimizer, resumed, tmp_path / "c")
    assert same(resumed.state_dict(), optimizer.state_dict())
    take_steps(model, optimizer, range(4, 8))
    take_steps(resumed_model, resumed, range(4, 8))
    assert all(map(torch.equal, model.parameters(), resumed_model.parameters()))


SCHEDULERS = {
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=7),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5]),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "CyclicLR": lambda o: schedules.CyclicLR(o, base_lr=0.1, max_lr=0.3),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_as_if_it_had_never_been_saved(name: str, tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.2, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, schedule = make()
    rates(optimizer, schedule, 3)
    resumed_optimizer, resumed = make()
    through_a_file(schedule, resumed, tmp_path / "schedule")
    through_a_file(optimizer, resumed_optimizer, tmp_path / "optimizer")
    assert rates(resumed_optimizer, resumed, 6) == rates(optimizer, schedule, 6)


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(PdpsgdError, match=r"Expected mine\.state\.f to be a number.*Got function"):
        pack_optimizer(Anything({"f": lambda: None}), prefix="mine")


def test_a_state_of_another_optimizer_is_refused() -> None:
    one = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(PdpsgdError, match="Expected a saved state that fits SGD"):
        unpack_optimizer(other, *pack_optimizer(one))
