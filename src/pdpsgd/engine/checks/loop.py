"""Checks of a recorded loop: what happens to an example must not depend on the other examples.

The recording (`replay`) is replayed with some examples replaced by another, and compared in the rows of those that
stayed: the model's inputs, and the gradients of the loss with respect to the model's outputs. Half of the examples are
replaced at a time, so that a statistic of one example, such as a maximum, changes; and all but one, so that a
normalization over the batch changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import exchanged, has_rows, same_but_for, tensors
from pdpsgd.engine.checks.replay import Call, CannotTellError, Change, Replay
from pdpsgd.errors import fail
from pdpsgd.gradients.clipping import leaves_of_graph

HALVES = 8
ALL_BUT_ONE = 4
TOLERANCE = 2e-3
_SCALING = ("div", "true_divide", "divide", "truediv", "rdiv", "rtruediv", "mul", "multiply", "rmul")


def check_inputs(replay: Replay, inputs: Any, *, views: int) -> None:
    """Refuse a loop in which other examples change the model's inputs for an example."""
    size, given = replay.size, tensors(inputs)
    known = [leaf for leaf in given if id(leaf) in replay.known]
    rows = [leaf for leaf in known if has_rows(leaf, size * views)]
    if replay.too_long:
        raise CannotTellError("it takes too many operations")
    if not rows:
        raise CannotTellError(
            "the model is called with what does not come from the batch by torch's functions"
        )
    if replay.looked_at and any(
        has_rows(leaf, size * views) and id(leaf) not in replay.known for leaf in given
    ):
        raise CannotTellError("values of the batch are taken out of torch before the model is called")
    if not _are_same([], known, replay.again(lambda leaf: leaf, known), rows, size):
        raise CannotTellError("it does not come out alike when it is done again")
    for replaced, change in _tries(size):
        if not _are_same(replaced, known, replay.again(change, known), rows, size):
            fail(
                "Examples mix before the model in this loop: replacing some examples of the batch changes what the "
                "model is called with for others. What is done to a batch must be done to each example by itself: "
                "no statistics of the batch (use public constants), no mixup, and with several views the rows of an "
                "example one after the other (inputs.repeat_interleave(views, 0))."
            )


class LossCheck:
    """Check of the recorded path from the model's outputs to the loss."""

    def __init__(self, replay: Replay, loss: Tensor, outputs: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.replay, self.loss, self.outputs = replay, loss, outputs
        self.size = replay.size

    def examples_do_not_mix(self) -> None:
        """Refuse a loss in which they mix."""
        if self._is_the_models_own:
            return
        self._check_that_it_can_be_told()
        together = self._gradients(lambda leaf: leaf)
        for replaced, change in _tries(self.size):
            stay = [row for row in range(self.size) if row not in replaced]
            before, after = together[stay], self._gradients(change)[stay]
            finite = before.isfinite().all(1)
            if not torch.equal(finite, after.isfinite().all(1)) or _differ(before[finite], after[finite]):
                _refuse_loss()

    @property
    def _is_the_models_own(self) -> bool:
        """Whether the model gives its own loss: then it was probed with it."""
        return id(self.loss) in self.outputs

    def _check_that_it_can_be_told(self) -> None:
        if not self.outputs:
            raise CannotTellError("the model was not called")
        calls = self.replay.calls_for([self.loss])
        used = {id(leaf) for call in calls for leaf in tensors((call.args, call.kwargs))}
        for key, (leaf, _) in self.outputs.items():
            if key in used and not has_rows(leaf, self.size):
                raise CannotTellError("the first dimension of the model's outputs is not the batch")
        written = {id(leaf) for call in calls for leaf in call.written}
        for call in calls:
            for leaf, made_by in zip(tensors(call.outputs), call.made_by, strict=True):
                if leaf.grad_fn is not made_by and id(leaf) not in written:
                    raise CannotTellError("it has an autograd function of its own")

    def is_reduced_by(self, said: str | None) -> bool:
        """Refuse a loss that is reduced otherwise than was said; whether a batch of another size need not be asked.

        A sum that is divided by len(batch), a number, looks like one that is divided by a constant. Which it is shows
        in batches of two sizes: the number goes along, or it does not.
        """
        if said is None or self._is_the_models_own:
            return True
        together = self._gradients(lambda leaf: leaf)
        rows = _spread(self.size, ALL_BUT_ONE)
        alone = torch.cat([self._gradients(_only(row), alone=True) for row in rows])
        is_mean, is_sum = not _differ(together[rows] * self.size, alone), not _differ(together[rows], alone)
        pairs = zip(rows, rows[1:] + rows[:1], strict=True)
        pair = torch.cat([self._gradients(_only(*two), alone=True)[:1] for two in pairs])
        if not ((is_mean and not _differ(2 * pair, alone)) or (is_sum and not _differ(pair, alone))):
            raise CannotTellError("it comes out otherwise for one, for two and for all examples")
        divided = is_sum and not is_mean and self._divides_by_size()
        found = ["mean"] if divided else ["mean"] * is_mean + ["sum"] * is_sum
        if said not in found:
            other = found[0]
            fail(
                f'Expected a loss reduced over the batch as loss_reduction="{said}". Got one that '
                f"is a {other}, so that gradients would be clipped at a norm that depends on the batch's size. "
                f'Reduce the loss by reduction="{said}", or say make_private(..., loss_reduction="{other}").'
            )
        return not divided

    def _gradients(self, change: Change, *, alone: bool = False) -> Tensor:
        """Return the gradients of the outputs, one row per example, with the loss replayed on a changed batch."""
        rows = [
            (key, leaf, value) for key, (leaf, value) in self.outputs.items() if has_rows(leaf, self.size)
        ]
        outputs = [change(value).clone().requires_grad_(leaf.requires_grad) for _, leaf, value in rows]
        instead = {key: new.clone() for (key, _, _), new in zip(rows, outputs, strict=True)}
        (result,) = self.replay.again(change, [self.loss], instead=instead, alone=alone)
        if result.numel() != 1 or not result.requires_grad:
            raise CannotTellError("its last operation does not give the loss")
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        found = torch.autograd.grad(result.reshape(()), trained, allow_unused=True)
        parts = [
            (torch.zeros_like(leaf) if part is None else part).reshape(len(leaf), -1).double()
            for leaf, part in zip(trained, found, strict=True)
        ]
        return torch.cat(parts, 1)

    def _divides_by_size(self) -> bool:
        """Whether something is divided by the number of examples, or of the outputs' numbers; or times its inverse."""
        sizes = {self.size} | {leaf.numel() for leaf, _ in self.outputs.values() if has_rows(leaf, self.size)}
        return any(
            math.isclose(number, size, rel_tol=1e-6) or math.isclose(number * size, 1.0, rel_tol=1e-6)
            for call in self.replay.calls_for([self.loss])
            if call.name in _SCALING
            for number in _numbers(call, self.replay)
            for size in sizes
        )


def check_parameters(loss: Tensor, replay: Replay, own: set[int]) -> None:
    """Refuse a loss that depends on something trainable which is not the private module's, nor of the examples."""
    for leaf in leaves_of_graph(loss):
        if id(leaf) in own or (
            not isinstance(leaf, nn.Parameter) and (id(leaf) in replay.known or has_rows(leaf, replay.size))
        ):
            continue
        fail(
            "Expected a loss that depends on trainable parameters of the private module only. Got one of "
            f"shape {tuple(leaf.shape)} beside it: its gradient is exact, and whatever it moves tells about "
            "people without noise. Make it a part of the module, or freeze it (requires_grad_(False))."
        )


def _tries(size: int) -> Iterator[tuple[list[int], Change]]:
    """Yield which examples are replaced, and the change that does it."""
    for row in _spread(size, ALL_BUT_ONE):
        yield _replacing([other for other in range(size) if other != row], row, size)
    halves = random.Random(0)
    for _ in range(HALVES):
        order = halves.sample(range(size), size)
        yield _replacing(sorted(order[: max(1, size // 2)]), order[-1], size)


def _replacing(rows: list[int], by: int, size: int) -> tuple[list[int], Change]:
    return rows, lambda leaf: exchanged(leaf, size, rows, by)


def _only(*rows: int) -> Change:
    return lambda leaf: leaf[list(rows)]


def _spread(size: int, most: int) -> list[int]:
    """Return up to `most` places, spread over the batch."""
    return sorted({round(place) for place in torch.linspace(0, size - 1, most).tolist()})


def _are_same(
    replaced: list[int], before: Sequence[Tensor], after: Sequence[Tensor], rows: list[Tensor], size: int
) -> bool:
    """Whether tensors with rows are alike but for those that were replaced, and others altogether."""
    by_row = set(map(id, rows))
    return all(
        same_but_for(replaced, one, other, size)
        if id(one) in by_row
        else one.shape == other.shape and torch.equal(one.detach(), other.detach())
        for one, other in zip(before, after, strict=True)
    )


def _refuse_loss() -> NoReturn:
    fail(
        "Examples mix in the loss of this loop: the gradient that it gives an example's outputs in a batch is not the "
        "one it gives them alone, or among others. Every example's loss must depend on that example only, and the "
        "batch's loss be their plain mean or sum: no class weights or ignored targets normalized over the batch, no "
        "mixed targets, no contrastive terms, no statistics of the batch."
    )


def _numbers(call: Call, replay: Replay) -> Iterator[float]:
    for leaf in (*call.args, *call.kwargs.values()):
        if isinstance(leaf, Tensor):
            if leaf.numel() == 1 and id(leaf) not in replay.known:
                yield float(leaf)
        elif isinstance(leaf, (int, float)):
            yield leaf


def _differ(one: Tensor, other: Tensor) -> bool:
    if not len(one):
        return False
    sizes = torch.maximum(one.norm(dim=1), other.norm(dim=1))
    return not bool(((one - other).norm(dim=1) <= TOLERANCE * (sizes + 1e-3 * sizes.max())).all())
