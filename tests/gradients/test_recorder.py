"""What a backward pass leaves behind, and what is let go of while it runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients import recorder, workspace
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.native import dispatch as native

Build = Callable[[], tuple[nn.Module, Tensor]]


class Twice(nn.Module):
    """A convolution that is used twice: its gradients add up before norms are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        twice: Tensor = self.layer(torch.relu(self.layer(inputs)))
        return twice


class First(nn.Module):
    """The first of the two things that a recurrent layer returns."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1, groups=4, bias=False),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 2, 2, 2),
    )


def few_features() -> nn.Module:
    """Linear layers over so many positions that their gradients are written out."""
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))


NETWORKS: dict[str, Build] = {
    "convolutions": lambda: (cnn(), torch.randn(6, 3, 8, 8)),
    "used twice": lambda: (Twice(), torch.randn(6, 3, 8, 8)),
    "positions": lambda: (few_features(), torch.randn(6, 40, 3)),
    "tokens": lambda: (
        nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)),
        torch.arange(42).reshape(6, 7) % 9,
    ),
    "recurrent": lambda: (
        nn.Sequential(nn.LSTM(3, 4, batch_first=True), First(), nn.Linear(4, 2)),
        torch.randn(6, 5, 3),
    ),
}
WAYS = {
    "examples": {"norms": torch.linspace(0.1, 2, 6)},
    "views": {"norms": torch.linspace(0.1, 2, 3), "views": 2},
    "people": {"norms": torch.linspace(0.1, 2, 3), "starts": torch.tensor([0, 1, 4, 6])},
}


def collected(build: Build, way: str, *, spoiled: bool = False) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    module, inputs = build()
    options = dict(WAYS[way])
    clipped = ClippedGradients(module)
    factor = torch.ones(6).index_fill_(0, torch.tensor([2]), float("nan" if spoiled else 1))
    outputs = module(inputs)
    (outputs.square().flatten(1).sum(1) * factor).sum().backward()
    written = clipped.per_example_gradients(loss_reduction="sum") if way == "examples" else {}
    bad = clipped.clipped_sum(
        options.pop("norms"),
        largest_clip_norm=2.0,
        loss_reduction="sum",
        **options,  # type: ignore[arg-type]
    )
    clipped.remove()
    return bad, [*written.values(), *clipped.sums.values()]


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_are_the_same_whether_gradients_are_taken_during_the_backward_pass_or_at_the_step(
    name: str, way: str, spoiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 1 << 40)
    expected = collected(NETWORKS[name], way, spoiled=spoiled)
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 0)
    found = collected(NETWORKS[name], way, spoiled=spoiled)
    assert found[0] == expected[0] == int(spoiled)
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_has_no_room_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel larger than its images: more numbers than what they would be kept instead of."""

    def build() -> tuple[nn.Module, Tensor]:
        return nn.Conv2d(20, 20, 3), torch.randn(6, 20, 4, 4)

    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 1 << 40)
    expected = collected(build, "examples")
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 0)
    monkeypatch.setattr("pdpsgd.gradients.workspace.ROOM", 0)
    found = collected(build, "examples")
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, or PDPSGD_NATIVE=0")
def test_activations_are_gone_after_the_backward_pass_although_the_loss_lives_on() -> None:
    module = cnn()
    clipped = ClippedGradients(module)
    seen: list[weakref.ref[Tensor]] = []
    module[3].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss = module(torch.randn(64, 3, 32, 32)).sum()
    assert seen[0]() is not None
    loss.backward()
    gc.collect()
    assert seen[0]() is None
    assert clipped.clipped_sum(torch.ones(64), loss_reduction="sum") == 0
    clipped.remove()


def test_a_graph_that_is_retained_can_be_gone_through_again() -> None:
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    clipped = ClippedGradients(module)
    loss = module(inputs).square().sum()
    found = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        clipped.zero_sums()
        clipped.clipped_sum(torch.ones(4), loss_reduction="sum")
        found.append(clipped.sums[module.weight].clone())
    assert torch.equal(*found)
    assert float(found[0].norm()) > 0
    clipped.remove()


def test_a_second_pass_through_a_graph_that_is_gone_is_refused() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    loss = module(torch.randn(4, 3)).sum()
    loss.backward()
    clipped.forget()
    with pytest.raises(PdpsgdError, match="one backward pass for each forward pass"):
        loss.backward()
    clipped.remove()


def test_inputs_that_are_overwritten_during_the_backward_pass_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 0)
    module, inputs = nn.Conv2d(1, 2, 3), torch.randn(4, 1, 6, 6)
    clipped = ClippedGradients(module)
    loss = module(inputs).sum()
    inputs.zero_()
    loss.backward()
    with pytest.raises(PdpsgdError, match="changed in place"):
        clipped.clipped_sum(torch.ones(4), loss_reduction="sum")
    clipped.remove()


class Linear(nn.Module):
    """A linear layer over few positions, whose per-example gradients are written out; once, or twice over."""

    def __init__(self, width: int, *, twice: bool = False) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(width, width, bias=False), twice

    def forward(self, inputs: Tensor) -> Tensor:
        first: Tensor = self.layer(inputs)
        return self.layer(torch.tanh(first)) if self.twice else first


def sums_of(
    gradients: ClippedGradients,
    rows: int,
    people: int,
    *,
    records: int,
    views: int,
    positions: int = 96,
    early: bool = False,
) -> Tensor:
    """Return the clipped sum where these people hold the same records, and further rows are nobody's."""
    width = next(iter(gradients.sums)).shape[0]
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randn(records * views, positions, width, generator=generator).repeat(
            rows // (records * views), 1, 1
        )
        for _ in range(2)
    )
    count = rows // (records * views)
    clip_norms = torch.zeros(count)
    clip_norms[:people] = 1
    of_many = {}
    if records > 1:
        whose = torch.where(torch.arange(count) < people, torch.arange(count), -1)
        of_many = {"starts": torch.arange(0, rows // views + 1, records), "whose": whose}
    if early:
        gradients.expect(views=views, **of_many)
    (gradients.module(inputs) * targets).sum().backward()
    gradients.zero_sums()
    gradients.clipped_sum(clip_norms, largest_clip_norm=1.0, loss_reduction="sum", views=views, **of_many)
    return gradients.flat_sums[0].clone()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("twice", "records", "views"),
    [(False, 2, 1), (False, 1, 2), (True, 1, 1), (True, 2, 1), (True, 1, 2), (False, 2, 2)],
    ids=["many", "views", "tied", "tied many", "tied views", "many views"],
)
def test_sums_are_the_same_bits_whether_or_not_gradients_are_taken_during_the_backward_pass(
    twice: bool, records: int, views: int, early: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether they are depends on how many rows there are: with one more, everybody's would be rounded otherwise.
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    gradients = ClippedGradients(Linear(4, twice=twice).train())
    edge = -(-(recorder.LARGE // (2 * 96 * 4) + 1) // 4) * 4
    people = (edge - 8) // (records * views)
    below, above = (
        sums_of(gradients, rows, people, records=records, views=views, early=early)
        for rows in (edge - 4, edge)
    )
    assert torch.equal(below, above)


@pytest.mark.parametrize("early", [True, False])
def test_sums_are_the_same_bits_whether_or_not_there_is_room_for_gradients(early: bool) -> None:
    gradients = ClippedGradients(Linear(64).train())
    edge = workspace.ROOM // 64**2
    within, beyond = (
        sums_of(gradients, rows, (edge - 8) // 2, records=1, views=2, positions=24, early=early)
        for rows in (edge, edge + 4)
    )
    assert torch.equal(within, beyond)


PEOPLE = {"starts": torch.tensor([0, 1, 4, 6])}


@pytest.mark.parametrize(
    ("said", "then"),
    [
        (PEOPLE, {"starts": torch.tensor([0, 2, 4, 6])}),
        (PEOPLE, {"views": 2}),
        ({"views": 2}, {"views": 3}),
        ({"views": 2}, PEOPLE),
        (PEOPLE, {}),
    ],
)
def test_what_was_added_up_over_some_is_not_taken_for_that_of_others(
    said: dict[str, Any], then: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 0)
    clipped = ClippedGradients(cnn())

    def add(now: dict[str, Any]) -> int:
        clipped.module(torch.randn(6, 3, 8, 8)).sum().backward()
        people = len(now["starts"]) - 1 if "starts" in now else 6 // now.get("views", 1)
        return clipped.clipped_sum(torch.ones(people), loss_reduction="sum", **now)

    clipped.expect(**said)
    assert add(said) == 0
    with pytest.raises(PdpsgdError, match="belong to whom they were said to"):
        add(then)
    clipped.module(torch.randn(6, 3, 8, 8)).sum().backward()
    with pytest.raises(PdpsgdError, match="gradients of single rows"):
        clipped.per_example_norms(loss_reduction="sum")
    clipped.forget()
    clipped.expect()
    assert add(then) == 0
    clipped.remove()


def test_checks_see_single_rows_whoever_they_are_said_to_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdpsgd.gradients.recorder.LARGE", 0)
    clipped = ClippedGradients(cnn())
    clipped.expect(views=2)
    clipped.record(clipped.module(torch.randn(6, 3, 8, 8)).sum())
    assert len(clipped.per_example_norms(loss_reduction="sum")) == 6
    clipped.remove()


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, or PDPSGD_NATIVE=0")
def test_only_sums_over_peoples_records_are_kept_and_activations_are_gone() -> None:
    module, starts = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)), torch.arange(0, 65, 16)
    clipped = ClippedGradients(module)
    seen: list[weakref.ref[Tensor]] = []
    module[2].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    clipped.expect(starts=starts)
    loss = module(torch.randn(64, 3, 32, 32)).sum()
    loss.backward()
    gc.collect()
    assert seen[0]() is None
    assert clipped.clipped_sum(torch.ones(4), loss_reduction="sum", starts=starts) == 0
    assert loss.requires_grad
    clipped.remove()
