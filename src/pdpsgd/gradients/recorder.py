"""What a backward pass leaves behind: for each call of a layer, the gradient of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients._torch import (
    backward_pass,
    full_precision,
    keeps_graph,
    on_gradient,
    pytree,
    version_of,
    without_view,
    without_view_in_graph,
)
from pdpsgd.gradients.native.dispatch import AtOnce
from pdpsgd.gradients.owners import Owners
from pdpsgd.gradients.per_example import PerExample
from pdpsgd.gradients.survey import Survey
from pdpsgd.gradients.workspace import Workspace

# From the gradient of a layer's output to each parameter's per-example gradients.
Gradients = Callable[[Tensor], Iterable[tuple[Tensor, PerExample]]]
# Tells compiled code where it can read the same, and whether it can: then there need be no such objects.
InPlace = Callable[[Tensor, AtOnce], bool]


# What layers with fewer numbers, inputs and outputs together, leave behind is kept until the step as it is.
LARGE = 1 << 16


class Use:
    """A call of a layer that waits for its output's gradient."""

    __slots__ = ("_check", "_gradients", "_in_place", "_inputs", "_site", "_version")

    def __init__(
        self,
        site: Site,
        inputs: Tensor,
        gradients: Gradients,
        check: Callable[[], None] | None,
        in_place: InPlace | None,
    ) -> None:
        self._site, self._check, self._in_place = site, check, in_place
        self._inputs: Tensor | None = inputs
        self._gradients: Gradients | None = gradients
        self._version = version_of(inputs)

    def receive(self, gradient: Tensor) -> None:
        """Take the gradient of the output, and let go of the inputs: the graph may live on for as long as the loss."""
        if self._inputs is None or self._gradients is None:
            fail(
                "Expected one backward pass for each forward pass. Got another one through the same graph. Compute the "
                "loss again, or write loss.backward(retain_graph=True) the first time."
            )
        call = Call(
            self._site, self._inputs, self._version, self._gradients, self._check, self._in_place, gradient
        )
        if not keeps_graph():
            self._inputs = self._gradients = self._in_place = None
        self._site.recorder.receive(call)


class Call:
    """A call of a layer, once its output's gradient is known.

    Where the per-example gradients are smaller than what they are computed from, inputs and the gradient of the output,
    as many numbers as the activations, are let go of during the backward pass.
    """

    __slots__ = (
        "_check",
        "_found",
        "_gradients",
        "_in_place",
        "_inputs",
        "_version",
        "dtype",
        "output_gradient",
        "shape",
        "site",
    )

    def __init__(
        self,
        site: Site,
        inputs: Tensor,
        version: int,
        gradients: Gradients,
        check: Callable[[], None] | None,
        in_place: InPlace | None,
        output_gradient: Tensor,
    ) -> None:
        self.site = site
        self.shape, self.dtype = output_gradient.shape, output_gradient.dtype
        self.output_gradient: Tensor | None = output_gradient
        self._inputs: Tensor | None = inputs
        self._version, self._gradients, self._check, self._in_place = version, gradients, check, in_place
        self._found: list[tuple[Tensor, PerExample]] | None = None

    @property
    def is_large(self) -> bool:
        """Whether there may be something to be saved: what compiled code reads in place stays as it is."""
        return (
            self._in_place is None
            and self._inputs is not None
            and self._inputs.numel() + self.shape.numel() >= LARGE
        )

    def settle(self) -> None:
        """Take the per-example gradients now, and let go of all that they do not need any more."""
        assert self.output_gradient is not None
        assert self._gradients is not None
        if not self._is_unchanged():
            return
        with torch.no_grad(), full_precision():
            found = [
                (parameter, part, self.site.recorder.settled(part))
                for parameter, part in self._gradients(self.output_gradient)
            ]
        self._found = [(parameter, part if now is None else now) for parameter, part, now in found]
        self.output_gradient = self._gradients = None  # type: ignore[assignment]
        if all(now is not None for *_, now in found):
            self._inputs = None

    def check_unchanged(self) -> None:
        """Refuse layers that are not what they were, and activations that were overwritten after a layer used them."""
        if self._check is not None:
            self._check()
        if not self._is_unchanged():
            fail(
                f"The input of {self.site.name} was changed in place after the layer used it, so its gradients "
                "cannot be computed. Use an operation that is not in place, or change it after optimizer.step()."
            )

    def is_found_in_place(self, at_once: AtOnce) -> bool:
        """Tell compiled code where the gradients lie, if it can read them there."""
        if self._in_place is None or self.output_gradient is None:
            return False
        return self._in_place(self.output_gradient, at_once)

    def found(self) -> Iterable[tuple[Tensor, PerExample]]:
        """Return the parameters and their per-example gradients."""
        if self._found is not None:
            return self._found
        assert self.output_gradient is not None
        return self._gradients(self.output_gradient)

    def _is_unchanged(self) -> bool:
        return self._inputs is None or version_of(self._inputs) == self._version


class Recorder:
    """The calls of one backward pass, and whether a forward pass is recorded at all."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[Call] = []
        self.inside = False  # a forward pass of the whole model
        self.batch_size: int | None = None  # of the last such pass, until its gradients are collected
        self.channels_last = False
        self.workspace = Workspace()
        self.owners: Owners | None = (
            None  # of the rows of passes to come, where several are one example's or person's
        )
        self.on_output_gradient: Callable[[Tensor], None] | None = None
        self.paused = False
        # A model may be trained in evaluation mode, without dropout: then it is when it is made private.
        self.records_evaluation = not module.training
        self.surveying: Survey | None = None  # a pass over a few rows that finds out what is batched
        self.survey: Survey | None = None  # what was found, for the model's inputs as they are given
        self.calls_so_far: dict[Any, int] = {}  # of each layer, in this forward pass
        self.sharing = 0  # modules that run with parameters that are shared values
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._backward = -1

    def active(self) -> bool:
        """Whether the running forward pass is recorded: only training passes are."""
        return torch.is_grad_enabled() and not self.paused and self.in_training_mode

    @property
    def in_training_mode(self) -> bool:
        """Whether the module is in the mode in which it is trained."""
        return self.module.training or self.records_evaluation

    def receive(self, call: Call) -> None:
        """Keep a call whose output gradient has arrived."""
        backward = backward_pass()
        if self.calls and backward != self._backward:
            raise PdpsgdError(
                "Two backward passes without optimizer.step() in between. Call backward() once per batch, "
                "optimizer.zero_grad() to give a batch up. To accumulate, write make_private(..., "
                "max_physical_batch_size=64), and backward() and step() for each batch that comes; "
                "activation checkpointing needs use_reentrant=False."
            )
        self._backward = backward
        self.calls.append(call)
        if self.on_output_gradient is not None and call.output_gradient is not None:
            self.on_output_gradient(call.output_gradient)
        if call.shape[:1] == (self.batch_size,) and call.is_large:
            with suppress(PdpsgdError, RuntimeError):  # the step finds it again, and says it
                call.settle()

    def settled(self, gradient: PerExample) -> PerExample | None:
        """Return what is kept of a gradient until the step, added up over its rows' owners; None if it waits."""
        return gradient.settled() if self.owners is None else self.owners.settled(gradient)

    def forget(self) -> None:
        """Drop what was recorded."""
        self.calls.clear()
        self.workspace.release()
        if not self.inside:
            self.batch_size, self.channels_last = None, False
        self._backward = -1


class Site:
    """An instrumented module: the place where its calls are recorded."""

    __slots__ = ("name", "recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def batched(self, inputs: Tensor) -> Tensor:
        """Give an input that is shared by all examples (first dimension 1) one row per example."""
        size = self.recorder.batch_size
        if size is None or inputs.dim() < 2 or inputs.shape[0] != 1 or size == 1:
            return inputs
        return inputs.expand(size, *inputs.shape[1:])

    def count_call(self) -> int:
        """Return how many calls of this layer the forward pass has had before."""
        so_far = self.recorder.calls_so_far
        number = so_far[self] = so_far.get(self, -1) + 1
        return number

    def follows_batch(self, call: int, leaf: int, dim: int) -> bool | None:
        """Whether a dimension of a leaf of a call's arguments is the batch; None where nobody knows."""
        survey = self.recorder.survey
        return None if survey is None else survey.follows(self, call, leaf, dim)

    def check_input(self, args: Any, kwargs: Any) -> None:
        """Refuse an input that all examples share, although it has as many rows as the batch."""
        call, survey, size = self.count_call(), self.recorder.survey, self.recorder.batch_size
        place, first = 0, args[0] if args else None
        if not isinstance(first, Tensor):
            leaves = enumerate(pytree.tree_leaves((args, kwargs)))
            place, first = next(((at, leaf) for at, leaf in leaves if isinstance(leaf, Tensor)), (0, None))
        elif survey is not None and survey.is_batched(self):
            return
        if first is None or size is None or size == 1:
            return
        shape = first.shape
        if shape and shape[0] == size and self.follows_batch(call, place, 0) is False:
            fail(
                f"Expected the first dimension of what {self.name} is given to be the batch. Got {tuple(shape)}, which "
                f"has as many rows as this batch of {shape[0]} examples by chance: with another batch size it has "
                "not. Something all examples share, such as positions, needs a first dimension of 1 "
                "(positions[None]), or one row per example."
            )

    def require_dimensions(self, inputs: Tensor, dimensions: int) -> None:
        """Refuse an input without its batch dimension."""
        if inputs.dim() != dimensions:
            fail(
                f"{self.name} needs inputs of {dimensions} dimensions, the first of them the batch. "
                f"Got shape {tuple(inputs.shape)}."
            )

    def record(
        self,
        outputs: Tensor,
        inputs: Tensor,
        gradients: Gradients,
        check: Callable[[], None] | None = None,
        in_place: InPlace | None = None,
    ) -> Tensor:
        """Return `outputs`, whose gradient is recorded when it arrives, with the inputs it belongs to.

        `outputs` must come from `inputs` and detached parameters, so that autograd itself computes the gradient of
        the inputs and nothing else. `check` refuses, at the step, a layer that is not what it was.
        """
        receive = Use(self, inputs, gradients, check, in_place).receive
        if outputs.requires_grad:
            # What overwrites a view (an activation in place) takes it out of the graph, and a hook with it.
            outputs = without_view_in_graph(outputs)
            on_gradient(outputs, receive)
            return outputs
        # The first layer: nothing before it needs a gradient, so autograd has to be told that this does. Its output may
        # be overwritten, which autograd does not allow of views.
        if outputs is not inputs:
            outputs = without_view(outputs)
        first: Tensor = _FirstLayer.apply(self.recorder.anchor, receive, [outputs])  # type: ignore[no-untyped-call]
        return first


class _FirstLayer(torch.autograd.Function):
    """Identity that makes a tensor nothing differentiable led to part of the graph, and records its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, receive: Callable[[Tensor], None], outputs: list[Tensor]) -> Tensor:
        ctx.receive = receive
        # In a list, so that autograd takes it for a new tensor (a later in-place ReLU is then allowed).
        return outputs.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.receive(gradients[0])
        return None, None, None
