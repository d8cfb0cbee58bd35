"""What all examples share, where it meets them: each example is given a value of its own, so autograd tells gradients.

Operations are known one by one: those in which an example's row of the outcome depends on its own rows alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients._torch import pytree
from pdpsgd.gradients.compiled_kernels import in_best_form
from pdpsgd.gradients.lookups import Passed, TableGradients
from pdpsgd.gradients.per_example import (
    Blocks,
    Gradient,
    Materialized,
    OuterProducts,
    PerExample,
    accurate,
    detached,
    positions,
    shift_gradient,
)
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.convolution import bias_gradient, kernel_gradient
from pdpsgd.gradients.rules.effective_weight import CONVOLUTIONS, geometry_of_call, pulled_back
from pdpsgd.gradients.workspace import Workspace

# Matrices that are used each by itself; more of them are materialized.
MOST_BLOCKS = 1 << 8


class Origin(NamedTuple):
    """The parameter whose numbers a shared value has: in the same order, or as a transposed matrix."""

    parameter: Tensor
    transposed: bool


class OtherUse(PdpsgdError):
    """A shared value is used in a way for which no per-example gradient is known here."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            "Expected what a module computes of its parameters to be used within its forward. Got a use of it "
            "elsewhere, or in a later pass, where no per-example gradient is known. Return a tensor with a row per "
            "example instead (value.expand(len(inputs), -1)), or compute it in the module that uses it."
        )
        self.run = run


class Run(Protocol):
    """One call of a module whose parameters are shared values."""

    def apply(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Return what an operation gives that has a shared value among its arguments."""

    def for_all(self, value: Shared) -> Tensor:
        """Return the value with one row per example."""


class Shared(Tensor):
    """A value that all examples share: a parameter, or what is computed of parameters alone."""

    plain: Tensor
    run: Run
    origin: Origin | None

    @classmethod
    def of(cls, plain: Tensor, run: Run, origin: Origin | None = None) -> Shared:
        """Return the tensor as a shared value."""
        found = plain.as_subclass(cls)
        found.plain, found.run, found.origin = plain, run, origin
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the run decide."""
        leaves, structure = _flattened(args, kwargs)
        shared = next((leaf for leaf in leaves if isinstance(leaf, Shared)), None)
        if shared is None:  # hidden in something that is no list, tuple or dict
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return shared.run.apply(func, leaves, structure)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[list[Any], Any]:
    """Return the leaves of arguments; of most operations these are the arguments."""
    if not kwargs and not any(isinstance(value, (tuple, list, dict)) for value in args):
        return list(args), None
    return pytree.tree_flatten((args, kwargs or {}))


def rebuilt(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments from their leaves."""
    if structure is None:
        return tuple(leaves), {}
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


@dataclass(frozen=True)
class Meeting:
    """An operation to which shared values and tensors with a row per example are given."""

    run: Run
    site: Site
    size: int  # of the batch
    parameters: tuple[Tensor, ...]
    func: Any
    leaves: list[Any]  # of the arguments
    structure: Any
    batched: frozenset[int]  # places of leaves that have a row per example

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were given."""
        return rebuilt(self.leaves, self.structure)

    def is_batched(self, value: Any) -> bool:
        """Whether this argument has a row per example."""
        return any(self.leaves[place] is value for place in self.batched)

    def demand(self, holds: bool) -> None:
        """Leave the module to the general rule if something does not hold."""
        if not holds:
            raise OtherUse(self.run)

    def each(self, shared: Shared, dimensions: int) -> Tensor:
        """Return the value once for each example, of so many dimensions, as it is broadcast to them."""
        plain = shared.plain
        self.demand(plain.is_floating_point() or plain.is_complex())
        missing = dimensions - plain.dim()
        self.demand(missing > 0 or (missing == 0 and plain.shape[0] == 1))
        if plain.is_complex():
            of_parts = Shared.of(torch.view_as_real(plain.resolve_conj()), self.run)
            return torch.view_as_complex(self.each(of_parts, dimensions + 1))
        shape = (1,) * missing + tuple(plain.shape)
        rows = plain.detach().reshape(shape).expand(self.size, *shape[1:])

        def gradients(output_gradient: Tensor) -> Gradient:
            gradient = accurate(output_gradient).reshape(self.size, -1).contiguous()
            yield from self.back(shared, Materialized(gradient, plain.shape))

        return self.site.record(rows, rows, gradients)

    def aligned(self, dimensions: int) -> Any:
        """Return what the operation gives if all that is shared has one value per example, broadcast as it would be."""
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Shared):
                fits = leaf.dim() == dimensions if place in self.batched else leaf.dim() < dimensions
                self.demand(fits or (place not in self.batched and leaf.dim() > 0 and leaf.shape[0] == 1))
                # A number alone does not raise the others' precision; a row of numbers does.
        dtypes = {leaf.dtype for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        self.demand(len(dtypes) <= 1)
        given = [self.each(leaf, dimensions) if isinstance(leaf, Shared) else leaf for leaf in self.leaves]
        args, kwargs = rebuilt(given, self.structure)
        return self.func(*args, **kwargs)

    def most_dimensions(self) -> int:
        """Return the number of dimensions of the outcome of broadcasting."""
        return max(leaf.dim() for leaf in self.leaves if isinstance(leaf, Tensor))

    def back(self, shared: Shared, gradient: PerExample) -> Gradient:
        """Yield what the per-example gradients of a value say of the parameters."""
        if shared.origin is not None and not shared.origin.transposed and isinstance(gradient, Materialized):
            parameter = shared.origin.parameter
            yield parameter, Materialized(gradient.values, parameter.shape)
        elif shared.origin is not None and shared.plain is shared.origin.parameter:
            yield shared.plain, gradient
        else:
            yield from pulled_back(shared.plain, gradient, {one: one for one in self.parameters})

    def record(self, outputs: Tensor, inputs: Tensor, gradients: Callable[[Tensor], Gradient]) -> Tensor:
        """Record the operation's outputs."""
        return self.site.record(outputs, inputs, gradients)


Handler = Callable[[Meeting], Any]


def _elementwise(meeting: Meeting) -> Any:
    return meeting.aligned(meeting.most_dimensions())


def _spread(meeting: Meeting) -> Any:
    """A shared value is given a dimension for the examples."""
    args, kwargs = meeting.arguments()
    shared, *rest = args
    meeting.demand(isinstance(shared, Shared) and not kwargs)
    if meeting.func in _REPEATS:
        sizes = _flat(rest)
        meeting.demand(len(sizes) >= shared.dim() and sizes[0] == meeting.size)
        return meeting.each(shared, len(sizes)).repeat(1, *sizes[1:])
    sizes = [*rest[0].shape] if meeting.func is Tensor.expand_as else _flat(rest)
    meeting.demand(len(sizes) >= shared.dim() and sizes[0] == meeting.size)
    return meeting.each(shared, len(sizes)).expand(-1, *sizes[1:])


def _flat(sizes: Iterable[Any]) -> list[int]:
    found: list[int] = []
    for size in sizes:
        found += _flat(size) if isinstance(size, (tuple, list)) else [size]
    return found


def _linear(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    inputs, weight, bias = _given(args, kwargs, ("input", "weight", "bias"))
    meeting.demand(meeting.is_batched(inputs) and inputs.dim() > 1 and not meeting.is_batched(weight))
    meeting.demand(not meeting.is_batched(bias) and weight.dim() == 2)
    outputs = F.linear(inputs, _fixed(weight), _fixed(bias))

    def gradients(output_gradient: Tensor) -> Gradient:
        if isinstance(weight, Shared):
            yield from _of_matrix(meeting, weight, positions(output_gradient), positions(inputs))
        if isinstance(bias, Shared):
            yield from meeting.back(bias, shift_gradient(output_gradient))

    return meeting.record(outputs, inputs, gradients)


def _of_matrix(meeting: Meeting, matrix: Shared, left: Tensor, right: Tensor) -> Gradient:
    """Yield the gradients of a matrix: sums over positions of outer products left (x) right."""
    workspace, origin = meeting.site.recorder.workspace, matrix.origin
    if origin is not None and origin.transposed:
        yield origin.parameter, in_best_form(OuterProducts(right, left, workspace=workspace))
    else:
        yield from meeting.back(matrix, in_best_form(OuterProducts(left, right, workspace=workspace)))


def _product(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    meeting.demand(len(args) == 2 and not kwargs)
    one, other = args
    if meeting.is_batched(one) and isinstance(other, Shared) and other.dim() == 2:
        meeting.demand(one.dim() > 1)
        inputs, matrix = one, other
        outputs = inputs @ matrix.plain.detach()

        def gradients(output_gradient: Tensor) -> Gradient:
            yield from _of_matrix(meeting, matrix, positions(inputs), positions(output_gradient))

        return meeting.record(outputs, inputs, gradients)
    if meeting.is_batched(other) and isinstance(one, Shared) and one.dim() == 2 and other.dim() > 2:
        given, mixing = other, one
        mixed = mixing.plain.detach() @ given

        def of_mixing(output_gradient: Tensor) -> Gradient:
            left, right = (part.transpose(-1, -2).contiguous() for part in (output_gradient, given))
            yield from _of_matrix(meeting, mixing, positions(left), positions(right))

        return meeting.record(mixed, given, of_mixing)
    if meeting.is_batched(one) and isinstance(other, Shared) and other.dim() == 1:
        meeting.demand(one.dim() > 1)
        vector, rows = other, one

        def of_vector(output_gradient: Tensor) -> Gradient:
            left, right = positions(output_gradient[..., None]), positions(rows)
            products = OuterProducts(left, right, vector.plain.shape, meeting.site.recorder.workspace)
            yield from meeting.back(vector, in_best_form(products))

        return meeting.record(rows @ vector.plain.detach(), rows, of_vector)
    dimensions = meeting.most_dimensions()
    meeting.demand(dimensions > 2 and min(one.dim(), other.dim()) > 1)
    return meeting.aligned(dimensions)


class Subscripts(NamedTuple):
    """What an einsum's equation says."""

    terms: tuple[str, ...]  # of the operands
    outcome: str


@functools.cache
def _subscripts(equation: Any) -> Subscripts | None:
    """Return the subscripts of an equation that says all; None of any other."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    terms, outcome = equation.replace(" ", "").split("->")
    letters = tuple(terms.split(","))
    if not outcome or any(len(set(subscripts)) != len(subscripts) for subscripts in letters):
        return None
    return Subscripts(letters, outcome)


def _einsum(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    equation, *operands = args
    subscripts = _subscripts(equation)
    meeting.demand(subscripts is not None and not kwargs)
    assert subscripts is not None
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    letters, outcome = subscripts
    meeting.demand(len(letters) == len(operands))
    batch = outcome[0]
    for own, operand in zip(letters, operands, strict=True):
        meeting.demand(own[:1] == batch if meeting.is_batched(operand) else batch not in own)
    if len(letters) == 2:
        (own, shared), (given, inputs) = sorted(
            zip(letters, operands, strict=True), key=lambda pair: meeting.is_batched(pair[1])
        )
        if isinstance(shared, Shared) and meeting.is_batched(inputs):
            contraction = _contraction(own, given, outcome, shared.plain.shape)
            if contraction is not None and contraction.suits(inputs):
                return contract(meeting, contraction, shared, inputs)
    each = [
        meeting.each(operand, operand.dim() + 1) if isinstance(operand, Shared) else operand
        for operand in operands
    ]
    found = [
        batch + own if isinstance(operand, Shared) else own
        for own, operand in zip(letters, operands, strict=True)
    ]
    return torch.einsum(f"{','.join(found)}->{outcome}", *each)


def contract(meeting: Meeting, contraction: Contraction, shared: Shared, inputs: Tensor) -> Tensor:
    """Contract a shared value with what each example has, and take the value's gradients from those of the outcome."""
    outputs = torch.einsum(contraction.equation, shared.plain.detach(), inputs)

    def gradients(output_gradient: Tensor) -> Gradient:
        workspace = meeting.site.recorder.workspace
        found = contraction.gradient(accurate(output_gradient), accurate(inputs), workspace)
        yield from meeting.back(shared, found)

    return meeting.record(outputs, inputs, gradients)


@functools.cache
def _contraction(own: str, given: str, outcome: str, shape: torch.Size) -> Contraction | None:
    """Return the contraction of these; None where something is summed over within one operand alone."""
    if set(own) <= {*given, *outcome} and set(given) <= {*own, *outcome}:
        return Contraction(own, given, outcome, shape)
    return None


class Contraction:
    """A value contracted with what each example has, by their subscripts: its gradients are sums of outer products.

    Subscripts that both and the outcome have in common count matrices of which each is used by itself: experts, heads.
    """

    def __init__(self, own: str, given: str, outcome: str, shape: torch.Size) -> None:
        """`shape` is the value's."""
        self.equation = f"{own},{given}->{outcome}"
        self._own, self._given, self._outcome, self._shape = own, given, outcome, shape
        self._sizes = dict(zip(own, shape, strict=True))
        left, right = ([one for one in own if one not in other] for other in (given, outcome))
        apart = [one for one in own if one in given and one in outcome]
        along = [one for one in given[1:] if one in outcome and one not in own]
        self._turned = [*apart, *right, *left] == [*own]  # where it saves turning the result
        if self._turned:
            left, right = right, left
        self._order = [*apart, *left, *right]
        blocks, height, width = (self._numbers(some) for some in (apart, left, right))
        self._is_whole = not apart
        self._is_in_blocks = blocks <= MOST_BLOCKS and height * width > 2 * (height + width)
        sides = (given, left), (outcome, right)
        if not self._turned:
            sides = (outcome, left), (given, right)
        self._orders = [
            [letters.index(one) for one in (*apart, outcome[0], *along, *features)]
            for letters, features in sides
        ]
        self._blocks = [blocks] * bool(apart)
        self._features = [[-1] * bool(along) + [numbers] for numbers in (height, width)]

    def suits(self, inputs: Tensor) -> bool:
        """Whether nothing is broadcast."""
        sizes = zip(self._given, inputs.shape, strict=True)
        return all(self._sizes.get(letter, size) == size for letter, size in sizes)

    def gradient(self, output_gradient: Tensor, inputs: Tensor, workspace: Workspace) -> PerExample:
        """Return the value's gradient."""
        sides = (inputs, output_gradient) if self._turned else (output_gradient, inputs)
        arrange = None if self._order == [*self._own] else self._arranged
        if self._is_whole or self._is_in_blocks:
            left, right = (
                factor.permute(order).reshape(*self._blocks, factor.shape[0], *features)
                for factor, order, features in zip(sides, self._orders, self._features, strict=True)
            )
            if self._is_whole:
                return in_best_form(OuterProducts(left, right, self._shape, workspace, arrange))
            blocks = Blocks(left, right, self._shape, workspace, arrange)
            if blocks.suit:
                return blocks
        equation = f"{self._outcome},{self._given}->{self._outcome[0]}{self._own}"
        return Materialized(torch.einsum(equation, output_gradient, inputs).flatten(1), self._shape)

    def _numbers(self, letters: list[str]) -> int:
        return math.prod(self._sizes[one] for one in letters)

    def _arranged(self, rows: Tensor) -> Tensor:
        found = rows.view(-1, *(self._sizes[one] for one in self._order))
        return found.permute(0, *(1 + self._order.index(one) for one in self._own)).reshape(-1, *self._shape)


def _lookup(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    if meeting.func is F.embedding:
        rows, table, padding, *others = _given(
            args, kwargs, ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        )
        meeting.demand(others[0] is None and not others[2])
    else:
        (table, rows), padding = args, None
    meeting.demand(isinstance(table, Shared) and table.dim() > 1 and isinstance(rows, Tensor))
    meeting.demand(meeting.is_batched(rows) and rows.dtype in (torch.int64, torch.int32))
    value = table.plain.detach()
    outputs = value[rows] if meeting.func is not F.embedding else F.embedding(rows, value, padding)

    def gradients(output_gradient: Tensor) -> Gradient:
        looked_up = rows.reshape(meeting.size, -1).remainder(len(value))
        gradient = accurate(output_gradient).reshape(*looked_up.shape, -1)
        passed = Passed(looked_up, gradient, None, None if padding is None else padding % len(value))
        flat = torch.Size((len(value), gradient.shape[2]))
        of_table = TableGradients(passed, flat)
        if value.dim() == 2:
            yield from meeting.back(table, of_table)
        else:
            yield from meeting.back(table, Materialized(of_table.materialize(0, meeting.size), value.shape))

    return meeting.record(outputs, rows, gradients)


def _convolve(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, kernel, bias = given["input"], given["weight"], given.get("bias")
    meeting.demand(meeting.is_batched(inputs) and inputs.dim() == kernel.dim())
    meeting.demand(not meeting.is_batched(kernel) and not meeting.is_batched(bias))
    geometry = geometry_of_call(tuple(kernel.shape), given)
    if geometry is None:
        raise OtherUse(meeting.run)
    outputs = meeting.func(**{**given, "weight": _fixed(kernel), "bias": _fixed(bias)})

    def gradients(output_gradient: Tensor) -> Gradient:
        gradient = accurate(output_gradient)
        if isinstance(kernel, Shared):
            workspace = meeting.site.recorder.workspace
            yield from meeting.back(kernel, kernel_gradient(geometry, accurate(inputs), gradient, workspace))
        if isinstance(bias, Shared):
            yield from meeting.back(bias, Materialized(bias_gradient(gradient), bias.plain.shape))

    return meeting.record(outputs, inputs, gradients)


def _normalize(meeting: Meeting) -> Any:
    """A normalization over the last dimensions: its scale and shift are applied by themselves."""
    args, kwargs = meeting.arguments()
    if meeting.func is F.layer_norm:
        names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")
    else:
        names = ("input", "normalized_shape", "weight", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, weight, bias = given.pop("input"), given.pop("weight", None), given.pop("bias", None)
    meeting.demand(meeting.is_batched(inputs))
    outputs = meeting.func(inputs, **given)
    for part, operation in ((weight, torch.mul), (bias, torch.add)):
        if part is not None:
            each = meeting.each(part, inputs.dim()) if isinstance(part, Shared) else part
            outputs = operation(outputs, each)
    return outputs


def _rectify(meeting: Meeting) -> Any:
    """PReLU: a slope for all channels, or one for each, where inputs are negative."""
    args, kwargs = meeting.arguments()
    inputs, slope = _given(args, kwargs, ("input", "weight"))
    meeting.demand(meeting.is_batched(inputs) and isinstance(slope, Shared) and inputs.dim() > 1)
    slopes = meeting.each(slope, 2).view(meeting.size, -1, *[1] * (inputs.dim() - 2))
    return torch.where(inputs > 0, inputs, slopes * inputs)


def _distances(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    inputs, points, *others = args
    meeting.demand(meeting.is_batched(inputs) and isinstance(points, Shared) and points.dim() == 2)
    meeting.demand(inputs.dim() in (2, 3))
    each = meeting.each(points, 3)
    if inputs.dim() == 3:
        return torch.cdist(inputs, each, *others, **kwargs)
    return torch.cdist(inputs[:, None], each, *others, **kwargs)[:, 0]


def _attend(meeting: Meeting) -> Any:
    meeting.demand(meeting.most_dimensions() > 3)
    return meeting.aligned(meeting.most_dimensions())


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def _fixed(value: Any) -> Any:
    return detached(value.plain) if isinstance(value, Shared) else value


def _named(names: str, *owners: Any) -> set[Any]:
    return {getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)}


ELEMENTWISE = _named(
    "add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmax fmin where lerp addcmul "
    "addcdiv atan2 hypot logaddexp eq ne lt le gt ge",
    torch,
    Tensor,
) | _named(
    "add_ sub_ mul_ div_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ "
    "__pow__ __rpow__ __eq__ __ne__",
    Tensor,
)
_REPEATS = {Tensor.repeat}
SPREADING = {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to, *_REPEATS}

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(SPREADING, _spread),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _product),
    **dict.fromkeys((F.embedding, Tensor.__getitem__), _lookup),
    **dict.fromkeys(CONVOLUTIONS, _convolve),
    **dict.fromkeys((F.layer_norm, F.rms_norm), _normalize),
    F.linear: _linear,
    torch.prelu: _rectify,
    torch.einsum: _einsum,
    torch.cdist: _distances,
    F.scaled_dot_product_attention: _attend,
}
"""What is done where a shared value and examples are given to one of these operations."""
