"""The optimizer of a private run: clipped sum, noise once, a public divisor, then the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd.engine.checks.buffers import BufferWatch
from pdpsgd.errors import fail, warn

if TYPE_CHECKING:
    from pdpsgd.engine.batches import Chunk
    from pdpsgd.engine.checks.watch import LossWatch
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.journal import Journal
    from pdpsgd.gradients.clipping import ClippedGradients
    from pdpsgd.planning.plans import Plan
    from pdpsgd.sampling.source import RandomSource

_steps_on: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # private steps, in this process
_private_before: WeakSet[Optimizer] = WeakSet()  # their state is what private steps left


class PrivateOptimizer(Optimizer):
    """Wraps any torch optimizer; shares its parameter groups and state, so schedulers may be built on either.
    (One that looks at training losses, as ReduceLROnPlateau may, makes the rate depend on them without noise.)

    `step()` adds the batch's clipped sum to the step's. At the step's last batch it adds noise to the sum,
    once, divides by the plan's expected batch size, puts the result where gradients are, and lets the wrapped
    optimizer step. `took_step` says whether the last `step()` did that, or only added (where physical batches
    are limited).

    Guarantee: what reaches the wrapped optimizer, and the parameters, is the Poisson-subsampled Gaussian
    mechanism of the plan's round: sum of gradients clipped to C_l = max_grad_norm * clip_scale of the
    person's level, plus Gaussian noise of standard deviation noise_multiplier * max_grad_norm, times a public
    constant. Whatever else lies in `grad` of its parameters, also of frozen ones, is cleared and never used. What
    the wrapped optimizer's state holds before the first step is not covered: a warning names it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        gradients: ClippedGradients,
        execution: Execution,
        source: RandomSource,
        ranks: Ranks,
        loss_reduction: str,
        views: int = 1,
    ) -> None:
        # On purpose not Optimizer.__init__: groups, state and defaults are the wrapped optimizer's own.
        self.original = optimizer
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self.took_step = False
        self._begun = False
        self.non_finite_gradients = 0  # sensitive: never written anywhere by default
        self._execution = execution
        self._gradients = gradients
        self._buffers = BufferWatch(gradients.module, trainable=gradients.sums)
        self.source = source
        self.journal: Journal | None = None
        self.watch: LossWatch | None = None
        self._ranks = ranks
        self._loss_reduction = loss_reduction
        self._views = views
        self._check_parameters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.original.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.original.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the batch's clipped sum; at the step's last batch release it with noise and move the model."""
        self.took_step = False
        chunk = self._execution.chunk_to_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.watch is not None:
            self.watch.stop(report=self._gradients.recorded_batch_size == chunk.size * self._views)
            self.watch = None
        self._buffers.check(empty=chunk.size == 0)
        self._add(chunk)
        chunk.added = True
        if chunk.last:
            self._release(chunk.step)
            self._execution.released()
            self.original.step()
            self.took_step = True
            _steps_on[self._gradients.module] = _steps_on.get(self._gradients.module, 0) + 1
            _private_before.add(self.original)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and drop a backward pass that was not stepped."""
        self.original.zero_grad(set_to_none)
        if self._gradients.recorded_batch_size is not None:
            self._gradients.forget()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state: loads without pdpsgd."""
        return self.original.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.original.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the private module; any others would be moved without noise and are refused."""
        self.original.add_param_group(param_group)
        self._check_parameters()

    def __repr__(self) -> str:
        return f"Private{self.original!r}"

    def begin(self, chunk: Chunk) -> None:
        """A batch is handed out: forget what an abandoned one left behind."""
        if chunk.step == 0 and not self._begun:  # a resumed run is another one's continuation
            self._begun = True
            if self._ranks.first:
                _warn_of_earlier_training(self._gradients.module, self._execution.plan)
                _warn_of_earlier_state(self.original, self._gradients.module)
        self._gradients.forget()
        self._buffers.start()
        if self.watch is not None:
            self.watch.stop(report=False)
            self.watch = None
        if chunk.first:
            self._gradients.zero_sums()
            for parameter in self._gradients.sums:
                parameter.grad = None

    def _add(self, chunk: Chunk) -> None:
        recorded = self._gradients.recorded_batch_size
        if chunk.size == 0:
            # Mean over nothing: no gradient, or NaN. Nobody was drawn, so the sum is zero.
            self._gradients.forget()
            return
        if recorded is None:
            fail(
                "Expected loss.backward() on the batch before optimizer.step(). Got none. (Was the model in "
                "evaluation mode, or under torch.no_grad()?)"
            )
        if recorded != chunk.size * self._views:
            fail(
                "Expected the loss of the batch as the loader gave it. Got a backward pass over more or "
                "fewer examples. Batches must go through the model whole and once: do not cut, filter, "
                "repeat or extend them."
            )
        norms = chunk.clip_norms.to(self._gradients.flat_sums[0].device)
        self.non_finite_gradients += self._gradients.clipped_sum(
            norms, loss_reduction=self._loss_reduction, views=self._views
        )

    def _release(self, step: int) -> None:
        self._check_parameters()
        planned = self._execution.round_of(step)
        sums = self._gradients.flat_sums
        self._ranks.gather_sums(sums)
        if self._ranks.first:
            if self.journal is not None:
                self.journal.meet(step, sums)
            deviation = planned.noise_multiplier * self._execution.plan.max_grad_norm
            self.source.noise_(sums, standard_deviation=deviation, step=step)
        self._ranks.spread(sums)
        # The public divisor: never the drawn size, never the number of records.
        for total in sums:
            total.div_(planned.expected_batch_size)
        # Nothing else may lie there: a gradient left in a frozen parameter would move it without noise.
        for group in self.original.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for parameter, total in self._gradients.sums.items():
            if parameter.requires_grad:
                parameter.grad = total if total.dtype == parameter.dtype else total.to(parameter.dtype)

    def _check_parameters(self) -> None:
        known = self._gradients.sums
        for index, group in enumerate(self.original.param_groups):
            for parameter in group["params"]:
                if parameter not in known and parameter.requires_grad:
                    fail(
                        "Expected the optimizer to hold trainable parameters of the private module only. Got "
                        f"one of shape {tuple(parameter.shape)} in param_groups[{index}] that the module "
                        "does not have (or did not have when it was made private): it would be moved by a "
                        "gradient without noise."
                    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that look at the data more than once a step."""
    if isinstance(optimizer, PrivateOptimizer):
        fail("Expected an optimizer that is not private yet. Got one that make_private gave back.")
    if isinstance(optimizer, torch.optim.LBFGS):
        fail("Expected an optimizer that takes one gradient a step. Got LBFGS, which asks for several.")


def _warn_of_earlier_training(module: nn.Module, plan: Plan) -> None:
    """Say that a module was trained before, unless the plan's history has as many steps."""
    taken = _steps_on.get(module, 0)
    counted = max(sum(exposure.steps for exposure in level.history) for level in plan.levels)
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
    """Whether the state holds more than what an optimizer is made with (Adagrad's, say, at its step 0)."""
    state = optimizer.state.get(parameter, {})
    return any(isinstance(value, Tensor) for value in state.values()) and bool(state.get("step", 1) > 0)
