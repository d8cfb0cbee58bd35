"""Clipped gradient sums: what a private step adds noise to.

The model's layers are instrumented: they record what its backward pass leaves behind. Afterwards the norm of each
per-example gradient is taken, mostly without materializing it, and one weighted sum gives the sum of clipped
gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError, check_one_of, fail
from pdpsgd.gradients._torch import full_precision
from pdpsgd.gradients.instrument import instrument
from pdpsgd.gradients.layers import Layers
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.owners import Owners
from pdpsgd.gradients.per_example import PerExample, accurate, summed
from pdpsgd.gradients.recorder import Call
from pdpsgd.gradients.weights import charged_norms, checked_largest, weigh

ADDED_TWICE = (
    "Expected sums to which every batch was added once. An error left them incomplete: added again, the batch would "
    "count twice. Begin a new pass over the private loader, which samples the step again."
)
_HALF = frozenset((torch.bfloat16, torch.float16))
_instrumented_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ClippedGradients]] = (
    weakref.WeakKeyDictionary()
)


class ClippedGradients:
    """The sum of a module's clipped per-example gradients, taken after each backward pass.

    The module keeps its type, its parameters and its names; only the `forward` of the layers is wrapped, until
    `remove()`. Passes in evaluation mode or under `torch.no_grad()` are not touched.
    """

    def __init__(self, module: nn.Module) -> None:
        if of_module(module) is not None:
            fail(
                "Expected a module that is not private yet. Got one that is: use what made it private, or remove() it."
            )
        self.module = module
        self._recorder, self._forwards = instrument(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.sums: dict[nn.Parameter, Tensor] = dict.fromkeys(trained, torch.empty(0, device="cpu"))
        devices = dict.fromkeys(parameter.device for parameter in trained)
        self.flat_sums = [_flat_sums(trained, device, self.sums) for device in devices]
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        # By identity: a tensor's own hash is slow.
        self._totals = {id(parameter): total for parameter, total in self.sums.items()}
        places = ((key, native.place_of_total(total)) for key, total in self._totals.items())
        self._places = {key: place for key, place in places if place is not None}
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._untracked: list[nn.Parameter] = []
        self._incomplete = False  # an error came while a batch was being added
        self.additions = 0
        """How often something began to be added to the sums of this step, also where an error ended it."""
        self._is_summed = False  # the mean of the pass that waits was multiplied by the number of rows
        self.times = 1  # that number, while `pass_back` passes a mean back
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note_untracked)  # type: ignore[no-untyped-call]
            for parameter in self.sums
        ]
        _instrumented_by[module] = weakref.ref(self)

    @property
    def anchor(self) -> Tensor:
        """Leaf that hangs the instrumented layers into autograd's graph; its gradient is nothing."""
        return self._recorder.anchor

    @property
    def in_training_mode(self) -> bool:
        """Whether the module is in the mode in which it is trained: that in which it was made private, or training."""
        return self._recorder.in_training_mode

    @property
    def recorded_batch_size(self) -> int | None:
        """Batch size of the backward pass that waits to be collected; None if none waits."""
        calls = self._recorder.calls
        return calls[0].shape[0] if calls else None

    @property
    def recorded_in_half_precision(self) -> bool:
        """Whether the backward pass that waits went through a layer in 16 bits."""
        return not _HALF.isdisjoint([call.dtype for call in self._recorder.calls])

    @torch.no_grad()
    def clipped_sum(
        self,
        clip_norms: Tensor,
        *,
        largest_clip_norm: float | None = None,
        loss_reduction: str = "mean",
        views: int = 1,
        starts: Tensor | None = None,
        whose: Tensor | None = None,
        note: Callable[[Tensor], None] | None = None,
    ) -> int:
        """Add the clipped per-example gradients of the last backward pass to `sums`, and forget the pass.

        Args:
            clip_norms: C_i, the clipping norm of each example.
            largest_clip_norm: The largest clipping norm anybody has, also outside of this batch: a public number. Not
                needed where everybody has the same.
            loss_reduction: "mean" if the loss was a mean over the batch, so that an example's own gradient is what
                backward gave, times the size of the batch; or "sum".
            views: How many views of each example went through the model, in consecutive rows (augmentation
                multiplicity). An example's gradient is their average.
            starts: For people with many records: person i has records starts[i] to starts[i + 1] of the batch, at least
                one (a placeholder, with a clipping norm of 0). `clip_norms` are those of people, and a person's
                gradient is the average over their records.
            whose: For people with many records: their places on the list, below 0 for placeholders that are nobody's.
            note: Called, before anything is added, with the most by which each example's or person's part moves the
                sum, rounding included: at most C_i, and less for small gradients (`charged_norms`; sensitive).

        Returns:
            How many examples, or people, had a gradient that is not finite. This number is sensitive.

        Guarantee: adding or removing the record of example i, in a row that is kept (its weight is 0 where the record
        is not there), moves the sum over a step by at most C_i, rounding included, for any model, loss and example,
        provided that examples do not mix in them (see `probe`). A gradient that is not finite adds nothing; neither
        does somebody whose C_i is below about a thousandth of the largest, where rounding of others' gradients would
        show. Norms and sums are taken in float32 or better, also within autocast or where TF32 is allowed.
        With `starts`, the same for adding or removing all records of person i, in rows that need not be kept, provided
        that the rows of others come out alike: the loss is a sum, or a mean over a power of two of rows.
        """
        if self._incomplete:
            fail(ADDED_TWICE)
        try:
            with full_precision():
                reduced = self._as_recorded(loss_reduction)
                owners = self._owners_of_rows(views, starts, whose, clip_norms.device)
                return self._add_clipped(clip_norms, largest_clip_norm, reduced, owners, note)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PdpsgdError(
                "Expected layers and parameters as they were in the forward pass, until after the step. Got an error: "
                f"{error}. Was a stride, a kernel's size or a shape changed in between?"
            ) from error
        finally:
            self.forget()

    def expect(self, *, views: int = 1, starts: Tensor | None = None, whose: Tensor | None = None) -> None:
        """Say before a backward pass what `clipped_sum` will say after it, of all passes until this is called again.

        Then gradients are added up over an example's views, or a person's records, as they are taken during the
        backward pass: fewer of them are kept, and several rows are one product.
        """
        self._recorder.owners = None
        if views > 1 or starts is not None:
            device = self.flat_sums[0].device
            self._recorder.owners = Owners(views=views, starts=starts, whose=whose, device=device, early=True)

    def zero_sums(self) -> None:
        """Start a new step."""
        for flat in self.flat_sums:
            flat.zero_()
        self._incomplete, self.additions = False, 0

    def forget(self) -> None:
        """Drop a backward pass that was recorded and not collected."""
        self._is_summed = False
        self._recorder.forget()
        self._untracked.clear()

    def remove(self) -> None:
        """Restore the module exactly as it was."""
        self.forget()
        for forward in reversed(self._forwards):
            forward.restore()
        for hook in self._hooks:
            hook.remove()
        self._forwards.clear()
        self._hooks.clear()
        _instrumented_by.pop(self.module, None)

    @torch.no_grad()
    def per_example_norms(self, *, loss_reduction: str = "mean") -> Tensor:
        """Return the per-example gradient norms before clipping, without forgetting the pass (sensitive)."""
        size, loss_reduction = self.recorded_batch_size or 0, self._as_recorded(loss_reduction)
        with full_precision():
            layers = Layers(self._gradients(loss_reduction, size), self._totals, size)
            norms = layers.squared_norms().sqrt_()
        return norms * (size if loss_reduction == "mean" else 1)

    @torch.no_grad()
    def per_example_gradients(self, *, loss_reduction: str = "mean") -> dict[nn.Parameter, Tensor]:
        """Return the per-example gradients, materialized, without forgetting the pass (sensitive; for audits)."""
        size, loss_reduction = self.recorded_batch_size or 0, self._as_recorded(loss_reduction)
        scale = size if loss_reduction == "mean" else 1
        with full_precision():
            gradients = dict(self._gradients(loss_reduction, size))
            return {
                parameter: gradients[parameter].materialize(0, size) * scale
                if parameter in gradients
                else accurate(parameter.new_zeros(size, *parameter.shape))
                for parameter in self.sums
            }

    @contextmanager
    def watching_output_gradients(self, watch: Callable[[Tensor], None]) -> Iterator[None]:
        """Let somebody see the gradients of layers' outputs as they arrive (sensitive; for checks)."""
        self._recorder.on_output_gradient = watch
        try:
            yield
        finally:
            self._recorder.on_output_gradient = None

    def summed(self, mean: Tensor, rows: int) -> Tensor:
        """Return a mean loss times the number of its rows, for the backward pass that comes next.

        What is recorded of a row is then its own gradient. Where the mean does nothing but divide by the number of
        rows, that has nothing to round: n / n is 1.
        """
        self._is_summed = True
        return mean * rows

    def pass_back(self, mean: Tensor, rows: int) -> None:
        """Do what `summed(mean, rows).backward()` does, also in a loop that is watched: its mean stays what it is."""
        self.times = rows
        try:
            times = torch.tensor(rows, dtype=mean.dtype, device=mean.device)
            mean.backward(times)  # type: ignore[no-untyped-call]
        finally:
            self.times = 1
        self._is_summed = True

    def record(self, loss: Tensor) -> None:
        """Do what `loss.backward()` does to the instrumented layers, and leave every `.grad` alone."""
        # All the leaves there are: only what leads to them is computed.
        leaves = [self._recorder.anchor, *leaves_of_graph(loss)]
        expected, self._recorder.owners = self._recorder.owners, None  # checks look at single rows
        try:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        finally:
            self._recorder.owners = expected
        pairs = zip(leaves, found, strict=True)
        self._untracked += [
            leaf
            for leaf, gradient in pairs
            if isinstance(leaf, nn.Parameter) and leaf in self.sums and gradient is not None
        ]

    @contextmanager
    def uninstrumented(self) -> Iterator[None]:
        """Let the module run as if it had never been touched."""
        self._recorder.paused = True
        try:
            yield
        finally:
            self._recorder.paused = False

    @contextmanager
    def recording_in_evaluation(self) -> Iterator[None]:
        """Record evaluation passes too (the probe compares examples without dropout)."""
        before, self._recorder.records_evaluation = self._recorder.records_evaluation, True
        try:
            yield
        finally:
            self._recorder.records_evaluation = before

    def _as_recorded(self, loss_reduction: str) -> str:
        """Return how the loss was reduced whose backward pass waits."""
        return "sum" if self._is_summed else loss_reduction

    def _add_clipped(
        self,
        clip_norms: Tensor,
        largest_clip_norm: float | None,
        loss_reduction: str,
        owners: Owners,
        note: Callable[[Tensor], None] | None,
    ) -> int:
        views, groups = owners.views, owners.groups
        examples = clip_norms.shape[0]
        size = examples * views if groups is None else int(groups.starts[-1])
        calls = self._checked_calls(loss_reduction, size)
        if examples == 0:
            return 0
        # What was recorded of a row, times this, is its own gradient. A person's is the mean over the person's rows.
        scale = size if loss_reduction == "mean" else 1.0
        if groups is None:
            scale /= views
        layers = None
        if largest_clip_norm is not None and note is None:
            layers = self._layers_at_once(calls, examples, owners)
            others = layers.squares_of_others() if layers.are_compiled else None
            self._begin_to_add()
            added = layers.add_clipped(clip_norms, largest_clip_norm, scale, others)
            self._incomplete = False
            if added:
                return 0
        if layers is None or layers.are_compiled:  # what clips at once does nothing else
            layers = self._layers(calls, examples, owners)
        squares = layers.squared_norms()
        largest = checked_largest(clip_norms, largest_clip_norm)
        found = weigh(squares, clip_norms, largest, scale, None if groups is None else groups.starts)
        if note is not None:
            note(charged_norms(found.norms, found.weights, largest))
        if found.non_finite:
            layers = layers.zeroed(~found.norms.isfinite())
        self._begin_to_add()
        layers.add_weighted_sums(found)
        self._incomplete = False
        return found.non_finite

    def _begin_to_add(self) -> None:
        """Note that sums are incomplete from here on."""
        self._incomplete = True
        self.additions += 1

    def _owners_of_rows(
        self, views: int, starts: Tensor | None, whose: Tensor | None, device: torch.device
    ) -> Owners:
        expected = self._recorder.owners
        if expected is not None and expected.are(views=views, starts=starts, whose=whose):
            return expected
        return Owners(views=views, starts=starts, whose=whose, device=device)

    def _layers_at_once(self, calls: list[Call], examples: int, owners: Owners) -> Layers:
        """Return what can clip in one call of compiled code, and do nothing else; if not, it tells."""
        groups = owners.groups
        if groups is not None or owners.views == 1:
            at_once = native.AtOnce(self._places, by_row=groups is None)
            gradients = _found_in([call for call in calls if not call.is_found_in_place(at_once)])
            used = {*at_once.parameters, *(id(parameter) for parameter, _ in gradients)}
            if len(used) == len(at_once.parameters) + len(gradients):
                return Layers(gradients, self._totals, examples, groups, at_once)
            # Several uses of a parameter are added up before norms are taken.
        return self._layers(calls, examples, owners)

    def _layers(self, calls: list[Call], examples: int, owners: Owners) -> Layers:
        gradients = _found_in(calls)
        if owners.groups is None and owners.views > 1:
            gradients = [(parameter, owners.over(part)) for parameter, part in gradients]
        return Layers(gradients, self._totals, examples, owners.groups)

    def _gradients(self, loss_reduction: str, size: int) -> list[tuple[Tensor, PerExample]]:
        """Return each parameter and its per-example gradients, after checking the recorded pass."""
        calls = self._checked_calls(loss_reduction, size)
        return _found_in(calls) if size else []

    def _checked_calls(self, loss_reduction: str, size: int) -> list[Call]:
        """Return the calls of the recorded pass."""
        check_one_of(("mean", "sum"), loss_reduction=loss_reduction)
        calls = self._recorder.calls
        if not calls:
            fail(
                "Expected loss.backward() before the gradients are collected. Got no backward pass in training mode."
            )
        self._check_nothing_untracked()
        for call in calls:
            call.check_unchanged()
            if not call.shape or call.shape[0] != size:
                fail(
                    f"Expected the first dimension to be the batch of {size} examples in every layer. Got output of "
                    f"shape {tuple(call.shape)} from {call.site.name}. Something all examples "
                    "share, such as positions, needs a first dimension of 1 (positions[None]), or one row per example."
                )
        return calls

    def _check_nothing_untracked(self) -> None:
        if self._untracked:
            names = ", ".join(self._names[parameter] for parameter in self._untracked)
            fail(
                f"Parameters {names} were used outside their own module's forward (as in x @ layer.weight), where no "
                "per-example gradient is known. Call the module that holds them, or freeze them; a penalty on "
                "parameters belongs in the optimizer, which looks at no data: SGD(..., weight_decay=0.01) for 0.005 "
                "times the sum of squares."
            )
        for parameter in self._frozen:
            if parameter.requires_grad:
                fail(
                    f"Parameter {self._names[parameter]} was frozen when the module was made private, and is not now."
                )

    def _note_untracked(self, parameter: nn.Parameter) -> None:
        if self._recorder.in_training_mode:
            self._untracked.append(parameter)


def of_module(module: nn.Module) -> ClippedGradients | None:
    """Return the `ClippedGradients` that instrument this module, if any do."""
    reference = _instrumented_by.get(module)
    return None if reference is None else reference()


def leaves_of_graph(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients a backward pass from the loss would add up."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _found_in(calls: list[Call]) -> list[tuple[Tensor, PerExample]]:
    """Return the parameters of these calls, each once, with the gradients of all its uses."""
    found = [pair for call in calls for pair in call.found()]
    uses: dict[int, list[PerExample]] = {}
    for parameter, part in found:
        uses.setdefault(id(parameter), []).append(part)
    if len(uses) == len(found):
        return found
    parameters = {id(parameter): parameter for parameter, _ in found}
    return [(parameters[key], summed(parts)) for key, parts in uses.items()]


def _flat_sums(
    parameters: list[nn.Parameter], device: torch.device, sums: dict[nn.Parameter, Tensor]
) -> Tensor:
    """Lay the sums of all parameters on a device side by side, in float64, so that a step handles them as one."""
    here = [parameter for parameter in parameters if parameter.device == device]
    sizes = [parameter.numel() for parameter in here]
    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = torch.split(flat, sizes)
    sums.update((parameter, part.view(parameter.shape)) for parameter, part in zip(here, parts, strict=True))
    return flat
