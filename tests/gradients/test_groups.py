"""People with many records: their gradients, norms and clipped sums are those of a loop of plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.native import dispatch as native
from tests.gradients.conftest import Oracle

SIZES = {
    "one each": [1] * 5,
    "four each": [4] * 4,
    "one to four": [1, 3, 2, 4, 1, 1],
    "one to sixteen": [1, 1, 16, 1, 2, 1, 7],
    "one person": [9],
}


class Tied(nn.Module):
    """A table used twice, by lookup and as a matrix, and attention with biases of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mixed, _ = self.attention(*[self.table(tokens)] * 3)
        logits: Tensor = self.out(mixed.mean(1))
        return logits


class Raw(nn.Module):
    """Parameters of its own: the general rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "linear": (lambda: nn.Linear(40, 2), (40,), False),
    "mlp": (lambda: nn.Sequential(nn.Linear(30, 25), nn.ReLU(), nn.Linear(25, 10)), (30,), False),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh()), (3, 6), False),
    "long sequence": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Flatten()), (40, 3), False),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 3),
            nn.GroupNorm(4, 32),
            nn.Flatten(),
            nn.Linear(32, 10),
        ),
        (1, 10, 10),
        False,
    ),
    "other convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Conv1d(4, 70, 12), nn.Flatten()
        ),
        (2, 12),
        False,
    ),
    "mobile": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 3, 2, stride=2),
            nn.InstanceNorm2d(3, affine=True),
            nn.Flatten(),
        ),
        (2, 5, 5),
        False,
    ),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), (5,), True),
    "tied": (Tied, (4,), True),
    "recurrent": (lambda: nn.GRU(3, 4, batch_first=True), (5, 3), False),
    "raw": (Raw, (6,), False),
}


def starts_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def compare(
    oracle: Oracle, module: nn.Module, inputs: Tensor, sizes: list[int], *, reduction: str, tolerance: float
) -> None:
    """Clip each person's mean gradient as a whole, by definition and by the rules."""
    count = len(inputs)
    rows = oracle.gradients(copy.deepcopy(module), (inputs,), count)
    people = {
        name: torch.stack([part.mean(0) for part in torch.split(values, sizes)])
        for name, values in rows.items()
    }
    norms = torch.cat([values.reshape(len(sizes), -1) for values in people.values()], 1).norm(dim=1)
    clip_norms = norms * torch.linspace(0.3, 1.7, len(sizes), dtype=norms.dtype)
    wanted = oracle.clipped(people, clip_norms)
    clipped = ClippedGradients(module)
    try:
        loss = oracle.loss(module, (inputs,), 0, count)
        (loss if reduction == "mean" else loss * count).backward()  # type: ignore[no-untyped-call]
        refused = clipped.clipped_sum(
            clip_norms,
            largest_clip_norm=float(clip_norms.max()),
            loss_reduction=reduction,
            starts=starts_of(sizes),
        )
        assert refused == 0
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, total in clipped.sums.items():
            scale = tolerance * len(sizes) * float(norms.max())
            assert torch.allclose(total, wanted[names[parameter]].double(), rtol=0, atol=scale), names[
                parameter
            ]
    finally:
        clipped.remove()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("network", NETWORKS)
def test_a_persons_mean_gradient_is_clipped_as_a_whole(
    oracle: Oracle, network: str, sizes: list[int]
) -> None:
    build, shape, tokens = NETWORKS[network]
    module = build()
    inputs = torch.randint(7, (sum(sizes), *shape)) if tokens else torch.randn(sum(sizes), *shape)
    # The same in float64, where rules differ from the loop by rounding alone; sequences by the form of their norms.
    compare(oracle, module, inputs, sizes, reduction="sum", tolerance=4e-5)
    precise = module.double()
    inputs = inputs if tokens else inputs.double()
    compare(oracle, precise, inputs, sizes, reduction="mean", tolerance=1e-9)


@pytest.mark.parametrize("network", ["mlp", "cnn", "other convolutions", "mobile", "sequence"])
def test_without_compiled_code_it_is_the_same(
    oracle: Oracle, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    build, shape, _ = NETWORKS[network]
    sizes = SIZES["one to sixteen"]
    compare(oracle, build(), torch.randn(sum(sizes), *shape), sizes, reduction="mean", tolerance=4e-5)


def clipped_sum(module: nn.Module, inputs: Tensor, sizes: list[int], **options: Any) -> tuple[Tensor, int]:
    clipped = ClippedGradients(module)
    try:
        module(inputs).square().sum().backward()
        options = {"loss_reduction": "sum", "starts": starts_of(sizes)} | options
        count = clipped.clipped_sum(torch.ones(len(sizes)), **options)
        return torch.cat([total.flatten() for total in clipped.flat_sums]), count
    finally:
        clipped.remove()


def test_records_squared_norms_are_not_simply_added() -> None:
    # Ten equal records: their mean is one of them, and clipping it gives a sum of norm about C, not C / sqrt(10).
    module = nn.Linear(3, 2)
    one = torch.full((1, 3), 5.0)
    many, _ = clipped_sum(module, one.repeat(10, 1), [10])
    single, _ = clipped_sum(module, one, [1])
    assert torch.allclose(many, single, rtol=1e-5)
    assert 0.998 < float(many.norm()) <= 1


def _sum_of(
    module: nn.Linear,
    inputs: torch.Tensor,
    shares: torch.Tensor,
    starts: list[int],
    whose: list[int] | None = None,
) -> torch.Tensor:
    """The sum with a clipping norm of 1 for everybody; of 0 for those who are nobody."""
    clipped = ClippedGradients(module)
    (module(inputs) * shares).sum().backward()
    people = torch.arange(len(starts) - 1) if whose is None else torch.tensor(whose)
    clipped.clipped_sum(
        (people >= 0).float(),
        largest_clip_norm=1.0,
        loss_reduction="sum",
        starts=torch.tensor(starts),
        whose=people,
    )
    clipped.remove()
    return torch.cat([total.flatten() for total in clipped.flat_sums])


@pytest.mark.parametrize("seed", range(5))
def test_large_records_that_nearly_cancel_are_clipped_all_the_same(seed: int) -> None:
    """Rounded after weighing, products a million times the sum would leave far more than the clipping norm."""
    torch.manual_seed(seed)
    module = nn.Linear(30, 20, bias=False)
    inputs, shares = torch.randn(2, 30).repeat_interleave(2, 0), torch.randn(2, 20).repeat_interleave(2, 0)
    shares[1::2] *= -1
    inputs[1::2] *= 1 + 2.0**-20
    found = _sum_of(module, inputs * 1e6, shares * 1e3, [0, 4])
    assert 0.9 < float(found.norm()) <= 1.0


@pytest.mark.parametrize("person", [0, 7, 15, 16, 39])
def test_how_many_records_somebody_has_changes_nothing_for_people_of_other_units(person: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(70, 20)
    sizes = torch.randint(1, 5, (40,))
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    inputs, shares = torch.randn(int(starts[-1]), 70), torch.randn(int(starts[-1]), 20)
    shares[starts[person] : starts[person + 1]] = 0  # their own part is nothing; others' rows move
    first, last = int(starts[person]), int(starts[person + 1])
    found = []
    for rows in (1, 9):
        moved = [
            torch.cat([part[:first], part[first : first + 1].expand(rows, -1), part[last:]])
            for part in (inputs, shares)
        ]
        changed = starts.clone()
        changed[person + 1 :] += rows - int(sizes[person])
        found.append(_sum_of(module, *moved, changed.tolist()))
    assert float((found[0] - found[1]).norm()) <= 2 * 4000 * 2.0**-24


def test_placeholders_between_people_do_not_move_where_others_are_added() -> None:
    """Where rows begin in lane 0, somebody with few of them has placeholders behind: units count people alone."""
    torch.manual_seed(0)
    units, unit, lanes, width = 4, 32, 4, 8
    module = nn.Linear(units * width, 20, bias=False)
    found = []
    for own in (1, 2, 3, 4):  # of the first person; everybody else has one or three
        generator = torch.Generator().manual_seed(1)
        rows, starts, whose = [], [0], []
        for person in range(units * unit):
            size = own if person == 0 else 1 + 2 * (person % 2)
            row = torch.zeros(lanes, units * width)
            at = person // unit * width
            row[:, at : at + width] = torch.randn(lanes, width, generator=generator)
            rows.append(row)
            starts += [starts[-1] + size, *range(starts[-1] + size + 1, starts[-1] + lanes + 1)]
            whose += [person] + [-1] * (lanes - size)
        inputs = torch.cat(rows)
        shares = torch.randn(len(inputs), 20, generator=generator)
        total = _sum_of(module, inputs, shares, starts, whose).view(20, units, width)
        found.append(total[:, 1:])
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("cancelling", [0.0, 0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_the_rounding_of_a_unit_is_bounded_however_much_its_rows_cancel(most: int, cancelling: float) -> None:
    torch.manual_seed(most)
    sizes = torch.randint(1, most + 1, (32,))
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    inputs, shares = torch.randn(int(starts[-1]), 40), torch.randn(int(starts[-1]), 12)
    for first, last in starts.unfold(
        0, 2, 1
    ).tolist():  # every row but the first takes back what is there already
        for row in range(first + 1, last):
            inputs[row] = inputs[first] + (1 - cancelling) * inputs[row]
            shares[row] = shares[first] * (-1) ** (row - first) + (1 - cancelling) * shares[row]
    module = nn.Linear(40, 12, bias=False)
    found = _sum_of(module, inputs, shares, starts.tolist()).view(12, 40)
    exact = torch.zeros(12, 40, dtype=torch.float64)
    for first, last in starts.unfold(0, 2, 1).tolist():
        own = shares[first:last].double().t() @ inputs[first:last].double() / (last - first)
        exact += own * min(1.0, (1 - 2.0**-11 - 2.0**-10) / float(own.norm()))
    norms_are_off_by = 2.0**-20  # and never too small
    assert float((found - exact).norm()) <= 4000 * 2.0**-24 + len(sizes) * norms_are_off_by


def test_records_that_cancel_leave_what_is_left_of_them() -> None:
    # Two huge records with opposite gradients and a small one: clipping is of what remains, within C.
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    inputs = torch.tensor([[3e6], [3e6], [0.5]])
    clipped = ClippedGradients(module)
    (module(inputs)[:, 0] * torch.tensor([1.0, -1.0, 1.0])).sum().backward()
    clipped.clipped_sum(torch.ones(1), loss_reduction="sum", starts=torch.tensor([0, 3]))
    assert float(clipped.flat_sums[0].abs()) <= 0.5 / 3 + 1e-9


@pytest.mark.parametrize("network", ["linear", "mlp", "sequence", "cnn", "other convolutions", "raw"])
def test_a_record_that_is_not_finite_takes_its_person_out_and_nobody_else(network: str) -> None:
    build, shape, _ = NETWORKS[network]
    module, sizes = build(), [2, 3, 1]
    inputs = torch.randn(6, *shape)
    inputs[3] = float("inf")
    found, count = clipped_sum(module, inputs, sizes)
    others, _ = clipped_sum(module, inputs[[0, 1, 5]], [2, 1])
    assert count == 1
    assert torch.allclose(found, others, atol=1e-5)


def test_a_product_beyond_single_precision_takes_its_person_out_and_nobody_else() -> None:
    """Its norm is a number in double precision, and its weight 0: nothing of it may reach the sum, NaN least of all."""
    module = nn.Linear(40, 5)
    inputs, shares = torch.randn(6, 40), torch.ones(6, 1)
    inputs[2:5] *= 1e8
    shares[3] = 3e35
    found = _sum_of(module, inputs, shares, [0, 2, 5, 6])
    others = _sum_of(module, inputs[[0, 1, 5]], shares[[0, 1, 5]], [0, 2, 3])
    assert torch.allclose(found, others, atol=1e-6)


def test_views_of_many_records_are_averaged_with_them(oracle: Oracle) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs = torch.randn(10, 4, dtype=torch.float64)  # five records, two views of each
    with_views, _ = clipped_sum(module, inputs, [2, 3], views=2)
    as_records, _ = clipped_sum(module, inputs, [4, 6])
    assert torch.allclose(with_views, as_records, rtol=1e-12)


def test_somebody_without_records_adds_nothing() -> None:
    module = nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    clipped = ClippedGradients(module)
    module(inputs).square().sum().backward()
    clipped.clipped_sum(
        torch.tensor([1.0, 0.0]),
        largest_clip_norm=1.0,
        loss_reduction="sum",
        starts=torch.tensor([0, 3, 4]),
    )
    wanted = clipped.flat_sums[0].clone()
    clipped.remove()
    assert torch.allclose(wanted, clipped_sum(module, inputs[:3], [3])[0], atol=1e-6)
