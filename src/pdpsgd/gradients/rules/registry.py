"""The rules of layers: which kind of layer has which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Rule:
    """The way one kind of layer is computed and recorded.

    `apply(site, module, *args, **kwargs)` gives what the module's own forward gives. `parameters` are the names of
    the parameters it accounts for; a dotted name belongs to a submodule that the layer never calls.
    """

    apply: Callable[..., Any]
    parameters: tuple[str, ...]


RULES: dict[type[nn.Module], Rule] = {}
NAMED_RULES: dict[str, Rule] = {}  # by module and name of a class: of packages that are not imported for this


def rule_for(*types: type[nn.Module], parameters: tuple[str, ...] = ("weight", "bias")) -> Callable[..., Any]:
    """Register the decorated function as the rule of these layers."""

    def register(apply: Callable[..., Any]) -> Callable[..., Any]:
        for kind in types:
            RULES[kind] = Rule(apply, parameters)
        return apply

    return register


def rule_for_named(*names: str, parameters: tuple[str, ...] = ("weight", "bias")) -> Callable[..., Any]:
    """Register the decorated function as the rule of classes of other packages, such as `package.module.Layer`."""

    def register(apply: Callable[..., Any]) -> Callable[..., Any]:
        NAMED_RULES.update((name, Rule(apply, parameters)) for name in names)
        return apply

    return register


def rule_of(module: nn.Module) -> Rule | None:
    """Return the module's rule, or None where only the general one is sure to compute what the module computes.

    A subclass inherits a rule only if it inherits `forward` too, and keeps its parameters under the usual names
    (parametrizations and weight norm do not).
    """
    if parametrize.is_parametrized(module) or not runs_its_own_forward(module):
        return None
    for kind in type(module).__mro__:
        rule = RULES.get(kind) or NAMED_RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if rule is not None:
            same_forward = type(module).forward is getattr(kind, "forward", None)
            own = {name for name, parameter in module.named_parameters() if parameter is not None}
            return rule if same_forward and own <= set(rule.parameters) else None
    return None


def runs_its_own_forward(module: nn.Module) -> bool:
    """Whether nobody has put another `forward` in place of that of the module's class."""
    replaced = module.__dict__.get("forward")
    return replaced is None or getattr(replaced, "__func__", None) is type(module).forward
