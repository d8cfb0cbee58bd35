"""Modules with parameters of their own, beside layers: class tokens, tables of positions, scales, learned queries.

The module's own forward runs on the whole batch, and so do the layers in it, by their own rules. Its parameters are
values that all examples share (`shared_values`), and so is what is computed of them alone. Where one meets examples,
each example is given one of its own.

What has a row per example is settled by the survey's passes over two and over three rows, use by use. A module that
uses a parameter in another way, or looks at numbers, is left to the general rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from pdpsgd.gradients._torch import parameters_replaced, pytree
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.effective_weight import LAYERS
from pdpsgd.gradients.rules.shared_values import (
    ELEMENTWISE,
    HANDLERS,
    SPREADING,
    Meeting,
    Origin,
    OtherUse,
    Shared,
    rebuilt,
)
from pdpsgd.gradients.survey import SIZES, Survey

_NOT_TRIED = (*LAYERS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# What gives the numbers of a parameter in the same order.
_SAME_ORDER = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "view_as")
    if hasattr(owner, name)
}
_TRANSPOSING = {Tensor.t, torch.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))}
_DETERMINISTIC = {
    *_SAME_ORDER,
    *_TRANSPOSING,
    *ELEMENTWISE,
    *SPREADING,
    Tensor.__getitem__,
    Tensor.exp,
    Tensor.neg,
}
# What makes numbers into something that Python decides by.
_LEAVING = {
    *(
        getattr(Tensor, f"__{name}__")
        for name in ["bool", "float", "int", "index", "complex", "contains", "array"]
    ),
    *(
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in (
            "nonzero",
            "equal",
            "allclose",
            "is_nonzero",
            "unique",
            "unique_consecutive",
            "masked_select",
        )
        if hasattr(owner, name)
    ),
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy")),
}


class Step(NamedTuple):
    """The shapes of what an operation is given, and of what it gives."""

    given: tuple[torch.Size, ...]
    gives: tuple[torch.Size, ...]


class Use(NamedTuple):
    """A use of a shared value together with other tensors, or to be spread over the examples."""

    func: Any
    shapes: tuple[tuple[int, ...], ...]  # of the other tensors
    outcome: tuple[int, ...]


class SettledUse(NamedTuple):
    """The same, and what of it has a row per example."""

    func: Any
    batched: tuple[int | None, ...]  # dimensions of each other tensor that has; None of one that has not
    spreads: bool


class OwnParameters:
    """The rule of such a module; `general` runs it where this is not known to be right."""

    def __init__(
        self, site: Site, module: nn.Module, forward: Callable[..., Any], general: Callable[..., Any]
    ) -> None:
        self._site, self._module, self._general = site, module, general
        self._original = forward
        self._trained = [place for place in own_parameters(module) if place[2].requires_grad]
        # Of what is frozen nothing is passed back, whoever uses it.
        trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
        self._of_layers = frozenset(map(id, trained - {parameter for *_, parameter in self._trained}))
        self.possible = may_share(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module in a training pass."""
        recorder = self._site.recorder
        uses = self._uses() if self.possible and recorder.batch_size else None
        if uses is None:
            return self._general(*args, **kwargs)
        state = torch.get_rng_state()
        parameters = tuple(dict.fromkeys(parameter for *_, parameter in self._places()))
        run = _Recording(self._site, parameters, uses)
        try:
            with self._sharing():
                outputs = self._forward(run, args, kwargs)
            if run.is_complete:
                return outputs
        except OtherUse as other:
            if other.run is not run:
                raise
        torch.set_rng_state(state)
        assert recorder.survey is not None
        recorder.survey.settled[self] = None
        return self._general(*args, **kwargs)

    def surveyed(self, survey: Survey, args: Any, kwargs: Any) -> Any:
        """Run the module in a pass of a survey, and note how its parameters are used."""
        calls, noted = survey.notes[-1].setdefault(self, []), survey.noted()
        if self.possible and None not in calls:
            run = _Trial(survey.size)
            try:
                with self._sharing(), _Watch(survey, self._of_layers, run):
                    outputs = self._forward(run, args, kwargs)
                calls.append((run.uses, run.steps))
                return outputs
            except OtherUse as other:
                if other.run is not run:
                    raise
            except (RuntimeError, ValueError, TypeError, IndexError):
                pass  # perhaps its own error, which it then repeats
        calls.append(None)
        # The general rule runs all that is inside: nothing about it has to be known.
        recorder = self._site.recorder
        survey.forget_since(noted)
        recorder.surveying = None
        try:
            return self._original(*args, **kwargs)
        finally:
            recorder.surveying = survey

    def _forward(self, run: _Run, args: Any, kwargs: Any) -> Any:
        shared = [
            (holder, name, Shared.of(parameter, run, Origin(parameter, False)))
            for holder, name, parameter in self._places()
        ]
        with parameters_replaced(shared):
            outputs = self._original(*args, **kwargs)
        if type(outputs) is Tensor:
            return outputs
        return pytree.tree_map_only(Shared, run.for_all, outputs)

    def _places(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Return where the parameters are, without those that were frozen since."""
        return [place for place in self._trained if place[2].requires_grad]

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        recorder = self._site.recorder
        recorder.sharing += 1
        try:
            yield
        finally:
            recorder.sharing -= 1

    def _uses(self) -> list[SettledUse] | None:
        """Return the uses of the call that begins."""
        survey, so_far = self._site.recorder.survey, self._site.recorder.calls_so_far
        if survey is None:
            return None
        if self not in survey.settled:
            survey.settled[self] = _settled([notes.get(self, [None]) for notes in survey.notes])
        calls: list[list[SettledUse]] | None = survey.settled[self]
        if calls is None:
            return None
        number = so_far[self] = so_far.get(self, -1) + 1
        return calls[number % len(calls)]


def may_share(module: nn.Module) -> bool:
    """Whether this rule is tried on a module: its parameters are no layer's as well."""
    if isinstance(module, _NOT_TRIED) or parametrize.is_parametrized(module):
        return False
    own = {parameter for *_, parameter in own_parameters(module)}
    return all(own.isdisjoint(layer.parameters()) for layer in _layers_inside(module))


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the parameters that a module itself uses, and who holds them: itself, or children that are never called."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield module, name, parameter
    for child in module.children():
        if not can_be_called(child):
            yield from own_parameters(child)


def _layers_inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that are called."""
    for child in module.children():
        if can_be_called(child):
            yield child
        else:
            yield from _layers_inside(child)


def can_be_called(module: nn.Module) -> bool:
    """Whether the module's class has a forward."""
    return type(module).forward is not nn.Module.forward


def _settled(passes: list[list[tuple[list[Use], list[Step]] | None]]) -> list[list[SettledUse]] | None:
    """Return what two passes say together; None where they do not agree."""
    first, second = passes
    if len(first) != len(second) or not first:
        return None
    found = []
    for one, other in zip(first, second, strict=True):
        if one is None or other is None or len(one[0]) != len(other[0]) or len(one[1]) != len(other[1]):
            return None
        if any(_is_of_all(*both) for both in zip(one[1], other[1], strict=True)):
            return None
        uses = [_together(*both) for both in zip(one[0], other[0], strict=True)]
        if None in uses:
            return None
        found.append([use for use in uses if use is not None])
    return found


def _is_of_all(one: Step, other: Step) -> bool:
    """Whether an operation makes something for all of what examples have, such as a mean: they would mix in it."""
    return one.given != other.given and one.gives == other.gives


def _together(one: Use, other: Use) -> SettledUse | None:
    if one.func != other.func or len(one.shapes) != len(other.shapes):
        return None
    batched: list[int | None] = []
    for shapes in zip(one.shapes, other.shapes, strict=True):
        if shapes[0] == shapes[1]:
            batched.append(None)
        elif _follow(*shapes):
            batched.append(len(shapes[0]))
        else:
            return None
    spreads = _follow(one.outcome, other.outcome)
    if not spreads and (one.outcome != other.outcome or any(batched)):
        return None
    return SettledUse(one.func, tuple(batched), spreads)


def _follow(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return (one[:1], other[:1]) == tuple((size,) for size in SIZES) and one[1:] == other[1:]


def _is_known_for_all(func: Any) -> bool:
    """Whether an operation takes no numbers from a batch, or is a loss, which the loss's own checks look at."""
    name = getattr(func, "__name__", "")
    return name in ("to", "type_as", "cross_entropy") or name.startswith("new_") or name.endswith("_loss")


class _Run:
    """Carries out operations on shared values."""

    def apply(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Return what an operation gives that has a shared value among its arguments."""
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
        if others or func in SPREADING:
            return self.meet(func, leaves, structure, others)
        return self.alone(func, leaves, structure)

    def alone(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Return what is computed of shared values (and constants) alone: a shared value."""
        name = getattr(func, "__name__", "")
        changes = (
            name == "__set__" or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        )
        if changes:
            raise OtherUse(self)
        plain = [leaf.plain if isinstance(leaf, Shared) else leaf for leaf in leaves]
        args, kwargs = rebuilt(plain, structure)
        if kwargs.get("out") is not None:
            raise OtherUse(self)
        if name == "__get__" or func in _DETERMINISTIC:
            found = func(*args, **kwargs)
        else:
            found = self._deterministic(func, args, kwargs)
        if isinstance(found, Tensor):
            return Shared.of(found, self, _origin(func, leaves, found)) if found.requires_grad else found
        return pytree.tree_map_only(
            Tensor, lambda one: Shared.of(one, self) if one.requires_grad else one, found
        )

    def _deterministic(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what is computed, unless random numbers are used: every example has its own."""
        state = torch.get_rng_state()
        found = func(*args, **kwargs)
        if not torch.equal(state, torch.get_rng_state()):
            raise OtherUse(self)
        return found

    def meet(self, func: Any, leaves: list[Any], structure: Any, others: list[Tensor]) -> Any:
        raise NotImplementedError

    def for_all(self, value: Shared) -> Tensor:
        raise NotImplementedError


def _origin(func: Any, leaves: list[Any], found: Tensor) -> Origin | None:
    """Return what parameter a result has the numbers of."""
    before = leaves[0].origin if leaves and isinstance(leaves[0], Shared) else None
    if before is None:
        return None
    if func in _SAME_ORDER and not before.transposed:
        return Origin(before.parameter, False)
    shape = tuple(before.parameter.shape)
    if len(shape) == 2 and tuple(found.shape) == shape[::-1] and leaves[0].plain is before.parameter:
        swaps = func in _TRANSPOSING or (
            func in (Tensor.transpose, torch.transpose) and {place % 2 for place in leaves[1:3]} == {0, 1}
        )
        if swaps:
            return Origin(before.parameter, True)
    return None


class _Trial(_Run):
    """A call in a pass of the survey."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.uses: list[Use] = []
        self.steps: list[Step] = []  # with what has a row per example or not, shared values apart

    def alone(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Compute it as a training pass would."""
        with torch.enable_grad():
            return super().alone(func, leaves, structure)

    def meet(self, func: Any, leaves: list[Any], structure: Any, others: list[Tensor]) -> Any:
        """Note the use."""
        before = [tuple(other.shape) for other in others]
        is_batched = any(shape[:1] == (self._size,) for shape in before)
        if not is_batched and not (func in SPREADING and self._spreads(func, leaves, structure)):
            found = self.alone(func, leaves, structure)
            outcome = found.shape if isinstance(found, Tensor) else ()
            self.uses.append(Use(func, tuple(before), tuple(outcome)))
            return found
        if func not in HANDLERS:
            raise OtherUse(self)
        found = self._plainly(func, leaves, structure)
        if not isinstance(found, Tensor):
            raise OtherUse(self)
        self.uses.append(Use(func, tuple(before), tuple(found.shape)))
        return found

    def for_all(self, value: Shared) -> Tensor:
        """Give it a row per example, if it has a dimension for it."""
        if value.plain.dim() < 2 or value.plain.shape[0] != 1:
            raise OtherUse(self)
        return value.plain.detach().expand(self._size, *value.plain.shape[1:])

    def _spreads(self, func: Any, leaves: list[Any], structure: Any) -> bool:
        shape = self._plainly(func, leaves, structure).shape
        own = leaves[0].plain.shape
        return bool(shape[:1] == (self._size,) and (len(shape) > len(own) or own[0] == 1))

    def _plainly(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        plain = [leaf.plain.detach() if isinstance(leaf, Shared) else leaf for leaf in leaves]
        args, kwargs = rebuilt(plain, structure)
        return func(*args, **kwargs)


class _Recording(_Run):
    """A call in a training pass."""

    def __init__(self, site: Site, parameters: tuple[Tensor, ...], uses: list[SettledUse]) -> None:
        self._site, self._parameters, self._uses = site, parameters, uses
        self._number = 0
        self._size = site.recorder.batch_size or 0

    @property
    def is_complete(self) -> bool:
        """Whether the call has had all the uses that were settled."""
        return self._number == len(self._uses)

    def alone(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Compute it, unless autograd is to know nothing of it."""
        if not torch.is_grad_enabled() and getattr(func, "__name__", "") != "__get__":
            raise OtherUse(self)
        return super().alone(func, leaves, structure)

    def meet(self, func: Any, leaves: list[Any], structure: Any, others: list[Tensor]) -> Any:
        """Give each example its own, where the use is one that was settled."""
        if not torch.is_grad_enabled() or self._number == len(self._uses):
            raise OtherUse(self)
        use = self._uses[self._number]
        self._number += 1
        if use.func != func or len(others) != len(use.batched):
            raise OtherUse(self)
        if not use.spreads:
            # Another module's parameter, say: what is computed of it here would not be passed back to it.
            if any(other.requires_grad for other in others):
                raise OtherUse(self)
            return self.alone(func, leaves, structure)
        rows = [other for other, dims in zip(others, use.batched, strict=True) if dims is not None]
        dims = [dims for dims in use.batched if dims is not None]
        if any(row.dim() != dim or row.shape[0] != self._size for row, dim in zip(rows, dims, strict=True)):
            raise OtherUse(self)
        places = frozenset(place for place, leaf in enumerate(leaves) if any(leaf is row for row in rows))
        return HANDLERS[func](self._meeting(func, leaves, structure, places))

    def for_all(self, value: Shared) -> Tensor:
        """Give it a row per example, if it has a dimension for it."""
        return self._meeting(None, [value], None, frozenset()).each(value, value.plain.dim())

    def _meeting(self, func: Any, leaves: list[Any], structure: Any, places: frozenset[int]) -> Meeting:
        return Meeting(self, self._site, self._size, self._parameters, func, leaves, structure, places)


class _Watch(TorchFunctionMode):
    """Leaves a module to the general rule that looks at numbers, or uses a layer's parameters itself."""

    def __init__(self, survey: Survey, of_layers: frozenset[int], run: _Trial) -> None:
        super().__init__()
        self._survey, self._depth, self._of_layers, self._run = survey, survey.depth, of_layers, run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._survey.depth == self._depth:
            leaves = pytree.tree_leaves((args, kwargs or {}))
            if any(id(leaf) in self._of_layers for leaf in leaves):
                raise OtherUse(self._run)
            if func in _LEAVING and not all(
                isinstance(leaf, Shared) for leaf in leaves if isinstance(leaf, Tensor)
            ):
                raise OtherUse(self._run)
            found = func(*args, **(kwargs or {}))
            if not _is_known_for_all(func):
                self._note(leaves, found)
            return found
        return func(*args, **(kwargs or {}))

    def _note(self, leaves: list[Any], found: Any) -> None:
        given = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        gives = tuple(leaf.shape for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))
        if given and gives:
            self._run.steps.append(Step(given, gives))
