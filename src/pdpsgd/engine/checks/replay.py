"""Records the torch functions that a loop applies to a batch, and replays them with other examples.

A replay never writes to the loop's own tensors: it works on copies of the batch as it was yielded, and of other tensors
that were changed in place, with the random numbers, grad mode and autocast of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdpsgd.engine.batches import has_rows, tensors
from pdpsgd.engine.checks.escaping_values import leaves_torch

MOST_CALLS = 2000
MOST_NUMBERS = 10_000
_SIZES = (Tensor.__len__, Tensor.size, Tensor.numel, vars(torch._C.TensorBase)["shape"].__get__)
Change = Callable[[Tensor], Tensor]


class CannotTellError(Exception):
    """A recording that cannot be replayed, and why."""


class Replay:
    """Recording of the torch functions that touched a batch of `size` examples.

    `known` are the tensors that come from the batch; they are held, so that no other tensor can take their place.
    """

    def __init__(self, batch: Any, size: int) -> None:
        self.size = size
        given = [leaf for leaf in tensors(batch) if has_rows(leaf, size)]
        self.known: dict[int, Tensor] = {id(leaf): leaf for leaf in given}
        self.calls: list[Call] = []
        self.too_long = False
        self.given_by_id = {id(leaf): leaf.detach().clone() for leaf in given}
        self.given_ids = set(self.known)
        self.asked_for_size = False  # by len(), .shape, .size() or .numel()
        self.used_size = False  # as an argument of a function: view(size, -1), arange(size)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Execute a call of the loop, and record it if it touches known tensors."""
        leaves = _leaves((args, kwargs))
        self.asked_for_size |= _asks_for_size(function) and any(id(leaf) in self.known for leaf in leaves)
        self.used_size |= any(type(leaf) is int and leaf == self.size for leaf in leaves)
        if self.too_long or not any(id(leaf) in self.known for leaf in leaves):
            return function(*args, **kwargs)
        self.too_long = len(self.calls) == MOST_CALLS
        written = list(_written(function, args, kwargs))
        overwritten = {id(leaf): leaf.detach().clone() for leaf in written if id(leaf) not in self.known}
        # Copies of the containers: the loop may change a list after the call.
        held_args, held_kwargs = _replaced((args, kwargs), lambda leaf: leaf)
        before = _Circumstances.now(leaves)
        outputs = function(*args, **kwargs)
        self.calls.append(
            Call(
                function,
                held_args,
                held_kwargs,
                _held(outputs),
                written,
                overwritten,
                before,
                random_states_after=_random_states(),
                made_by=[leaf.grad_fn for leaf in tensors(outputs)],
            )
        )
        self.add(*written, *tensors(outputs))
        return outputs

    def add(self, *leaves: Tensor) -> None:
        """Count these tensors as coming from the batch from now on."""
        self.known.update({id(leaf): leaf for leaf in leaves})

    @property
    def given(self) -> list[Tensor]:
        """Return the tensors of the batch as it was yielded."""
        return list(self.given_by_id.values())

    def draws_for(self, wanted: Sequence[Tensor]) -> bool:
        """Whether random numbers are drawn on the way to these tensors."""
        return any(call.draws for call in self.calls_for(wanted))

    @property
    def looked_at(self) -> bool:
        """Whether values left torch, where they cannot be followed."""
        return any(call.leaves_torch for call in self.calls)

    def again(
        self,
        change: Change,
        wanted: Sequence[Tensor],
        *,
        instead: dict[int, Tensor] | None = None,
        alone: bool = False,
        given: dict[int, Tensor] | None = None,
    ) -> list[Tensor]:
        """Replay the calls behind the wanted tensors on a changed batch, and return their new values.

        `instead` has values for tensors that come from the batch by calls that are not recorded (through the model).
        With `alone`, the changed batch has another size: then no tensor of the batch's size may come from elsewhere.
        `given` has tensors to begin with in place of the batch's own, by their ids.
        """
        if self.too_long:
            raise CannotTellError("it takes too many operations")
        values: dict[int, Any] = {
            key: change((given or {}).get(key, leaf)).clone() for key, leaf in self.given_by_id.items()
        }
        values |= instead or {}

        def replaced(leaf: Any) -> Any:
            if alone and isinstance(leaf, Tensor) and id(leaf) not in values and has_rows(leaf, self.size):
                raise CannotTellError("it uses tensors of the batch's size that do not come from the batch")
            return values.get(id(leaf), leaf)

        try:
            for call in self.calls_for(wanted):
                if alone and any(has_rows(leaf, self.size) for leaf in call.overwritten.values()):
                    raise CannotTellError(
                        "it writes to tensors of the batch's size that do not come from the batch"
                    )
                values |= {key: leaf.clone() for key, leaf in call.overwritten.items()}
                arguments = (*call.args, *call.kwargs.values())
                if alone and any(len(part) == self.size > 1 for each in arguments for part in _lists(each)):
                    raise CannotTellError("it puts the examples together one by one")
                outputs = call.again(replaced, alone=alone)
                if alone and any(leaf.numel() == 0 for leaf in tensors(outputs)):
                    raise CannotTellError("it takes examples out one by one")
                pairs = zip(tensors(call.outputs), tensors(outputs), strict=True)
                values |= {id(old): new for old, new in pairs if instead is None or id(old) not in instead}
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            what = "for a single example" if alone else "with other examples"
            raise CannotTellError(f"it cannot be done {what} ({type(error).__name__})") from error
        if any(id(leaf) not in values for leaf in wanted):
            raise CannotTellError("it does not come from the batch by torch's functions")
        return [values[id(leaf)] for leaf in wanted]

    def calls_for(self, wanted: Sequence[Tensor]) -> list[Call]:
        """Return the calls behind these tensors, directly, through others, or possibly through numbers and branches."""
        needed, memory = set(map(id, wanted)), set(map(memory_of, wanted))
        found: list[Call] = []
        left = {number for call in self.calls if call.leaves_torch for number in _numbers(call.outputs)}
        takes_numbers = False
        for call in reversed(self.calls):
            made = any(id(leaf) in needed for leaf in tensors(call.outputs))
            made |= any(memory_of(leaf) in memory for leaf in call.written)
            decides = call.leaves_torch and (takes_numbers or (call.name == "bool" and bool(found)))
            if made or decides:
                found.append(call)
                used = _leaves((call.args, call.kwargs))
                takes_numbers |= any(self._may_come_back(leaf, left) for leaf in used)
                needed.update(id(leaf) for leaf in used if isinstance(leaf, Tensor))
                memory.update(memory_of(leaf) for leaf in used if isinstance(leaf, Tensor))
        return found[::-1]

    def _may_come_back(self, leaf: Any, left: set[float]) -> bool:
        """Whether an argument could be, or be computed from, a value that left torch.

        Whole numbers that left, and numbers that are not round: constants in code have a few digits.
        """
        if isinstance(leaf, Tensor):
            return id(leaf) not in self.known
        if isinstance(leaf, np.ndarray):
            return True
        if isinstance(leaf, bool) or not isinstance(leaf, (int, float, np.generic)):
            return False
        number = float(leaf)
        if number.is_integer():
            return number in left
        return float(f"{number:.6g}") != number and number * self.size != 1.0


@dataclass(frozen=True)
class _Circumstances:
    """State that a call depends on besides its arguments."""

    random_states: list[Tensor]
    generators: list[tuple[torch.Generator, Tensor]]
    grad_enabled: bool
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def now(cls, leaves: Sequence[Any]) -> _Circumstances:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            _random_states(),
            [(leaf, leaf.get_state()) for leaf in leaves if isinstance(leaf, torch.Generator)],
            torch.is_grad_enabled(),
            [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        )


@dataclass(frozen=True)
class Call:
    """One recorded call: function, arguments, outputs."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Any
    written: list[Tensor]  # what it writes to in place
    overwritten: dict[int, Tensor]  # those of them that were not known before, as they were
    before: _Circumstances
    random_states_after: list[Tensor]
    made_by: list[Any]  # the nodes of autograd's graph that its outputs have

    @property
    def name(self) -> str:
        """Return the function's name without underscores."""
        return getattr(self.function, "__name__", "").strip("_")

    @property
    def leaves_torch(self) -> bool:
        """Whether it takes values out of torch."""
        return leaves_torch(self.function)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return not _equal(self.before.random_states, self.random_states_after)

    def again(self, replaced: Callable[[Any], Any], *, alone: bool) -> Any:
        """Repeat the call with other arguments."""
        args, kwargs = _replaced((self.args, self.kwargs), replaced)
        kept = [(generator, generator.get_state()) for generator, _ in self.before.generators]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.before.grad_enabled))
            for kind, enabled, dtype in self.before.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            _set_random_states(self.before.random_states)
            for generator, state in self.before.generators:
                generator.set_state(state)
            outputs = self.function(*args, **kwargs)
            for generator, state in kept:
                generator.set_state(state)
        if self.draws and (alone or not _equal(_random_states(), self.random_states_after)):
            raise CannotTellError("it draws random numbers")
        if self.leaves_torch and not alone and not _same_value(outputs, self.outputs):
            raise CannotTellError("it takes numbers out of torch that depend on the examples")
        return outputs


def _asks_for_size(function: Callable[..., Any]) -> bool:
    return function in _SIZES


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of tuples, lists, mappings and slices."""
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in _leaves(part)]
    if isinstance(tree, slice):
        return _leaves((tree.start, tree.stop, tree.step))
    return [tree]


def _lists(tree: Any) -> Iterator[Sequence[Any]]:
    """Yield lists and tuples of tensors among the arguments."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        if any(isinstance(part, Tensor) for part in tree):
            yield tree
        for part in tree:
            yield from _lists(part)


def _replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the arguments of a call with other leaves."""
    if isinstance(tree, dict):
        return {key: _replaced(part, change) for key, part in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_replaced(part, change) for part in tree)
    if isinstance(tree, slice):
        return slice(*_replaced((tree.start, tree.stop, tree.step), change))
    return change(tree)


def memory_of(leaf: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    try:
        return leaf.untyped_storage().data_ptr() or id(leaf)
    except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
        return id(leaf)


def _written(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a call writes to: x.add_(), x[i] = ..., x += ..., out=..., inplace=True."""
    name = getattr(function, "__name__", "")
    in_place = (
        (name.endswith("_") and not name.startswith("__"))
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or kwargs.get("inplace", False)
    )
    if in_place and args:
        yield from tensors(args[0])
    yield from tensors(kwargs.get("out"))


def _numbers(outputs: Any) -> list[float]:
    """Return some of the numbers that left torch."""
    flat = np.asarray(outputs).ravel()[:MOST_NUMBERS]
    return [float(number) for number in flat] if flat.dtype.kind in "biuf" else []


def _held(outputs: Any) -> Any:
    return outputs.copy() if isinstance(outputs, np.ndarray) else outputs


def _same_value(one: Any, other: Any) -> bool:
    before, after = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(before, after, equal_nan=before.dtype.kind == "f" == after.dtype.kind))


def _random_states() -> list[Tensor]:
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cards]


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
