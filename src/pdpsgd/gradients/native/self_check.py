"""Compares the compiled code with PyTorch's operations before it is used; every way through the code is taken."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.gradients._torch import without_dispatch_modes
from pdpsgd.gradients.geometry import Geometry, channels_last
from pdpsgd.gradients.native import calls

# Examples, positions, left and right width.
_LAYERS = ((70, 1, 37, 49), (5, 20, 33, 16), (3, 70, 5, 300), (3, 20, 70, 5), (9, 4, 80, 300))
# Channels, output channels, kernel, stride, padding, dilation; channels, pooling.
_CONVOLUTIONS = (
    (3, 5, (3, 3), (2, 2), (1, 1), 1),
    (16, 17, (4, 4), (2, 2), (1, 1), 1),
    (1, 16, (8, 8), (2, 2), (1, 1), 1),
    (1, 19, (3, 3), (2, 2), (1, 1), 2),
    (4, 32, (2, 3), (1, 2), (0, 2), 1),
    (4, 70, (3, 2), (2, 1), (2, 1), 1),
)
# Channels, output channels, kernel, groups, dilation.
_KERNELS: tuple[tuple[int, int, tuple[int, ...], int, int], ...] = (
    (3, 16, (3, 2), 1, 1),
    (16, 5, (2, 3), 1, 1),
    (4, 70, (3,), 1, 2),
    (17, 16, (3,), 1, 1),
    (2, 3, (2, 3, 2), 1, 1),
    (6, 8, (2, 1, 3), 2, 2),
    (32, 32, (3, 3), 2, 1),
    (20, 20, (3, 3), 20, 1),
    (16, 32, (9,), 16, 1),
    (3, 6, (2, 3, 2), 3, 2),
)
_POOLINGS = (
    (3, (3, 2, 1)),
    (18, (3, 2, 1)),
    (16, (2, 2, 0)),
    (16, (2, 1, 0)),
    (16, (3, 2, 0)),
    (6, (2, 2, 0)),
)


def agrees_with_pytorch(code: ctypes.CDLL) -> bool:
    """Compare the compiled code with PyTorch's operations, on numbers of its own that disturb no seed."""
    numbers = torch.Generator().manual_seed(0)
    with (
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        return (
            all(_same_sums(code, numbers, rows, width) for rows, width in ((3, 37), (200, 37), (7, 411)))
            and all(_same_layers(code, numbers, *sizes) for sizes in _LAYERS)
            and all(_same_people(code, numbers, *sizes) for sizes in ((37, 49), (5, 130)))
            and _same_people(code, numbers, 21, 33, odd=True)
            and all(_same_at_once(code, numbers, *sizes) for sizes in _LAYERS)
            and _same_side_by_side(code, numbers)
            and all(_same_weights(code, numbers, kind) for kind in (torch.float32, torch.float64))
            and all(_same_convolution(code, numbers, *sizes) for sizes in _CONVOLUTIONS)
            and all(
                _same_kernel_gradients(code, numbers, *sizes, first)
                for sizes in _KERNELS
                for first in (False, True)
            )
            and all(_same_lookups(code, numbers, *sizes) for sizes in ((1, 3), (9, 5), (30, 900)))
            and all(_same_tables(code, numbers, *sizes) for sizes in ((1, 1), (9, 5), (30, 40)))
            and all(_same_lstm(code, numbers, *sizes) for sizes in ((3, 35, 18), (4, 2, 16)))
            and all(_same_scales(code, numbers, *sizes) for sizes in ((6, 2), (48, 3)))
            and all(
                _same_outputs(code, numbers, out, width)
                for out in (16, 32, 48)
                for width in range(1, calls.LANES // 2 + 1)
            )
            and all(
                _same_pooling(code, numbers, channels, nn.MaxPool2d(*sizes), rectify)
                for channels, sizes in _POOLINGS
                for rectify in (False, True)
            )
        )


def _same_sums(code: ctypes.CDLL, numbers: torch.Generator, count: int, width: int) -> bool:
    values = _random(numbers, count, 5, width)
    rows, left = values.flatten(1), values[:, 0].contiguous()
    left[1] *= 1e-30
    left[2] = 0
    wanted = rows.double().square().sum(1)
    outer = left.double().square().sum(1).clamp(min=1e-20).mul_(wanted)
    if not (
        torch.allclose(calls.row_squares(code, rows, torch.float64), wanted, rtol=1e-12)
        and torch.allclose(calls.row_squares(code, rows, torch.float32), wanted.float(), rtol=1e-6)
        and torch.allclose(calls.outer_squares(code, left, rows, 1e-20), outer.float(), rtol=1e-6, atol=0)
        and torch.allclose(calls.position_sums(code, values), values.sum(1), atol=1e-5)
    ):
        return False
    starts = torch.tensor([0, 1, count - 1, count], device="cpu")  # one row, many, one
    people = starts.unfold(0, 2, 1).tolist()
    sums = [rows[a:b].double().sum(0) for a, b in people]
    squares = torch.stack(
        [(left[a:b].double().t() @ rows[a:b].double()).square_().sum() for a, b in people]
    ).float()
    if not (
        torch.allclose(calls.segment_sums(code, rows, starts), torch.stack(sums).float(), atol=1e-4)
        and torch.allclose(calls.group_squares(code, left, rows, starts), squares, rtol=1e-6)
    ):
        return False
    weights, total = _random(numbers, count).double(), _random(numbers, rows.shape[1]).double()
    weighted = weights @ rows.double() + total
    calls.add_weighted_rows(code, weights, rows, total)
    if not torch.allclose(total, weighted, rtol=1e-12, atol=1e-12):
        return False
    left[0, -1], rows[1, 0] = float("nan"), float("inf")  # never a norm that seems to be one
    outer = torch.cat(
        [calls.outer_squares(code, left, rows, 1e-20)[:2], calls.group_squares(code, left, rows, starts)[:2]]
    )
    return not bool(outer.isfinite().any() or calls.row_squares(code, left, torch.float32)[0].isfinite())


def _same_layers(
    code: ctypes.CDLL, numbers: torch.Generator, examples: int, positions: int, *widths: int
) -> bool:
    """Products of one position or of many, which cancel in one example; and rows."""
    left, right = (_random(numbers, examples, positions, width) for width in widths)
    if positions > 1:
        left[-1, 2], right[-1, 2] = -1e6 * left[-1, 0], right[-1, 0]
        left[-1, 0] *= 1e6
    rows, weights = _random(numbers, examples, 19), _random(numbers, examples).abs()
    totals = (
        torch.ones(widths, dtype=torch.float64, device="cpu"),
        torch.zeros(19, dtype=torch.float64, device="cpu"),
    )
    layers = calls.Layers(code, [(left, right, totals[0]), (rows, None, totals[1])], examples)
    products = left.double().transpose(1, 2) @ right.double()
    exact = products.square().sum((1, 2)) + rows.double().square().sum(1)
    squares = layers.squares(1e-40)
    layers.add(weights)
    cancelled = slice(-1, None) if positions > 1 else slice(0)  # their norm is too large, never too small
    if not (
        torch.allclose(squares[:-1], exact[:-1], rtol=1e-2)
        and bool((squares >= exact * (1 - 1e-6))[cancelled].all())
    ):
        return False
    summed = torch.einsum("n,nij->ij", weights.double(), products)
    return torch.allclose(totals[0] - 1, summed, rtol=1e-3, atol=1e-3) and torch.allclose(
        totals[1], weights.double() @ rows.double(), rtol=1e-12, atol=1e-12
    )


def _same_at_once(
    code: ctypes.CDLL, numbers: torch.Generator, examples: int, positions: int, *widths: int
) -> bool:
    """All that clips in one call: the bits of the steps one by one; or nothing, where a norm is not finite."""
    left, right = (_random(numbers, examples, positions, width) for width in widths)
    rows, passed = _random(numbers, examples, 19), _random(numbers, examples, 4, 19)
    lookups = torch.randint(9, (examples, 4), generator=numbers, device="cpu"), passed, None, 3
    figures = (64.0, 0.75, 0.125, 1e-16, 1e-16)
    clip_norms = torch.linspace(0.0, 2.0, examples, dtype=torch.float32, device="cpu")

    def fresh() -> tuple[calls.Layers, list[Tensor]]:
        totals = [torch.ones(size, dtype=torch.float64, device="cpu") for size in (widths, (19,), (9, 19))]
        parts = [(left, right, totals[0]), (rows, None, totals[1])]
        return calls.Layers(code, parts, examples, tables=[(lookups, totals[2])]), totals

    others = _random(numbers, examples).square().double()
    for norms, more in ((clip_norms, None), (clip_norms.double(), None), (clip_norms, others)):
        (layers, wanted), (at_once, found) = fresh(), fresh()
        squares = layers.squares(1e-40)
        *_, scaled, narrow, _ = calls.weigh(code, squares if more is None else squares + more, norms, figures)
        layers.add(narrow)
        weights = at_once.add_clipped(norms, figures, smallest=1e-40, largest=2.0, others=more)
        if weights is None or not all(map(torch.equal, (*weights, *found), (scaled, narrow, *wanted))):
            return False
    at_once, found = fresh()
    too_large = at_once.add_clipped(clip_norms, figures, smallest=1e-40, largest=1.9)
    rows[-1, 0] = float("nan")
    not_finite = at_once.add_clipped(clip_norms, figures, smallest=1e-40, largest=2.0)
    return too_large is not_finite is None and all(bool((total == 1).all()) for total in found)


def _same_side_by_side(code: ctypes.CDLL, numbers: torch.Generator) -> bool:
    """Blocks, and sums over positions that are taken first: the bits of the same as parts of their own."""
    left, right = _random(numbers, 3, 9, 6, 21), _random(numbers, 3, 9, 6, 5)
    values, clip_norms = _random(numbers, 9, 6, 19), torch.ones(9, dtype=torch.float32, device="cpu")
    found = []
    for as_parts in (True, False):
        totals = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in ((3, 21, 5), (19,))]
        parts: list[tuple[Tensor, Tensor | None, Tensor]] = [*zip(left, right, totals[0], strict=True)]
        if as_parts:
            sums = calls.position_sums(code, values)
            layers = calls.Layers(code, [(sums, None, totals[1]), *parts], 9)
        else:
            shift = (6, 19, 1, values.data_ptr(), 0, totals[1].data_ptr(), 0, 0)
            layers = calls.Layers(code, [], 9, blocks=[(left, right, totals[0])], more=shift)
        figures = (1.0, 0.75, 0.125, 1e-16, 1e-16)
        found.append((layers.add_clipped(clip_norms, figures, smallest=1e-40, largest=1.0), totals))
    (weights, wanted), (same_weights, totals) = found
    return (
        weights is not None
        and same_weights is not None
        and all(map(torch.equal, (*weights, *wanted), (*same_weights, *totals)))
    )


def _same_people(code: ctypes.CDLL, numbers: torch.Generator, *widths: int, odd: bool = False) -> bool:
    """Products and rows of people who have from one row to seven; two of them cancel, one hardly leaves anything.

    With odd sizes, a row of one of them has a tiny factor and a huge one.
    """
    sizes = torch.arange(40, device="cpu") % 7 + 1
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    count = int(starts[-1])
    left, right = (_random(numbers, count, width) for width in widths)
    for person in (5, 26):
        first = int(starts[person])
        left[first] = -1e5 * left[first + 1]
        right[first] = right[first + 1] * (1 + 2.0**-12 * (person == 26))
        left[first + 1] *= 1e5
    if odd:
        left[starts[12]] *= 2.0**-50
        right[starts[12]] *= 2.0**50
    rows, weights = _random(numbers, count, 19), _random(numbers, 40).abs().double()

    def fresh() -> tuple[calls.Layers, list[Tensor]]:
        totals = [torch.ones(shape, dtype=torch.float64, device="cpu") for shape in (widths, (19,))]
        parts = [(left[:, None], right[:, None], totals[0]), (rows, None, totals[1])]
        return calls.Layers(code, parts, 40, starts, torch.arange(40, device="cpu")), totals

    layers, totals = fresh()
    owner = torch.repeat_interleave(torch.arange(40, device="cpu"), sizes)
    of_people = [
        torch.zeros(40, *some.shape[1:], dtype=torch.float64, device="cpu").index_add_(0, owner, some)
        for some in (left.double()[:, :, None] * right.double()[:, None], rows.double())
    ]
    squares = of_people[0].flatten(1).square().sum(1) + of_people[1].square().sum(1)
    found = layers.squares(1e-40)
    layers.add(weights.float(), weights)
    never_too_small = bool((found >= squares * (1 - 1e-9)).all())
    figures = (64.0, 0.75, 0.125, 1e-16, 1e-16)
    clip_norms = torch.linspace(0.0, 2.0, 40, dtype=torch.float32, device="cpu")
    (steps, one_by_one), (at_once, in_one_call) = fresh(), fresh()
    *_, scaled, narrow, _ = calls.weigh(code, steps.squares(1e-40), clip_norms, figures, starts)
    steps.add(narrow, scaled)
    done = at_once.add_clipped(clip_norms, figures, smallest=1e-40, largest=2.0)
    return (
        never_too_small
        and done is not None
        and all(map(torch.equal, (*done, *in_one_call), (scaled, narrow, *one_by_one)))
        and torch.allclose(found, squares, rtol=1e-2)
        and all(
            torch.allclose(total - 1, torch.tensordot(weights, some, 1), rtol=1e-4, atol=1e-4)
            for total, some in zip(totals, of_people, strict=True)
        )
    )


def _same_weights(code: ctypes.CDLL, numbers: torch.Generator, kind: torch.dtype) -> bool:
    """Ordinary norms, tiny and huge ones, and what is no number."""
    inf, nan = float("inf"), float("nan")
    odd = [0.0, 1e-40, 1e-33, 1e40, inf, nan, -1.0]  # the last one's root is no number
    squares = torch.cat(
        [_random(numbers, 40).square().double(), torch.tensor(odd, dtype=torch.float64, device="cpu")]
    )
    clip_norms = torch.linspace(0.0, 2.0, len(squares), dtype=kind, device="cpu")
    scale, kept, room, smallest, least = 64.0, 0.75, 0.125, 1e-16, 1e-16
    norms = squares.sqrt() * scale
    limits = (clip_norms.double() * kept - room).clamp(min=0)
    weights = (limits / norms.clamp(min=smallest)).clamp(max=1).nan_to_num(nan=0.0)
    weights = torch.where(weights > least, weights, 0)
    wanted = (norms, weights, weights * scale, (weights * scale).float())
    twice = torch.arange(0, 2 * len(squares) + 1, 2, device="cpu")  # everybody has two rows
    for factor, starts in ((scale, None), (2 * scale, twice)):
        figures = (factor, kept, room, smallest, least)
        *found, count = calls.weigh(code, squares, clip_norms, figures, starts)
        if count != 3 or not all(
            torch.allclose(a, b, rtol=1e-12, atol=0, equal_nan=True)
            for a, b in zip(found, wanted, strict=True)
        ):
            return False
    return True


def _same_convolution(
    code: ctypes.CDLL,
    numbers: torch.Generator,
    channels: int,
    out: int,
    kernel: calls.Pair,
    stride: calls.Pair,
    padding: calls.Pair,
    dilation: int,
) -> bool:
    options: Any = {"stride": stride, "padding": padding, "dilation": (dilation, 1)}
    module = _convolution(channels, out, kernel, **options)
    examples = 2 * torch.get_num_threads() + 1  # so that a thread has several
    weight = channels_last(_random(numbers, out, channels, *kernel)).requires_grad_()
    bias = _random(numbers, out) if channels > 1 else None
    inputs = _random(numbers, examples, channels, 13, 11).requires_grad_()
    outputs = F.conv2d(inputs, weight, bias, **options)
    gradient = _random(numbers, *outputs.shape)
    ours = calls.Convolution.apply(inputs, weight.detach(), bias, calls.describe(module, inputs), code)  # type: ignore[no-untyped-call]
    (back,), (wanted,) = (
        torch.autograd.grad(one, inputs, gradient, retain_graph=True) for one in (ours, outputs)
    )
    return _close(ours, outputs) and _close(back, wanted)


def _same_kernel_gradients(
    code: ctypes.CDLL,
    numbers: torch.Generator,
    channels: int,
    out: int,
    kernel: tuple[int, ...],
    groups: int,
    dilation: int,
    first: bool,
) -> bool:
    """Kernels of any dimensions, groups and layout, of which some positions are skipped, and some lie outside."""
    dimensions = len(kernel)
    options: Any = {"stride": 2 if dilation == 1 else 1, "padding": 1, "dilation": dilation, "groups": groups}
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dimensions - 1]
    weight = _random(numbers, out, channels // groups, *kernel).requires_grad_()
    examples = 2 * torch.get_num_threads() + 1  # so that a thread has several
    inputs = _random(numbers, examples, channels, *((21,) if dimensions == 1 else (9, 8, 7)[:dimensions]))
    outputs = convolve(inputs, weight, None, **options)
    gradient = _random(numbers, *outputs.shape)
    geometry = Geometry(
        tuple(weight.shape),
        (options["stride"],) * dimensions,
        (dilation,) * dimensions,
        groups,
        (1,) * 2 * dimensions,
    )
    given, met = (part if first else _channels_side_by_side(part) for part in (inputs, gradient))
    by_columns = calls.runs_along_columns(geometry, met)
    results, squares = calls.empty(examples, weight.numel()), calls.empty(examples)
    calls.kernel_gradients(code, geometry, given, met, by_columns, results, squares)
    found = calls.in_kernel_order(geometry, results, by_columns)
    for one in range(examples):
        (wanted,) = torch.autograd.grad(outputs[one], weight, gradient[one], retain_graph=True)
        if not (
            _close(found[one], wanted) and torch.allclose(squares[one], wanted.square().sum(), rtol=1e-4)
        ):
            return False
    starts = torch.tensor([0, 1, examples], device="cpu")
    sums, squares = calls.empty(2, weight.numel()), calls.empty(2)
    calls.kernel_gradients(code, geometry, given, met, by_columns, sums, squares, starts)
    wanted = torch.stack([results[0], results[1:].sum(0)])
    return _close(sums, wanted) and torch.allclose(squares, sums.square().sum(1), rtol=1e-4)


def _channels_side_by_side(values: Tensor) -> Tensor:
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def _same_scales(code: ctypes.CDLL, numbers: torch.Generator, channels: int, groups: int) -> bool:
    """Gradients of scales and shifts: over groups in both layouts, over the last dimension with a mean or without."""
    inputs = _random(numbers, 3, channels, 5, 7) * 3 + 2
    gradient = _random(numbers, *inputs.shape)
    normalized = F.group_norm(inputs, groups, eps=0.1)
    wanted = (gradient * normalized).sum((2, 3)), gradient.sum((2, 3))
    for given in (inputs, _channels_side_by_side(inputs)):
        found = calls.group_scales(code, given, gradient, groups, 0.1)
        if not all(map(_close, found, wanted)):
            return False
    rows, shares = inputs.flatten(2), gradient.flatten(2)  # (examples, positions, width)
    for centered in (False, True):
        normalized = (
            F.layer_norm(rows, rows.shape[2:], eps=0.1)
            if centered
            else F.rms_norm(rows, rows.shape[2:], None, 0.1)
        )
        scales, shifts = calls.last_scales(code, rows, shares, centered=centered, eps=0.1, shifts=centered)
        if not _close(scales, (shares * normalized).sum(1)):
            return False
        if centered and (shifts is None or not _close(shifts, shares.sum(1))):
            return False
    return True


def _same_tables(code: ctypes.CDLL, numbers: torch.Generator, length: int, table: int) -> bool:
    """Gradients of lookups that are of the same row now and then, beside those of bags, and rows that no table has."""
    rows = torch.randint(table, (4, length), generator=numbers, device="cpu")
    gradients = _random(numbers, 4, length, 19)
    shares, weights = _random(numbers, 4, length), _random(numbers, 4).abs()
    totals = [torch.ones(table, 19, dtype=torch.float64, device="cpu") for _ in range(2)]
    given = (rows, gradients, None, table - 1), (rows, gradients[:, 0].clone(), shares, None)
    layers = calls.Layers(code, [], 4, tables=list(zip(given, totals, strict=True)))
    squares = layers.squares(1e-40)
    layers.add(weights)
    passed = gradients.double(), shares.double()[..., None] * gradients.double()[:, :1]
    wanted = torch.zeros(2, 4, table, 19, dtype=torch.float64, device="cpu")
    for found, values in zip(wanted, passed, strict=True):
        found.index_put_((torch.arange(4, device="cpu")[:, None], rows), values, accumulate=True)
    wanted[0, :, table - 1] = 0
    summed = 1 + torch.einsum("n,knij->kij", weights.double(), wanted)
    broken = [((rows + table, *given[0][1:]), totals[0])]
    try:
        calls.Layers(code, [], 4, tables=broken).squares(1e-40)
        return False
    except RuntimeError:
        return torch.allclose(squares, wanted.square().sum((0, 2, 3)), rtol=1e-12) and torch.allclose(
            torch.stack(totals), summed, rtol=1e-12, atol=1e-12
        )


def _same_lookups(code: ctypes.CDLL, numbers: torch.Generator, length: int, table: int) -> bool:
    rows = torch.randint(table, (4, length), generator=numbers, device="cpu") << 20
    owners, used, use_of = calls.distinct_uses(code, rows)
    owner = torch.arange(4, device="cpu")[:, None].expand_as(rows).flatten()
    pairs = torch.stack([owners, used], 1)
    if not (
        torch.equal(pairs[use_of], torch.stack([owner, rows.flatten()], 1))
        and len(torch.unique(pairs, dim=0)) == len(pairs)
    ):
        return False
    values, weights = _random(numbers, len(used), 19), _random(numbers, 4).double()
    total, used = torch.ones(table, 19, dtype=torch.float64, device="cpu"), used >> 20
    wanted = total.index_add(0, used, values.double() * weights[owners, None])
    calls.add_uses(code, owners, used, weights, values, total)
    return torch.allclose(total, wanted, rtol=1e-12, atol=1e-12)


def _same_lstm(code: ctypes.CDLL, numbers: torch.Generator, times: int, rows: int, width: int) -> bool:
    """Outputs, gates and gradients of a layer, with sums of gates that are small, large, and no number in one row."""
    sums = (_random(numbers, times, rows, 4 * width) * 4).requires_grad_()
    weight = _random(numbers, 4 * width, width) / width**0.5
    first = [_random(numbers, rows, width).requires_grad_() for _ in range(2)]
    (state, cell), outputs, bents = first, [], []
    for given in sums:
        enter, keep, new, show = (given + state @ weight.t()).chunk(4, 1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        bents.append(cell.tanh())
        state = show.sigmoid() * bents[-1]
        outputs.append(state)
    shares, last = _random(numbers, times, rows, width), [_random(numbers, rows, width) for _ in range(2)]
    loss = (torch.stack(outputs) * shares).sum() + (state * last[0] + cell * last[1]).sum()
    wanted = torch.autograd.grad(loss, [sums, *first])
    states, cells = (calls.empty(times + 1, rows, width) for _ in range(2))
    states[0], cells[0] = (begin.detach() for begin in first)
    gates, bent = sums.detach().clone(), calls.empty(times, rows, width)
    calls.lstm(code, gates, weight, states, cells, bent)
    if not (_close(states[1:], torch.stack(outputs)) and _close(bent, torch.stack(bents))):
        return False
    found, begins = calls.lstm_backward(code, (states, cells, gates, bent), weight, shares, last)
    if not all(map(_close, (found, *begins), wanted)):
        return False
    bad = sums.detach().clone()
    bad[0, -1, 0] = float("nan")
    calls.lstm(code, bad, weight, states, cells, bent)
    alone = states[1:, :-1], torch.stack(outputs)[:, :-1]
    return _close(*alone) and bool(states[1, -1, 0].isnan())


def _same_outputs(code: ctypes.CDLL, numbers: torch.Generator, out: int, width: int) -> bool:
    """So many positions side by side, and so many channels: each has code of its own."""
    module = _convolution(2, out, 2)
    inputs, weight = _random(numbers, 1, 2, 2, width + 1), channels_last(_random(numbers, out, 2, 2, 2))
    return _close(
        calls.convolve(code, calls.describe(module, inputs), inputs, weight, None), F.conv2d(inputs, weight)
    )


def _convolution(channels: int, out: int, kernel: Any, **options: Any) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        return nn.Conv2d(channels, out, kernel, **{**options, "dtype": torch.float32, "device": "cpu"})


def _close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def _same_pooling(
    code: ctypes.CDLL, numbers: torch.Generator, channels: int, module: nn.MaxPool2d, rectify: bool
) -> bool:
    values = channels_last(_random(numbers, 2, channels, 9, 8))
    values[0, 0, 3, 3] = float("nan")
    inputs = values.requires_grad_()
    wanted = F.relu(module(inputs)) if rectify else module(inputs)
    found = calls.MaxPool.apply(inputs, module, rectify, code)  # type: ignore[no-untyped-call]
    gradient = _random(numbers, *wanted.shape)
    (one,), (other,) = (torch.autograd.grad(outputs, inputs, gradient) for outputs in (wanted, found))
    return torch.allclose(wanted, found, rtol=0, atol=0, equal_nan=True) and torch.allclose(
        one, other, rtol=1e-5, atol=1e-5
    )


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")
