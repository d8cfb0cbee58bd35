"""Options are defined once, and each value knows where it comes from."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import typer.main

from pdpsgd.cli import app
from pdpsgd.errors import PdpsgdError
from pdpsgd.training.fitting import fit
from pdpsgd.training.options import TrainingOptions
from pdpsgd.training.presets import PRESETS, preset

ABOUT_DATA = {"record_ids", "record_of_person", "test_data", "test_budgets", "test_tiers", "test_ids"}


def test_what_is_said_comes_before_the_preset_and_the_preset_before_defaults():
    options = TrainingOptions(preset="mnist", learning_rate=2.0, momentum=0.5, from_file=["momentum"])
    assert (options.learning_rate, options.momentum, options.views) == (2.0, 0.5, 4)
    found = {name: options.sources[name] for name in ("learning_rate", "momentum", "views", "optimizer")}
    assert found == {"learning_rate": "given", "momentum": "file", "views": "preset", "optimizer": "default"}


def test_a_value_that_happens_to_be_the_default_is_given_all_the_same():
    options = TrainingOptions(preset="mnist", learning_rate=1.0, max_grad_norm=1.0)
    assert options.sources["learning_rate"] == "given"
    assert options.learning_rate == 1.0
    same = TrainingOptions(preset="mnist", learning_rate=preset("mnist").learning_rate)
    assert same.said("learning_rate")


def test_changes_keep_what_was_said_and_ask_the_preset_again():
    options = TrainingOptions(preset="mnist", momentum=0.5, from_file=["momentum"]).changed(preset="svhn")
    assert (options.steps, options.momentum) == (preset("svhn").steps, 0.5)
    assert (options.sources["momentum"], options.sources["steps"]) == ("file", "preset")


def test_defaults_that_depend_on_data_replace_defaults_only():
    options = TrainingOptions(steps=30).with_defaults(steps=7, evaluate_every=3).changed(seed=1)
    assert (options.steps, options.evaluate_every, options.seed) == (30, 3, 1)
    assert options.sources["evaluate_every"] == "default"


def test_a_given_noise_multiplier_leaves_the_number_of_steps_open():
    assert TrainingOptions(preset="mnist", noise_multiplier=1.1).steps is None
    assert TrainingOptions(preset="mnist", plan_options={"noise_multiplier": 1.1}).steps is None
    assert TrainingOptions(preset="mnist", noise_multiplier=1.1, steps=600).steps == 600


def test_without_an_augmentation_there_is_one_view():
    assert TrainingOptions(preset="mnist", augment="none").views == 1
    with pytest.raises(PdpsgdError, match="Expected augment"):
        TrainingOptions(preset="mnist", augment="none", views=4)


def test_every_keyword_of_fit_is_an_option_or_about_the_data():
    keywords = {
        name
        for name, parameter in inspect.signature(fit).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords - ABOUT_DATA - {"options", "plan", "reservation"} <= set(TrainingOptions.declared())


@pytest.mark.parametrize("made", PRESETS.values(), ids=lambda made: made.name)
def test_a_preset_speaks_of_options_alone(made):
    assert set(made.fit_options()) <= set(TrainingOptions.declared())
    assert all(getattr(TrainingOptions(preset=made.name), k) == v for k, v in made.fit_options().items())


def test_the_command_has_an_option_for_each_field_with_its_help():
    command = typer.main.get_command(app).commands["train"]
    offered = {parameter.name: parameter for parameter in command.params}
    for name, known in TrainingOptions.declared().items():
        if known.kind is not None:
            assert offered[name].help == known.help, name


def test_help_is_a_short_noun_phrase():
    for each in fields(TrainingOptions):
        if "option" in each.metadata:
            text = each.metadata["option"].help
            assert len(text) < 70, text
            assert not text.endswith("."), text
