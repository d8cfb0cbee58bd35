"""What person i holds changes nobody else's clipped contribution: an adversary looks at each of them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdpsgd.engine.noising import Recording, WithoutNoise, released_by
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.gradients.layers import Layers
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.per_example import Materialized, OuterProducts
from pdpsgd.gradients.weights import Weighed
from tests.engine.conftest import budgets_of, make_plan

OTHERS = [1, 2, 4, 1, 3, 1, 2, 4, 1, 1]  # records of everybody else
WHO = 3  # whose records come and go
MOST = 4


class Tied(nn.Module):
    """A layer over positions that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, inputs: Tensor) -> Tensor:
        twice: Tensor = self.layer(torch.tanh(self.layer(inputs)))
        return twice


# Sizes that fill neither vectors nor 64 bytes: libraries round these by where they lie.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 5, 5, 2, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(5, 7, 3),
            nn.Flatten(),
            nn.Linear(63, 3),
        ),
        (1, 12, 12),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv3d(3, 3, 3)),
        (2, 5, 6, 6),
    ),
    "many positions": (lambda: nn.Sequential(nn.Linear(27, 11), nn.Tanh(), nn.Linear(11, 7)), (60, 27)),
    "few positions": (lambda: nn.Sequential(nn.Linear(27, 33), nn.Tanh(), nn.Linear(33, 35)), (5, 27)),
    "two positions": (lambda: nn.Sequential(nn.Linear(27, 33), nn.Tanh(), nn.Linear(33, 35)), (2, 27)),
    "tied": (Tied, (40, 9)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True), (11, 6)),
}


@dataclass(frozen=True)
class Share:
    """What a person adds to a step: the norm before clipping, what is added, and what rows give where that is kept."""

    norm: float
    added: Tensor
    rows: list[Tensor]

    def is_that_of(self, other: Share) -> bool:
        """Tell whether nothing differs: no bit of a norm or a row, and of a sum over own rows in float64 the last."""
        largest = float(other.added.abs().max())
        return (
            self.norm == other.norm
            and all(map(torch.equal, self.rows, other.rows))
            and float((self.added - other.added).abs().max()) <= 1e-12 * largest
        )


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, Share]]:
    """Return what everybody adds to one step that samples everybody."""
    add, seen = Layers.add_weighted_sums, dict[int, Share]()
    sums: list[Tensor] = []
    views_of_all = [1]

    def look(layers: Layers, found: Weighed) -> None:
        groups, views = layers._groups, views_of_all[0]
        assert groups is not None
        for place, person in enumerate(groups.whose.tolist()):
            if person >= 0:
                weights = torch.zeros_like(found.scaled)
                weights[place] = found.scaled[place]
                for flat in sums:
                    flat.zero_()
                # Blocks of what is added together are cut by people: their rounding is bounded, see `layers`.
                for gradient, total in layers._others:
                    gradient.add_weighted_sum(weights, total)
                rows = slice(int(groups.starts[place]), int(groups.starts[place + 1]))
                kept = [
                    factor[rows].clone() for _, gradient in layers._gradients for factor in _by_row(gradient)
                ]
                assert rows.stop - rows.start <= MOST * views
                seen[person] = Share(
                    float(found.norms[place]), torch.cat([flat.clone() for flat in sums]), kept
                )
        for flat in sums:
            flat.zero_()
        add(layers, found)

    monkeypatch.setattr(Layers, "add_weighted_sums", look)
    monkeypatch.setattr(Layers, "add_clipped", lambda *_: False)  # the same bits, at once

    def run(network: str, own: int, *, views: int = 1, sampled: bool = True) -> dict[int, Share]:
        build, shape = NETWORKS[network]
        torch.manual_seed(1)
        module, people = build(), len(OTHERS)
        counts = np.array([*OTHERS[:WHO], own, *OTHERS[WHO + 1 :]])
        records = torch.randn(people, max(9, *OTHERS), *shape, generator=torch.Generator().manual_seed(5))
        rows = torch.cat([of_one[:count] for of_one, count in zip(records, counts, strict=True)])
        plan = make_plan(people=people, rates=(1.0,), steps=1)

        def loss(outputs: Tensor, _: Tensor) -> Tensor:
            flat = outputs.flatten(1)
            return (flat * torch.linspace(0.9, 1.1, flat.shape[1])).sum()

        with released_by(Recording(inner=WithoutNoise())):
            engine = PrivacyEngine(watch_loop=False)
            module, optimizer, loader = engine.make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
                data_loader=(rows, torch.zeros(len(rows))),
                plan=plan,
                budgets=budgets_of(plan),
                record_ids=np.repeat(np.arange(people), counts),
                records_per_person=MOST,
                views=views,
                criterion=loss,
                loss_reduction="sum",
                seed=1,
            )
        # The coins of the others, in either case.
        who = np.array([person for person in range(people) if sampled or person != WHO])
        words = np.random.default_rng(0).integers(2**64, size=people, dtype=np.uint64)
        monkeypatch.setattr(engine.execution.sampler, "draw", lambda step: who)
        monkeypatch.setattr(engine.source, "place_words", lambda **_: words[who])
        seen.clear()
        views_of_all[0], sums[:] = views, engine.gradients.flat_sums
        for inputs, targets in loader:
            optimizer.zero_grad()
            seen_by_model = inputs.repeat_interleave(views, 0)
            shift = torch.arange(len(seen_by_model)).remainder(views).view(-1, *[1] * (inputs.dim() - 1))
            loss(module(seen_by_model + 0.1 * shift), targets).backward()
            optimizer.step()
        engine.gradients.remove()
        return dict(seen)

    return run


def _by_row(gradient: object) -> tuple[Tensor, ...]:
    if isinstance(gradient, Materialized):
        return (gradient.values,)
    return gradient.factors if isinstance(gradient, OuterProducts) and gradient.positions == 1 else ()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("network", NETWORKS)
def test_nobody_elses_share_depends_on_what_somebody_holds_or_whether_they_are_sampled(
    network: str,
    views: int,
    compiled: bool,
    shares: Callable[..., dict[int, Share]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some gradients are taken during the backward pass at some of these numbers of rows, and not at others."""
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 7000)
    monkeypatch.setattr("pdpsgd.gradients.workspace.ROOM", 9000)
    monkeypatch.setattr("pdpsgd.gradients.groups.CACHE", 1500)
    one = shares(network, 1, views=views)
    assert sorted(one) == list(range(len(OTHERS)))
    for own in (0, 2, 3, 4, 9):
        other = shares(network, own, views=views)
        assert all(other[person].is_that_of(one[person]) for person in one if person != WHO), own
    absent = shares(network, 1, views=views, sampled=False)
    assert WHO not in absent
    assert all(share.is_that_of(one[person]) for person, share in absent.items())
