"""What all examples share, where it meets them: each example is given a value of its own, so autograd tells gradients.

Operations are known one by one: those in which an example's row of the outcome depends on its own rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients._torch import pytree
from pdpsgd.gradients.lookups import Passed, TableGradients
from pdpsgd.gradients.per_example import (
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
        yield origin.parameter, OuterProducts(right, left, workspace=workspace)
    else:
        yield from meeting.back(matrix, OuterProducts(left, right, workspace=workspace))


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
            yield from meeting.back(vector, products)

        return meeting.record(rows @ vector.plain.detach(), rows, of_vector)
    dimensions = meeting.most_dimensions()
    meeting.demand(dimensions > 2 and min(one.dim(), other.dim()) > 1)
    return meeting.aligned(dimensions)


def _einsum(meeting: Meeting) -> Any:
    args, kwargs = meeting.arguments()
    equation, *operands = args
    meeting.demand(isinstance(equation, str) and "." not in equation and "->" in equation and not kwargs)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    terms, outcome = equation.replace(" ", "").split("->")
    letters = terms.split(",")
    meeting.demand(len(letters) == len(operands) and bool(outcome))
    batch = outcome[0]
    for subscripts, operand in zip(letters, operands, strict=True):
        fits = subscripts[:1] == batch if meeting.is_batched(operand) else batch not in subscripts
        meeting.demand(fits and len(set(subscripts)) == len(subscripts))
    if len(letters) == 2 and meeting.is_batched(operands[0]):
        letters, operands = letters[::-1], operands[::-1]
    if len(letters) == 2 and isinstance(operands[0], Shared) and meeting.is_batched(operands[1]):
        own, given = letters
        # What is summed over within one operand alone is left to autograd.
        same_sizes = all(
            operands[0].shape[own.index(letter)] == operands[1].shape[given.index(letter)]
            for letter in own
            if letter in given
        )
        if same_sizes and set(own) <= {*given, *outcome} and set(given) <= {*own, *outcome}:
            return _contract(meeting, operands[0], operands[1], (own, given, outcome))
    each = [
        meeting.each(operand, operand.dim() + 1) if isinstance(operand, Shared) else operand
        for operand in operands
    ]
    found = [
        batch + subscripts if isinstance(operand, Shared) else subscripts
        for subscripts, operand in zip(letters, operands, strict=True)
    ]
    return torch.einsum(f"{','.join(found)}->{outcome}", *each)


def _contract(meeting: Meeting, shared: Shared, inputs: Tensor, subscripts: tuple[str, str, str]) -> Tensor:
    """Contract a shared value with what each example has, and take the value's gradients from those of the outcome."""
    own, given, outcome = subscripts
    batch, value = outcome[0], shared.plain.detach()
    outputs = torch.einsum(f"{own},{given}->{outcome}", value, inputs)
    sizes = dict(zip(own, value.shape, strict=True))
    left, right = ([letter for letter in own if letter not in other] for other in (given, outcome))
    along = [letter for letter in given[1:] if letter in outcome and letter not in own]

    def ordered(factor: Tensor, letters: str, features: list[str]) -> Tensor:
        order = [letters.index(letter) for letter in (batch, *along, *features)]
        width = math.prod(sizes[letter] for letter in features)
        shape = (meeting.size, -1, width) if along else (meeting.size, width)
        return factor.permute(order).reshape(shape)

    def arrange(rows: Tensor) -> Tensor:
        found = rows.view(-1, *(sizes[letter] for letter in (*left, *right)))
        order = (1 + [*left, *right].index(letter) for letter in own)
        return found.permute(0, *order).reshape(-1, *value.shape)

    def gradients(output_gradient: Tensor) -> Gradient:
        gradient, met = accurate(output_gradient), accurate(inputs)
        if any(letter in given and letter in outcome for letter in own):
            rows = torch.einsum(f"{outcome},{given}->{batch}{own}", gradient, met)
            yield from meeting.back(shared, Materialized(rows.flatten(1), value.shape))
            return
        products = OuterProducts(
            ordered(gradient, outcome, left),
            ordered(met, given, right),
            value.shape,
            meeting.site.recorder.workspace,
            None if [*left, *right] == list(own) else arrange,
        )
        yield from meeting.back(shared, products)

    return meeting.record(outputs, inputs, gradients)


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
