"""Drawn digits look like digits, come from nothing but a seed, and are worth starting from."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from pdpsgd.data.benchmarks import load
from pdpsgd.data.benchmarks.catalog import benchmark
from pdpsgd.errors import PdpsgdError
from pdpsgd.models import pretraining as starts
from pdpsgd.models.networks import digits_network
from pdpsgd.models.pretraining import start_from_synthetic
from pdpsgd.models.synthetic_digits import DATASETS, make_digits
from pdpsgd.training.evaluation import evaluate
from pdpsgd.training.fitting import fit
from pdpsgd.training.presets import preset


@pytest.mark.parametrize("dataset", DATASETS)
def test_pictures_are_of_the_benchmark_s_shape_and_range(dataset: str) -> None:
    images, digits = make_digits(dataset, 300)
    assert images.shape == (300, *benchmark(dataset).input_shape)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert images.isfinite().all()
    assert digits.unique().tolist() == list(range(10))


@pytest.mark.parametrize("dataset", DATASETS)
def test_pictures_are_a_function_of_the_seed(dataset: str) -> None:
    before = torch.get_rng_state()
    images, digits = make_digits(dataset, 20, seed=1)
    again, same = make_digits(dataset, 20, seed=1)
    other, _ = make_digits(dataset, 20, seed=2)
    assert torch.equal(images, again)
    assert torch.equal(digits, same)
    assert not torch.equal(images, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("digit", range(10))
def test_a_digit_is_written_in_the_middle_of_the_page(digit: int) -> None:
    images = DATASETS["mnist"](torch.full((200,), digit), torch.Generator().manual_seed(0))
    ink = images.sum((1, 2, 3))
    inside = images[..., 2:-2, 2:-2].sum((1, 2, 3))
    assert float(ink.min()) > 10
    assert float((inside / ink).min()) > 0.8


def test_a_network_that_has_seen_drawn_digits_only_reads_real_ones() -> None:
    digits = load("digits")
    torch.manual_seed(0)
    model = digits_network()
    people = (digits.train_inputs, digits.train_targets)
    before = evaluate(model, people, cross_entropy).accuracy
    told: list[tuple[str, int, int]] = []
    start_from_synthetic(model, "digits", pictures=4_000, progress=lambda *what: told.append(what))
    after = evaluate(model, people, cross_entropy).accuracy
    assert before is not None
    assert after is not None
    assert before < 0.3
    assert after > 0.5
    assert told[-1][1] == told[-1][2]
    assert {name for name, _, _ in told} == {"Digits generated", "Learned from them"}


def test_a_start_is_the_same_for_the_same_seed_whatever_else_is_random() -> None:
    def started(before: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10)).eval()
        torch.manual_seed(before)
        before_it = model[2].weight.clone()
        start_from_synthetic(model, "digits", pictures=200)
        assert not model.training
        assert not torch.equal(model[2].weight, before_it)
        return model[2].weight.detach()

    assert torch.equal(started(1), started(2))


def test_private_training_goes_on_from_there() -> None:
    digits = load("digits")
    model = digits_network()
    start_from_synthetic(model, "digits", pictures=200)
    assert all(parameter.grad is None for parameter in model.parameters())
    data = (digits.train_inputs[:100], digits.train_targets[:100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(model, data, [1.0] * 100, steps=2, batch_size=20, seed=0, progress=False)
    assert all((level.proven_epsilon or 9) <= level.epsilon for level in result.plan.levels)


def test_a_preset_starts_its_network_from_drawn_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(model: object, dataset: str, **options: object) -> None:
        seen.append(dataset)

    monkeypatch.setattr(starts, "start_from_synthetic", noted)
    digits = load("digits")
    for name in ("mnist", "mnist-drawn"):
        made = replace(preset(name), dataset="digits", model="digits")
        made.make_model(made.prepare(digits))
    assert seen == ["digits"]


def test_what_cannot_be_drawn_is_refused_with_what_can() -> None:
    with pytest.raises(PdpsgdError, match="svhn"):
        make_digits("fashion-mnist", 10)
    with pytest.raises(PdpsgdError, match="pictures"):
        make_digits("mnist", 0)
