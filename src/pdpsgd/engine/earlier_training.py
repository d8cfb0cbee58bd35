"""What happened to a module and its optimizer before a run: warned of where it may add to what people spend."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.accounting.history import exposures_of
from pdpsgd.engine.observers import StepObserver
from pdpsgd.errors import warn

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

_steps_on: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()  # private steps, in this process
_private_before: WeakSet[Optimizer] = WeakSet()  # their state is what private steps left


class TakenSteps:
    """The private steps that a module has taken in this process."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._begun = False
        self._count = _steps_on.setdefault(module, [0])

    def count(self) -> None:
        """Remember that the module has taken one more private step, by this optimizer."""
        self._count[0] += 1
        if not self._begun:  # weak references take their time
            self._begun = True
            _private_before.add(self._optimizer)


class EarlierTraining(StepObserver):
    """Warns, before the first step, of training that the plan does not count."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
        self._module = module
        self._optimizer = optimizer
        self._plan = plan
        self._begun = False

    def step_begins(self, step: int, round: int) -> None:
        """Look once, at step 0: a resumed run is another one's continuation."""
        if step == 0 and not self._begun:
            self._begun = True
            _warn_of_earlier_steps(self._module, self._plan)
            _warn_of_earlier_state(self._optimizer, self._module)


def _warn_of_earlier_steps(module: nn.Module, plan: Plan) -> None:
    """Say that a module was trained before, unless the plan's history has as many steps."""
    taken = sum(_steps_on.get(module, [0]))
    counted = max(sum(exposure.steps for exposure in exposures_of(level.history)) for level in plan.levels)
    if taken > counted:
        warn(
            f"This module has taken {taken:,} private steps in this process before, and the plan counts {counted:,} as "
            "history. On the same people what both runs spend adds up, beyond what either plan proves: plan this run "
            "with history=[the earlier plan]. (On other people's data nothing adds up.)",
        )


def _warn_of_earlier_state(optimizer: Optimizer, module: nn.Module) -> None:
    """Name the parameters of which the optimizer remembers gradients that no private step gave it."""
    if optimizer in _private_before:
        return
    names = [name for name, parameter in module.named_parameters() if _remembers(optimizer, parameter)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(
            f"The optimizer has a state for {', '.join(names[:3])}{more} before the first private step: it remembers "
            "gradients, and moves the model by them without noise. If they are of people's data, make a new optimizer; "
            "gradients of public data do no harm.",
        )


def _remembers(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Tell whether the state holds more than what an optimizer is made with (Adagrad's, say, at its step 0)."""
    state = optimizer.state.get(parameter, {})
    return any(isinstance(value, Tensor) for value in state.values()) and bool(state.get("step", 1) > 0)
