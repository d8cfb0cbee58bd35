"""What a loop did to a batch by torch's functions, written down so that it can be done again with other examples.

Nothing of the loop's own is ever written to: what is done again works on copies of the batch as it was handed out, and
of whatever else was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pdpsgd.examples import has_rows, tensors

MOST_CALLS = 2000
_LEAVING = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
)

Change = Callable[[Tensor], Tensor]


class CannotTellError(Exception):
    """What was written down cannot be done again, and why."""


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Any
    written: list[Tensor]  # what it writes to in place
    overwritten: dict[int, Tensor]  # those of them that were not known before, as they were
    random_states: list[Tensor]


class Replay:
    """Calls of torch functions that touched a batch of `size` examples.

    `known` are the tensors that come from the batch; they are held, so that no other tensor can take their place.
    `left_torch` says whether values may have been taken out of torch (as a number, or into NumPy), and back: nothing is
    followed there.
    """

    def __init__(self, batch: Any, size: int) -> None:
        self.size = size
        given = [leaf for leaf in tensors(batch) if has_rows(leaf, size)]
        self.known: dict[int, Tensor] = {id(leaf): leaf for leaf in given}
        self.calls: list[_Call] = []
        self.left_torch = False
        self.too_long = False
        self._looked_at = False
        self._given = {id(leaf): leaf.detach().clone() for leaf in given}

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a call of the loop's, and write it down if it touches what is known."""
        leaves = pytree.tree_leaves((args, kwargs))
        if self.too_long or not any(id(leaf) in self.known for leaf in leaves):
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") in _LEAVING:
            self._looked_at = True
            return function(*args, **kwargs)
        self.left_torch |= self._looked_at and any(self._may_come_back(leaf) for leaf in leaves)
        self.too_long = len(self.calls) == MOST_CALLS
        written = list(_written(function, args, kwargs))
        overwritten = {id(leaf): leaf.detach().clone() for leaf in written if id(leaf) not in self.known}
        # A copy of the containers: the loop may change a list after the call.
        held_args, held_kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        states = _random_states()
        outputs = function(*args, **kwargs)
        self.calls.append(_Call(function, held_args, held_kwargs, outputs, written, overwritten, states))
        self.add(*written, *_leaves(outputs))
        return outputs

    def _may_come_back(self, leaf: Any) -> bool:
        """Whether this, in a call, could be something that was taken out of torch before."""
        if isinstance(leaf, Tensor):
            return id(leaf) not in self.known
        return isinstance(leaf, (int, float, complex, np.ndarray, np.generic)) and not isinstance(leaf, bool)

    def add(self, *leaves: Tensor) -> None:
        """From now on these count as coming from the batch."""
        self.known.update({id(leaf): leaf for leaf in leaves})

    def again(
        self,
        change: Change,
        wanted: Sequence[Tensor],
        *,
        instead: dict[int, Tensor] | None = None,
        alone: bool = False,
    ) -> list[Tensor]:
        """Do again on a changed batch what the wanted tensors came from; their new values.

        `instead` has values for tensors that come from the batch in a way that is not written down (through the model).
        With `alone`, the changed batch has another size: then nothing of the batch's size may come from elsewhere.
        """
        if self.too_long:
            raise CannotTellError("it takes too many operations")
        values = {key: change(leaf).clone() for key, leaf in self._given.items()} | (instead or {})

        def replaced(leaf: Tensor) -> Tensor:
            if alone and id(leaf) not in values and has_rows(leaf, self.size):
                raise CannotTellError("it uses tensors of the batch's size that do not come from the batch")
            return values.get(id(leaf), leaf)

        try:
            for call in self._calls_for(wanted):
                values |= {key: leaf.clone() for key, leaf in call.overwritten.items()}
                args, kwargs = pytree.tree_map_only(Tensor, replaced, (call.args, call.kwargs))
                _set_random_states(call.random_states)
                outputs = call.function(*args, **kwargs)
                values |= {
                    id(old): new
                    for old, new in zip(_leaves(call.outputs), _leaves(outputs), strict=False)
                    if instead is None or id(old) not in instead
                }
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            what = "for a single example" if alone else "with other examples"
            raise CannotTellError(f"it cannot be done {what} ({type(error).__name__})") from error
        if missing := [leaf for leaf in wanted if id(leaf) not in values]:
            raise CannotTellError(f"{len(missing)} of its results do not come from the batch")
        return [values[id(leaf)] for leaf in wanted]

    def _calls_for(self, wanted: Sequence[Tensor]) -> list[_Call]:
        """The calls that these tensors came from, directly or through others."""
        needed, memory = set(map(id, wanted)), set(map(_memory, wanted))
        found = []
        for call in reversed(self.calls):
            made = any(id(leaf) in needed for leaf in _leaves(call.outputs))
            if made or any(_memory(leaf) in memory for leaf in call.written):
                found.append(call)
                used = _leaves((call.args, call.kwargs))
                needed.update(map(id, used))
                memory.update(map(_memory, used))
        return found[::-1]


def _memory(leaf: Tensor) -> int:
    """Where its numbers are: a view has its tensor's."""
    return leaf.untyped_storage().data_ptr() or id(leaf)


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes to: x.add_(), x[i] = ..., x += ..., out=..., inplace=True."""
    name = getattr(function, "__name__", "")
    dunder = name.startswith("__")
    in_place = (
        (name.endswith("_") and not dunder)
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or kwargs.get("inplace", False)
    )
    if in_place and args:
        yield from _leaves(args[0])
    yield from _leaves(kwargs.get("out"))


def _random_states() -> list[Tensor]:
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cards]


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])
