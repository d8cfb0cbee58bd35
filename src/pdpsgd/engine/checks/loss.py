"""Refuses a loss function in which examples mix, tried on made-up outputs: no private value is looked at.

Outputs are random numbers in float64 with the shape of the model's, targets have every class. A row's gradient, times
the number of rows (for a mean) or not (for a sum), must be the same among all rows, in parts, in pairs, and alone. That
tells class weights and ignored targets in a mean, a loss scaled by the number of rows, branches on that number, and
whatever else lets rows meet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdpsgd.engine.batches import has_rows, map_tensors, seeded, tensors
from pdpsgd.engine.checks.rows import differing_rows, pick
from pdpsgd.errors import PdpsgdError, fail

Loss = Callable[..., Tensor]

MOST_ROWS = 2048
MOST_NUMBERS = 2**21
LEAST_ROWS = 24
SINGLE_ROWS = 16
TARGETS = 64
SCALES = (1.0, 1.0, 4.0, 12.0)  # some rows are large: a loss may be cut off there
# Relative to a row's gradient. In float64 nothing but mixing is larger; some losses compute in less.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


def check_loss(
    loss: Loss, outputs: Any, targets: Any = None, *, rows: int, size: int, loss_reduction: str = "mean"
) -> bool:
    """Refuse a loss in which a row's gradient depends on the other rows or on their number.

    Args:
        loss: `loss(outputs, targets)`, or `loss(outputs)` where `targets` is None; gives one number.
        outputs: Outputs of the model for `rows` examples: only their shapes and ranges are used.
        targets: Targets of a batch of `size` examples: the values that targets can have.
        rows: The first dimension of outputs that belong to examples.
        size: The first dimension of targets that belong to examples; up to twice as many rows are tried.
        loss_reduction: How the loss is reduced over the batch, "mean" or "sum".

    Returns:
        Whether that could be told. Not if the loss is computed inside the model, draws random numbers, or cannot be
        computed for made-up outputs.

    Raises:
        PdpsgdError: Rows mix, or the loss is reduced otherwise than `loss_reduction` says.

    Guarantee: none by itself. Mixing that depends on rare values, or on sizes that were not tried, can stay unseen.
    """
    tried = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    for made in _made_up_batches(outputs, targets, rows=rows, size=size):
        try:
            with seeded(0), torch.enable_grad():
                _Trial(_in_precision(tried, made.dtype), made, Precision()).check(loss_reduction)
        except _CannotTellError:
            return False
        except PdpsgdError:
            raise
        except Exception:  # a user's function may raise anything on values that it does not expect
            continue
        return True
    return False


class _CannotTellError(Exception):
    """Made-up outputs do not tell anything about this loss."""


@dataclass(frozen=True)
class _MadeUp:
    """A batch of made-up outputs and targets."""

    outputs: Any
    targets: Any
    size: int
    dtype: torch.dtype


class Precision(TorchFunctionMode):
    """Tolerance of the lowest precision that a loss computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = TOLERANCES[torch.float64]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.note(*tensors(result))
        return result

    def note(self, *leaves: Tensor) -> None:
        """Count the precision of these tensors."""
        self.tolerance = max([self.tolerance, *(TOLERANCES.get(leaf.dtype, 0.0) for leaf in leaves)])


@dataclass(frozen=True)
class _Trial:
    loss: Loss
    made: _MadeUp
    precision: Precision

    def check(self, loss_reduction: str) -> None:
        """Compare all rows together with parts of them."""
        size = self.made.size
        everybody = torch.arange(size, device="cpu")
        together = self._gradients(everybody)
        if not torch.equal(together, self._gradients(everybody)):
            _refuse("the same rows give another gradient when the loss is computed again")
        found = {"mean", "sum"}
        for rows in self._parts():
            part, whole = self._gradients(rows), together[rows]
            fits = {
                kind
                for kind, factors in (("mean", (len(rows), size)), ("sum", (1, 1)))
                if self._agree(part * factors[0], whole * factors[1])
            }
            found &= fits
            if not found:
                _refuse(f"among {size} rows it is another than among {len(rows)} of them")
        if loss_reduction not in found:
            (other,) = found
            fail(
                f'Expected a loss reduced over the batch as loss_reduction="{loss_reduction}". Got one that is a '
                f'{other}: change the loss, or say loss_reduction="{other}".'
            )

    def _parts(self) -> Iterator[Tensor]:
        size = self.made.size
        shuffled = torch.randperm(size, device="cpu")
        for length in dict.fromkeys((size - 1, size // 2, size // 3, 7, 3)):
            if 0 < length < size:
                yield shuffled[:length]
        for row in range(0, size, max(1, size // SINGLE_ROWS)):
            other = int(shuffled[row])
            yield torch.tensor([row], device="cpu")
            yield torch.tensor([row] if other == row else [row, other], device="cpu")

    def _gradients(self, rows: Tensor) -> Tensor:
        """Return the gradient of the loss of these rows, one row per example."""
        size = self.made.size
        outputs = map_tensors(
            lambda leaf: leaf.detach().clone().requires_grad_(leaf.is_floating_point()),
            pick(self.made.outputs, rows, size),
        )
        targets = map_tensors(torch.clone, pick(self.made.targets, rows, size))
        state = torch.get_rng_state()
        with self.precision:
            value = self.loss(outputs) if targets is None else self.loss(outputs, targets)
        if not torch.equal(state, torch.get_rng_state()) or value.numel() != 1 or not value.requires_grad:
            raise _CannotTellError
        trained = [leaf for leaf in tensors(outputs) if leaf.requires_grad]
        found = torch.autograd.grad(value.reshape(()), trained, allow_unused=True)
        parts = []
        for made, gradient in zip(
            (leaf for leaf in tensors(self.made.outputs) if leaf.is_floating_point()), found, strict=True
        ):
            if has_rows(made, size):
                shape = (len(rows), made[0].numel())
                parts.append(
                    made.new_zeros(shape) if gradient is None else gradient.reshape(shape).to(made.dtype)
                )
            elif gradient is not None and bool(gradient.any()):
                raise _CannotTellError  # what the model itself computed from all examples: its own loss
        if not parts:
            raise _CannotTellError
        return torch.cat(parts, 1).double()

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        finite = one.isfinite().all(1)
        if not torch.equal(finite, other.isfinite().all(1)):
            return False
        one, other = one[finite], other[finite]
        if not len(one):
            return True
        sizes = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        close = (one - other).norm(dim=1) <= self.precision.tolerance * (sizes + 1e-3 * sizes.max())
        return bool(close.all())


def _made_up_batches(outputs: Any, targets: Any, *, rows: int, size: int) -> Iterator[_MadeUp]:
    """Yield batches to try, until the loss can be computed on one of them."""
    by_row = [leaf for leaf in tensors(outputs) if has_rows(leaf, rows) and leaf.is_floating_point()]
    classes = class_counts(by_row, tensors(targets), size)
    wanted = max(min(2 * size, MOST_ROWS), LEAST_ROWS, 2 * max(classes.values(), default=0))
    count = max(4, min(wanted, MOST_NUMBERS // max(1, sum(leaf[0].numel() for leaf in by_row))))
    for dtype in (torch.float64, torch.float32):
        with seeded(1):
            made_outputs = map_tensors(lambda leaf: made_up(leaf, rows, count, dtype), outputs)  # noqa: B023
            for invented in (True, False) if classes else (False,):
                made_targets = _made_up_targets(
                    targets, classes if invented else {}, size=size, count=count, dtype=dtype
                )
                yield _MadeUp(made_outputs, made_targets, count, dtype)


def made_up(leaf: Tensor, rows: int, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return `count` random rows like those of the leaf: in its range, if that has a meaning."""
    leaf, dtype = leaf.detach(), dtype or leaf.dtype
    if not leaf.is_floating_point():
        return leaf[torch.arange(count, device=leaf.device) % rows] if has_rows(leaf, rows) else leaf
    if not has_rows(leaf, rows):
        return leaf.to(dtype)
    made = torch.randn(count, *leaf.shape[1:], dtype=dtype, device="cpu").to(leaf.device)
    turns = torch.arange(count, device=leaf.device) // 2 % len(SCALES)
    scales = torch.tensor(SCALES, dtype=dtype, device=leaf.device)[turns]
    made = made * scales.reshape(-1, *[1] * (leaf.dim() - 1))
    lowest, highest = float(leaf.min()), float(leaf.max())
    if lowest >= 0 and highest <= 1 and leaf.numel() > 1:
        is_distribution = leaf.dim() > 1 and torch.allclose(leaf.sum(1), leaf.new_ones(()), atol=1e-4)
        return made.softmax(1) if is_distribution else made.sigmoid()
    if lowest >= 0:
        return made.exp()
    return made.log_softmax(1) if highest <= 0 and leaf.dim() > 1 else made


def _made_up_targets(
    targets: Any, classes: dict[int, int], *, size: int, count: int, dtype: torch.dtype
) -> Any:
    """Return targets with the values that occur; every second one has a class of all that can occur."""
    each = 2 if classes else 1
    chosen = torch.tensor(differing_rows(targets, size, most=min(TARGETS, count // each)), device="cpu")
    rows = chosen[torch.arange(count, device=chosen.device) // each % len(chosen)]

    def change(leaf: Tensor) -> Tensor:
        if not has_rows(leaf, size):
            return leaf
        made = leaf.detach()[rows]
        if id(leaf) in classes:
            made = every_class(made, classes[id(leaf)])
        return made.to(dtype) if made.is_floating_point() else made

    return map_tensors(change, targets)


def every_class(targets: Tensor, count: int) -> Tensor:
    """Return targets of which every second one is a class in turn.

    >>> every_class(torch.tensor([7, 7, 7, 7, 7, 7]), 3).tolist()
    [7, 0, 7, 1, 7, 2]
    """
    made = targets.detach().clone()
    rows = torch.arange(len(made), device=made.device).reshape(-1, *[1] * (made.dim() - 1)) // 2
    inside = torch.arange(made[0].numel(), device=made.device).reshape(made.shape[1:])
    made[1::2] = ((rows + inside) % count).expand_as(made).to(made)[1::2]
    return made


def class_counts(outputs: list[Tensor], targets: Iterable[Tensor], size: int) -> dict[int, int]:
    """Return the number of classes for each tensor of targets (by id) that names classes of an output."""
    found: dict[int, int] = {}
    for leaf in targets:
        if leaf.is_floating_point() or not has_rows(leaf, size):
            continue
        for output in outputs:
            if output.dim() < 2:
                continue
            last = output.shape[1:-1] == leaf.shape[1:]
            second = output.shape[2:] == leaf.shape[1:]
            count = output.shape[1] if second else output.shape[-1] if last else 0
            if count and int(leaf.max()) < count <= MOST_ROWS:
                found[id(leaf)] = count
    return found


def _in_precision(loss: Loss, dtype: torch.dtype) -> Loss:
    return copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss


def _refuse(why: str) -> NoReturn:
    fail(
        f"Examples mix in this loss: of a row's gradient, {why}, beyond the factor of a mean or a sum. Every example's "
        "loss must depend on that example only, and the batch's loss be their plain mean or sum: no class weights or "
        "ignored targets normalized over the batch (write `(loss_none * w[y]).mean()`, with loss_none as "
        "of reduction='none'), no factor that depends on the batch's size, no contrastive terms, no statistics of the "
        "batch."
    )
