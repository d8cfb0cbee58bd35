"""A trained model in use: `load_run(RUN).predict(rows)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pdpsgd.budgets.files import read_text
from pdpsgd.data.remarks import Remarks
from pdpsgd.data.rows import Rows, read_rows
from pdpsgd.engine.batches import call
from pdpsgd.errors import PdpsgdError, fail, warn
from pdpsgd.models.adapters import AdaptedEncoder, encoder_of, load_adapted
from pdpsgd.models.last_layer import LastLayer, states
from pdpsgd.training.model_description import WITHHELD, ModelDescription
from pdpsgd.training.presets import features_of
from pdpsgd.training.regression import in_range
from pdpsgd.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.models.encoders import Encoder

AT_ONCE = 16_384
"""Rows of a file that are held in memory together."""
TEXTS_AT_ONCE = 64
"""Texts, of which each takes an encoder a while."""
THROUGH_THE_NETWORK = 1_024


@dataclass(frozen=True, eq=False)
class Predictions:
    """The answers for some rows: one value each, and the probability of each class where there are classes."""

    rows: Rows
    values: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float32] | None = None


class TrainedModel:
    """A trained network together with all that was done to records before it saw them.

    Using a model is post-processing: it costs no more privacy, however often and on whatever rows it is done.
    """

    def __init__(self, network: nn.Module, description: ModelDescription) -> None:
        self.network = network.eval()
        self.description = description

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the columns of `predict_proba`."""
        return self.description.classes

    def predict(self, rows: Any) -> npt.NDArray[Any]:
        """Predict the class of each row by its name (its number, if classes have no names), or the number of each.

        Args:
            rows: A pandas or polars frame; an array or tensor, for models of arrays or images; or the path of a
                .csv, .parquet or .npz file, an image, or a folder of images. Labels, ids and budgets are not needed.

        Returns:
            One value for each row.

        Raises:
            PdpsgdError: If the rows are not such as the model was trained on.
        """
        return _joined([part.values for part in self._warned(rows)])

    def predict_proba(self, rows: Any) -> npt.NDArray[np.float32]:
        """Predict the probability of each class for each row; for the arguments see `predict`."""
        if self.description.task != "classification":
            fail(f"Expected a model of classes, to have probabilities. Got a {self.description.task}.")
        return _joined([part.probabilities for part in self._warned(rows)])

    @property
    def rows_at_once(self) -> int:
        """How many rows of a file are held in memory together, unless somebody says otherwise."""
        return AT_ONCE if self.description.encoder is None else TEXTS_AT_ONCE

    def batches(
        self, rows: Any, *, at_once: int | None = None, remarks: Remarks | None = None
    ) -> Iterator[Predictions]:
        """Predict some rows after another, so that a file may be larger than memory.

        Args:
            rows: As for `predict`.
            at_once: Rows that are held in memory together; by default `rows_at_once`.
            remarks: Counts what is unusual in the rows.

        Yields:
            The answers, in the order of the rows.
        """
        known = self.description
        seen = Remarks() if remarks is None else remarks
        most = at_once or self.rows_at_once
        for part in read_rows(rows, known.preprocessing, known.shape, at_once=most, remarks=seen):
            yield self._answers(part, self.outputs(self.inputs_of(part)))

    def inputs_of(self, rows: Rows) -> Tensor:
        """Return what the network is given of these rows."""
        if self.description.encoder is None:
            return self.features_of(rows.inputs)
        if isinstance(self.network, LastLayer):
            return states(self.encoder, rows.texts)
        read = self.encoder.tokens if isinstance(self.network, AdaptedEncoder) else self.encoder.embed
        return read(rows.texts)

    def features_of(self, inputs: Tensor) -> Tensor:
        """Return the fixed features that the network is given of inputs, or the inputs where there are none."""
        known = self.description.features
        return inputs if known is None else features_of(known, inputs)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder that reads texts for the network."""
        assert self.description.encoder is not None  # asked for texts only
        return encoder_of(self.description.encoder)

    def _warned(self, rows: Any) -> Iterator[Predictions]:
        remarks = Remarks()
        yield from self.batches(rows, remarks=remarks)
        if said := remarks.alarming():
            warn(" ".join(said))

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the network says of inputs, as it is: before any calibration."""
        parameter = next(self.network.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        with torch.no_grad():
            parts = [
                call(self.network, part.to(device)).float().cpu()
                for part in torch.split(inputs, THROUGH_THE_NETWORK)
            ]
        return torch.cat(parts)

    def _answers(self, rows: Rows, outputs: Tensor) -> Predictions:
        if self.description.task == "regression":
            return Predictions(
                rows, in_range(outputs.reshape(len(rows)), self.description.label_range).numpy()
            )
        if self.description.calibration is not None:
            outputs = self.description.calibration.apply(outputs)
        if outputs.numel() == len(rows):  # one logit, for the second of two classes
            second = torch.sigmoid(outputs.reshape(-1))
            probabilities = torch.stack([1 - second, second], dim=1)
        else:
            probabilities = torch.softmax(outputs, dim=1)
        chosen = probabilities.argmax(1).numpy()
        names = np.array(self.classes) if self.classes else None
        if names is not None and len(names) != probabilities.shape[1]:
            fail(
                f"Expected one output of the network for each of {len(names)} classes. Got {probabilities.shape[1]}."
            )
        return Predictions(rows, chosen if names is None else names[chosen], probabilities.numpy())


def load_run(run: str | os.PathLike[str], *, model: nn.Module | str | None = None) -> TrainedModel:
    """Load the model of a finished run, ready to predict.

    Args:
        run: The run folder, a copy of its `public/`, or a `model.safetensors` file.
        model: The network, or its name as module:function, where the run does not say how to make it, or another name
            is to be used. A network of your own is otherwise found under the name that it was trained by, so load only
            runs of people you trust to run code.

    Returns:
        The model.

    Raises:
        PdpsgdError: If there is no finished run, its files are damaged, or its network cannot be found.
    """
    weights, description, place = model_files(Path(run))
    network = (
        model if model is not None and not isinstance(model, str) else _network(description, model, place)
    )
    _load_weights(network, weights, place)
    return TrainedModel(network, description)


def model_files(path: Path) -> tuple[Path, ModelDescription, str]:
    """Find the weights and the description of a model, and say where the latter stands."""
    folder = RunFolder(path)
    if path.is_dir():
        if not (path / "model.json").exists() and not (path / "model.safetensors").exists():
            folder.check_layout()
        texts = folder.model_descriptions() or [path / "model.json"]
        weights = folder.model if folder.public.is_dir() else path / "model.safetensors"
        if not weights.exists():
            state = "a run that has not ended: continue it with --resume" if folder.begun else "no model"
            fail(f"Expected a finished run in {str(path)!r}. There is {state}.")
        text = next((each for each in texts if each.exists()), None)
        if text is not None:
            content, place = read_text(text, "a model's description (JSON)"), str(text)
            return weights, _as_weights_say(ModelDescription.from_json(content, place=place), weights), place
        path = weights
    if path.suffix != ".safetensors":
        fail(f"Expected a run folder, or a model.safetensors file. Got {str(path)!r}.")
    stored = model_metadata(path).get("pdpsgd")
    if stored is None:
        fail(
            f"Expected a model that says what it is given and how it is made. Got {str(path)!r}, which an earlier "
            "version, or another program, wrote. Its weights can be loaded with safetensors."
        )
    place = f"the metadata of {path}"
    description = ModelDescription.from_json(stored, place=place)
    if description.withheld:
        fail(f"Expected all of the model's description with {str(path)!r}. {WITHHELD}")
    return path, description, place


def _as_weights_say(description: ModelDescription, weights: Path) -> ModelDescription:
    """Keep what the weights say against their release, whatever the file that lies beside them."""
    stored = model_metadata(weights).get("pdpsgd")
    if stored is None or description.not_for_release is not None:
        return description
    known = ModelDescription.from_json(stored, place=f"the metadata of {weights}")
    return replace(description, not_for_release=known.not_for_release)


def model_metadata(path: Path) -> Mapping[str, str]:
    """Read what a safetensors file says beside its weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        fail(f"Expected a model (safetensors) at {str(path)!r}. It cannot be read: {error}.")


def _network(description: ModelDescription, name: str | None, place: str) -> nn.Module:
    if description.encoder is not None and "finetune" in description.encoder and name is None:
        return load_adapted(description.encoder, description.network.outputs)
    known = description.network if name is None else replace(description.network, layers=None, name=name)
    try:
        return known.make(place)
    except PdpsgdError as error:
        if known.layers is not None or known.name is None:
            raise
        raise PdpsgdError(
            f"{error} The model was trained as {known.name!r}: load it where that can be imported, or name the network "
            "(--model module:function, load_run(RUN, model=...))."
        ) from error


def _load_weights(network: nn.Module, path: Path, place: str) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        weights = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        fail(f"Expected a model (safetensors) at {str(path)!r}. It cannot be read: {error}.")
    try:
        network.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        fail(f"Expected the weights in {str(path)!r} to fit the network of {place}. {reason}")


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
