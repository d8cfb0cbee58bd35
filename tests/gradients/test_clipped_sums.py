"""Whatever happens, nobody contributes more than their clipping norm, and the module is left alone."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.layers import Layers
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.gradients.weights import clip_limits, clip_weights, weigh


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 3)
    )


def contribution(module: nn.Module, loss: Any, inputs: Tensor, example: int, clip_norm: float) -> float:
    """The norm, in float64, of what one example adds to the sums: everybody else is clipped to zero."""
    clipped = ClippedGradients(module)
    try:
        loss(module(inputs)).backward()
        clip_norms = torch.zeros(inputs.shape[0])
        clip_norms[example] = clip_norm
        clipped.clipped_sum(clip_norms, largest_clip_norm=clip_norm, loss_reduction="sum")
        return float(torch.cat([total.double().flatten() for total in clipped.sums.values()]).norm())
    finally:
        clipped.remove()


ARCHITECTURES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), (3, 7)),
    "positions": (lambda: nn.Linear(9, 8), (3, 4, 9)),
    "many positions": (lambda: nn.Linear(3, 2), (3, 60, 3)),
    "reused": (lambda: nn.Sequential(*[nn.Linear(5, 5)] * 2), (3, 5)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2), (3, 2, 9, 9)),
    "conv, few positions": (lambda: nn.Conv2d(6, 6, 3), (3, 6, 4, 4)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(2), nn.LayerNorm(9)), (3, 4, 3, 3)),
    "deep": (lambda: small_cnn(), (3, 1, 8, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=25, deadline=None)
@given(
    input_scale=st.integers(-30, 30),
    loss_scale=st.integers(-30, 30),
    clip_scale=st.integers(-20, 15),
    seed=st.integers(0, 99),
)
def test_no_contribution_is_above_its_clipping_norm(
    name: str, dtype: torch.dtype, input_scale: int, loss_scale: int, clip_scale: int, seed: int
) -> None:
    torch.manual_seed(seed)
    build, shape = ARCHITECTURES[name]
    module, inputs = build().to(dtype), (torch.randn(shape) * 10.0**input_scale).to(dtype)
    clip_norm = 10.0**clip_scale

    def loss(outputs: Tensor) -> Tensor:
        return (outputs * torch.randn(outputs.shape, dtype=outputs.dtype)).sum() * 10.0**loss_scale

    assert contribution(module, loss, inputs, 1, clip_norm) <= clip_norm


@pytest.mark.parametrize("sizes", [(20, 9), (66, 34)])  # few positions that are added up, or multiplied
@pytest.mark.parametrize("factored", [True, False])
def test_positions_that_cancel_do_not_hide_a_gradient(
    factored: bool, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two huge positions cancel up to rounding: the sum's rounding error must count as gradient."""
    for place in ("per_example.gram_is_cheaper", "native.dispatch.takes_products"):
        monkeypatch.setattr(f"pdpsgd.gradients.{place}", lambda *_: factored)
    for seed in range(40):
        torch.manual_seed(seed)
        module = nn.Linear(*sizes)
        rows = torch.randn(2, 1, sizes[0])
        inputs = torch.cat([rows, rows * (1 + 10.0 ** -(seed % 8)), torch.randn(2, 2, sizes[0]) * 1e-4], 1)
        direction = torch.randn(sizes[1])

        def loss(outputs: Tensor, direction: Tensor = direction) -> Tensor:
            return 1e3 * ((outputs[:, 0] - outputs[:, 1]) @ direction).sum() + outputs[:, 2:].sum()

        for clip_norm in (1e-3, 1.0, 30.0):
            assert contribution(module, loss, inputs, 0, clip_norm) <= clip_norm


def test_each_example_has_its_own_clipping_norm() -> None:
    module = nn.Linear(4, 2, bias=False)
    clipped = ClippedGradients(module)
    module(torch.eye(4) * 10).sum().backward()
    clip_norms = torch.tensor([1.0, 2.0, 0.0, 20.0])
    clipped.clipped_sum(clip_norms, largest_clip_norm=20.0, loss_reduction="sum")
    norms = clipped.sums[module.weight].norm(dim=0).float()
    expected = torch.tensor([1.0, 2.0, 0.0, 200**0.5])
    assert torch.allclose(norms, expected, atol=20 * 2**-10 + 2 * 2**-11)
    assert bool((norms <= clip_norms).all())


def test_clipping_leaves_room_for_rounding_in_parts_of_ones_own_and_of_the_largest_norm() -> None:
    limits = clip_limits(torch.tensor([8.0, 1.0, 8 * 2**-10, 0.0], dtype=torch.float64), 8.0)
    wanted = [8 * (1 - 2**-11) - 8 * 2**-10, 1 - 2**-11 - 8 * 2**-10, 0.0, 0.0]
    assert limits.tolist() == wanted


def test_the_largest_clipping_norm_is_public_and_not_read_off_the_batch() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    for largest, message in ((None, "largest_clip_norm"), (1.5, "<= largest_clip_norm = 1.5. Got 2.0")):
        module(torch.randn(2, 3)).sum().backward()
        with pytest.raises(PdpsgdError, match=message):
            clipped.clipped_sum(torch.tensor([1.0, 2.0]), largest_clip_norm=largest)
    module(torch.randn(2, 3)).sum().backward()
    assert clipped.clipped_sum(torch.tensor([2.0, 2.0])) == 0


def test_physical_batches_add_up_to_the_whole_batch() -> None:
    module, inputs = small_cnn().double(), torch.randn(6, 1, 8, 8, dtype=torch.float64)
    clipped, clip_norms = ClippedGradients(module), torch.linspace(0.1, 3, 6)
    module(inputs).square().sum(1).mean().backward()
    clipped.clipped_sum(clip_norms, largest_clip_norm=3.0)
    whole = {parameter: total.clone() for parameter, total in clipped.sums.items()}
    clipped.zero_sums()
    for first, last in ((0, 1), (1, 4), (4, 4), (4, 6)):
        module(inputs[first:last]).square().sum(1).mean().backward()
        clipped.clipped_sum(clip_norms[first:last], largest_clip_norm=3.0)
    for parameter, total in clipped.sums.items():
        assert torch.allclose(total, whole[parameter], rtol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch_adds_nothing(reduction: str) -> None:
    module = nn.Sequential(small_cnn(), nn.LayerNorm(3))
    clipped = ClippedGradients(module)
    loss = module(torch.zeros(0, 1, 8, 8))
    (loss.mean() if reduction == "mean" else loss.sum()).backward()
    assert clipped.recorded_batch_size == 0
    assert clipped.clipped_sum(torch.zeros(0), loss_reduction=reduction) == 0
    assert all(bool((total == 0).all()) for total in clipped.sums.values())


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_an_empty_batch_adds_nothing_in_recurrent_networks(kind: type[nn.RNNBase]) -> None:
    module = kind(3, 4, batch_first=True)
    clipped = ClippedGradients(module)
    outputs = module(torch.zeros(0, 5, 3))[0]
    assert outputs.shape == (0, 5, 4)
    outputs.sum().backward()
    assert clipped.clipped_sum(torch.zeros(0), loss_reduction="sum") == 0
    assert all(bool((total == 0).all()) for total in clipped.sums.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "embedding"])
def test_a_gradient_that_is_not_finite_counts_as_zero(name: str, value: float) -> None:
    torch.manual_seed(1)
    if name == "embedding":
        module: nn.Module = nn.Embedding(5, 3)
        inputs, poison = torch.randint(5, (3, 4)), torch.tensor([1.0, value, 1.0])
    else:
        build, shape = ARCHITECTURES[name]
        module, inputs, poison = build(), torch.randn(shape), torch.tensor([1.0, value, 1.0])

    def sums(rows: list[int]) -> tuple[int, list[Tensor]]:
        clipped = ClippedGradients(module)
        outputs = module(inputs[rows]).flatten(1).square().sum(1)
        (outputs * poison[rows] * (1e30 if value == 1e38 else 1.0)).sum().backward()
        count = clipped.clipped_sum(torch.ones(len(rows)), loss_reduction="sum")
        clipped.remove()
        return count, list(clipped.sums.values())

    count, found = sums([0, 1, 2])
    assert count >= 1
    alone, expected = sums([0, 2])
    if value != 1e38:
        assert (count, alone) == (1, 0)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_sums_of_a_bfloat16_model_are_kept_in_float64() -> None:
    module = nn.Linear(4, 3).bfloat16()
    clipped = ClippedGradients(module)
    module(torch.randn(300, 4).bfloat16()).sum().backward()
    clipped.clipped_sum(torch.full((300,), 0.01), loss_reduction="sum")
    assert all(total.dtype == torch.float64 for total in clipped.sums.values())
    assert float(clipped.sums[module.bias].norm()) > 0.5


@given(
    norms=st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=9),
    clip_norm=st.just(0.0) | st.floats(2.0**-100, 2.0**126, width=32),
)
def test_weight_times_norm_is_at_most_the_clipping_norm(norms: list[float], clip_norm: float) -> None:
    given_norms = torch.tensor(norms)
    weights = clip_weights(given_norms, torch.full_like(given_norms, clip_norm), clip_norm)
    assert bool(((weights >= 0) & (weights <= 1)).all())
    assert bool((weights.double() * given_norms.double() <= clip_norm).all())


@given(
    squares=st.lists(
        st.floats(0, 2.0**250) | st.sampled_from([float("inf"), float("nan")]), min_size=1, max_size=9
    ),
    clip_norm=st.just(0.0) | st.floats(2.0**-100, 2.0**100, width=32),
    scale=st.sampled_from([1.0, 0.25, 64.0, 1000.0]),
    kind=st.sampled_from([torch.float32, torch.float64]),
)
def test_compiled_weights_clip_as_well_and_are_those_of_the_formula(
    squares: list[float], clip_norm: float, scale: float, kind: torch.dtype
) -> None:
    given_squares = torch.tensor(squares, dtype=torch.float64)
    clip_norms = torch.linspace(0.0, clip_norm, len(squares), dtype=kind)
    found = weigh(given_squares, clip_norms, clip_norm, scale)
    norms = given_squares.sqrt() * scale
    assert torch.allclose(found.norms, norms, rtol=1e-15, atol=0, equal_nan=True)
    assert torch.allclose(found.weights, clip_weights(norms, clip_norms, clip_norm), rtol=1e-12, atol=0)
    assert torch.equal(found.scaled, found.weights * scale)
    assert torch.equal(found.narrow, found.scaled.float())
    assert found.non_finite == int((~norms.isfinite()).sum())
    finite = norms.isfinite()
    assert bool((found.weights[~finite] == 0).all())
    assert bool((found.weights * norms <= clip_norms)[finite].all())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_weights_of_people_are_those_of_the_mean_over_their_rows(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = torch.tensor([4.0, 9.0, 1e-40, float("inf")], dtype=torch.float64)
    clip_norms, starts = torch.tensor([0.5, 2.0, 1.0, 1.0], dtype=kind), torch.tensor([0, 3, 4, 6, 11])
    found = weigh(squares, clip_norms, 2.0, 8.0, starts)
    norms = squares.sqrt() * 8.0 / torch.tensor([3, 1, 2, 5])
    assert torch.allclose(found.norms, norms, rtol=1e-15, atol=0)
    assert torch.allclose(found.weights, clip_weights(norms, clip_norms, 2.0), rtol=1e-12, atol=0)
    monkeypatch.setattr(native, "library", lambda: None)
    plain = weigh(squares, clip_norms, 2.0, 8.0, starts)
    for one, other in zip(found.__dict__.values(), plain.__dict__.values(), strict=True):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-7, atol=0)


@pytest.mark.parametrize("shape", [(300, 40), (20, 6, 40)])
def test_norms_and_sums_are_taken_in_full_precision_also_within_autocast(shape: tuple[int, ...]) -> None:
    module, inputs = nn.Linear(40, 30), torch.randn(shape)
    found = []
    for autocast in (False, True):
        clipped = ClippedGradients(module)
        module(inputs).square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            norms = clipped.per_example_norms(loss_reduction="sum")
            clipped.clipped_sum(torch.ones(shape[0]), loss_reduction="sum")
        found.append((norms, *(total.clone() for total in clipped.sums.values())))
        clipped.remove()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_two_backward_passes_without_a_collection_are_refused() -> None:
    module = small_cnn()
    clipped = ClippedGradients(module)
    module(torch.randn(2, 1, 8, 8)).sum().backward()
    with pytest.raises(PdpsgdError, match="Two backward passes"):
        module(torch.randn(2, 1, 8, 8)).sum().backward()
    clipped.forget()
    assert clipped.recorded_batch_size is None
    module(torch.randn(2, 1, 8, 8)).sum().backward()
    assert clipped.clipped_sum(torch.ones(2)) == 0


def test_backward_twice_through_the_same_graph_is_refused() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    loss = module(torch.randn(2, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PdpsgdError, match="Two backward passes"):
        loss.backward()
    clipped.remove()


def test_collecting_without_a_backward_pass_is_refused() -> None:
    clipped = ClippedGradients(nn.Linear(3, 2))
    with pytest.raises(PdpsgdError, match="backward"):
        clipped.clipped_sum(torch.ones(2))


def test_a_pass_is_forgotten_once_collected() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    module(torch.randn(2, 3)).sum().backward()
    clipped.clipped_sum(torch.ones(2))
    assert clipped.recorded_batch_size is None


def test_the_wrong_number_of_clipping_norms_is_refused() -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    module(torch.randn(2, 3)).sum().backward()
    with pytest.raises(PdpsgdError, match=r"batch of 3 examples .* shape \(2, 2\)"):
        clipped.clipped_sum(torch.ones(3))


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
def test_evaluation_records_nothing(how: str) -> None:
    module = small_cnn()
    clipped = ClippedGradients(module)
    inputs = torch.randn(2, 1, 8, 8)
    if how == "eval":
        module.eval()
        outputs = module(inputs)
        outputs.sum().backward()
        assert module[0].weight.grad is not None
        module.train()
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            module(inputs)
    assert clipped.recorded_batch_size is None


def test_a_submodule_in_evaluation_mode_is_still_clipped() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].eval()
    clipped = ClippedGradients(module)
    module(torch.randn(2, 3)).sum().backward()
    clipped.clipped_sum(torch.ones(2))
    assert float(clipped.sums[module[0].weight].norm()) > 0


def test_remove_restores_the_module_exactly() -> None:
    module = small_cnn()
    before = {name: dict(child.__dict__) for name, child in module.named_modules()}
    names = list(module.state_dict())
    clipped = ClippedGradients(module)
    assert list(module.state_dict()) == names
    module(torch.randn(2, 1, 8, 8)).sum().backward()
    clipped.remove()
    assert {name: dict(child.__dict__) for name, child in module.named_modules()} == before
    module(torch.randn(2, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_copies_and_pickles_of_a_watched_module_stand_on_their_own() -> None:
    module = small_cnn()
    clipped = ClippedGradients(module)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    inputs = torch.randn(2, 1, 8, 8)
    for twin in (copy.deepcopy(module), torch.load(stream, weights_only=False)):
        with torch.no_grad():
            twin[0].weight.zero_()
        assert not torch.allclose(twin(inputs), module(inputs))
        twin(inputs).sum().backward()
        assert twin[0].weight.grad is not None
        assert clipped.recorded_batch_size is None


def test_outputs_are_those_of_the_module_itself() -> None:
    module, inputs = small_cnn().double(), torch.randn(3, 1, 8, 8, dtype=torch.float64)
    expected = module(inputs)
    clipped = ClippedGradients(module)
    assert torch.allclose(module(inputs), expected, rtol=1e-12)
    clipped.remove()


def test_a_second_watcher_is_refused() -> None:
    module = nn.Linear(2, 2)
    clipped = ClippedGradients(module)
    with pytest.raises(PdpsgdError, match="not private yet"):
        ClippedGradients(module)
    clipped.remove()
    ClippedGradients(module).remove()


def test_dropout_works_in_the_general_rule() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(500))

        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(x * self.weight, 0.5, self.training)

    module = Noisy()
    clipped = ClippedGradients(module)
    outputs = module(torch.ones(2, 500))
    outputs.sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")[module.weight]
    assert torch.equal(found, outputs.detach())  # the gradients of what was computed, not of another draw


def test_activation_checkpointing_is_right() -> None:
    from torch.utils.checkpoint import checkpoint

    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(3, 3, dtype=torch.float64)
    clipped = ClippedGradients(module)
    module(inputs).square().sum().backward()
    expected = clipped.per_example_gradients(loss_reduction="sum")
    clipped.forget()
    checkpoint(module, inputs, use_reentrant=False).square().sum().backward()
    found = clipped.per_example_gradients(loss_reduction="sum")
    assert all(torch.allclose(found[parameter], rows) for parameter, rows in expected.items())


def test_sums_lie_side_by_side_and_each_parameter_has_its_own_part() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2).double())
    clipped = ClippedGradients(module)
    assert [(flat.dtype, flat.numel()) for flat in clipped.flat_sums] == [
        (torch.float64, 3 * 4 + 4 + 4 * 2 + 2),
    ]
    for number, total in enumerate(clipped.sums.values()):
        total.fill_(number)
    assert torch.cat([total.flatten().float() for total in clipped.sums.values()]).equal(
        torch.cat([flat.float() for flat in clipped.flat_sums])
    )
    clipped.zero_sums()
    assert not any(bool(total.any()) for total in clipped.sums.values())


class TwoBranches(nn.Module):
    """The first layer's input needs a gradient of its own; the second's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        needed = inputs.detach().requires_grad_()
        out: Tensor = self.first(needed) + self.second(inputs)
        return out


def test_recording_sees_layers_whose_input_needs_a_gradient() -> None:
    model, inputs = TwoBranches(), torch.randn(4, 3)
    clipped = ClippedGradients(model)
    found = []
    for record in (clipped.record, lambda loss: loss.backward()):
        record(model(inputs).square().mean(1).mean())
        found.append(clipped.per_example_gradients())
        clipped.forget()
    clipped.remove()
    for parameter in model.parameters():
        assert found[0][parameter].abs().max() > 0
        assert torch.equal(found[0][parameter], found[1][parameter])


TABLES: dict[str, Any] = {
    "table": lambda: nn.Embedding(9, 5, padding_idx=2),
    "mean of a bag": lambda: nn.EmbeddingBag(9, 5, mode="mean"),
    "sum of a bag": lambda: nn.EmbeddingBag(9, 5, mode="sum"),
    "padded bag": lambda: nn.EmbeddingBag(9, 5, mode="sum", padding_idx=2),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *TABLES])
def test_clipping_in_one_call_gives_the_bits_of_the_steps_one_by_one(
    name: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library() is None:
        pytest.skip("no compiled code")
    torch.manual_seed(0)
    if name in TABLES:
        module, shape = nn.Sequential(TABLES[name](), nn.Linear(5, 2)), (3, 4)
    else:
        build, shape = ARCHITECTURES[name]
        module = build()
    # Rows that do not lie side by side: the code reads copies, which have to be there for as long.
    inputs = torch.randint(9, shape[::-1]).t() if name in TABLES else torch.randn(shape)
    at_once, found = Layers.add_clipped, []
    done: list[bool] = []

    def noting(*args: Any) -> bool:
        done.append(at_once(*args))
        return done[-1]

    for add in (noting, lambda *_: False):
        monkeypatch.setattr(Layers, "add_clipped", add)
        clipped = ClippedGradients(module)
        module(inputs).square().sum().backward()
        of_people = {"starts": torch.tensor([0, 2, 3]), "whose": torch.tensor([1, 0])} if many else {}
        norms = torch.tensor([0.5, 2.0] if many else [0.5, 2.0, 0.0])
        clipped.clipped_sum(norms, largest_clip_norm=2.0, loss_reduction="sum", **of_people)
        found.append([total.clone() for total in clipped.flat_sums])
        clipped.remove()
    assert all(map(torch.equal, *found))
    # A layer that is used twice: what is added up over people is not read at once.
    assert done == [not (many and name == "reused")]


@pytest.mark.parametrize("wrong", ["gradient", "clipping norm"])
def test_clipping_in_one_call_adds_nothing_where_something_is_wrong(wrong: str) -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    outputs = module(torch.ones(2, 3))
    (outputs * torch.tensor([[torch.nan if wrong == "gradient" else 1.0], [1.0]])).sum().backward()
    norms = torch.tensor([1.0, 2.0])
    if wrong == "gradient":
        assert clipped.clipped_sum(norms, largest_clip_norm=2.0, loss_reduction="sum") == 1
        assert torch.cat(clipped.flat_sums).norm() <= 2
    else:
        with pytest.raises(PdpsgdError, match=r"largest_clip_norm = 1\.5\. Got 2\.0"):
            clipped.clipped_sum(norms, largest_clip_norm=1.5, loss_reduction="sum")
        assert not torch.cat(clipped.flat_sums).any()


@pytest.mark.parametrize("largest", [None, 1.0])  # step by step, and at once
def test_a_parameter_that_has_grown_is_refused_and_not_written_beyond_its_sum(largest: float | None) -> None:
    module = nn.Linear(3, 2)
    clipped = ClippedGradients(module)
    module.weight.data, module.bias.data = torch.randn(4, 3), torch.randn(4)
    module(torch.ones(2, 3)).sum().backward()
    with pytest.raises(PdpsgdError, match=r"as they were in the forward pass.* \(4, 3\), not \(2, 3\)"):
        clipped.clipped_sum(torch.ones(2), largest_clip_norm=largest, loss_reduction="sum")
    assert not torch.cat(clipped.flat_sums).any()


def test_signs_beside_the_numbers_do_not_change_how_others_are_added() -> None:
    """Somebody without a finite gradient adds nothing, and all others what they add without a record there."""

    class OfImaginaryParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 7)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(torch.complex(inputs, inputs).conj().imag)

    clipped, inputs = ClippedGradients(model := OfImaginaryParts()), torch.randn(200, 6)
    found = []
    for of_one in (0.0, float("inf")):
        clipped.zero_sums()
        outputs = model(inputs)
        (outputs.square().sum() + (of_one * outputs[100].sum() if of_one else 0)).backward()
        clip_norms = torch.full((200,), 2.0)
        clip_norms[100] = 2 * bool(of_one)
        assert clipped.clipped_sum(clip_norms, largest_clip_norm=2.0, loss_reduction="sum") == bool(of_one)
        found.append(torch.cat(clipped.flat_sums).clone())
    clipped.remove()
    assert torch.equal(*found)
