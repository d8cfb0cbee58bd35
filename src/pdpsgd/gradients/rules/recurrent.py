"""Recurrent layers: unrolled over time, with the gradients of all gates kept.

An example's gradients are sums over time of outer products: of the gates' gradients with what the layer was given, and
with the state before. The factors by which a step's gradient is multiplied do not depend on it, so they are computed
for all times at once; what is left to do in turn is one small matrix product per time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from pdpsgd.errors import fail
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import Gradient, OuterProducts, detached, shift_gradient
from pdpsgd.gradients.recorder import Site
from pdpsgd.gradients.rules.general import refuse_packed
from pdpsgd.gradients.rules.linear import project
from pdpsgd.gradients.rules.registry import rule_for

_MOST_LAYERS = 64  # more than anybody stacks; a rule names its parameters
_PARAMETERS = tuple(
    f"{kind}_l{layer}{way}"
    for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    for layer in range(_MOST_LAYERS)
    for way in ("", "_reverse")
)


class Cell(ABC):
    """The arithmetic of one kind of recurrent layer, time first: (time, examples, features)."""

    parts: int  # gates whose gradients are kept, each as wide as the state

    @abstractmethod
    def run(self, inputs: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the states (time + 1, examples, width), the first one given; then what `gate_gradients` needs."""

    @abstractmethod
    def gate_gradients(
        self, kept: tuple[Tensor, ...], weight: Tensor, outputs: Tensor, last: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gates' gradients (time, examples, parts * width), and those of the first states.

        Args:
            kept: What `run` returned.
            weight: By which states are multiplied.
            outputs: The gradients of the states after each time.
            last: More gradients of the last states.
        """

    def for_inputs(self, gates: Tensor) -> Tensor:
        """Return the gradients of gates as the inputs' weight meets them (features last)."""
        return gates

    def for_states(self, gates: Tensor) -> Tensor:
        """Return the gradients of gates as the states' weight meets them."""
        return gates


class Elman(Cell):
    """nn.RNN: state = tanh or relu of a sum of two linear maps."""

    parts = 1

    def __init__(self, nonlinearity: str) -> None:
        self._relu = nonlinearity == "relu"

    def run(self, inputs: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """Unroll."""
        weight = weights[1].t()
        sums = F.linear(inputs, weights[0], _both_biases(weights))
        all_states = _with_first(states[0], len(inputs))
        for before, after, given in zip(all_states[:-1], all_states[1:], sums, strict=True):
            torch.addmm(given, before, weight, out=after)
            if self._relu:
                after.relu_()
            else:
                after.tanh_()
        return (all_states,)

    def gate_gradients(
        self, kept: tuple[Tensor, ...], weight: Tensor, outputs: Tensor, last: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Go back in time."""
        states = kept[0][1:]
        slopes = (states > 0).to(states.dtype) if self._relu else 1 - states.square()
        gates = torch.empty_like(states)
        gradient = outputs[-1] + last[0]
        for time in range(len(states) - 1, -1, -1):
            torch.mul(gradient, slopes[time], out=gates[time])
            gradient = torch.addmm(outputs[time - 1], gates[time], weight) if time else gates[time] @ weight
        return gates, [gradient]


class Lstm(Cell):
    """nn.LSTM: gates i, f, g, o; cell = f * cell + i * g; state = o * tanh(cell)."""

    parts = 4

    def run(self, inputs: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """Unroll."""
        weight, width = weights[1].t(), states[0].shape[1]
        gates = F.linear(inputs, weights[0], _both_biases(weights))
        all_states, cells = _with_first(states[0], len(inputs)), _with_first(states[1], len(inputs))
        bent = torch.empty_like(cells[1:])
        if native.has_lstm(gates, weights[1], states[0], states[1]):
            native.lstm(gates, weights[1], all_states, cells, bent)
            return all_states, cells, gates, bent
        for time in range(len(inputs)):
            now = gates[time].addmm_(all_states[time], weight)
            now[:, : 2 * width].sigmoid_()
            now[:, 2 * width : 3 * width].tanh_()
            now[:, 3 * width :].sigmoid_()
            enter, keep, new, show = now.chunk(4, 1)
            torch.mul(keep, cells[time], out=cells[time + 1]).addcmul_(enter, new)
            torch.tanh(cells[time + 1], out=bent[time])
            torch.mul(show, bent[time], out=all_states[time + 1])
        return all_states, cells, gates, bent

    def gate_gradients(
        self, kept: tuple[Tensor, ...], weight: Tensor, outputs: Tensor, last: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Go back in time."""
        _, cells, gates, bent = kept
        if native.has_lstm(gates, weight, outputs, *last):
            return native.lstm_backward(kept, weight, outputs, last)
        width = bent.shape[2]
        enter, keep, new, show = gates.chunk(4, 2)
        # By what the gradient of the cell, or of the state, is multiplied to give that of a gate's sum.
        by_cell = torch.stack(
            [new * enter * (1 - enter), cells[:-1] * keep * (1 - keep), enter * (1 - new.square())], 2
        )
        by_state = bent * show * (1 - show)
        to_cell = show * (1 - bent.square())
        found = torch.empty(*gates.shape[:2], 4, width, dtype=gates.dtype, device=gates.device)
        flat = found.flatten(2)
        gradient, of_cell = outputs[-1] + last[0], last[1].clone()
        for time in range(len(gates) - 1, -1, -1):
            of_cell.addcmul_(gradient, to_cell[time])
            torch.mul(of_cell[:, None], by_cell[time], out=found[time, :, :3])
            torch.mul(gradient, by_state[time], out=found[time, :, 3])
            of_cell.mul_(keep[time])
            gradient = torch.addmm(outputs[time - 1], flat[time], weight) if time else flat[time] @ weight
        return flat, [gradient, of_cell]


class Gru(Cell):
    """nn.GRU: gates r, z, n; the state's part of n is multiplied by r, so n's gradient is kept in two ways."""

    parts = 4

    def run(self, inputs: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """Unroll."""
        weight, width = weights[1].t(), states[0].shape[1]
        bias = weights[3] if weights[2:] else weights[1].new_zeros(len(weights[1]))
        given = F.linear(inputs, weights[0], weights[2] if weights[2:] else None)
        all_states = _with_first(states[0], len(inputs))
        carried = torch.empty_like(given)
        for time in range(len(inputs)):
            before, now = all_states[time], given[time]
            own = torch.addmm(bias, before, weight, out=carried[time])
            both = now[:, : 2 * width].add_(own[:, : 2 * width]).sigmoid_()
            new = now[:, 2 * width :].addcmul_(both[:, :width], own[:, 2 * width :]).tanh_()
            torch.lerp(new, before, both[:, width:], out=all_states[time + 1])
        return all_states, given, carried

    def gate_gradients(
        self, kept: tuple[Tensor, ...], weight: Tensor, outputs: Tensor, last: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Go back in time."""
        states, gates, carried = kept
        width = states.shape[2]
        reset, update, new = gates.chunk(3, 2)
        by_new = (1 - update) * (1 - new.square())
        by_update = (states[:-1] - new) * update * (1 - update)
        by_carried = by_new * reset
        by_reset = by_carried * (1 - reset) * carried[..., 2 * width :]
        factors = torch.stack([by_new, by_reset, by_update, by_carried], 2)
        found = torch.empty_like(factors)
        of_states = found.flatten(2)[..., width:]
        gradient = outputs[-1] + last[0]
        for time in range(len(gates) - 1, -1, -1):
            torch.mul(gradient[:, None], factors[time], out=found[time])
            gradient = gradient * update[time]
            if time:
                gradient += outputs[time - 1]
            gradient.addmm_(of_states[time], weight)
        return found.flatten(2), [gradient]

    def for_inputs(self, gates: Tensor) -> Tensor:
        """Kept are n, r, z, and n as the state's part meets it; the weight's order is r, z, n."""
        width = gates.shape[-1] // 4
        return torch.cat([gates[..., width : 3 * width], gates[..., :width]], -1)

    def for_states(self, gates: Tensor) -> Tensor:
        """Return r, z, n of the state's part."""
        return gates[..., gates.shape[-1] // 4 :]


@rule_for(nn.RNN, nn.LSTM, nn.GRU, parameters=_PARAMETERS)
def recurrent(site: Site, module: nn.RNNBase, input: Tensor, hx: Any = None) -> Any:
    """Rule of nn.RNN, nn.LSTM and nn.GRU with batch_first=True (otherwise they were refused beforehand)."""
    if isinstance(input, PackedSequence):
        refuse_packed(site, module)
    inputs = site.batched(input)
    site.require_dimensions(inputs, 3)
    if inputs.shape[1] == 0:
        fail(f"Expected sequences of at least one step for {site.name}. Got shape {tuple(inputs.shape)}.")
    states, shape = _first_states(module, inputs, hx)
    found = [tuple(state.shape) for state in states]
    if found != shape:
        fail(f"Expected first states of shape {shape[0]} for {site.name}. Got {found}.")
    return _unrolled(site, module, inputs, states)


@rule_for(nn.RNNCell, nn.LSTMCell, nn.GRUCell, parameters=("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
def recurrent_cell(site: Site, module: nn.RNNCellBase, input: Tensor, hx: Any = None) -> Any:
    """Rule of nn.RNNCell, nn.LSTMCell and nn.GRUCell: two linear layers, and what is made of them."""
    inputs = site.batched(input)
    site.require_dimensions(inputs, 2)
    if hx is None:
        nothing = inputs.new_zeros(len(inputs), module.hidden_size)
        hx = (nothing, nothing) if isinstance(module, nn.LSTMCell) else nothing
    states = [site.batched(state) for state in (hx if isinstance(module, nn.LSTMCell) else (hx,))]
    given = project(site, inputs, module.weight_ih, module.bias_ih)
    carried = project(site, states[0], module.weight_hh, module.bias_hh)
    if isinstance(module, nn.LSTMCell):
        enter, keep, new, show = (given + carried).chunk(4, 1)
        cell = torch.sigmoid(keep) * states[1] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(cell), cell
    if isinstance(module, nn.GRUCell):
        width = 2 * module.hidden_size
        reset, update = torch.sigmoid(given[:, :width] + carried[:, :width]).chunk(2, 1)
        new = torch.tanh(given[:, width:] + reset * carried[:, width:])
        return new + update * (states[0] - new)
    assert isinstance(module, nn.RNNCell)
    bend = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return bend(given + carried)


def frozen_recurrent(module: nn.RNNBase, original: Callable[..., Any], input: Any, hx: Any = None) -> Any:
    """Run a frozen layer as one that trains: kernels of PyTorch's own round a row by how many there are.

    What these layers take besides (packed sequences, single ones) is left to PyTorch.
    """
    if not isinstance(input, Tensor) or input.dim() != 3 or 0 in input.shape:
        return original(input, hx)
    states, shape = _first_states(module, input, hx)
    if [tuple(state.shape) for state in states] != shape:
        return original(input, hx)
    return _unrolled(None, module, input, states)


def _unrolled(site: Site | None, module: nn.RNNBase, inputs: Tensor, states: list[Tensor]) -> Any:
    """Run all layers, of examples first; the site of a layer that trains records what gradient its gates get."""
    is_lstm, ways = isinstance(module, nn.LSTM), 2 if module.bidirectional else 1
    outputs = inputs.transpose(0, 1)
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            outputs = F.dropout(outputs, module.dropout)
        found = []
        for way in range(ways):
            place = layer * ways + way
            given = outputs.flip(0) if way else outputs
            after, *last = _one_layer(site, module, place, given, [state[place] for state in states])
            found.append(after.flip(0) if way else after)
            ends.append(tuple(last))
        outputs = found[0] if ways == 1 else torch.cat(found, 2)
    joined = tuple(torch.stack(of_kind) for of_kind in zip(*ends, strict=True))
    # A copy: what somebody overwrites must not be what gradients are computed of.
    return outputs.transpose(0, 1).clone(memory_format=torch.contiguous_format), (
        joined if is_lstm else joined[0]
    )


def _first_states(module: nn.RNNBase, inputs: Tensor, hx: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Return the first states that were given, or zeros; and the shapes that they must have."""
    places = module.num_layers * (2 if module.bidirectional else 1)
    shape: tuple[int, ...] = places, inputs.shape[0], module.hidden_size
    shapes = [shape] * (2 if isinstance(module, nn.LSTM) else 1)
    if hx is None:
        return [inputs.new_zeros(shape) for shape in shapes], shapes
    return list(hx) if isinstance(hx, (tuple, list)) else [hx], shapes


def _one_layer(
    site: Site | None, module: nn.RNNBase, place: int, inputs: Tensor, states: list[Tensor]
) -> tuple[Tensor, ...]:
    """Run one layer in one direction."""
    cell = _cell(module)
    layer, way = divmod(place, 2 if module.bidirectional else 1)
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]
    parameters = [getattr(module, f"{kind}_l{layer}{'_reverse' if way else ''}") for kind in kinds]
    kept: list[Tensor] = []

    def gradients(gates: Tensor) -> Gradient:
        assert site is not None
        gates = gates.contiguous()  # once for all who read them
        of_inputs, of_states = cell.for_inputs(gates), cell.for_states(gates)
        met = [(of_inputs, inputs), (of_states, kept[0][:-1])]
        workspace = site.recorder.workspace
        for parameter, (left, right) in zip(parameters, met, strict=False):
            if parameter.requires_grad:
                yield parameter, OuterProducts(left, right.detach().transpose(0, 1), workspace=workspace)
        shift = shift_gradient(of_inputs)
        shifts_of_both = shift, shift if of_states is of_inputs else shift_gradient(of_states)
        for parameter, of_bias in zip(parameters[2:], shifts_of_both, strict=False):
            if parameter.requires_grad:
                yield parameter, of_bias

    # Nothing is added to the gates; but autograd then tells what gradient it would have.
    time, examples, width = *inputs.shape[:2], cell.parts * module.hidden_size
    nothing = inputs.new_zeros(1).expand(examples, time, width)
    shifts = nothing if site is None else site.record(nothing, inputs, gradients)
    weights = [detached(parameter) for parameter in parameters]
    outputs: tuple[Tensor, ...] = _Unrolled.apply(cell, kept, weights, shifts, inputs, *states)  # type: ignore[no-untyped-call]
    return outputs


def _cell(module: nn.RNNBase) -> Cell:
    if isinstance(module, nn.RNN):
        return Elman(module.nonlinearity)
    return Lstm() if isinstance(module, nn.LSTM) else Gru()


def _both_biases(weights: list[Tensor]) -> Tensor | None:
    return weights[2] + weights[3] if len(weights) > 2 else None


def _with_first(state: Tensor, times: int) -> Tensor:
    """Return memory for a state before and after each time; the first is filled in."""
    states = state.new_empty(times + 1, *state.shape)
    states[0] = state
    return states


class _Unrolled(torch.autograd.Function):
    """One recurrent layer over time. Its gradients are those of the gates, the inputs and the first states."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        kept: list[Tensor],
        weights: list[Tensor],
        shifts: Tensor,
        inputs: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(inputs.device.type, enabled=False):
            given = [part.to(weights[0].dtype) for part in (inputs, *states)]
            found = cell.run(given[0], weights, given[1:])
        kept[:] = found
        ctx.cell, ctx.kept, ctx.weights = cell, found, weights
        last = [of_kind[-1].clone() for of_kind in found[: len(states)]]
        return found[0][1:].clone(), *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        outputs, *last = gradients
        with torch.autocast(outputs.device.type, enabled=False):
            gates, first = ctx.cell.gate_gradients(ctx.kept, ctx.weights[1], outputs.contiguous(), last)
            of_inputs = ctx.cell.for_inputs(gates) @ ctx.weights[0] if ctx.needs_input_grad[4] else None
        return None, None, None, gates.transpose(0, 1), of_inputs, *first
