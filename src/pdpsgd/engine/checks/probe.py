"""Refuses models and losses in which examples mix: then per-example gradients do not exist, and nothing is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import RandomStates, call, has_rows, map_tensors, tensors
from pdpsgd.errors import PdpsgdError, check_one_of, fail
from pdpsgd.gradients.clipping import ClippedGradients, of_module

Loss = Callable[..., Tensor]

EXAMPLES = 4
# Relative to the gradient's norm. Rounding differs between batch sizes; mixing is far coarser than this.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
MOVED_BY = 1e-3


def check_examples_do_not_mix(
    module: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    loss_reduction: str = "mean",
    size: int | None = None,
) -> bool:
    """Refuse a model or loss in which an example's gradient depends on the rest of the batch.

    `inputs` is what the model is called with (a tuple or dict is spread out), and `loss(outputs, targets)`, or
    `loss(outputs)` without targets, is reduced over the batch as `loss_reduction` says. The first few examples of
    the batch (of `size`; by default the first tensor's) are used. Returns whether there were enough of them (two).

    Two things are compared: without dropout, an example's gradient alone (plain autograd) with its gradient in the
    batch (as it will be clipped); and in training mode with the same random numbers, the gradients of the other
    examples before and after one example is exchanged. What is found has to be found also with slightly other weights:
    where two numbers of a maximum are equal but for rounding, batches of two sizes may pick different ones (on images
    once in some thousand probes). Nothing is left behind: parameters, buffers, modes and the random state stay as they
    were.

    Guarantee: none by itself. A probe on a few examples finds what mixes for them; mixing that depends on rare values
    can stay unseen.
    """
    check_one_of(("mean", "sum"), loss_reduction=loss_reduction)
    size = _batch_size(inputs) if size is None else size
    if size < 2:
        return False
    examples = min(EXAMPLES, size)
    batch = _pick((inputs, targets), list(range(examples)), size)
    watching = of_module(module)
    gradients = watching or ClippedGradients(module)
    probe = _Probe(gradients, loss, loss_reduction, examples)
    try:
        with _left_as_it_was(module):
            probe.confirm(probe.compare_alone_with_batch, batch)
            probe.confirm(probe.compare_with_one_exchanged, batch)
    finally:
        gradients.forget()
        if watching is None:
            gradients.remove()
    return True


class _Probe:
    def __init__(self, gradients: ClippedGradients, loss: Loss, loss_reduction: str, examples: int) -> None:
        self.gradients, self.loss, self.loss_reduction, self.examples = (
            gradients,
            loss,
            loss_reduction,
            examples,
        )
        self.parameters = [parameter for parameter in gradients.sums if parameter.requires_grad]
        self.tolerance = max((TOLERANCES[parameter.dtype] for parameter in self.parameters), default=0.0)

    def confirm(self, compare: Callable[[Any], None], batch: Any) -> None:
        """Compare, and refuse what is found but by an accident of rounding.

        Such an accident is there again with the same weights, and gone where they are moved a little. All comparisons
        see the same random numbers. What is not found again with the same weights is no accident: the model keeps
        something from call to call.
        """
        devices = _devices(self.gradients.module)

        states = RandomStates.now()

        def is_refused() -> PdpsgdError | None:
            states.restore()
            with torch.random.fork_rng(devices):
                try:
                    compare(batch)
                except PdpsgdError as error:
                    return error
            return None

        refused = is_refused()
        if refused is None:
            return
        with _moved_a_little(self.parameters, devices):
            refused_elsewhere = is_refused()
        if refused_elsewhere is not None or is_refused() is None:
            raise refused

    def compare_alone_with_batch(self, batch: Any) -> None:
        self.gradients.module.eval()
        state = torch.get_rng_state()
        with self.gradients.recording_in_evaluation():
            together = self._in_batch(batch)
        if not torch.equal(state, torch.get_rng_state()):
            return  # a model that draws random numbers when it is evaluated: alone, it would draw others
        alone = torch.stack(
            [self._alone(_pick(batch, [index], self.examples)) for index in range(self.examples)]
        )
        if self._differ(together, alone).any():
            other = "sum" if self.loss_reduction == "mean" else "mean"
            factor = self.examples if other == "sum" else 1 / self.examples
            if not self._differ(together, alone * factor).any():
                fail(
                    f'Expected a loss reduced over the batch as loss_reduction="{self.loss_reduction}". Got one that '
                    f'is a {other}: change the loss, or say loss_reduction="{other}".'
                )
            index = int(self._differ(together, alone).nonzero()[0])
            fail(
                f"Examples mix in this model or loss: the gradient of example {index} alone has norm "
                f"{float(alone[index].norm()):.4g}, in a batch of {self.examples} it differs from that by "
                f"{float((together[index] - alone[index]).norm()):.4g}. Every example's loss must depend on that "
                "example only, and the batch's loss be their plain mean or sum: no class weights or ignored targets "
                "normalized over the batch, no contrastive terms, no statistics of the batch."
            )

    def compare_with_one_exchanged(self, batch: Any) -> None:
        self.gradients.module.train()
        state = RandomStates.now()
        before = self._in_batch(batch)
        for exchanged in range(self.examples):
            rows = list(range(self.examples))
            rows[exchanged] = (exchanged + 1) % self.examples
            state.restore()
            after = self._in_batch(_pick(batch, rows, self.examples))
            moved = self._differ(before, after)
            moved[exchanged] = False
            if moved.any():
                fail(
                    "Examples mix in this model or loss while it trains: the gradient of example "
                    f"{int(moved.nonzero()[0])} changed when example {exchanged} of the batch was exchanged. Every "
                    "example must go through the model and the loss without regard to the others."
                )

    def _in_batch(self, batch: Any) -> Tensor:
        self.gradients.forget()
        self.gradients.record(self._value(batch))
        found = self.gradients.per_example_gradients(loss_reduction=self.loss_reduction)
        self.gradients.forget()
        return torch.cat(
            [found[parameter].reshape(self.examples, -1).double() for parameter in self.parameters], 1
        )

    def _alone(self, example: Any) -> Tensor:
        with self.gradients.uninstrumented():
            found = torch.autograd.grad(self._value(example), self.parameters, allow_unused=True)
        parts = zip(self.parameters, found, strict=True)
        return torch.cat(
            [
                (torch.zeros_like(parameter) if part is None else part).flatten().double()
                for parameter, part in parts
            ]
        )

    def _value(self, batch: Any) -> Tensor:
        inputs, targets = batch
        module = self.gradients.module
        outputs = call(module, inputs)
        return self.loss(outputs) if targets is None else self.loss(outputs, targets)

    def _differ(self, one: Tensor, other: Tensor) -> Tensor:
        sizes: Tensor = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        distances: Tensor = (one - other).norm(dim=1)
        return distances > self.tolerance * (sizes + 1e-3 * sizes.max())


@contextmanager
def _moved_a_little(parameters: list[nn.Parameter], devices: list[int]) -> Iterator[None]:
    held = [parameter.detach().clone() for parameter in parameters]
    with ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(parameter))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                for parameter in parameters:
                    parameter.mul_(1 + MOVED_BY * torch.randn_like(parameter))
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, held, strict=True):
                    parameter.copy_(value)


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    held = [(child, dict(child._buffers)) for child in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    states = RandomStates.now()
    with ExitStack() as stack:
        stack.callback(states.restore)
        # That the probe wrote to a buffer must not be taken for a write of the training's.
        for buffer, _ in buffers:
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer))
        try:
            with torch.random.fork_rng(_devices(module)), torch.enable_grad():
                yield
        finally:
            for child, mode in modes:
                child.training = mode
            for child, own in held:
                child._buffers.clear()
                child._buffers.update(own)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.resize_(value.shape).copy_(value)


def _devices(module: nn.Module) -> list[int]:
    """The graphics cards whose random numbers the module uses."""
    return sorted(
        {parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"}
    )


def _batch_size(inputs: Any) -> int:
    return next((leaf.shape[0] for leaf in tensors(inputs) if leaf.dim()), 0)


def _pick(batch: Any, rows: list[int], size: int) -> Any:
    """Return these examples of a batch of `size`; what has no batch dimension stays whole."""
    return map_tensors(lambda leaf: leaf[rows] if has_rows(leaf, size) else leaf, batch)
