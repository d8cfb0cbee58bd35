"""The noise-free sums of the real engine, with and without one person's records, are within that person's C_i.

Searched over models, precisions, reductions, sizes, extreme values, physical batches, views and, where people have many
records, who has how many of which how many take part (K). The same key draws the
same people, so what differs is the record alone; distances are taken of what noise is added to. With two ranks, the
same search is in ranks/worker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pdpsgd.engine.noising import Recording, WithoutNoise, released_by
from pdpsgd.engine.privacy_engine import PrivacyEngine
from tests.engine.conftest import budgets_of, make_plan

CLASSES = 3
SCALES = (
    1.0,
    0.25,
    0.002,
    0.0005,
)  # of the clipping norm, level by level; the last is below what rounding needs


class Pooled(nn.Module):
    """A table of tokens, mixed by another layer, and pooled."""

    def __init__(self, inner: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.inner, self.out = nn.Embedding(7, 4), inner, nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.inner(self.tokens(tokens))
        logits: Tensor = self.out((mixed[0] if isinstance(mixed, tuple) else mixed).mean(1))
        return logits


class Raw(nn.Module):
    """Parameters of its own, and a matrix that all examples share: the general rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, CLASSES)), nn.Parameter(torch.ones(()))
        self.register_buffer("shared", torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * (self.shared @ x)).mean(1) @ self.weight


@dataclass(frozen=True)
class Kind:
    """A network, and the shape of a record; of whole numbers where it looks up tokens."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False


KINDS = {
    "linear": Kind(lambda: nn.Linear(5, CLASSES), (5,)),
    "mlp": Kind(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, CLASSES)), (5,)),
    "wide": Kind(lambda: nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, CLASSES)), (5,)),
    "positions": Kind(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Flatten(1), nn.Linear(18, CLASSES)), (3, 4)
    ),
    "convolution": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        ),
        (1, 6, 6),
    ),
    "group norm": Kind(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, CLASSES)),
        (2, 6),
    ),
    "transformer": Kind(
        lambda: Pooled(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)), (5,), tokens=True
    ),
    "recurrent": Kind(lambda: Pooled(nn.GRU(4, 3, batch_first=True), 3), (4,), tokens=True),
    "bag": Kind(lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, CLASSES)), (5,), tokens=True),
    "raw": Kind(Raw, (6, 4)),
}


@dataclass(frozen=True)
class Case:
    """One of everything that is searched."""

    kind: str
    dtype: torch.dtype
    reduction: str
    people: int
    person: int
    limit: int | None
    views: int
    own: float
    others: float
    clip: float
    alike: bool
    seed: int
    rate: float = 1.0
    most: int | None = None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(list(KINDS)))
    people = draw(st.sampled_from([1, 2, 6, 9, 70, 150]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    most = draw(st.sampled_from([None, 1, 2, 16]))
    size = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1.0, 30.0, 1e6, 1e18, 1e30])
    return Case(
        kind=kind,
        dtype=dtype,
        reduction="sum" if dtype == torch.bfloat16 else draw(st.sampled_from(["mean", "sum"])),
        people=people,
        person=draw(st.integers(0, people - 1)),
        limit=draw(st.sampled_from([None, None, *((3, 64) if most is None else (32, 64))])),
        views=draw(st.sampled_from([1, 1, 2])),
        own=draw(st.one_of(size, st.sampled_from([float("nan"), float("inf"), -1e38]))),
        others=draw(size),
        clip=draw(st.sampled_from([1e-8, 1e-2, 1.0, 1e3])),
        alike=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
        rate=draw(st.sampled_from([1.0, 1.0, 0.5])),
        most=most,
    )


def persons(case: Case) -> np.ndarray:
    """Return the person of each record: one each, or any number from none to 20, of which the person has some."""
    if case.most is None:
        return np.arange(case.people)
    counts = np.random.default_rng(case.seed).choice([0, 1, 1, 2, 5, 20], case.people)
    counts[case.person] = max(1, counts[case.person])
    return np.repeat(np.arange(case.people), counts)


def records(case: Case) -> tuple[Tensor, Tensor]:
    """Everybody's; the person's own are of another size, or not a number."""
    generator, kind, whose = torch.Generator().manual_seed(case.seed), KINDS[case.kind], persons(case)
    targets = torch.randint(CLASSES, (len(whose),), generator=generator)
    if kind.tokens:
        return torch.randint(7, (len(whose), *kind.shape), generator=generator), targets
    rows = 1 if case.alike else len(whose)
    inputs = torch.randn(rows, *kind.shape, generator=generator).repeat(
        len(whose) // rows, *[1] * len(kind.shape)
    )
    own = torch.from_numpy(whose == case.person)
    some = inputs[own] * case.own
    inputs = inputs * case.others
    inputs[own] = some
    return inputs.to(case.dtype), targets


def noise_free_sum(case: Case, *, supplied: bool) -> Tensor:
    """Take one step through the engine, and return what noise would be added to; of many ranks, on the first."""
    inputs, targets = records(case)
    whose = persons(case)
    if not supplied:
        others = whose != case.person
        inputs, targets, whose = inputs[others], targets[others], whose[others]
    sizes = [len(part) for part in np.array_split(np.arange(case.people), min(case.people, len(SCALES)))]
    plan = make_plan(
        people=sizes,
        rates=[case.rate] * len(sizes),
        steps=1,
        clip_scales=SCALES[: len(sizes)],
        max_grad_norm=case.clip,
    )
    torch.manual_seed(case.seed)
    module = KINDS[case.kind].build().to(case.dtype)
    criterion = partial(functional.cross_entropy, reduction=case.reduction)
    double, engine = Recording(inner=WithoutNoise()), PrivacyEngine(watch_loop=False)
    with released_by(double):
        module, optimizer, loader = engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            data_loader=(inputs, targets),
            plan=plan,
            budgets=budgets_of(plan),
            record_ids=whose,
            records_per_person=case.most,
            loss_reduction=case.reduction,
            views=case.views,
            criterion=criterion if case.views > 1 else None,
            max_physical_batch_size=case.limit,
            seed=case.seed,
        )
    repeat = partial(torch.repeat_interleave, repeats=case.views, dim=0)
    for some, labels in loader:
        optimizer.zero_grad()
        criterion(module(repeat(some)), repeat(labels)).backward()
        optimizer.step()
    totals = double.totals[0] if engine.ranks.first else []
    return torch.cat([torch.zeros(0), *(total.flatten() for total in totals)])


def clip_norm_of(case: Case) -> float:
    parts = np.array_split(np.arange(case.people), min(case.people, len(SCALES)))
    level = next(index for index, part in enumerate(parts) if case.person in part)
    return case.clip * SCALES[level]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of seeds; what is searched here are sums
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_record_moves_the_noise_free_sum_by_its_clipping_norm_at_most(case: Case) -> None:
    whole, without = (noise_free_sum(case, supplied=supplied) for supplied in (True, False))
    assert bool(whole.isfinite().all())
    distance = float((whole - without).norm())
    event(f"{case.kind}: {'moved' if distance > 0 else 'not moved'}")
    assert distance <= clip_norm_of(case)


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_search_would_see_more_than_a_clipping_norm(
    kind: str, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everybody clipped to twice their norm, the same distance is above it."""
    case = Case(
        kind, torch.float32, "sum", 6, person=1, limit=None, views=1, own=1.0, others=1.0, clip=1e-2, alike=False,
        seed=1, most=most,
    )  # fmt: skip
    honest = [noise_free_sum(case, supplied=supplied) for supplied in (True, False)]
    assert 0.98 * clip_norm_of(case) < float((honest[0] - honest[1]).norm()) <= clip_norm_of(case)
    monkeypatch.setattr("pdpsgd.gradients.weights.NORM_MARGIN", -1.0)
    found = [noise_free_sum(case, supplied=supplied) for supplied in (True, False)]
    assert float((found[0] - found[1]).norm()) > 1.5 * clip_norm_of(case)
