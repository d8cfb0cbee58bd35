"""What has to be known of a trained model to use it: network, preprocessing, classes; beside its weights, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets.files import ANY, Nullable, OneOf, Optional, Range, check_shape, parse_json
from pdpsgd.data.preprocessing import Preprocessing
from pdpsgd.data.schema import NOT_PRIVATE
from pdpsgd.errors import fail
from pdpsgd.training.file_shapes import ENCODER
from pdpsgd.training.regression import TASKS
from pdpsgd.training.temperature import Calibration

if TYPE_CHECKING:
    from torch import nn

FORMAT = "pdpsgd-model"
FORMAT_VERSION = 1
WITHHELD = (
    "How records become inputs, and the names of the classes, were read from the data, and nobody has confirmed them "
    "as public knowledge: they are in private/model.json of the run folder alone."
)
_SIZE = Range(1, whole=True)
_SHAPE = {
    "format": OneOf((FORMAT,)),
    "format_version": _SIZE,
    "task": OneOf(TASKS),
    "confirmed": bool,
    "classes": [str],
    "label_range": Optional([Range()]),
    "features": Optional(str),
    "encoder": Optional(ENCODER),
    "not_for_release": Optional(str),
    "calibration": Optional({"temperature": Range(1e-4, 1e4), "bias": [Range()], "fitted_on": str}),
    "inputs": Optional({"shape": Nullable([_SIZE])}),
    "network": {
        "input_shape": Nullable([_SIZE]),
        "outputs": Nullable(_SIZE),
        "layers": Nullable([[ANY]]),
        "name": Nullable(str),
        "activation": Nullable(str),
        "models": _SIZE,
    },
}


@dataclass(frozen=True)
class NetworkDescription:
    """A network: its layers if they stand in a row, else the name under which it is made again.

    `models` counts the networks whose outputs are averaged, where a plan trained several.
    """

    input_shape: tuple[int, ...] | None = None
    outputs: int | None = None
    layers: list[list[Any]] | None = None
    name: str | None = None
    activation: str | None = None
    models: int = 1

    @classmethod
    def of(cls, module: nn.Module, **known: Any) -> NetworkDescription:
        """Describe a module; `known` are fields that it does not tell by itself."""
        from pdpsgd.models.architecture import importable_name, layers_of

        described = {"layers": layers_of(module), "name": importable_name(module)}
        return cls(**{**described, **{key: value for key, value in known.items() if value is not None}})

    def make(self, place: str) -> nn.Module:
        """Make the network, without its weights."""
        made = [self._make_one(place) for _ in range(self.models)]
        if self.models == 1:
            return made[0]
        from pdpsgd.training.ensemble import WeightedModels

        return WeightedModels([(1.0, each) for each in made])

    def _make_one(self, place: str) -> nn.Module:
        if self.layers is not None:
            from pdpsgd.models.architecture import make_layers

            return make_layers(self.layers, place=place)
        if self.name is None or self.input_shape is None:
            fail(
                f"Expected a network that can be made again from {place}: layers of torch in a row, or a class or "
                "function in a module. Got another: give it, as in load_run(RUN, model=the_network)."
            )
        from pdpsgd.models.networks import by_name

        return by_name(
            self.name, input_shape=self.input_shape, classes=self.outputs, activation=self.activation
        )


@dataclass(frozen=True)
class ModelDescription:
    """A model but for its weights: what it is given, what it is, and what its answers mean.

    `encoder` is what reads texts, by its description (`models.encoders`), with adapters or without.
    `not_for_release` says why the model is not, where that is so: it stays with the weights wherever they are copied.
    `shape` is that of one record before `features` are made of it. `confirmed` is false where ranges, categories or
    classes were read from the data, which no promise covers: such a description is not public.
    """

    network: NetworkDescription
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    shape: tuple[int, ...] | None = None
    features: str | None = None
    encoder: Mapping[str, Any] | None = None
    task: str = "classification"
    classes: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = None
    confirmed: bool = True
    withheld: bool = False
    calibration: Calibration | None = None
    not_for_release: str | None = None

    @property
    def label(self) -> str | None:
        """The column of a table that is predicted."""
        return None if self.preprocessing.schema is None else self.preprocessing.schema.label

    def public_part(self) -> ModelDescription:
        """Leave out what was read from the data."""
        if self.confirmed:
            return self
        return replace(self, preprocessing=Preprocessing(), classes=(), label_range=None, withheld=True)

    def to_json(self) -> str:
        """Write it as the text of `model.json`."""
        network = self.network
        notes = [] if self.confirmed else [WITHHELD if self.withheld else NOT_PRIVATE]
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "pdpsgd": version("pdpsgd"),
            "confirmed": self.confirmed,
            "notes": notes,
            "task": self.task,
            "label": self.label,
            "classes": list(self.classes),
            "label_range": None if self.label_range is None else list(self.label_range),
            "inputs": None
            if self.withheld
            else {"shape": _listed(self.shape), **self.preprocessing.to_dict()},
            "features": self.features,
            **({} if self.not_for_release is None else {"not_for_release": self.not_for_release}),
            **({} if self.encoder is None else {"encoder": dict(self.encoder)}),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "network": {
                "input_shape": _listed(network.input_shape),
                "outputs": network.outputs,
                "layers": network.layers,
                "name": network.name,
                "activation": network.activation,
                "models": network.models,
            },
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, place: str) -> ModelDescription:
        """Read a description; errors name the place.

        Args:
            text: What `to_json` wrote.
            place: The file it is from.

        Returns:
            The description.

        Raises:
            PdpsgdError: If it is damaged, of another kind, or of a version that is not known here.
        """
        content = parse_json(text, place)
        known = content.get("format_version") if isinstance(content, dict) else None
        if isinstance(known, int) and known > FORMAT_VERSION:
            fail(
                f"Expected a model of format version {FORMAT_VERSION} or less in {place}. Got {known}: load it with "
                f"the version of pdpsgd that wrote it, {content.get('pdpsgd')!r}."
            )
        check_shape(place, content, _SHAPE)
        inputs, network, limits = content.get("inputs"), content["network"], content.get("label_range")
        fitted = content.get("calibration")
        if limits is not None and not (len(limits) == 2 and limits[0] < limits[1]):
            fail(f"Expected label_range as [low, high] in {place}. Got {limits!r}.")
        return cls(
            network=NetworkDescription(
                input_shape=_tupled(network["input_shape"]),
                outputs=network["outputs"],
                layers=network["layers"],
                name=network["name"],
                activation=network["activation"],
                models=network["models"],
            ),
            preprocessing=Preprocessing()
            if inputs is None
            else Preprocessing.from_dict(inputs, place=f"{place}: inputs"),
            shape=None if inputs is None else _tupled(inputs["shape"]),
            features=content.get("features"),
            encoder=content.get("encoder"),
            task=content["task"],
            classes=tuple(content["classes"]),
            label_range=None if limits is None else (limits[0], limits[1]),
            confirmed=content["confirmed"],
            withheld=inputs is None,
            calibration=None if fitted is None else Calibration.from_dict(fitted),
            not_for_release=content.get("not_for_release"),
        )


def _listed(shape: tuple[int, ...] | None) -> list[int] | None:
    return None if shape is None else list(shape)


def _tupled(shape: list[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)
