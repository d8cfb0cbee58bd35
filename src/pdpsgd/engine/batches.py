"""Trees of tensors, the physical batch, and a batch with one example exchanged for another.

What becomes of an example must not depend on the others. The way to see it, wherever something is done to a batch: do
it again with one example exchanged, and compare what became of the others.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdpsgd._typing import IntArray

Batch = Any


def named_tensors(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors in tuples, lists, mappings and dataclasses, by where they are.

    >>> list(named_tensors({"x": [torch.zeros(2), 1], "y": torch.ones(1)}))
    ['.x.0', '.y']
    """
    if isinstance(tree, Tensor):
        return {name: tree}
    found: dict[str, Tensor] = {}
    for key, part in _parts(tree):
        found |= named_tensors(part, f"{name}.{key}")
    return found


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists, mappings and dataclasses."""
    return list(named_tensors(tree).values())


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Change the tensors of a tree; what is neither a tensor nor a container stays."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)
        for key, part in tree.items():
            changed[key] = map_tensors(change, part)
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(change, part) for part in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(change, part) for part in tree)
    if _holds_fields(tree):
        return replace(
            tree, **{key: map_tensors(change, part) for key, part in _parts(tree) if part is not None}
        )
    return tree


def has_rows(tensor: Tensor, size: int) -> bool:
    """Tell whether a tensor has a row for each of `size` examples."""
    return tensor.dim() > 0 and tensor.shape[0] == size


def exchanged(tree: Any, size: int, rows: Sequence[int], by: int) -> Any:
    """Copy a batch of `size` examples with some of them replaced by another.

    >>> exchanged(torch.tensor([1, 2, 3]), 3, [0, 1], 2).tolist()
    [3, 3, 3]
    """

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.detach().clone()
        if has_rows(tensor, size):
            changed[list(rows)] = tensor.detach()[by]
        return changed

    return map_tensors(change, tree)


def same_but_for(rows: Sequence[int], one: Tensor, other: Tensor, size: int) -> bool:
    """Tell whether two tensors are alike but in the rows (of all views) of some of `size` examples.

    Rounding may differ with what stands in other rows; what mixes examples is far coarser than that.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    kept = torch.ones(size, dtype=torch.bool, device=one.device)
    kept[list(rows)] = False
    kept = kept.repeat_interleave(one.shape[0] // size)
    before, after = one.detach()[kept], other.detach()[kept]
    if not before.is_floating_point():
        return bool(torch.equal(before, after))
    return torch.allclose(before, after, rtol=1e-5, atol=1e-6, equal_nan=True)


@dataclass(frozen=True)
class RandomStates:
    """Where the random numbers of torch (on the processor), NumPy and Python stand."""

    of_torch: Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> RandomStates:
        """Read the states."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002

    def same_as(self, other: RandomStates) -> bool:
        """Whether no random number was drawn in between."""
        return (
            torch.equal(self.of_torch, other.of_torch)
            and self.of_python == other.of_python
            and self.of_numpy[2:] == other.of_numpy[2:]
            and bool((self.of_numpy[1] == other.of_numpy[1]).all())
        )

    def restore(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)  # noqa: NPY002
        random.setstate(self.of_python)


def reseed(seed: int) -> None:
    """Seed the generators of torch (on the processor), NumPy and Python."""
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, NumPy and Python for a while, and put their random states back afterwards."""
    states = RandomStates.now()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            states.restore()


def _parts(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, (list, tuple)):
        yield from enumerate(tree)
    elif isinstance(tree, Mapping):
        yield from tree.items()
    elif _holds_fields(tree):
        yield from ((field.name, getattr(tree, field.name)) for field in fields(tree) if field.init)


def _holds_fields(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)


@dataclass(eq=False)
class PhysicalBatch:
    """The records of a step that go through the model together: all of them, unless a limit cuts the step.

    `records` are numbers of records, `NO_RECORD` for somebody who supplied none: a placeholder stands in the
    row, and its clipping norm is 0. Where people have many records, person i of the batch has rows starts[i] to
    starts[i + 1], and `clip_norms` are those of people; otherwise every row is a person. `people` are their places on
    the list, -1 for a placeholder that is nobody's. `examples` is what the loop gets. `when_stepped` has checks that
    are run, the last one first, when the loop calls `step()` for this batch, before anything is added to the
    step's sum; `when_taken` what is run when that `step()` is through.

    Sensitive: who was sampled, and how many.
    """

    step: int
    records: IntArray
    clip_norms: Tensor
    first: bool
    last: bool
    people: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    starts: IntArray | None = None
    seed: int | None = None  # of the first row, for whatever is random in reading the records; counted on
    examples: Batch = None
    when_stepped: list[Callable[[], None]] = field(default_factory=list)
    when_taken: list[Callable[[], None]] = field(default_factory=list)
    added: bool = False

    @property
    def size(self) -> int:
        """How many rows there are, of everybody who was sampled."""
        return len(self.records)


def to_device(part: Any, device: torch.device | None) -> Any:
    """Move a tensor, or the tensors of a batch."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), part)


def repeated(part: Any, times: int) -> Any:
    """Repeat each row, in a tensor or in the tensors of a batch, one after the other."""
    return map_tensors(lambda tensor: tensor.repeat_interleave(times, 0), part)


@dataclass(frozen=True)
class Arguments:
    """What a model is called with: positional and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's outputs; a tuple, list or dict of inputs is spread out."""
    if isinstance(inputs, Arguments):
        return model(*inputs.args, **inputs.kwargs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)
