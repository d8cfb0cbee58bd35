"""Instruments a model: rules take the place of its layers' own forward, and are taken out again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients._torch import SpectralNorm, pytree
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.recorder import Recorder, Site
from pdpsgd.gradients.rules.effective_weight import EffectiveWeight
from pdpsgd.gradients.rules.general import general_rule
from pdpsgd.gradients.rules.own_parameters import OwnParameters, can_be_called, may_share, own_parameters
from pdpsgd.gradients.rules.recurrent import frozen_recurrent
from pdpsgd.gradients.rules.registry import Rule, rule_of, runs_its_own_forward
from pdpsgd.gradients.rules.shared_values import Shared
from pdpsgd.gradients.shortcuts import pool, sequence
from pdpsgd.gradients.survey import Survey, survey
from pdpsgd.gradients.unsupported import check_module, is_constant_batch_norm

_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules that in evaluation mode skip their layers for one fused operation."""


def instrument(model: nn.Module) -> tuple[Recorder, list[InstrumentedForward]]:
    """Instrument every layer that trains, and the model as a whole; refuse the model before anything is changed."""
    rules = list(rules_of(model))
    native.library()  # now, and not in the middle of somebody's forward pass
    recorder = Recorder(model)
    instrumented = []
    for name, module, rule in rules:
        site = Site(recorder, name or type(module).__name__)
        instrumented.append(InstrumentedForward(module, recorder, _by_rule(site, module, rule), site))
    inside_general = {
        child
        for _, module, rule in rules
        if rule is None and not may_share(module)
        for child in module.modules()
    }
    sequences = [
        child for child in model.modules() if type(child) is nn.Sequential and child not in inside_general
    ]
    instrumented += [InstrumentedForward(child, recorder, partial(sequence, child)) for child in sequences]
    poolings = [
        child
        for child in model.modules()
        if type(child) is nn.MaxPool2d and child not in inside_general and runs_its_own_forward(child)
    ]
    instrumented += [
        InstrumentedForward(child, recorder, partial(pool, child, child.forward)) for child in poolings
    ]
    instrumented += [
        FrozenForward(child, recorder, partial(frozen_recurrent, child, child.forward))
        for child in model.modules()
        if isinstance(child, (nn.RNN, nn.LSTM, nn.GRU))
        and child not in inside_general
        and rule_of(child) is not None
        and not any(parameter.requires_grad for parameter in child.parameters())
    ]
    instrumented += [
        ConstantForward(child, recorder, child.forward)
        for child in model.modules()
        if is_constant_batch_norm(child) or isinstance(child, SpectralNorm)
    ]
    instrumented.append(InstrumentedForward(model, recorder, _WholeModel(model, recorder, instrumented)))
    return recorder, instrumented


def rules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rule | None]]:
    """Yield the modules to instrument with their rules; None is the general rule, for a module and all in it."""
    for name, module in model.named_modules():
        check_module(name, module)
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, *, in_use: bool) -> Iterator[tuple[str, nn.Module, Rule | None]]:
        if module in seen or not any(parameter.requires_grad for parameter in module.parameters()):
            return
        seen.add(module)
        rule = rule_of(module)
        if rule is not None:
            yield name, module, rule
            return
        if _uses_parameters(module) and not in_use:
            if not can_be_called(module):
                place = f"{name or 'The model'} ({type(module).__name__})"
                fail(
                    f"{place} holds trainable parameters and has no forward, so its per-example gradient is unknown."
                )
            yield name, module, None
            if not may_share(module):
                return
        # What children hold that are never called, the module uses itself.
        held = in_use or can_be_called(module)
        for child_name, child in module.named_children():
            place = f"{name}.{child_name}" if name else child_name
            yield from walk(place, child, in_use=held and not can_be_called(child))

    yield from walk("", model, in_use=False)


class InstrumentedForward:
    """Stand-in for a module's forward; copies and pickles of the module get its own forward back."""

    def __init__(
        self, module: nn.Module, recorder: Recorder, forward: Callable[..., Any], site: Site | None = None
    ) -> None:
        self.module, self._recorder, self._site = module, recorder, site
        self.stands_in_for_own = runs_its_own_forward(module)
        self._before = module.__dict__.get("forward")
        self._original: Callable[..., Any] = module.forward
        self.forward = forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: by its rule in a training pass, as it is in any other."""
        if self._recorder.sharing and not (len(args) == 1 and not kwargs and type(args[0]) is Tensor):
            args, kwargs = pytree.tree_map_only(
                Shared, lambda shared: shared.run.for_all(shared), (args, kwargs)
            )
        if self._recorder.active():
            return self.forward(*args, **kwargs)
        surveying = self._recorder.surveying
        if surveying is None or self._site is None:
            return self._original(*args, **kwargs)
        surveying.note(self._site, args, kwargs)
        surveying.depth += 1
        try:
            if isinstance(self.forward, _Generally):
                return self.forward.surveyed(surveying, args, kwargs)
            if self._recorder.sharing:  # as in a training pass, where what is given out meets parameters
                args, kwargs = _with_rows(args, kwargs, surveying.size)
            return self._original(*args, **kwargs)
        finally:
            surveying.depth -= 1

    def restore(self) -> None:
        """Give the module its own forward back."""
        if self._before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module), self.module)
        return types.MethodType(type(self.module).forward, copied)

    def __reduce__(self) -> Any:
        # When this is read, the module has no forward but its class's.
        return getattr, (self.module, "forward")


class ConstantForward(InstrumentedForward):
    """Stand-in for the forward of a module that stays in evaluation mode, also after model.train().

    Of a frozen batch normalization; and of a spectral norm, which iterates in training mode: how many passes there were
    would show in its buffers, so whoever trains has it iterate once a step.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module in evaluation mode."""
        mode, self.module.training = self.module.training, False
        try:
            return self._original(*args, **kwargs)
        finally:
            self.module.training = mode


class FrozenForward(InstrumentedForward):
    """Stand-in for the forward of a frozen layer: by its rule in all training passes, also under torch.no_grad()."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        by_rule = self._recorder.in_training_mode and not self._recorder.paused
        return (self.forward if by_rule else self._original)(*args, **kwargs)


class _WholeModel:
    """Forward of the whole model: finds the batch size and chooses the memory layout for what happens inside.

    On a CPU, images are laid out channels last, where pooling and convolutions are faster. Code that insists on the
    default layout, such as x.view(batch, -1), fails then: it is run again, and from then on, in the default layout.

    Where a layer is given something that has no row per example (relative positions, or examples cut into windows), the
    module around it, which is given the examples themselves, is run by the general rule from then on.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, instrumented: list[InstrumentedForward]) -> None:
        self._original: Callable[..., Any] = model.forward
        self._recorder = recorder
        self._instrumented = instrumented
        self._run_whole: set[str] = set()  # places
        self._by_parameters = {
            one.module: one.forward.own for one in instrumented if isinstance(one.forward, _Generally)
        }
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._channels_last = on_cpu and any(isinstance(child, nn.Conv2d) for child in model.modules())
        self._attention = any(isinstance(child, _WITH_FAST_PATH) for child in model.modules())
        self._tried = False
        self._surveys: dict[Any, Survey | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder.inside:  # the model calls itself
            return self._original(*args, **kwargs)
        recorder.inside = True
        # Both stay after the pass: layers run again during the backward pass where activations are checkpointed.
        recorder.batch_size = _batch_size(args, kwargs)
        recorder.survey = self._surveyed(args, kwargs)
        recorder.calls_so_far.clear()
        recorder.channels_last = self._channels_last
        fast_path = torch.backends.mha.get_fastpath_enabled()
        if self._attention:
            torch.backends.mha.set_fastpath_enabled(False)  # it has no gradient, and calls no layer
        try:
            if self._tried or not self._channels_last:
                return self._original(*args, **kwargs)
            return self._try(*args, **kwargs)
        finally:
            recorder.inside = False
            if self._attention:
                torch.backends.mha.set_fastpath_enabled(fast_path)

    def _surveyed(self, args: Any, kwargs: Any) -> Survey | None:
        """Return what is known of inputs of this structure; find it out the first time."""
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            structure: Any = args[0].dim()
        else:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            structure = tree, tuple(leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves)
        if structure not in self._surveys and self._recorder.batch_size != 0:
            found = self._survey(args, kwargs)
            while found is not None and self._widen(found.sites_without_rows()):
                found = self._survey(args, kwargs)
            self._surveys[structure] = found
        return self._surveys.get(structure)

    def _survey(self, args: Any, kwargs: Any) -> Survey | None:
        model, recorder = self._recorder.module, self._recorder
        return survey(
            model,
            self._original,
            args,
            kwargs,
            recorder.batch_size,
            lambda running: setattr(recorder, "surveying", running),
        )

    def _widen(self, sites: Iterable[Any]) -> bool:
        """Run the modules around these layers by the general rule; returns whether there were any new ones."""
        modules = dict(self._recorder.module.named_modules())
        places = [site.name for site in sites if site.name in modules]
        around = {_place_around(place, modules) for place in places if not self._is_inside(place)}
        around -= {place for place in around if not place and modules[place] not in self._by_parameters}
        for place in sorted(around):
            if not self._is_inside(place):
                module, site = modules[place], Site(self._recorder, place)
                if module in self._by_parameters:
                    self._by_parameters[module].possible = False
                else:
                    forward = partial(general_rule, site, module, module.forward)
                    self._instrumented.insert(-1, InstrumentedForward(module, self._recorder, forward, site))
                self._run_whole.add(place)
                self._surveys.clear()
        return bool(around)

    def _is_inside(self, place: str) -> bool:
        return any(
            not whole or (f"{place}.".startswith(f"{whole}.") and place != whole) for whole in self._run_whole
        )

    def _try(self, *args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        try:
            outputs = self._original(*args, **kwargs)
        except PdpsgdError:
            raise
        except RuntimeError:
            self._channels_last = self._recorder.channels_last = False
            torch.set_rng_state(state)
            outputs = self._original(*args, **kwargs)
        self._tried = True
        return outputs


class _Generally:
    """Runs a module that has no rule of its own kind: by its weight, by its own parameters, or example by example."""

    def __init__(self, site: Site, module: nn.Module) -> None:
        self._recorder = site.recorder
        self._by_weight = EffectiveWeight(site, module, module.forward)
        self._general = partial(general_rule, site, module, module.forward)
        self.own = OwnParameters(site, module, module.forward, self._general)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._by_weight(*args, **kwargs)
        return self.own(*args, **kwargs) if outputs is None else outputs

    def surveyed(self, survey: Survey, args: Any, kwargs: Any) -> Any:
        if not self.own.possible and self._recorder.sharing:
            args, kwargs = _with_rows(args, kwargs, survey.size)
        return self.own.surveyed(survey, args, kwargs)


def _by_rule(site: Site, module: nn.Module, rule: Rule | None) -> Callable[..., Any]:
    if rule is None:
        return _Generally(site, module)
    apply = rule.apply

    def by_rule(*args: Any, **kwargs: Any) -> Any:
        site.check_input(args, kwargs)
        return apply(site, module, *args, **kwargs)

    return by_rule


def _with_rows(args: Any, kwargs: Any, size: int) -> tuple[Any, Any]:
    """Give a layer's first input one row per example, if it has one row for all."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    place = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    if place is not None and leaves[place].dim() > 1 and leaves[place].shape[0] == 1:
        leaves[place] = leaves[place].expand(size, *leaves[place].shape[1:])
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def _place_around(place: str, modules: dict[str, nn.Module]) -> str:
    """Return the name of the nearest module around a layer that is called; "" for the model itself."""
    place = place.rpartition(".")[0]
    while place and not can_be_called(modules[place]):
        place = place.rpartition(".")[0]
    return place


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim():
        return args[0].shape[0]
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)


def _uses_parameters(module: nn.Module) -> bool:
    """Whether the module itself uses trainable parameters: its own, or those of children that are never called."""
    return any(parameter.requires_grad for *_, parameter in own_parameters(module))
