"""Data and model of a run; features that need no training are computed once and kept in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from experiments.kept_features import kept_features
from experiments.random_processes import STARTS as PROCESSES
from experiments.random_processes import start_from_processes
from experiments.settings import VALIDATION_PEOPLE, Setting
from pdpsgd.data import benchmarks as datasets
from pdpsgd.data.benchmarks.catalog import Normalization, benchmark
from pdpsgd.errors import check_one_of
from pdpsgd.models import networks as models
from pdpsgd.models.pretraining import STARTS, start_at_zero, start_from_synthetic
from pdpsgd.models.standardization import PIXELS

Pair = tuple[Tensor, Tensor]
FEATURES = (
    "pixels",
    "unit-pixels",
    "signed-pixels",
    "standardised-pixels",
    "locally-standardised-pixels",
    "scattering",
)
"""Pixels are normalized by fixed constants; unit pixels are from 0 to 1, as they are in the files; signed pixels from
-1 to 1; standardized pixels have mean 0 and standard deviation 1 within each image, or around each pixel."""


def data_of(setting: Setting) -> tuple[Pair, Pair]:
    """Load training and test people; for a search, 5,000 of the training people are held out instead."""
    loaded = features_of(setting.dataset, setting.recipe.features)
    inputs, targets = loaded.train_inputs, loaded.train_targets
    if setting.split == "test":
        return (inputs, targets), (loaded.test_inputs, loaded.test_targets)
    held_out = min(VALIDATION_PEOPLE, len(targets) // 5)
    return (inputs[:-held_out], targets[:-held_out]), (inputs[-held_out:], targets[-held_out:])


def model_of(setting: Setting) -> nn.Module:
    """Make the recipe's network for the data set; on scattering features a linear model that starts at zero."""
    check_one_of((*STARTS, *PROCESSES), start=setting.recipe.start)
    check_one_of(("paper", "idp"), network=setting.recipe.network)
    shape = features_of(setting.dataset, setting.recipe.features).input_shape
    if setting.recipe.features == "scattering":
        linear = models.by_name("linear", input_shape=shape, classes=10)
        start_at_zero(linear)
        return linear
    name = {"digits": "digits", "svhn": "svhn-cnn"}.get(setting.dataset, "mnist-cnn")
    if setting.recipe.network == "idp":
        name = f"idp-{name}"
    network = models.by_name(name, input_shape=shape, classes=10, activation=setting.recipe.activation)
    if setting.recipe.start == "drawn":
        changed = partial(
            _changed,
            features=setting.recipe.features,
            normalization=benchmark(setting.dataset).normalization,
        )
        start_from_synthetic(network, setting.dataset, features_of=changed)
    elif setting.recipe.start in PROCESSES and isinstance(network, nn.Sequential):
        constants = benchmark(setting.dataset).normalization
        start_from_processes(
            network, setting.recipe.start, mean=constants.mean[0], deviation=constants.std[0]
        )
    return network


@lru_cache(maxsize=1)
def features_of(dataset: str, features: str) -> datasets.Dataset:
    """Load a benchmark with these features as inputs."""
    check_one_of(FEATURES, features=features)
    loaded = datasets.load(dataset)
    if features == "scattering":
        return _scattered(loaded)
    return replace(
        loaded,
        train_inputs=_changed(loaded.train_inputs, features, loaded.normalization),
        test_inputs=_changed(loaded.test_inputs, features, loaded.normalization),
    )


_PIXELS: dict[str, Callable[[Tensor, Normalization], Tensor]] = {
    "unit-pixels": lambda images, normalization: normalization.undone(images),
    "signed-pixels": lambda images, normalization: 2 * normalization.undone(images) - 1,
}
"""As they are in the files, or twice that less one; others are in `standardization`."""


def _changed(images: Tensor, features: str, normalization: Normalization) -> Tensor:
    return _PIXELS[features](images, normalization) if features in _PIXELS else PIXELS[features](images)


def _scattered(loaded: datasets.Dataset) -> datasets.Dataset:
    """Compute scattering features, rounded to half precision so that fresh and stored ones are the same."""
    from pdpsgd.models.scattering import scattering_features

    def compute() -> dict[str, Tensor]:
        return {
            name: scattering_features(inputs, dtype=torch.float16)
            for name, inputs in (("train", loaded.train_inputs), ("test", loaded.test_inputs))
        }

    kept = kept_features(f"{loaded.name}-scattering", compute)
    return replace(loaded, train_inputs=kept["train"].float(), test_inputs=kept["test"].float())
