"""Which dimensions follow the batch size: settled once, by passes over two and over three rows.

A tensor that all examples share, such as a mask (time, time) or positions (time, features), may happen to have as
many rows as the batch. So the shape of one batch does not say what is batched; two batch sizes do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.gradients._torch import pytree, version_of, without_hooks

SIZES = (2, 3)

Shapes = list[torch.Size | None]  # of the leaves of a call's arguments; None where a leaf is no tensor


class Survey:
    """The shapes of what each layer is given, call by call, in a pass of each size."""

    def __init__(self) -> None:
        self._passes: list[dict[object, list[Shapes]]] = []
        self._known: dict[tuple[object, int, int, int], bool | None] = {}
        self._batched: dict[object, bool] = {}
        self.notes: list[dict[Any, Any]] = []  # what rules note besides, in each pass
        self.settled: dict[Any, Any] = {}  # what they make of it
        self.depth = 0  # how many layers the pass is in

    @property
    def size(self) -> int:
        """The number of rows in the pass that is running."""
        return SIZES[len(self.notes) - 1]

    def begin_pass(self) -> None:
        """Start the pass of the next size."""
        self._passes.append({})
        self.notes.append({})

    def note(self, site: object, args: Any, kwargs: Any) -> None:
        """Note what a layer is given in the pass that is running."""
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._passes[-1].setdefault(site, []).append(shapes)

    def noted(self) -> dict[object, int]:
        """Return how many calls of each layer the pass that is running has noted."""
        return {site: len(calls) for site, calls in self._passes[-1].items()}

    def forget_since(self, noted: dict[object, int]) -> None:
        """Forget what was noted since then."""
        for site, calls in self._passes[-1].items():
            del calls[noted.get(site, 0) :]

    def follows(self, site: object, call: int, leaf: int, dim: int) -> bool | None:
        """Whether this dimension of a leaf of a site's call is the batch; None where there was no such call."""
        place = site, call, leaf, dim
        if place not in self._known:
            self._known[place] = self._find(*place)
        return self._known[place]

    def is_batched(self, site: object) -> bool:
        """Whether the first dimension of a site's first leaf is the batch, in every call that was noted."""
        if site not in self._batched:
            calls = range(max((len(calls.get(site, ())) for calls in self._passes), default=0))
            self._batched[site] = all(self.follows(site, call, 0, 0) for call in calls)
        return self._batched[site]

    def _find(self, site: object, call: int, leaf: int, dim: int) -> bool | None:
        shapes = [calls.get(site, ())[call : call + 1] for calls in self._passes]
        if not all(of_call and leaf < len(of_call[0]) for of_call in shapes):
            return None
        found = [of_call[0][leaf] for of_call in shapes]
        return all(
            shape is not None and len(shape) > dim and shape[dim] == size
            for shape, size in zip(found, SIZES, strict=True)
        )

    def sites_without_rows(self) -> list[Any]:
        """Return the layers that are called with tensors of which none has a row per example, or one row for all."""
        found = dict.fromkeys(site for one in self._passes for site in one)
        return [
            site
            for site in found
            if any(map(_has_no_rows, zip(*(one.get(site, []) for one in self._passes), strict=False)))
        ]

    def is_consistent(self) -> bool:
        """Whether an example's part of what layers are given has the same shape in all passes."""
        calls = [itertools.chain.from_iterable(one.values()) for one in self._passes]
        firsts = [[next(filter(None, shapes), torch.Size())[1:] for shapes in of_pass] for of_pass in calls]
        return all(first == firsts[0] for first in firsts)


def survey(
    model: nn.Module,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    batch_size: int | None,
    noting: Callable[[Survey | None], None],
) -> Survey | None:
    """Run the model on a few rows of its inputs and return what was found; None where that cannot be told.

    Args:
        model: The model, whose buffers are left as they are. So is the state of torch's random numbers.
        run: Its forward.
        args: What the model is given.
        kwargs: What the model is given by name.
        batch_size: The rows of the first tensor.
        noting: Called with the survey that layers are to be noted in, and with None afterwards.

    Inputs with as many rows as the first tensor are taken for batched, unless the model fails then or an example's
    share changes its shape with the batch size; then only the first is.
    """
    if not batch_size:
        return None
    leaves, structure = pytree.tree_flatten((args, kwargs))
    rows = [index for index, leaf in enumerate(leaves) if _has_rows(leaf, batch_size)]
    for chosen in dict.fromkeys((tuple(rows), tuple(rows[:1]))):
        found = Survey()
        noting(found)
        try:
            with _undone(model):
                for size in SIZES:
                    picked = _few_rows(leaves, chosen, size, batch_size)
                    inner_args, inner_kwargs = pytree.tree_unflatten(picked, structure)
                    found.begin_pass()
                    run(*inner_args, **inner_kwargs)
        except Exception:  # the model itself says what is wrong, if it is, on the whole batch
            continue
        finally:
            noting(None)
        if found.is_consistent():
            return found
    return None


def _has_no_rows(shapes: tuple[Shapes, ...]) -> bool:
    """Whether no tensor of a call, as it is in each pass, has the batch or a single row in its first dimension."""
    leaves = [leaf for leaf in zip(*shapes, strict=False) if all(shape is not None for shape in leaf)]
    firsts = [tuple(shape[0] if len(shape) else None for shape in leaf) for leaf in leaves if leaf]
    return bool(firsts) and not any(first == SIZES or set(first) == {1} for first in firsts)


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _few_rows(leaves: list[Any], chosen: tuple[int, ...], size: int, batch_size: int) -> list[Any]:
    """Return the leaves with `size` rows in those that were chosen, rows repeated if there are fewer."""
    picked = list(leaves)
    for index in chosen:
        rows = torch.arange(size, device=leaves[index].device) % batch_size
        picked[index] = leaves[index].detach().index_select(0, rows)
    return picked


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Take back what a pass does to modules, buffers and random numbers, and let no hook see it."""
    buffers = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [vars(module) for module in model.modules()]
    kept = [({name: _copied(value) for name, value in own.items()}, dict(own)) for own in attributes]
    cards = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(cards)), torch.no_grad(), without_hooks(model):
        try:
            yield
        finally:
            for own, (copies, values) in zip(attributes, kept, strict=True):
                for name in own.keys() - values.keys():
                    del own[name]
                for name, value in values.items():
                    own[name] = value
                    _restore(value, copies[name])
            for buffer, version, value in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)


def _copied(value: Any) -> Any:
    return next((kind(value) for kind in (dict, list, set) if isinstance(value, kind)), None)


def _restore(value: Any, copied: Any) -> None:
    """Give a collection its content back, where that is not what it was."""
    if isinstance(value, list):
        if len(value) != len(copied) or any(a is not b for a, b in zip(value, copied, strict=True)):
            value[:] = copied
    elif isinstance(value, (dict, set)):
        same = len(value) == len(copied) and (
            all(value.get(key) is content for key, content in copied.items())
            if isinstance(value, dict)
            else value == copied
        )
        if not same:
            value.clear()
            value.update(copied)
