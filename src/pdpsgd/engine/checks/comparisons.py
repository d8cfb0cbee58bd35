"""Comparisons of one example's outputs and gradients in batches of several sizes and with other examples beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pdpsgd.engine._torch import keep_version
from pdpsgd.engine.batches import RandomStates, call, has_rows, map_tensors, tensors
from pdpsgd.engine.checks.draws import check_draws
from pdpsgd.engine.checks.escaping_values import Leaving, altered, same_values
from pdpsgd.engine.checks.rows import differing_rows, pick, sorted_rows
from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients.clipping import ClippedGradients

Loss = Callable[..., Tensor]

# As many as fit into this many numbers of materialized per-example gradients.
MOST_ROWS, LEAST_ROWS, MOST_NUMBERS = 12, 4, 2**25
# Relative to the gradient's norm. Rounding differs between batch sizes; mixing is far coarser than this.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
MOVED_BY = 1e-3


class Probe:
    """Comparisons of gradients in batches of several sizes."""

    def __init__(
        self, gradients: ClippedGradients, batch: Any, size: int, loss_reduction: str | None
    ) -> None:
        self.gradients, self.batch, self.size = gradients, batch, size
        self.loss_reduction = loss_reduction
        self.found_reduction: str | None = None
        self.loss_is_given = True
        self.draws_in_training = True
        self.parameters = [parameter for parameter in gradients.sums if parameter.requires_grad]
        kind = next((parameter.device.type for parameter in self.parameters), "cpu")
        dtypes = [parameter.dtype for parameter in self.parameters]
        dtypes += [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
        self.tolerance = max((TOLERANCES[dtype] for dtype in dtypes), default=0.0)
        numbers = max(1, sum(parameter.numel() for parameter in self.parameters))
        most = max(LEAST_ROWS, min(MOST_ROWS, MOST_NUMBERS // numbers))
        self.rows = differing_rows(batch, size, most=most)
        self.few = pick(batch, self.rows, size)

    @property
    def examples(self) -> int:
        """Return the number of rows that are tried one by one."""
        return len(self.rows)

    def outputs_of_few(self) -> Any:
        """Return the model's outputs for the rows that are tried one by one."""
        state = torch.get_rng_state()
        with self._evaluating(), torch.no_grad():
            first, second = (call(self.gradients.module, self.few[0]) for _ in range(2))
        same = all(map(_equal, tensors(first), tensors(second)))
        if not same and torch.equal(state, torch.get_rng_state()):
            _refuse("the model gives the same examples other outputs when it is called again")
        return second

    def confirm(self, compare: Callable[[], None]) -> None:
        """Compare, and refuse what is found unless an accident of rounding explains it.

        Such an accident is there again with the same weights, and gone where they are moved a little. All comparisons
        see the same random numbers. What is not found again with the same weights is no accident: the model keeps
        something from call to call.
        """
        devices = devices_of(self.gradients.module)

        states = RandomStates.now()

        def is_refused() -> PdpsgdError | None:
            states.restore()
            with torch.random.fork_rng(devices):
                try:
                    compare()
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

    def compare_alone_with_batch(self, loss: Loss) -> None:
        """Compare the gradient of an example alone, in plain autograd, with its gradient in a batch."""
        self.gradients.module.eval()
        state = torch.get_rng_state()
        with self.gradients.recording_in_evaluation():
            together = self._in_batch(loss, self.few)
        if not torch.equal(state, torch.get_rng_state()):
            return  # a model that draws random numbers when it is evaluated: alone, it would draw others
        alone = torch.empty_like(together)
        for index, row in enumerate(alone):
            row.copy_(self._total(loss, pick(self.few, [index], self.examples)))
        if self._differ(together, alone).any():
            other = "sum" if self.loss_reduction == "mean" else "mean"
            factor = self.examples if other == "sum" else 1 / self.examples
            if self.loss_is_given and not self._differ(together, alone * factor).any():
                self._refuse_reduction(other)
            index = int(self._differ(together, alone).nonzero()[0])
            _refuse(
                f"the gradient of example {index} alone has norm {float(alone[index].norm()):.4g}, in a batch of "
                f"{self.examples} it differs from that by {float((together[index] - alone[index]).norm()):.4g}"
            )

    def compare_with_one_replaced(self, loss: Loss) -> None:
        """Compare the gradients of examples in training mode before and after another one is replaced."""
        self.gradients.module.train()
        state = RandomStates.now()
        before = self._in_batch(loss, self.few)
        self.draws_in_training = not state.same_as(RandomStates.now())
        for replaced in range(self.examples):
            rows = list(range(self.examples))
            rows[replaced] = (replaced + 1) % self.examples
            state.restore()
            after = self._in_batch(loss, pick(self.few, rows, self.examples))
            moved = self._differ(before, after)
            moved[replaced] = False
            if moved.any():
                fail(
                    "Examples mix in this model or loss while it trains: the gradient of example "
                    f"{int(moved.nonzero()[0])} changed when example {replaced} of the batch was replaced. Every "
                    "example must go through the model and the loss without regard to the others."
                )

    def compare_with_one_extreme(self) -> None:
        """Compare the outputs of examples before and after one is made very large, or not a number.

        What mixes weakly (1e-4 of a mean), or only for values that nobody has yet, shows there.
        """
        state, module = RandomStates.now(), self.gradients.module
        for training in (False, True):
            module.train(training)
            with self.gradients.uninstrumented(), torch.no_grad():
                state.restore()
                before = tensors(call(module, self.few[0]))
                for value in (1e4, -1e8, math.nan):
                    state.restore()
                    changed = map_tensors(partial(_with_extreme, self.examples, value), self.few[0])
                    try:
                        after = tensors(call(module, changed))
                    except Exception:  # an assertion on the range of inputs, say
                        continue
                    self._check_others(before, after)
        state.restore()

    def _check_others(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Refuse outputs that differ in another row than the first."""
        for one, other in zip(before, after, strict=False):
            by_row, changed = output_by_row(one, self.examples), output_by_row(other, self.examples)
            if by_row is None or changed is None or not one.is_floating_point():
                continue
            rows, others = _flat(by_row)[1:], _flat(changed)[1:]
            finite = rows.isfinite().all(1)
            same = rows.shape == others.shape and torch.equal(finite, others.isfinite().all(1))
            if not same or self._differ(rows[finite], others[finite]).any():
                _refuse("an example of extreme values changes what the model gives to others")

    def compare_few_with_all(self) -> None:
        """Compare the outputs of some rows, and the gradients of each output, among few rows and among all."""
        self._compare_few_with_all(training=False)
        if not self.draws_in_training:
            self._compare_few_with_all(training=True)

    def _compare_few_with_all(self, *, training: bool) -> None:
        state = torch.get_rng_state()
        few = list(range(self.examples))
        if self.examples == self.size:
            few = few[: self.size // 2]
        with self._evaluating():
            self.gradients.module.train(training)
            of_few = tensors(call(self.gradients.module, pick(self.few[0], few, self.examples)))
            of_all = tensors(call(self.gradients.module, self.batch[0]))
        if not torch.equal(state, torch.get_rng_state()) or len(of_few) != len(of_all):
            return
        rows = [self.rows[place] for place in few]
        for place, (one, other) in enumerate(zip(of_few, of_all, strict=True), 1):
            by_row, all_by_row = output_by_row(one, len(few)), output_by_row(other, self.size)
            if by_row is None or all_by_row is None or not one.is_floating_point():
                continue
            chosen = all_by_row[rows]
            if chosen.shape != by_row.shape or self._differ(_flat(by_row), _flat(chosen)).any():
                _refuse(
                    f"what the model gives an example among {len(few)} examples is not what it gives it among "
                    f"{self.size}"
                )
            if one.requires_grad and other.requires_grad:
                last = place == len(of_few)
                totals = [self._gradient(weighted_sum(part), last=last) for part in (by_row, chosen)]
                if self._differ(totals[0][None], totals[1][None]).any():
                    _refuse(
                        f"the gradient of the outputs of {len(few)} examples changes where they are among {self.size}"
                    )

    def check_values_that_leave_torch(self) -> None:
        """Refuse a model whose outputs depend on a number that it takes from all examples: int(inputs.max()).

        Such a number may be the same for the examples that are tried, and another for somebody's. So it is changed to
        see whether it matters, and the inputs are, to see whether it comes from them. A number for each example
        belongs to that example.
        """
        usual, alone = Leaving(), Leaving()
        inputs, one = self.few[0], pick(self.few[0], [0], self.examples)
        with self._evaluating(), torch.no_grad():
            before = self._outputs_under(usual, inputs)
            if not usual.values or before is None:
                return
            self._outputs_under(alone, one)
            if alone.values and len(usual.values) == self.examples * len(alone.values) > len(alone.values):
                return
            if all(
                self._same_values_with(usual.values, partial(_moved, by)) for by in (1000.0, -1000.0, 0.0)
            ):
                return
            instead = [[altered(value, large=large) for value in usual.values] for large in (False, True)]
            after = [self._outputs_under(Leaving(instead=values), inputs) for values in instead]
        if all(found is None or self._all_alike(before, found) for found in after):
            return
        fail(
            "Examples mix in this model: it takes a number out of torch that depends on the examples together "
            f"({', '.join(dict.fromkeys(usual.places))}), and its outputs depend on it. What an example gets must not "
            "depend on a maximum, a mean or a test over the batch: compute it for each example, in torch "
            "(inputs.flatten(1).amax(1)), or use a public constant."
        )

    def check_draws(self) -> None:
        """Refuse random draws that all examples share."""
        self.gradients.module.train()
        with self.gradients.uninstrumented():
            check_draws(partial(call, self.gradients.module), self.few[0], self.examples)

    def _outputs_under(self, mode: Leaving, inputs: Any) -> list[Tensor] | None:
        """Return the outputs with a mode that looks at values which leave torch; None if that fails."""
        state = torch.get_rng_state()
        try:
            with mode:
                return tensors(call(self.gradients.module, map_tensors(torch.clone, inputs)))
        except Exception:  # an assertion of the model's, say: then the number decides nothing else
            return None
        finally:
            torch.set_rng_state(state)

    def _same_values_with(self, values: list[Any], change: Callable[[Tensor], Tensor]) -> bool:
        found = Leaving()
        self._outputs_under(found, map_tensors(change, self.few[0]))
        return same_values(values, found.values)

    def _all_alike(self, before: list[Tensor], after: list[Tensor]) -> bool:
        return len(before) == len(after) and all(map(self._alike, before, after))

    def _alike(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or not one.is_floating_point() or not one.numel():
            return one.shape == other.shape and torch.equal(one, other)
        rows = [
            part.reshape(len(part) if part.dim() else 1, -1).double().nan_to_num() for part in (one, other)
        ]
        return not bool(self._differ(*rows).any())

    def compare_parts_with_all(self, loss: Loss) -> None:
        """Compare the gradient of all rows with the gradients of two halves that differ, and of two that do not."""
        state = torch.get_rng_state()
        with self._evaluating():
            whole = self._total(loss, self.batch)
            if not torch.equal(state, torch.get_rng_state()):
                return
            ordered = sorted_rows(self.batch, self.size)
            shuffled = torch.randperm(self.size, generator=torch.Generator().manual_seed(0), device="cpu")
            splits = [(ordered, self.size // 2), (shuffled, max(1, self.size // 4))]
            splits += [(torch.tensor(self.rows, device="cpu"), 1)] if self.examples < self.size else []
            found = {"mean", "sum"}
            for order, length in splits:
                parts = [part for part in (order[:length], order[length:]) if len(part)]
                of_parts = [self._total(loss, pick(self.batch, part, self.size)) for part in parts]
                all_of_them = (
                    whole
                    if len(order) == self.size
                    else self._total(loss, pick(self.batch, order, self.size))
                )
                found &= {
                    kind
                    for kind in found
                    if self._add_up(
                        all_of_them * (len(order) if kind == "mean" else 1),
                        [
                            part * (len(rows) if kind == "mean" else 1)
                            for part, rows in zip(of_parts, parts, strict=True)
                        ],
                    )
                }
        if not found:
            _refuse("the gradient of the whole batch is not that of its parts together")
        if self.loss_reduction is not None and self.loss_reduction not in found:
            self._refuse_reduction(*found)
        self.found_reduction = "mean" if self.loss_reduction is None and "mean" in found else found.pop()

    def _add_up(self, whole: Tensor, parts: list[Tensor]) -> bool:
        if not whole.isfinite().all():
            return (
                True  # an infinite gradient adds nothing to the sum of clipped ones, and tells nothing here
            )
        largest = max(float(whole.norm()), sum(float(part.norm()) for part in parts))
        distance = float((whole - torch.stack(parts).sum(0)).norm())
        return distance <= self.tolerance * largest

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.gradients.module.eval()
        with self.gradients.uninstrumented():
            yield

    def _in_batch(self, loss: Loss, batch: Any) -> Tensor:
        self.gradients.forget()
        self.gradients.record(self._value(loss, batch))
        found = self.gradients.per_example_gradients(loss_reduction=self.loss_reduction or "mean")
        self.gradients.forget()
        # In their own precision: as many numbers as some copies of the model have, which may be large.
        return torch.cat(
            [found.pop(parameter).reshape(self.examples, -1) for parameter in self.parameters], 1
        )

    def _total(self, loss: Loss, batch: Any) -> Tensor:
        with self.gradients.uninstrumented():
            return self._gradient(self._value(loss, batch), last=True)

    def _gradient(self, value: Tensor, *, last: bool) -> Tensor:
        """Return the gradient of a number by plain autograd, all parameters in a row.

        Unless it is the last one through its graph, all of the model's activations stay in memory.
        """
        found: Sequence[Tensor | None] = [None] * len(self.parameters)
        if value.requires_grad:
            found = torch.autograd.grad(value, self.parameters, allow_unused=True, retain_graph=not last)
        return torch.cat(
            [
                (torch.zeros_like(parameter) if part is None else part).flatten().double()
                for parameter, part in zip(self.parameters, found, strict=True)
            ]
        )

    def _value(self, loss: Loss, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = call(self.gradients.module, inputs)
        return loss(outputs) if targets is None else loss(outputs, targets)

    def _differ(self, one: Tensor, other: Tensor) -> Tensor:
        if not len(one):
            return one.new_zeros(0, dtype=torch.bool)
        found = []
        for mine, theirs in zip(one, other, strict=True):  # in float64, a row at a time
            mine, theirs = mine.double(), theirs.double()
            found.append(torch.stack([mine.norm(), theirs.norm(), (mine - theirs).norm()]))
        own, others, distances = torch.stack(found, 1)
        sizes = torch.maximum(own, others)
        return distances > self.tolerance * (sizes + 1e-3 * sizes.max())

    def _refuse_reduction(self, other: str) -> NoReturn:
        fail(
            f'Expected a loss reduced over the batch as loss_reduction="{self.loss_reduction}". Got one that '
            f'is a {other}: change the loss, or say loss_reduction="{other}".'
        )


def _refuse(why: str) -> NoReturn:
    fail(
        f"Examples mix in this model or loss: {why}. Every example's loss must depend on that example only, and the "
        "batch's loss be their plain mean or sum: no class weights or ignored targets normalized over the batch (write "
        "`(loss_none * w[y]).mean()`, with loss_none as of reduction='none'), no "
        "contrastive terms, no statistics of the batch, nothing that depends on the batch's size."
    )


def output_by_row(leaf: Tensor, size: int) -> Tensor | None:
    """Return an output with examples first; they may be second, as recurrent layers have it."""
    if has_rows(leaf, size):
        return leaf
    return leaf.transpose(0, 1) if leaf.dim() > 1 and leaf.shape[1] == size else None


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _moved(by: float, leaf: Tensor) -> Tensor:
    """Return other inputs of the same kind."""
    return leaf * by + 1 if leaf.is_floating_point() else leaf.flip(0) if leaf.dim() else leaf


def _with_extreme(size: int, value: float, leaf: Tensor) -> Tensor:
    """Return inputs whose first example is very large, or not a number."""
    changed = leaf.detach().clone()
    if has_rows(leaf, size) and leaf.is_floating_point():
        changed[0] = changed[0] * value + value
    return changed


def _flat(leaf: Tensor) -> Tensor:
    return leaf.detach().reshape(leaf.shape[0], -1).double()


def weighted_sum(leaf: Tensor) -> Tensor:
    """Return a number in which every output of every example counts."""
    flat = leaf.reshape(leaf.shape[0], -1)
    return (flat * torch.arange(1, flat.shape[1] + 1, device=flat.device).to(flat).cos()).sum()


@contextmanager
def _moved_a_little(parameters: list[nn.Parameter], devices: list[int]) -> Iterator[None]:
    held = [parameter.detach().clone() for parameter in parameters]
    with ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(keep_version(parameter))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                for parameter in parameters:
                    parameter.mul_(1 + MOVED_BY * torch.randn_like(parameter))
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, held, strict=True):
                    parameter.copy_(value)


def devices_of(module: nn.Module) -> list[int]:
    """The graphics cards whose random numbers the module uses."""
    return sorted(
        {parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"}
    )
