"""What a backward pass leaves behind: for each call of a layer, the gradient of its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients._torch import backward_pass, pytree, version_of, without_view
from pdpsgd.gradients.per_example import PerExample, Workspace
from pdpsgd.gradients.survey import Survey

# From the gradient of a layer's output to each parameter's per-example gradients.
Gradients = Callable[[Tensor], Iterable[tuple[Tensor, PerExample]]]


@dataclass(frozen=True)
class Call:
    """A call of a layer, once its output's gradient is known."""

    site: Site
    inputs: Tensor
    version: int
    gradients: Gradients
    output_gradient: Tensor

    def check_inputs_unchanged(self) -> None:
        """Refuse activations that were overwritten after the layer used them."""
        if version_of(self.inputs) != self.version:
            fail(
                f"The input of {self.site.name} was changed in place after the layer used it, so its gradients "
                "cannot be computed. Use an operation that is not in place, or change it after optimizer.step()."
            )


class Recorder:
    """The calls of one backward pass, and whether a forward pass is recorded at all."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[Call] = []
        self.inside = False  # a forward pass of the whole model
        self.batch_size: int | None = None  # of the last such pass, until its gradients are collected
        self.channels_last = False
        self.workspace = Workspace()
        self.paused = False
        # A model may be trained in evaluation mode, without dropout: then it is when it is made private.
        self.records_evaluation = not module.training
        self.surveying: Survey | None = None  # a pass over a few rows that finds out what is batched
        self.survey: Survey | None = None  # what was found, for the model's inputs as they are given
        self.calls_so_far: Counter[Site] = Counter()  # of each layer, in this forward pass
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
        number = self.recorder.calls_so_far[self]
        self.recorder.calls_so_far[self] += 1
        return number

    def follows_batch(self, call: int, leaf: int, dim: int) -> bool | None:
        """Whether a dimension of a leaf of a call's arguments is the batch; None where nobody knows."""
        survey = self.recorder.survey
        return None if survey is None else survey.follows(self, call, leaf, dim)

    def check_input(self, args: Any, kwargs: Any) -> None:
        """Refuse an input that all examples share, although it has as many rows as the batch."""
        call = self.count_call()
        leaves = [args[0]] if args and isinstance(args[0], Tensor) else pytree.tree_leaves((args, kwargs))
        place = next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if place is None or self.recorder.batch_size in (None, 1):
            return
        shape = leaves[place].shape
        if shape[:1] == (self.recorder.batch_size,) and self.follows_batch(call, place, 0) is False:
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

    def record(self, outputs: Tensor, inputs: Tensor, gradients: Gradients) -> Tensor:
        """Return `outputs`, whose gradient is recorded when it arrives, with the inputs it belongs to.

        `outputs` must come from `inputs` and detached parameters, so that autograd itself computes the gradient of
        the inputs and nothing else.
        """
        version = version_of(inputs)

        def receive(gradient: Tensor) -> None:
            self.recorder.receive(Call(self, inputs, version, gradients, gradient))

        if outputs.requires_grad:
            outputs.register_hook(receive)  # type: ignore[no-untyped-call]
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
