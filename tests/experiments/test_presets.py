"""Presets can be given to `fit` as they are, and are what the search tried."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.record import Record
from experiments.search import GRIDS, chosen_recipe, trials
from pdpsgd.data.benchmarks import load
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.networks import digits_network
from pdpsgd.training.fitting import fit
from pdpsgd.training.presets import PRESETS, Preset, preset

SEARCH = Record(Path(__file__).parents[2] / "docs" / "results" / "search.jsonl")


def kind_of(made: Preset) -> str:
    """The kind of training in the search that a preset is of."""
    return "scattering" if made.features == "scattering" else "drawn" if made.start == "drawn" else "best"


@pytest.mark.parametrize("made", PRESETS.values(), ids=lambda made: made.name)
def test_a_preset_fits_the_signature_of_fit(made: Preset) -> None:
    assert set(made.fit_options()) <= set(inspect.signature(fit).parameters)


@pytest.mark.parametrize("made", PRESETS.values(), ids=lambda made: made.name)
def test_a_preset_is_one_of_the_recipes_that_the_search_tried(made: Preset) -> None:
    recipe, rates = GRIDS[made.dataset, kind_of(made)]
    for name in (
        "steps",
        "batch_size",
        "max_grad_norm",
        "features",
        "views",
        "momentum",
        "schedule",
        "start",
    ):
        assert getattr(made, name) == getattr(recipe, name), name
    assert made.activation in (None, recipe.activation)
    assert made.augment == ("shifts" if recipe.views > 1 else None)
    assert made.learning_rate in [pytest.approx(rate / recipe.max_grad_norm) for rate in rates]


@pytest.mark.parametrize("made", PRESETS.values(), ids=lambda made: made.name)
def test_a_preset_has_the_learning_rate_that_the_search_chose(made: Preset) -> None:
    chosen = chosen_recipe(SEARCH, trials(made.dataset, "pdp-sgd-exact", kind_of(made)))
    assert chosen is not None
    assert made.learning_rate == pytest.approx(chosen.learning_rate / chosen.max_grad_norm)


def test_fit_takes_from_a_preset_what_it_is_not_told() -> None:
    digits = load("digits")
    data = (digits.train_inputs[:200], digits.train_targets[:200])
    given = {"steps": 3, "batch_size": 32, "seed": 0, "progress": False}
    result = fit(digits_network(), data, [1.0] * 200, preset="mnist", **given)
    assert (result.plan.steps, result.plan.max_grad_norm) == (3, preset("mnist").max_grad_norm)
    assert result.settings["learning_rate"] == preset("mnist").learning_rate
    plain = fit(digits_network(), data, [1.0] * 200, **given)
    assert plain.plan.max_grad_norm == 1.0
    assert plain.settings["learning_rate"] != preset("mnist").learning_rate  # by the plan's noise


def test_a_preset_s_learning_rate_is_not_used_at_another_clipping_norm() -> None:
    digits = load("digits")
    data = (digits.train_inputs[:200], digits.train_targets[:200])
    given = {"steps": 3, "batch_size": 32, "seed": 0, "progress": False}
    with pytest.raises(PdpsgdError, match="or a learning_rate of your own"):
        fit(digits_network(), data, [1.0] * 200, preset="mnist", max_grad_norm=1.0, **given)
    told = fit(
        digits_network(), data, [1.0] * 200, preset="mnist", max_grad_norm=1.0, learning_rate=2.0, **given
    )
    assert told.settings["learning_rate"] == 2.0


def test_several_views_are_taken_from_a_preset() -> None:
    digits = load("digits")
    data = (digits.train_inputs[:200], digits.train_targets[:200])
    given = {"steps": 3, "batch_size": 32, "seed": 0, "progress": False, "preset": "mnist"}

    def rows_seen(**options: object) -> tuple[int, dict[str, object]]:
        seen: list[int] = []
        model = digits_network()
        model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
        result = fit(model, data, [1.0] * 200, **{**given, **options})
        return max(seen), dict(result.settings)

    four, settings = rows_seen()
    one, _ = rows_seen(views=1)
    off, switched_off = rows_seen(augment="none")
    assert four > 2 * one
    assert off == one
    assert (settings["augment"], settings["views"]) == ("shifts", 4)
    assert (switched_off["augment"], switched_off["views"]) == (None, 1)
    with pytest.raises(PdpsgdError, match=r"views to be a whole number >= 1. Got 0"):
        rows_seen(views=0)


def test_a_preset_that_standardises_images_does_so() -> None:
    digits = load("digits")
    prepared = replace(preset("svhn"), dataset="digits").prepare(digits)
    assert prepared.train_inputs.mean((1, 2, 3)).abs().max() < 1e-5
    assert torch.equal(prepared.test_targets, digits.test_targets)


def test_a_preset_refuses_another_data_set() -> None:
    with pytest.raises(PdpsgdError, match="digits"):
        preset("mnist").prepare(load("digits"))


def test_a_linear_preset_starts_at_zero() -> None:
    digits = load("digits")
    made = replace(preset("mnist-scattering"), dataset="digits", features="pixels")
    model = made.make_model(made.prepare(digits))
    assert all(float(parameter.detach().abs().max()) == 0 for parameter in model.parameters())


def test_an_unknown_preset_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PdpsgdError, match="mnist-scattering"):
        preset("cifar")
