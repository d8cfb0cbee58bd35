"""Checks of a recorded loop: what happens to an example must not depend on the other examples, nor on their number.

The recording (`replay`) is replayed with some examples replaced by another, and compared in the rows of those that
stayed: the model's inputs, and the gradients of the loss with respect to the model's outputs. Half of the examples are
replaced at a time, so that a statistic of one example, such as a maximum, changes; and all but one, so that a
normalization over the batch changes. The same is done with made-up outputs and targets of every class, which the batch
may not have. A second batch of another size is replayed on the first one's examples: that shows numbers that a replay
keeps as they were, such as the size itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import has_rows, same_but_for, tensors
from pdpsgd.engine.checks.exchanges import (
    ALL_BUT_ONE,
    are_same,
    converted,
    extremes,
    only,
    spread,
    tries,
)
from pdpsgd.engine.checks.loss import Precision, class_counts, every_class, made_up
from pdpsgd.engine.checks.replay import CannotTellError, Change, Replay
from pdpsgd.engine.checks.sizes import (
    SIZE_TOLERANCE,
    Course,
    Recorded,
    in_this_size,
    numbers_in,
    numbers_of,
    say_if_size_was_asked,
)
from pdpsgd.errors import fail
from pdpsgd.gradients.clipping import leaves_of_graph

TOLERANCE = 2e-3
_TIMES = ("mul", "multiply", "rmul", "imul", "rdiv", "rtruediv")
_OVER = ("div", "true_divide", "divide", "truediv", "idiv", "itruediv")
_SCALING = dict.fromkeys(_TIMES, 1) | dict.fromkeys(_OVER, -1)

CheckOwnLoss = Callable[[int], str | None]
_SHOWN_LATER = " (A batch of another size showed it: do not use what earlier steps trained.)"


def check_inputs(replay: Replay, inputs: Any, *, views: int) -> list[Tensor]:
    """Refuse a loop in which other examples change the model's inputs for an example; return the inputs by row."""
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
    if not are_same([], known, replay.again(lambda leaf: leaf, known), rows, size):
        raise CannotTellError("it does not come out alike when it is done again")
    for replaced, change in tries(size):
        if not are_same(replaced, known, replay.again(change, known), rows, size):
            _refuse_inputs("replacing some examples of the batch changes")
    for replaced, change in extremes(size):
        with suppress(CannotTellError):  # an assertion on the range, say, may end there
            if not are_same(replaced, known, replay.again(change, known), rows, size):
                _refuse_inputs("replacing some examples of the batch changes")
    return rows


def check_inputs_of_two_sizes(replay: Replay, rows: list[Tensor], earlier: Recorded, *, views: int) -> None:
    """Refuse a loop that gives the model other inputs for the same examples in a batch of another size.

    Where a schedule may have done that, `earlier.before` waits for further batches.
    """
    if len(rows) != len(earlier.inputs) or replay.draws_for(rows):
        return
    again = replay.again(lambda leaf: leaf, rows, given=in_this_size(replay, earlier))
    chosen = earlier.rows_for(replay.size)
    if views > 1:
        chosen = (chosen[:, None] * views + torch.arange(views, device=chosen.device)).flatten()
    pairs = zip(earlier.inputs, again, strict=True)
    alike = all(same_but_for([], before[chosen], after, replay.size) for before, after in pairs)
    if alike and replay.size != earlier.size:
        earlier.before.is_contradicted()
        return
    goes = earlier.before.goes_with_size(replay.size, numbers_of(replay, rows))
    if goes:
        _refuse_inputs("the number of examples in the batch changes", _SHOWN_LATER)
    if goes is False and not alike:
        say_if_size_was_asked(replay, "what the model is called with for an example")


class LossCheck:
    """Check of the recorded path from the model's outputs to the loss."""

    def __init__(self, replay: Replay, loss: Tensor, outputs: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.replay, self.loss, self.outputs = replay, loss, outputs
        self.size = replay.size
        calls = [] if replay.too_long else replay.calls_for([loss])
        used = {id(leaf) for call in calls for leaf in tensors((call.args, call.kwargs))} | {id(loss)}
        self._calls = calls
        self._by_row = [key for key, (leaf, _) in outputs.items() if has_rows(leaf, self.size)]
        self._shared = [key for key in outputs if key in used and key not in self._by_row]
        # Numbers that the model computed over the examples: a loss of its own, or a part of one.
        self.scalars = [
            key for key in self._shared if outputs[key][0].numel() == 1 and outputs[key][0].requires_grad
        ]
        self.own_reduction: str | None = None

    def examples_do_not_mix(self, check_own_loss: CheckOwnLoss) -> None:
        """Refuse a loss in which they mix.

        `check_own_loss` is called with the place of a number among the model's outputs, and returns how it is reduced.
        """
        places = list(self.outputs)
        for key in self.scalars:
            self.own_reduction = check_own_loss(places.index(key))
        if self._is_the_models_own:
            return
        self._check_that_it_can_be_told()
        self._compare({}, lambda leaf: leaf)
        self._compare_made_up()

    def _compare(self, given: dict[int, Tensor], convert: Change, precision: Precision | None = None) -> None:
        """Compare the gradients of rows that stay while others, or numbers of the model's own, are replaced."""
        together = self._gradients(lambda leaf: leaf, given=given, convert=convert, precision=precision)
        tolerance = TOLERANCE if precision is None else precision.tolerance
        if self.scalars:
            moved = self._gradients(lambda leaf: leaf, given=given, convert=convert, scale=1.37)
            if _differ(together.flat(), moved.flat(), tolerance):
                _refuse_loss()
        for replaced, change in tries(self.size):
            stay = torch.ones(self.size, dtype=torch.bool, device=together.rows.device)
            stay[replaced] = False
            changed = self._gradients(change, given=given, convert=convert)
            before, after = together.rows[stay], changed.rows[stay]
            finite = before.isfinite().all(1)
            if (
                not torch.equal(finite, after.isfinite().all(1))
                or _differ(before[finite], after[finite], tolerance)
                or _differ(together.of_scalars[None], changed.of_scalars[None], tolerance)
            ):
                _refuse_loss()

    def _compare_made_up(self) -> None:
        """Compare once more with made-up outputs in float64, and targets of every class."""
        values = [self.outputs[key][1] for key in self._by_row if self.outputs[key][1].is_floating_point()]
        classes = class_counts(values, self.replay.given, self.size)
        for dtype in (torch.float64, None):
            made = {key: made_up(self.outputs[key][1], self.size, self.size, dtype) for key in self._by_row}
            made |= {
                key: every_class(leaf, classes[id(leaf)])
                for key, leaf in self.replay.given_by_id.items()
                if id(leaf) in classes
            }
            precision = Precision()
            try:
                self._compare(made, partial(converted, dtype), precision if dtype else None)
            except CannotTellError:
                continue
            return

    @property
    def _is_the_models_own(self) -> bool:
        """Whether the model gives its own loss: then it was probed with it."""
        return id(self.loss) in self.outputs

    def _check_that_it_can_be_told(self) -> None:
        if not self.outputs:
            raise CannotTellError("the model was not called")
        if set(self._shared) - set(self.scalars):
            raise CannotTellError("the first dimension of the model's outputs is not the batch")
        written = {id(leaf) for call in self._calls for leaf in call.written}
        for call in self._calls:
            for leaf, made_by in zip(tensors(call.outputs), call.made_by, strict=True):
                if leaf.grad_fn is not made_by and id(leaf) not in written:
                    raise CannotTellError("it has an autograd function of its own")

    def is_reduced_by(self, said: str | None) -> bool:
        """Refuse a loss that is reduced otherwise than was said; whether that is certain from one batch.

        A sum that is divided by len(batch), a number, looks like one that is divided by a constant. Which it is shows
        in batches of two sizes: the number goes along, or it does not.
        """
        if said is None:
            return True
        if self.own_reduction is not None:
            if self._is_the_models_own and self.own_reduction != said:
                _refuse_reduction(said, self.own_reduction)
            return self._is_the_models_own
        if self._is_the_models_own:
            return True
        rows = spread(self.size, ALL_BUT_ONE)
        pairs = zip(rows, rows[1:] + rows[:1], strict=True)
        precision = Precision()
        together = self._gradients(lambda leaf: leaf, precision=precision).rows[rows]
        alone = torch.cat([self._gradients(only(row), alone=True).rows for row in rows])
        pair = torch.cat([self._gradients(only(*two), alone=True).rows[:1] for two in pairs])
        differ = partial(_differ, other=alone, tolerance=max(TOLERANCE, precision.tolerance))
        is_mean, is_sum = not differ(together * self.size), not differ(together)
        if not ((is_mean and not differ(2 * pair)) or (is_sum and not differ(pair))):
            raise CannotTellError("it comes out otherwise for one, for two and for all examples")
        if is_mean and not is_sum and said == "mean" and self.replay.asked_for_size and self._is_scaled(1):
            # mean * len(batch) / constant: a sum, unless a constant happens to be the size
            _refuse_reduction(said, "sum")
        if is_sum and not is_mean and self._is_scaled(-1):
            return False
        if not (is_mean if said == "mean" else is_sum):
            _refuse_reduction(said, "mean" if is_mean else "sum")
        return True

    def record(self, inputs: list[Tensor], before: Course) -> Recorded:
        """Return what a batch of another size is compared with."""
        gradients = self._gradients(lambda leaf: leaf)
        return Recorded(
            self.size,
            self.replay.given,
            inputs,
            [self.outputs[key][1] for key in self.outputs],
            gradients.rows,
            gradients.of_scalars.tolist(),
            self.own_reduction,
            before,
            Course(self.size, numbers_of(self.replay, [self.loss])),
            self.replay.known,
        )

    def settles_reduction(self, said: str) -> None:
        """Refuse a sum that is divided by the size where it was said to be a sum; by a constant, to be a mean.

        In the first batch the two were equal. In this one, of another size, they are not.
        """
        found = "mean" if self._is_scaled(-1) else "sum"
        if found != said:
            _refuse_reduction(said, found, _SHOWN_LATER)

    def agrees_with(self, earlier: Recorded, *, said: str) -> None:
        """Refuse a loss that gives the same examples other gradients in a batch of another size.

        Where a schedule may have done that, `earlier.after` waits for further batches.
        """
        if self.replay.draws_for([self.loss]) or len(earlier.outputs) != len(self.outputs):
            return
        chosen = earlier.rows_for(self.size)
        given = in_this_size(self.replay, earlier)
        for key, value in zip(self.outputs, earlier.outputs, strict=True):
            given[key] = value[chosen] if key in self._by_row and has_rows(value, earlier.size) else value
        precision = Precision()
        here = self._gradients(lambda leaf: leaf, given=given, precision=precision)
        tolerance = max(SIZE_TOLERANCE, precision.tolerance)
        there = earlier.gradients[chosen]
        factors = {"mean": (self.size, earlier.size), "sum": (1, 1)}
        if here.rows.shape != there.shape:
            return
        found = [kind for kind, (a, b) in factors.items() if not _differ(here.rows * a, there * b, tolerance)]
        own = earlier.own_reduction
        for before, after in zip(earlier.scalar_gradients, here.of_scalars.tolist(), strict=True):
            # The model's own mean, times a constant, is a mean; times the size it is a sum, and the other way round.
            ratio = {"mean": 1.0, "sum": self.size / earlier.size}
            if own == "sum":
                ratio = {"mean": earlier.size / self.size, "sum": 1.0}
            found = [
                kind
                for kind in found
                if own is None or math.isclose(after, before * ratio[kind], rel_tol=tolerance)
            ]
        if said in found and self.size != earlier.size:
            earlier.after.is_contradicted()
            return
        course = earlier.after
        goes = course.goes_with_size(self.size, numbers_of(self.replay, [self.loss]), kinds=set(found))
        if goes and course.kinds:
            _refuse_reduction(said, min(course.kinds), _SHOWN_LATER)
        if goes:
            _refuse_loss(_SHOWN_LATER)
        if goes is False and not found:
            say_if_size_was_asked(self.replay, "the gradient that the loss gives an example")

    def expected(self) -> dict[int, Tensor]:
        """Return the gradient that the loss, as it was recorded, gives each output of the model."""
        return self._gradients(lambda leaf: leaf).by_output

    def _gradients(
        self,
        change: Change,
        *,
        alone: bool = False,
        given: dict[int, Tensor] | None = None,
        convert: Change = lambda leaf: leaf,
        scale: float = 1.0,
        precision: Precision | None = None,
    ) -> _Gradients:
        """Return the gradients of the outputs, one row per example, with the loss replayed on a changed batch."""
        given = given or {}
        keys = [*self._by_row, *self.scalars]
        outputs = []
        for key in keys:
            leaf, value = self.outputs[key]
            value = convert(given.get(key, value))
            value = change(value) if key in self._by_row else value * scale
            outputs.append(value.detach().clone().requires_grad_(leaf.requires_grad))
        if precision is not None:
            precision.note(*outputs)
        instead = {key: new.clone() for key, new in zip(keys, outputs, strict=True)}
        with precision or nullcontext():
            (result,) = self.replay.again(
                lambda leaf: change(convert(leaf)), [self.loss], instead=instead, alone=alone, given=given
            )
        if result.numel() != 1 or not result.requires_grad:
            raise CannotTellError("its last operation does not give the loss")
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        if not trained:
            raise CannotTellError("no output of the model has a gradient")
        found = torch.autograd.grad(result.reshape(()), trained, allow_unused=True)
        by_leaf = {
            id(leaf): torch.zeros_like(leaf) if part is None else part
            for leaf, part in zip(trained, found, strict=True)
        }
        by_output = {
            key: by_leaf[id(leaf)] for key, leaf in zip(keys, outputs, strict=True) if id(leaf) in by_leaf
        }
        parts = [part for key, part in by_output.items() if key in self._by_row]
        size = len(outputs[0]) if self._by_row else self.size
        rows = [part.reshape(size, -1).double() for part in parts] or [result.new_zeros(size, 1)]
        scalars = [part.reshape(1).double() for key, part in by_output.items() if key not in self._by_row]
        return _Gradients(
            by_output, torch.cat(rows, 1), torch.cat(scalars) if scalars else result.new_zeros(0)
        )

    def _is_scaled(self, power: int) -> bool:
        """Whether something is multiplied (1) or divided (-1) by the number of examples, or of the outputs' numbers."""
        sizes = {self.size} | {self.outputs[key][0].numel() for key in self._by_row}
        return any(
            number and math.isclose(number ** (power * _SCALING[call.name]), size, rel_tol=1e-6)
            for call in self._calls
            if call.name in _SCALING
            for number in numbers_in(call, self.replay)
            for size in sizes
        )


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the loss with respect to outputs: by output, by row, and of numbers of the model's own."""

    by_output: dict[int, Tensor]
    rows: Tensor
    of_scalars: Tensor

    def flat(self) -> Tensor:
        """Return all of them in one row."""
        return torch.cat([self.rows.flatten(), self.of_scalars])[None]


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


def check_arrived(expected: dict[int, Tensor], arrived: dict[int, Tensor]) -> None:
    """Refuse a backward pass that gave the model's outputs other gradients than its loss does."""
    for key, gradient in expected.items():
        if key in arrived and gradient.shape == arrived[key].shape and gradient.dim():
            rows = [part.reshape(len(part), -1).double() for part in (gradient, arrived[key])]
            finite = rows[0].isfinite().all(1)
            if _differ(rows[0][finite], rows[1][finite]):
                fail(
                    "Expected the model's outputs to get the gradients that the loss gives them. Got others: a hook "
                    "(register_hook) or an autograd function of the loop changes gradients, where examples may mix. "
                    "A hook may look at gradients, and return None. Put what has to be done into the loss."
                )


def _refuse_inputs(what: str, more: str = "") -> NoReturn:
    fail(
        f"Examples mix before the model in this loop: {what} what the model is called with for others. What is done to "
        "a batch must be done to each example by itself: no statistics of the batch (use public constants), no mixup, "
        "nothing that depends on the batch's size, and with several views the rows of an example one after the other "
        f"(inputs.repeat_interleave(views, 0)).{more}"
    )


def _refuse_loss(more: str = "") -> NoReturn:
    fail(
        "Examples mix in the loss of this loop: the gradient that it gives an example's outputs in a batch is not the "
        "one it gives them alone, or among others. Every example's loss must depend on that example only, and the "
        "batch's loss be their plain mean or sum: no class weights or ignored targets normalized over the batch (write "
        "`(loss_none * w[y]).mean()`, with loss_none as of reduction='none'), no "
        "mixed targets, no contrastive terms, no statistics of the batch, nothing that depends on the batch's size."
        f"{more}"
    )


def _refuse_reduction(said: str, other: str, more: str = "") -> NoReturn:
    fail(
        f'Expected a loss reduced over the batch as loss_reduction="{said}". Got one that '
        f"is a {other}, so that gradients would be clipped at a norm that depends on the batch's size. "
        f'Reduce the loss by reduction="{said}", or say make_private(..., loss_reduction="{other}").{more}'
    )


def _differ(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    if not one.numel():
        return False
    sizes = torch.maximum(one.norm(dim=1), other.norm(dim=1))
    return not bool(((one - other).norm(dim=1) <= tolerance * (sizes + 1e-3 * sizes.max())).all())
