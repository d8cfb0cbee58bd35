"""Named recipes: what did best in the search for each benchmark, for budgets around epsilon 0.5 to 1.

What they reach is on record in docs/results (`search.md`, `table-1.md`, `features.md`). They were found with
the data of those benchmarks; on other data they are a start, not a promise.

>>> preset("mnist").fit_options()["batch_size"]
1024
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import check_one_of, fail

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.datasets import Dataset


@dataclass(frozen=True)
class Preset:
    """A network and the settings of its training, by which `fit` and `train` can be called.

    `learning_rate` is the optimizer's own. Gradients are clipped far below their size, so that all people
    count alike; the learning rate makes up for it.
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
        }

    def prepare(self, dataset: Dataset) -> Dataset:
        """The data set with the preset's features as inputs; the same one if those are its pixels."""
        if dataset.name != self.dataset:
            fail(f"Expected the data set {self.dataset!r} for preset {self.name!r}. Got {dataset.name!r}.")
        if self.features == "pixels":
            return dataset
        from pdpsgd.scattering import scattered

        return scattered(dataset)

    def make_model(self, dataset: Dataset) -> nn.Module:
        """The preset's network for a data set that `prepare` gave back."""
        from torch.nn import init

        from pdpsgd import models

        made = models.by_name(
            self.model,
            input_shape=dataset.input_shape,
            classes=len(dataset.classes),
            activation=self.activation,
        )
        if self.model == "linear":  # convex: zero is as good a start as any, and needs no luck
            for parameter in made.parameters():
                init.zeros_(parameter)
        return made


PRESETS = {
    made.name: made
    for made in (
        Preset(
            name="mnist",
            summary="the paper's CNN with tanh",
            dataset="mnist",
            model="mnist-cnn",
            activation="tanh",
            features="pixels",
            steps=300,
            batch_size=1024,
            learning_rate=40.0,
            max_grad_norm=0.1,
        ),
        Preset(
            name="mnist-scattering",
            summary="a linear model on wavelet features: the most accurate",
            dataset="mnist",
            model="linear",
            activation=None,
            features="scattering",
            steps=400,
            batch_size=2048,
            learning_rate=20.0,
            max_grad_norm=0.1,
        ),
        Preset(
            name="fashion-mnist",
            summary="the paper's CNN",
            dataset="fashion-mnist",
            model="mnist-cnn",
            activation="relu",
            features="pixels",
            steps=300,
            batch_size=1024,
            learning_rate=80.0,
            max_grad_norm=0.1,
        ),
        Preset(
            name="fashion-mnist-scattering",
            summary="a linear model on wavelet features: the most accurate",
            dataset="fashion-mnist",
            model="linear",
            activation=None,
            features="scattering",
            steps=400,
            batch_size=2048,
            learning_rate=40.0,
            max_grad_norm=0.1,
        ),
        Preset(
            name="svhn",
            summary="the paper's CNN",
            dataset="svhn",
            model="svhn-cnn",
            activation="relu",
            features="pixels",
            steps=400,
            batch_size=1024,
            learning_rate=4.0,
            max_grad_norm=1.0,
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name."""
    check_one_of(tuple(PRESETS), preset=name)
    return PRESETS[name]
