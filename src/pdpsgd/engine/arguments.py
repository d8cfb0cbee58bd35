"""What `PrivacyEngine.make_private` is given: checked, and people matched with their levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdpsgd._typing import IdArray, IntArray
from pdpsgd.engine._torch import is_compiled
from pdpsgd.engine.optimizer import PrivateOptimizer, refuse_half_precision_mean
from pdpsgd.errors import check_positive, fail
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.verdict import needs_to_be_verified

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan


def check_counts(**counts: int | None) -> None:
    """Refuse what is neither None nor a whole number of at least 1."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            fail(f"Expected {name} to be a whole number >= 1, or None. Got {value!r}.")


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that look at the data more than once a step."""
    if isinstance(optimizer, PrivateOptimizer):
        fail("Expected an optimizer that is not private yet. Got one that make_private gave back.")
    if isinstance(optimizer, torch.optim.LBFGS):
        fail("Expected an optimizer that takes one gradient a step. Got LBFGS, which asks for several.")


def check_module(module: nn.Module) -> None:
    """Refuse a module inside a wrapper that adds gradients up before they are clipped."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        fail(
            f"Expected the bare module. Got it inside {type(module).__name__}: take it out (`.module`). "
            "Under torchrun the ranks are joined by pdpsgd itself, because gradients must be clipped before "
            "they are added up."
        )
    # A DTensor has a mesh of devices; importing its class would take a third of a second.
    named = module.named_parameters()
    sharded = next((name for name, parameter in named if hasattr(parameter, "device_mesh")), None)
    if sharded is not None:
        fail(
            f"Expected parameters that every rank holds as a whole. Got {sharded} in shards (fully_shard, FSDP2): it "
            "averages gradients over ranks before they are clipped. Leave the module as it was; under torchrun the "
            "ranks are joined by pdpsgd itself, and adapters (LoRA) keep what is trained small."
        )
    compiled = next((name for name, child in module.named_modules() if is_compiled(child)), None)
    if compiled is not None:
        fail(
            f"Expected a module that is not compiled: what its layers compute must be seen. Got {compiled or 'one'} "
            "from torch.compile. Make the module private as it was before, and compile what make_private gives back."
        )


def check_precision(module: nn.Module, *, loss_reduction: str) -> None:
    """Refuse a mean loss of a module in half precision."""
    half = (torch.bfloat16, torch.float16)
    if loss_reduction == "mean" and any(p.requires_grad and p.dtype in half for p in module.parameters()):
        refuse_half_precision_mean()


def check_criterion(criterion: Callable[..., Tensor] | None, module: nn.Module, *, views: int) -> None:
    """Refuse a loss with trainable parameters of its own, and several views without a loss to check."""
    if views > 1 and criterion is None:
        fail("Expected criterion (the loss), to check that examples do not mix in it. Got None.")
    if isinstance(criterion, nn.Module):
        own = {id(parameter) for parameter in module.parameters()}
        for name, parameter in criterion.named_parameters():
            if parameter.requires_grad and id(parameter) not in own:
                fail(
                    "Expected a criterion without trainable parameters of its own: they would be moved by gradients "
                    f"without noise. Got {name} of shape {tuple(parameter.shape)}. Make it a part of the module, or "
                    "freeze it (requires_grad_(False))."
                )


def check_plan(plan: Plan, *, max_grad_norm: float | None, on_fresh_model: object | None) -> Plan:
    """Return the plan at the wanted clipping norm, verified if this process has not made it.

    With another norm privacy is the same, because it depends on the ratio of noise to norm only.
    """
    if max_grad_norm is not None and max_grad_norm != plan.max_grad_norm:
        check_positive(max_grad_norm=max_grad_norm)
        plan = replace(plan, max_grad_norm=max_grad_norm)
    if needs_to_be_verified(plan):
        plan.verify()  # made or changed by hand, or elsewhere: refused if it breaks a promise
    if on_fresh_model is None and any(r.fresh_model for r in plan.rounds[1:]):
        fail(
            "Expected on_fresh_model, a function that resets the module's parameters: the plan trains a "
            "fresh model in each round. Got None. (pdpsgd.fit does this by itself.)"
        )
    return plan


def people_of(plan: Plan, budgets: Budgets | None) -> tuple[IntArray, IdArray | None]:
    """Return the level of each person on the list, and their ids."""
    if budgets is not None:
        return np.asarray(plan.level_of_person(budgets), dtype=np.int64), budgets.ids
    if plan.roster is not None:
        return np.asarray(plan.roster.level, dtype=np.int64), plan.roster.ids
    if len(plan.levels) == 1:
        return np.zeros(plan.people, dtype=np.int64), None
    fail(f"Expected budgets, to know who is on which of the plan's {len(plan.levels)} levels. Got None.")


def with_roster(plan: Plan, budgets: Budgets | None, levels: IntArray) -> Plan:
    """Return the plan with its people, so that its file says on whom it was executed."""
    if budgets is None or plan.roster is not None or plan.not_for_release is not None:
        return plan
    return replace(plan, roster=Roster(budgets.ids, levels, budgets.named))
