"""Finds how the rows of a batch have to stand for this model's kernels to round each of them alike.

The same made-up row, many times over, goes through the model in batches of several sizes. In which order kernels add
depends on places and sizes, not on values; so where outputs and gradients of all these rows are equal to the bit, a row
is rounded alike wherever it stands, at all these sizes. The first `Layout` for which they are is taken.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import Batch, call, has_rows, map_tensors, tensors, to_device
from pdpsgd.engine.checks.comparisons import output_by_row, weighted_sum
from pdpsgd.engine.checks.probe import left_as_it_was
from pdpsgd.engine.layout import FEWEST, SMALLEST, Layout
from pdpsgd.gradients.instrument import InstrumentedForward

if TYPE_CHECKING:
    from pdpsgd.engine.records import Records
    from pdpsgd.gradients.clipping import ClippedGradients

LANES = (1, 4)
LANES_OF_FEW = (1, 2)  # where a physical batch has fewer than four rows
MOST = 64  # the largest multiple that is tried
MOST_ROWS = 1024  # in a batch that is tried
MOST_SIZES = 24  # that are tried where a loss divides by the number of rows
FACTORS, ROWS = (3, 5, 7, 11), 8  # of the number of rows, and how many made-up rows are tried at these
MOST_NUMBERS = 2**13  # of a model whose per-example gradients are compared one by one
NOT_TRIED = (
    "It is assumed that kernels round a row of this model alike whoever else is sampled: with a made-up row the model "
    "could not be called before the run, to try it."
)
LOSS_NOT_TRIED = (
    "It is assumed that the loss rounds a row of its mean alike whoever else is sampled: for a made-up row it could "
    "not be computed before the run, to try it. A summed loss needs nothing of the kind."
)
NONE_FOUND = (
    "It is assumed that it does not matter how kernels round a row of this model: at all numbers of rows that were "
    "tried, they round it otherwise when it stands elsewhere or among more rows."
)


@dataclass(frozen=True)
class Settled:
    """A layout, and what has to be assumed of the model because no layout was found; None where one was."""

    layout: Layout
    assumed: str | None = None


Pass = Callable[[Batch], Tensor]
"""From a batch of the loader to the loss summed over it: all that the loop does with one."""


def settle_layout(
    gradients: ClippedGradients,
    records: Records,
    *,
    expected: float,
    limit: int | None,
    views: int,
    whole_pass: Pass | None = None,
    divides: bool = False,
) -> Settled:
    """Return the layout that costs least among those in which the model rounds a row alike wherever it stands.

    Args:
        gradients: Of the model, which is left as it was.
        records: The data; one record is looked at for its shapes, and for whole numbers in it (tokens).
        expected: The expected number of records in a step.
        limit: The largest number of records in a physical batch.
        views: The number of rows that a record has.
        whole_pass: What the loop does with a batch, where that is known before the run; otherwise, or where that cannot
            be computed for a made-up row, the model alone is tried, with parts of a batch.
        divides: Whether the loss in it is a mean times the number of rows. Where that leaves rounding behind, the
            number of rows is a power of two.

    Returns:
        The layout; the least one, and what is then assumed, if none will do, or if the model cannot be called before
        the loop calls it.

    Guarantee: none by itself. Rows were alike at the sizes that were tried, for made-up numbers.
    """
    least = Layout(multiple=_least_multiple(expected), limit=limit)
    without_loss = LOSS_NOT_TRIED if whole_pass is not None and divides else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            example = records.example()
            trial = None
            if whole_pass is not None:
                trial = _Trial.of_pass(gradients, example, views, whole_pass, divides=divides)
            if trial is not None:
                without_loss = None
            else:
                trial = _Trial.of(gradients, example, views)
            found = None if trial is None else trial.settle(least, expected)
        except Exception:  # whatever it is, the first batch says it better
            return Settled(least, NOT_TRIED)
        finally:
            gradients.forget()
    if found is None:
        return Settled(least, NOT_TRIED if trial is None else NONE_FOUND)
    return Settled(found, without_loss)


def _least_multiple(expected: float) -> int:
    """Return the power of two that costs at most one row in sixty, but four rows of few.

    >>> [_least_multiple(expected) for expected in (8.0, 64.0, 256.0, 1024.0, 1e6)]
    [4, 4, 8, 32, 64]
    """
    return min(MOST, max(FEWEST, 1 << (max(int(expected), 1) // 32).bit_length() >> 1))


class _Trial:
    """One made-up row, and what the model makes of it among copies of itself."""

    def __init__(
        self,
        gradients: ClippedGradients,
        row: Any,
        views: int,
        *,
        whole_pass: Pass | None = None,
        divides: bool = False,
    ) -> None:
        self.gradients, self.row, self.views = gradients, row, views
        self.whole_pass, self.divides = whole_pass, divides
        # With other made-up rows: of one, few numbers may happen to come out alike.
        self.others: list[_Trial] = []
        self.is_small = sum(parameter.numel() for parameter in gradients.sums) <= MOST_NUMBERS
        self.results = cache(self._results)

    @classmethod
    def of(cls, gradients: ClippedGradients, example: Batch, views: int) -> _Trial | None:
        """Find out what of a batch the model is called with; None if nothing of it will do."""
        device = next((parameter.device for parameter in gradients.sums), None)
        for inputs in _possible_inputs(example):
            trial = cls(gradients, to_device(map_tensors(_made_up, inputs), device), views)
            try:
                trial.results(1)
            except Exception:
                continue
            return trial
        return None

    @classmethod
    def of_pass(
        cls, gradients: ClippedGradients, example: Batch, views: int, whole_pass: Pass, *, divides: bool
    ) -> _Trial | None:
        """Begin with a batch that has one made-up record in it; None if that cannot be computed for it."""
        rows = [map_tensors(partial(_made_up, number=number), example) for number in range(ROWS)]
        trial, *others = (
            cls(gradients, row, views, whole_pass=whole_pass, divides=divides)
            for row in (rows if divides else rows[:1])
        )
        trial.others = others
        try:
            trial.results(SMALLEST)
        except Exception:
            return None
        return trial

    def settle(self, least: Layout, expected: float) -> Layout | None:
        """Return the first layout in which all copies are equal; None if they are in none."""
        few = least.limit is not None and least.limit < FEWEST
        for powers in (False, True) if self.divides else (False,):
            for lanes in LANES_OF_FEW[: least.limit] if few else LANES:
                multiple = least.multiple
                while multiple <= MOST:
                    layout = Layout(multiple=multiple, lanes=lanes, limit=least.limit, powers=powers)
                    odd = {layout.rows(factor * multiple) for factor in FACTORS}
                    if self._is_alike(layout, self._sizes(layout, expected)) and all(
                        other._is_alike(layout, odd) for other in self.others
                    ):
                        return layout
                    multiple *= 2
        return None

    def _sizes(self, layout: Layout, expected: float) -> set[int]:
        """Return sizes of batches that the layout has."""
        typical = layout.rows(min(int(expected), MOST_ROWS))
        wanted = {
            layout.rows(size)
            for size in (1, typical, typical + layout.multiple, typical + 3 * layout.multiple)
        }
        if self.divides:  # by a number of rows that is a power of two, or by one that may round
            wanted |= {layout.rows(size) for size in _usual_sizes(layout, typical)}
        return wanted

    def _is_alike(self, layout: Layout, wanted: set[int]) -> bool:
        """Tell whether rows of a lane are equal, in a batch and among batches of these sizes."""
        if any(size % layout.lanes for size in wanted):
            return False
        pattern: list[Tensor] | None = None
        for size in sorted(wanted):
            found = self.results(size)
            period = layout.lanes * self.views
            firsts = [part.first[:period] for part in found]
            pattern = firsts if pattern is None else pattern
            if not all(period in part.periods for part in found):
                return False
            if not all(map(_repeats, firsts, pattern)):
                return False
        return True

    def _results(self, size: int) -> list[_Rows]:
        """Return what became of all rows, of so many records: in outputs and gradients."""
        rows = size * self.views
        given = size if self.whole_pass is not None else rows
        inputs = map_tensors(
            lambda leaf: leaf.repeat(given, *[1] * (leaf.dim() - 1)) if has_rows(leaf, 1) else leaf, self.row
        )
        module, found = self.gradients.module, list[_Rows]()

        def see(part: Tensor) -> None:
            if has_rows(part, rows):
                found.append(
                    _Rows.of(part, [lanes * self.views for lanes in sorted({*LANES, *LANES_OF_FEW})])
                )

        with left_as_it_was(module), _attributes_kept(module), self.gradients.recording_in_evaluation():
            module.eval()
            if self.whole_pass is None:
                loss = _sum_of_outputs(tensors(call(module, inputs)), rows, see)
            else:
                with _outputs_seen(module, see):
                    loss = self.whole_pass(inputs)
            with self.gradients.watching_output_gradients(see):
                self.gradients.record(loss)
            if self.is_small:
                for part in self.gradients.per_example_gradients(loss_reduction="sum").values():
                    see(part)
            see(self.gradients.per_example_norms(loss_reduction="sum"))
            self.gradients.forget()
        return found


def _usual_sizes(layout: Layout, typical: int) -> list[int]:
    """Return sizes of batches that a run will have: within four standard deviations, or up to the limit."""
    spread = 4 * math.isqrt(typical)
    least, most = max(1, typical - spread), typical + spread
    if layout.at_once is not None:
        least, most = 1, min(most, layout.at_once)
    step = max(layout.multiple, (most - least) // MOST_SIZES)
    return [*range(least, most, step), most]


def _sum_of_outputs(outputs: list[Tensor], rows: int, see: Callable[[Tensor], None]) -> Tensor:
    """Let somebody see what a model gives each row, and add it all up."""
    by_row = [
        part
        for leaf in outputs
        if leaf.is_floating_point() and (part := output_by_row(leaf, rows)) is not None
    ]
    for part in by_row:
        see(part.detach())
    return torch.stack([weighted_sum(part) for part in by_row if part.requires_grad]).sum()


@contextmanager
def _outputs_seen(module: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Let somebody see what the parts of a module give, as they give it."""

    def look(part: nn.Module, inputs: Any, outputs: Any) -> None:
        for leaf in tensors(outputs):
            if leaf.is_floating_point():
                see(leaf.detach())

    hooks = [part.register_forward_hook(look) for part in module.modules() if part is not module]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Rows:
    """The first rows of a tensor, and which periods all of its rows repeat them with, to the bit."""

    first: Tensor
    periods: frozenset[int]

    @classmethod
    def of(cls, part: Tensor, periods: list[int]) -> _Rows:
        """Look at rows, of which only the first ones are kept: all of a model's would be as much as its activations."""
        part = part.reshape(len(part), -1)
        alike = (period for period in periods if _repeats(part, part[:period]))
        return cls(part[: max(periods)].clone(), frozenset(alike))


def _possible_inputs(example: Batch) -> Iterator[Any]:
    """Yield what a model may be called with, of a batch: its first part, all but its last, all of it, any one part."""
    if isinstance(example, (list, tuple)):
        yield example[0]
        if len(example) > 2:
            yield tuple(example[:-1])
        yield tuple(example)
        yield from example[1:]
    elif isinstance(example, Mapping):
        yield {name: part for name, part in example.items() if "label" not in str(name)}
        yield example
        yield from example.values()
    elif example is not None:
        yield example


def _made_up(leaf: Tensor, number: int = 0) -> Tensor:
    """Return a tensor of normal numbers; of ones, where whole numbers (tokens, masks) or truth values are wanted."""
    if not leaf.is_floating_point():
        return torch.ones_like(leaf)
    generator = torch.Generator().manual_seed(leaf.numel() + 1_000_003 * number)
    return torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf)


def _repeats(part: Tensor, first: Tensor) -> bool:
    """Tell whether rows are these ones again and again, to the bit."""
    return len(part) % len(first) == 0 and all(
        some.shape == first.shape and _same(some, first) for some in torch.split(part, len(first))
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    before = [(vars(child), dict(vars(child))) for child in module.modules()]
    try:
        yield
    finally:
        for now, then in before:
            # What the pass showed to need the general rule is instrumented from now on.
            instrumented = {
                name: value for name, value in now.items() if isinstance(value, InstrumentedForward)
            }
            now.clear()
            now.update({**then, **instrumented})
