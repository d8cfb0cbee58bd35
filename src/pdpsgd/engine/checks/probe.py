"""Refuses models and losses in which examples mix: then per-example gradients do not exist, and nothing is proven.

A loss function is tried on made-up outputs (`loss`). The model, and a loss that it computes itself, are tried on rows
of the batch that differ (each class, the largest, the smallest): alone, among few and among all, each output by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.engine._torch import keep_version, own_buffers
from pdpsgd.engine.batches import RandomStates, has_rows, map_tensors, tensors
from pdpsgd.engine.checks.comparisons import Loss, Probe, devices_of, output_by_row, weighted_sum
from pdpsgd.engine.checks.loss import check_loss, class_counts, every_class
from pdpsgd.engine.checks.replay import CannotTellError
from pdpsgd.errors import check_one_of
from pdpsgd.gradients.clipping import ClippedGradients, of_module

MOST_OUTPUTS = 8


def check_examples_do_not_mix(
    module: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    loss_reduction: str = "mean",
    size: int | None = None,
    is_cut: bool = False,
) -> bool:
    """Refuse a model or loss in which an example's gradient depends on the rest of the batch.

    Args:
        module: The model; it may be private already.
        loss: `loss(outputs, targets)`, or `loss(outputs)` where `targets` is None.
        inputs: What the model is called with; a tuple or dict is spread out.
        targets: What the loss is called with beside the outputs.
        loss_reduction: How the loss is reduced over the batch, "mean" or "sum".
        size: The number of examples in the batch; by default the first dimension of the first tensor.
        is_cut: Whether a step may be cut into physical batches: then no draw may be shared by all examples.

    Returns:
        Whether there were enough examples to tell (two).

    Raises:
        PdpsgdError: Examples mix, or share random draws, or the loss is reduced otherwise than `loss_reduction` says.

    The loss is tried on made-up outputs. Of the whole, some rows that differ are tried: without dropout, an example's
    gradient alone (plain autograd) against its gradient in the batch (as it will be clipped); in training mode with the
    same random numbers, the gradients of the other examples before and after one example is replaced. Then the whole
    batch: outputs and gradients of these rows among all rows, and the gradient of all rows against that of parts. What
    is found has to be found also with slightly other weights: where two numbers of a maximum are equal but for
    rounding, batches of two sizes may pick different ones (on images once in some thousand probes). Nothing is left
    behind: parameters, buffers, modes and the random state stay as they were.

    Guarantee: none by itself. Mixing that depends on values that this batch does not have can stay unseen.
    """
    check_one_of(("mean", "sum"), loss_reduction=loss_reduction)
    size = _batch_size(inputs) if size is None else size
    if size < 2:
        return False
    with _probing(module, size, (inputs, targets), loss_reduction) as probe:
        outputs = probe.outputs_of_few()
        check_loss(loss, outputs, targets, rows=len(probe.rows), size=size, loss_reduction=loss_reduction)
        probe.confirm(partial(probe.compare_alone_with_batch, loss))
        probe.confirm(partial(probe.compare_with_one_replaced, loss))
        probe.confirm(probe.compare_few_with_all)
        probe.confirm(partial(probe.compare_parts_with_all, loss))
        probe.check_values_that_leave_torch()
        probe.confirm(probe.compare_with_one_extreme)
        if is_cut:
            probe.check_draws()
    return True


def check_model(
    module: nn.Module, inputs: Any, *, size: int, loss_reduction: str, is_cut: bool = False
) -> None:
    """Refuse a model in which examples mix, by each of its outputs that has a row per example.

    A model that gives nothing but its own loss is tried with that, reduced as `loss_reduction` says.

    Guarantee: none by itself, as for `check_examples_do_not_mix`.
    """
    if size < 2:
        return
    numbers = torch.zeros(size, device="cpu")  # from their count, the loss knows that of the examples
    with _probing(module, size, (inputs, numbers), "mean") as probe:
        leaves = tensors(probe.outputs_of_few())
        places = [
            place for place, leaf in enumerate(leaves) if output_by_row(leaf, len(probe.rows)) is not None
        ]
        places = [place for place in places if leaves[place].is_floating_point()][-MOST_OUTPUTS:]
        own = [place for place, leaf in enumerate(leaves) if leaf.numel() == 1 and leaf.is_floating_point()]
        if not places and not own:
            raise CannotTellError("it gives no tensor in which the examples can be told")
        probe.loss_is_given = not places
        losses = [partial(_loss_of_output, place) for place in places]
        if not places:  # nothing but a loss of its own
            losses, probe.loss_reduction = [partial(_number_at, own[0])], loss_reduction
        for loss in losses:
            probe.confirm(partial(probe.compare_alone_with_batch, loss))
            probe.confirm(partial(probe.compare_with_one_replaced, loss))
        probe.confirm(probe.compare_few_with_all)
        probe.check_values_that_leave_torch()
        probe.confirm(probe.compare_with_one_extreme)
        if is_cut:
            probe.check_draws()


def check_own_loss(module: nn.Module, inputs: Any, place: int, *, size: int) -> str | None:
    """Refuse a model that mixes examples in a loss of its own, the tensor at this place among its outputs.

    Only plain autograd is used: a pass that waits to be collected is left alone.

    Args:
        module: The model.
        inputs: What the model is called with.
        place: The number of the loss among the tensors of the outputs.
        size: The number of examples in the batch.

    Returns:
        "mean" or "sum"; None if it cannot be told, because the model draws random numbers.
    """
    with _probing(module, size, (inputs, None), None, keep=True) as probe:
        probe.confirm(partial(probe.compare_parts_with_all, partial(_tensor_at, place)))
        found = probe.found_reduction
        outputs = [leaf for leaf in tensors(probe.outputs_of_few()) if has_rows(leaf, len(probe.rows))]
        classes = class_counts(outputs, tensors(inputs), size)
        if classes:  # labels of every class, which the batch may not have
            probe.batch = map_tensors(
                lambda leaf: every_class(leaf, classes[id(leaf)]) if id(leaf) in classes else leaf,
                probe.batch,
            )
            with suppress(IndexError, RuntimeError):
                probe.confirm(partial(probe.compare_parts_with_all, partial(_tensor_at, place)))
        return found


@contextmanager
def _probing(
    module: nn.Module, size: int, batch: Any, loss_reduction: str | None, *, keep: bool = False
) -> Iterator[Probe]:
    instrumented = of_module(module)
    gradients = instrumented or ClippedGradients(module)
    try:
        with left_as_it_was(module):
            yield Probe(gradients, batch, size, loss_reduction)
    finally:
        if not keep:
            gradients.forget()
        if instrumented is None:
            gradients.remove()


def _loss_of_output(place: int, outputs: Any, rows: Tensor) -> Tensor:
    """Return a mean over examples of one output, in which nothing mixes."""
    leaf = output_by_row(tensors(outputs)[place], len(rows))
    assert leaf is not None
    return weighted_sum(leaf) / len(rows)


def _tensor_at(place: int, outputs: Any) -> Tensor:
    return tensors(outputs)[place]


def _number_at(place: int, outputs: Any, rows: Tensor) -> Tensor:
    return tensors(outputs)[place].reshape(())


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put modes, buffers and random states back afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    held = [(child, dict(own_buffers(child))) for child in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    states = RandomStates.now()
    with ExitStack() as stack:
        stack.callback(states.restore)
        # That the probe wrote to a buffer must not be taken for a write of the training's.
        for buffer, _ in buffers:
            stack.enter_context(keep_version(buffer))
        try:
            with torch.random.fork_rng(devices_of(module)), torch.enable_grad():
                yield
        finally:
            for child, mode in modes:
                child.training = mode
            for child, own in held:
                own_buffers(child).clear()
                own_buffers(child).update(own)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.resize_(value.shape).copy_(value)


def _batch_size(inputs: Any) -> int:
    return next((leaf.shape[0] for leaf in tensors(inputs) if leaf.dim()), 0)
