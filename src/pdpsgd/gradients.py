"""Clipped gradient sums: what a private step adds noise to.

The model's layers are watched while it runs forward and backward. Afterwards each example's gradient norm is taken,
mostly without writing the gradient out, and one weighted sum gives the sum of clipped gradients.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdpsgd.errors import PdpsgdError, check_one_of, fail
from pdpsgd.layers import Recorder, Rule, Site, any_module, check_module, rule_of
from pdpsgd.layers.forms import PerExample, summed
from pdpsgd.layers.views import over_views

# Room for rounding in norms, weights and sums, so that a clipped norm is never above C_i.
CLIPPING_MARGIN = 1 - 2**-10
# Below this, squares of float32 numbers lose digits or vanish: such a norm counts as this large.
SMALLEST_NORM = 1e-16

_instrumented: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ClippedGradients]] = (
    weakref.WeakKeyDictionary()
)


class ClippedGradients:
    """Watches a module, and adds up its clipped gradients after each backward pass.

    The module keeps its type, its parameters and its names; only the `forward` of the layers is wrapped, until
    `remove()`. Passes in evaluation mode or under `torch.no_grad()` are not touched.
    """

    def __init__(self, module: nn.Module) -> None:
        if of_module(module) is not None:
            fail(
                "Expected a module that is not private yet. Got one that is: use what made it private, or remove() it."
            )
        rules = list(_rules_of(module))  # refuses before anything is changed
        self.module = module
        self.sums: dict[nn.Parameter, Tensor] = {
            parameter: torch.zeros_like(
                parameter, dtype=_accurate_dtype(parameter), memory_format=torch.contiguous_format
            )
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._recorder = Recorder(module)
        self._astray: list[nn.Parameter] = []
        self._wrapped: list[_WatchedForward] = []
        for name, child, rule in rules:
            self._wrap(child, name, rule)
        self._wrap_model()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note_astray) for parameter in self.sums
        ]
        _instrumented[module] = weakref.ref(self)

    @property
    def recorded_batch_size(self) -> int | None:
        """How many examples the backward pass that waits to be collected had; None if none waits."""
        calls = self._recorder.calls
        return calls[0].output_gradient.shape[0] if calls else None

    @torch.no_grad()
    def clipped_sum(self, clip_norms: Tensor, *, loss_reduction: str = "mean", views: int = 1) -> int:
        """Add the clipped gradients of the examples of the last backward pass to `sums`, and forget the pass.

        `clip_norms` has C_i for each example. With `loss_reduction="mean"` the loss was a mean over the batch, so that
        an example's own gradient is what backward gave, times the size of the batch. Returns how many examples had
        a gradient that is not finite; this number is sensitive. Where an example went through the model in several
        `views`, in consecutive rows, its gradient is their average.

        Guarantee: what example i adds has norm at most C_i, whatever the model, the loss and the example are, provided
        that examples do not mix in them (see `probe`); a gradient that is not finite adds nothing. So adding or
        removing example i moves the sum by at most C_i.
        """
        try:
            rows = clip_norms if views == 1 else clip_norms.repeat_interleave(views)
            gradients = self._gradients(loss_reduction, rows)
            if clip_norms.shape[0] == 0:
                return 0
            if views > 1:
                gradients = {parameter: over_views(part, views) for parameter, part in gradients.items()}
            norms = self._norms(gradients)
            scale = clip_norms.shape[0] if loss_reduction == "mean" else 1 / views
            norms.mul_(scale)
            weights = clip_weights(norms, clip_norms)
            wild = ~norms.isfinite()
            count = int(wild.sum())
            for parameter, gradient in gradients.items():
                finite = gradient.zeroed(wild) if count else gradient
                finite.add_weighted_sum(
                    (weights * scale).to(self.sums[parameter].dtype), self.sums[parameter]
                )
            return count
        finally:
            self.forget()

    def zero_sums(self) -> None:
        """Start a new step."""
        torch._foreach_zero_(list(self.sums.values()))

    def forget(self) -> None:
        """Drop a backward pass that was recorded and not collected."""
        self._recorder.forget()
        self._astray.clear()

    def remove(self) -> None:
        """Restore the module exactly as it was."""
        self.forget()
        for wrapped in reversed(self._wrapped):
            wrapped.restore()
        for hook in self._hooks:
            hook.remove()
        self._wrapped.clear()
        self._hooks.clear()
        _instrumented.pop(self.module, None)

    @torch.no_grad()
    def per_example_norms(self, *, loss_reduction: str = "mean") -> Tensor:
        """Return each example's gradient norm before clipping, without forgetting the pass (sensitive)."""
        size = self.recorded_batch_size or 0
        return self._norms(self._gradients(loss_reduction, torch.ones(size))) * (
            size if loss_reduction == "mean" else 1
        )

    @torch.no_grad()
    def per_example_gradients(self, *, loss_reduction: str = "mean") -> dict[nn.Parameter, Tensor]:
        """Return each example's gradient, written out, without forgetting the pass (sensitive; for tests and audits)."""
        size = self.recorded_batch_size or 0
        scale = size if loss_reduction == "mean" else 1
        gradients = self._gradients(loss_reduction, torch.ones(size))
        return {
            parameter: gradients[parameter].written_out(0, size) * scale
            if parameter in gradients
            else total.new_zeros(size, *total.shape)
            for parameter, total in self.sums.items()
        }

    def record(self, loss: Tensor) -> None:
        """Do what `loss.backward()` does to the watched layers, and leave every `.grad` alone."""
        inputs = [self._recorder.anchor, *self.sums]
        _, *astray = torch.autograd.grad(loss, inputs, allow_unused=True)
        pairs = zip(self.sums, astray, strict=True)
        self._astray += [parameter for parameter, gradient in pairs if gradient is not None]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let the module run as if it had never been touched."""
        self._recorder.paused = True
        try:
            yield
        finally:
            self._recorder.paused = False

    @contextmanager
    def recording_in_evaluation(self) -> Iterator[None]:
        """Record evaluation passes too (the probe compares examples without dropout)."""
        self._recorder.forced = True
        try:
            yield
        finally:
            self._recorder.forced = False

    def _gradients(self, loss_reduction: str, clip_norms: Tensor) -> dict[nn.Parameter, PerExample]:
        """Return the gradients of the recorded pass per parameter, after checking that it is what it should be."""
        check_one_of(("mean", "sum"), loss_reduction=loss_reduction)
        calls = self._recorder.calls
        if not calls:
            fail(
                "Expected loss.backward() before the gradients are collected. Got no backward pass in training mode."
            )
        self._check_nothing_astray()
        size = clip_norms.shape[0]
        uses: dict[nn.Parameter, list[PerExample]] = {}
        for call in calls:
            call.check_inputs_unchanged()
            found = call.output_gradient.shape[0] if call.output_gradient.dim() else None
            if found != size:
                fail(
                    f"Expected the first dimension to be the batch of {size} examples in every layer. Got output of shape "
                    f"{tuple(call.output_gradient.shape)} from {call.site.name}. Something all examples share, such as "
                    "positions, needs a first dimension of 1 (positions[None]), or one row per example."
                )
            if size:
                for parameter, gradient in call.gradients(call.output_gradient.detach()):
                    uses.setdefault(parameter, []).append(gradient)
        return {parameter: summed(parts) for parameter, parts in uses.items()}

    def _norms(self, gradients: dict[nn.Parameter, PerExample]) -> Tensor:
        squares = [gradient.squared_norms() for gradient in gradients.values()]
        return torch.stack(squares).sum(0).sqrt_()

    def _check_nothing_astray(self) -> None:
        if self._astray:
            names = ", ".join(self._names[parameter] for parameter in self._astray)
            fail(
                f"Parameters {names} were used outside their own module's forward (as in x @ layer.weight), where no "
                "example's gradient can be told. Call the module that holds them, or freeze them."
            )
        for parameter in self._frozen:
            if parameter.requires_grad:
                fail(
                    f"Parameter {self._names[parameter]} was frozen when the module was made private, and is not now."
                )

    def _note_astray(self, parameter: nn.Parameter) -> None:
        if self._recorder.module.training:
            self._astray.append(parameter)

    def _wrap(self, module: nn.Module, name: str, rule: Rule | None) -> None:
        site = Site(self._recorder, name or type(module).__name__)
        wrapped = _WatchedForward(module, self._recorder)
        if rule is None:
            original = wrapped.original
            wrapped.watched = lambda *args, **kwargs: any_module(site, module, original, *args, **kwargs)
        else:
            apply = rule.apply
            wrapped.watched = lambda *args, **kwargs: apply(site, module, *args, **kwargs)
        self._wrapped.append(wrapped)

    def _wrap_model(self) -> None:
        """Learn the batch size from the model's inputs, and choose the memory layout for what happens inside."""
        recorder = self._recorder
        wrapped = _WatchedForward(self.module, recorder)
        original = wrapped.original
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.sums)
        layout = {
            "channels_last": on_cpu and any(isinstance(child, nn.Conv2d) for child in self.module.modules())
        }

        def whole(*args: Any, **kwargs: Any) -> Any:
            if recorder.batch_size is not None:  # the model calls itself
                return original(*args, **kwargs)
            tensors = (
                leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()
            )
            first = next(tensors, None)
            recorder.batch_size = None if first is None else first.shape[0]
            recorder.channels_last = layout["channels_last"]
            try:
                if not recorder.channels_last:
                    return original(*args, **kwargs)
                state = torch.get_rng_state()
                try:
                    return original(*args, **kwargs)
                except PdpsgdError:
                    raise
                except RuntimeError:
                    # Code such as x.view(batch, -1) insists on the default layout: it gets it from now on.
                    layout["channels_last"] = recorder.channels_last = False
                    torch.set_rng_state(state)
                    return original(*args, **kwargs)
            finally:
                recorder.batch_size, recorder.channels_last = None, False

        wrapped.watched = whole
        self._wrapped.append(wrapped)


def of_module(module: nn.Module) -> ClippedGradients | None:
    """Return what watches this module, if anything does."""
    reference = _instrumented.get(module)
    return None if reference is None else reference()


def clip_weights(norms: Tensor, clip_norms: Tensor) -> Tensor:
    """Return min(1, C_i (1 - 2^-10) / norm_i), and 0 where the norm is not finite.

    Guarantee: weight times norm is at most C_i (1 - 2^-11), also in float32 and for norms whose squares vanish there.
    """
    limits = clip_norms.to(norms) * CLIPPING_MARGIN
    weights = (limits / norms.clamp(min=SMALLEST_NORM)).clamp(min=0, max=1)
    return torch.where(norms.isfinite(), weights, 0)


class _WatchedForward:
    """Stands in for a module's forward; copies and pickles of the module get the module's own forward back."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self.module = module
        self.recorder = recorder
        self.before = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        self.watched: Callable[..., Any] = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.watched if self.recorder.active() else self.original)(*args, **kwargs)

    def restore(self) -> None:
        """Undo."""
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module))
        return types.MethodType(type(self.module).forward, self.module if copied is None else copied)

    def __reduce__(self) -> Any:
        # When this is read, the module has no forward but its class's.
        return getattr, (self.module, "forward")


def _rules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rule | None]]:
    """Yield the modules to be watched, with their rules; None is the general rule for a module and all it contains."""
    for name, module in model.named_modules():
        check_module(name, module)
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Rule | None]]:
        if module in seen or not any(parameter.requires_grad for parameter in module.parameters()):
            return
        seen.add(module)
        rule = rule_of(module)
        if rule is not None or _holds_parameters(module):
            if not _can_be_called(module):
                fail(
                    f"{name or 'The model'} ({type(module).__name__}) holds trainable parameters and has no forward."
                )
            yield name, module, rule
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    yield from walk("", model)


def _holds_parameters(module: nn.Module) -> bool:
    """Whether the module uses trainable parameters itself: its own, or those of children that are never called."""
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return True
    return any(not _can_be_called(child) and _holds_parameters(child) for child in module.children())


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _accurate_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
