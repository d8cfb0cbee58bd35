"""Named recipes: what did best in the search for each benchmark, for budgets around epsilon 0.5 to 1.

What they reach is on record in docs/results (`search.md`, `networks.md`, `features.md`). They were found with
the data of those benchmarks; on other data they are a start, not a promise.

    made = pdpsgd.training.presets.preset("mnist")
    data = made.prepare(pdpsgd.data.benchmarks.loading.load("mnist"))
    pdpsgd.fit(made.make_model(data), (data.train_inputs, data.train_targets), budgets, preset="mnist")

>>> preset("mnist").fit_options()["batch_size"]
1024
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from pdpsgd.errors import check_one_of, fail

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.data.benchmarks.loading import Dataset
    from pdpsgd.models.pretraining import Progress

FEATURES = ("pixels", "standardised-pixels", "locally-standardised-pixels", "scattering")


class HasShape(Protocol):
    """Data that a network can be made for."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""


@dataclass(frozen=True)
class Preset:
    """A network and the settings of its training, by which `fit` and `train` can be called.

    `learning_rate` is the optimizer's own. Gradients are clipped far below their size, so that all people
    count alike; the learning rate makes up for it. With `start` "drawn", the network has seen synthetic digits
    before (see `pdpsgd.models.pretraining`).
    """

    name: str
    summary: str
    dataset: str
    model: str
    activation: str | None
    features: str
    steps: int
    batch_size: int
    learning_rate: float
    max_grad_norm: float
    momentum: float = 0.0
    schedule: str = "cosine"
    weight_average: float | None = None
    augment: str | None = None
    views: int = 1
    start: str = "random"

    def fit_options(self) -> dict[str, Any]:
        """Keyword arguments of `pdpsgd.fit`."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "max_grad_norm": self.max_grad_norm,
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "schedule": self.schedule,
            "weight_average": self.weight_average,
            "augment": self.augment,
            "views": self.views,
        }

    def prepare(self, dataset: Dataset) -> Dataset:
        """Return the data set with the preset's features as inputs."""
        self.check_is_for(dataset.name)
        return replace(
            dataset,
            train_inputs=self.features_of(dataset.train_inputs),
            test_inputs=self.features_of(dataset.test_inputs),
        )

    def check_is_for(self, dataset: str) -> None:
        """Refuse another data set than the preset's."""
        if dataset != self.dataset:
            fail(f"Expected the data set {self.dataset!r} for preset {self.name!r}. Got {dataset!r}.")

    def features_of(self, images: Tensor) -> Tensor:
        """Say what the preset's network is given of these images, each image's by itself."""
        return features_of(self.features, images)

    def make_model(self, data: HasShape, *, progress: Progress | None = None) -> nn.Module:
        """Make the preset's network for data with its features.

        One that starts from synthetic digits is trained on them first, which takes a minute; `progress` is told of it.
        """
        from pdpsgd.models import networks as models
        from pdpsgd.models.pretraining import STARTS, start_at_zero, start_from_synthetic

        check_one_of(STARTS, start=self.start)
        made = models.by_name(
            self.model,
            input_shape=data.input_shape,
            classes=len(data.classes),
            activation=self.activation,
        )
        if self.model == "linear":
            start_at_zero(made)
        if self.start == "drawn":
            start_from_synthetic(made, self.dataset, features_of=self.features_of, progress=progress)
        return made


def features_of(name: str, images: Tensor) -> Tensor:
    """Compute the features of that name, each image's from that image alone."""
    check_one_of(FEATURES, features=name)
    if name == "scattering":
        from pdpsgd.models.scattering import scattering_features

        return scattering_features(images)
    from pdpsgd.models.standardization import PIXELS

    return PIXELS[name](images)


_CNN = Preset(
    name="mnist",
    summary="the paper's CNN with tanh, on four views of each image",
    dataset="mnist",
    model="mnist-cnn",
    activation="tanh",
    features="pixels",
    steps=600,
    batch_size=1024,
    learning_rate=30.0,
    max_grad_norm=0.1,
    augment="shifts",
    views=4,
)
_LINEAR = Preset(
    name="mnist-scattering",
    summary="a linear model on wavelet features",
    dataset="mnist",
    model="linear",
    activation=None,
    features="scattering",
    steps=400,
    batch_size=2048,
    learning_rate=20.0,
    max_grad_norm=0.1,
)
_SVHN = replace(
    _CNN,
    name="svhn",
    summary="the paper's CNN with tanh, on standardized images",
    dataset="svhn",
    model="svhn-cnn",
    features="standardised-pixels",
    steps=400,
    learning_rate=40.0,
    augment=None,
    views=1,
)
PRESETS = {
    made.name: made
    for made in (
        _CNN,
        _LINEAR,
        replace(
            _CNN,
            name="fashion-mnist",
            summary="the paper's CNN",
            dataset="fashion-mnist",
            activation="relu",
            steps=1000,
            batch_size=2048,
            augment=None,
            views=1,
        ),
        replace(_LINEAR, name="fashion-mnist-scattering", dataset="fashion-mnist", learning_rate=40.0),
        _SVHN,
        replace(_LINEAR, name="svhn-scattering", dataset="svhn", learning_rate=40.0),
        replace(
            _CNN,
            name="mnist-drawn",
            summary="the paper's CNN with tanh, started from synthetic digits",
            steps=300,
            learning_rate=20.0,
            augment=None,
            views=1,
            start="drawn",
        ),
        replace(
            _SVHN,
            name="svhn-drawn",
            summary="the paper's CNN with tanh, started from synthetic house numbers, on images standardized locally",
            features="locally-standardised-pixels",
            steps=800,
            learning_rate=20.0,
            augment="shifts",
            views=4,
            start="drawn",
        ),
    )
}


def preset(name: str) -> Preset:
    """Return the preset of that name."""
    check_one_of(tuple(PRESETS), preset=name)
    return PRESETS[name]
