"""Finds how the rows of a batch have to stand for this model's kernels to round each of them alike.

The same made-up row, many times over, goes through the model in batches of several sizes. In which order kernels add
depends on places and sizes, not on values; so where outputs and gradients of all these rows are equal to the bit, a row
is rounded alike wherever it stands, at all these sizes. The first `Layout` for which they are is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdpsgd.engine.batches import Batch, call, has_rows, map_tensors, tensors, to_device
from pdpsgd.engine.checks.comparisons import output_by_row, weighted_sum
from pdpsgd.engine.checks.probe import left_as_it_was
from pdpsgd.engine.layout import FEWEST, Layout
from pdpsgd.gradients.instrument import InstrumentedForward

if TYPE_CHECKING:
    from pdpsgd.engine.records import Records
    from pdpsgd.gradients.clipping import ClippedGradients

LANES = (1, 4)
LANES_OF_FEW = (1, 2)  # where a physical batch has fewer than four rows
MOST = 64  # the largest multiple that is tried
MOST_ROWS = 1024  # in a batch that is tried
MOST_NUMBERS = 2**13  # of a model whose per-example gradients are compared one by one
NOT_TRIED = (
    "It is assumed that kernels round a row of this model alike whoever else is sampled: with a made-up row the model "
    "could not be called before the run, to try it."
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


def settle_layout(
    gradients: ClippedGradients, records: Records, *, expected: float, limit: int | None, views: int
) -> Settled:
    """Return the layout that costs least among those in which the model rounds a row alike wherever it stands.

    Args:
        gradients: Of the model, which is left as it was.
        records: The data; one record is looked at for its shapes, and for whole numbers in it (tokens).
        expected: The expected number of records in a step.
        limit: The largest number of records in a physical batch.
        views: The number of rows that a record has.

    Returns:
        The layout; the least one, and what is then assumed, if none will do, or if the model cannot be called before
        the loop calls it.

    Guarantee: none by itself. Rows were alike at the sizes that were tried, for made-up numbers.
    """
    least = Layout(multiple=_least_multiple(expected), limit=limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial = _Trial.of(gradients, records.example(), views)
            found = None if trial is None else trial.settle(least, expected)
        except Exception:  # whatever it is, the first batch says it better
            return Settled(least, NOT_TRIED)
        finally:
            gradients.forget()
    if found is None:
        return Settled(least, NOT_TRIED if trial is None else NONE_FOUND)
    return Settled(found)


def _least_multiple(expected: float) -> int:
    """Return the power of two that costs at most one row in sixty, but four rows of few.

    >>> [_least_multiple(expected) for expected in (8.0, 64.0, 256.0, 1024.0, 1e6)]
    [4, 4, 8, 32, 64]
    """
    return min(MOST, max(FEWEST, 1 << (max(int(expected), 1) // 32).bit_length() >> 1))


class _Trial:
    """One made-up row, and what the model makes of it among copies of itself."""

    def __init__(self, gradients: ClippedGradients, row: Any, views: int) -> None:
        self.gradients, self.row, self.views = gradients, row, views
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

    def settle(self, least: Layout, expected: float) -> Layout | None:
        """Return the first layout in which all copies are equal; None if they are in none."""
        few = least.limit is not None and least.limit < FEWEST
        for lanes in LANES_OF_FEW[: least.limit] if few else LANES:
            multiple = least.multiple
            while multiple <= MOST:
                layout = Layout(multiple=multiple, lanes=lanes, limit=least.limit)
                if self._is_alike(layout, expected):
                    return layout
                multiple *= 2
        return None

    def _is_alike(self, layout: Layout, expected: float) -> bool:
        """Tell whether rows of a lane are equal, in a batch and among batches of sizes that the layout has."""
        typical = layout.rows(min(int(expected), MOST_ROWS))
        wanted = {
            layout.rows(size)
            for size in (1, typical, typical + layout.multiple, typical + 3 * layout.multiple)
        }
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
        inputs = map_tensors(
            lambda leaf: leaf.repeat(rows, *[1] * (leaf.dim() - 1)) if has_rows(leaf, 1) else leaf, self.row
        )
        module, found = self.gradients.module, list[_Rows]()

        def see(part: Tensor) -> None:
            if has_rows(part, rows):
                found.append(
                    _Rows.of(part, [lanes * self.views for lanes in sorted({*LANES, *LANES_OF_FEW})])
                )

        with left_as_it_was(module), _attributes_kept(module), self.gradients.recording_in_evaluation():
            module.eval()
            outputs = tensors(call(module, inputs))
            by_row = [
                part
                for leaf in outputs
                if leaf.is_floating_point() and (part := output_by_row(leaf, rows)) is not None
            ]
            for part in by_row:
                see(part.detach())
            loss = torch.stack([weighted_sum(part) for part in by_row if part.requires_grad]).sum()
            with self.gradients.watching_output_gradients(see):
                self.gradients.record(loss)
            if self.is_small:
                for part in self.gradients.per_example_gradients(loss_reduction="sum").values():
                    see(part)
            see(self.gradients.per_example_norms(loss_reduction="sum"))
            self.gradients.forget()
        return found


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


def _made_up(leaf: Tensor) -> Tensor:
    """Return a tensor of normal numbers; of ones, where whole numbers (tokens, masks) or truth values are wanted."""
    if not leaf.is_floating_point():
        return torch.ones_like(leaf)
    generator = torch.Generator().manual_seed(leaf.numel())
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
