"""First weights from an earlier run, or from any safetensors file, and where they come from.

A released model is public, so starting from it costs nothing; a model that is not for release makes what starts from
it not for release either.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail, shown
from pdpsgd.planning.verdict import NOT_FOR_RELEASE
from pdpsgd.training.predict import model_files, model_metadata
from pdpsgd.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.training.inputs import TrainingInputs
    from pdpsgd.training.model_description import ModelDescription


@dataclass(frozen=True)
class Start:
    """Where first weights come from.

    `description` says how the earlier model was made and what it was given; None for a file that does not tell.
    `lineage` is what the settings of the new run say: name, digest of the weights, and the start's own start.
    """

    weights: Path
    description: ModelDescription | None
    lineage: Mapping[str, Any]
    not_for_release: str | None = None

    def check_fits(self, inputs: TrainingInputs) -> None:
        """Refuse records that become inputs in another way than those of the earlier run.

        Args:
            inputs: The records of the new run; where nothing is known of how they were read, nothing is asked.

        Raises:
            PdpsgdError: If ranges, categories, classes or features differ.
        """
        known = self.description
        if known is None or inputs.name is None:
            return
        before = _how_read(known.preprocessing.to_dict(), known.classes, known.features)
        now = _how_read(inputs.preprocessing.to_dict(), inputs.classes, inputs.features)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                fail(
                    f"Expected records that are read as those of {str(self.weights)!r} were, to start from it: "
                    f"{name} {shown(before.get(name))}. Got {shown(now.get(name))}. Give --schema the schema of that "
                    "run (public/schema.toml in its folder), or start without it."
                )

    def load_into(self, model: nn.Module) -> None:
        """Give the model these weights.

        Args:
            model: The network to be trained.

        Raises:
            PdpsgdError: If the file cannot be read, or belongs to another network.
        """
        import safetensors.torch
        from safetensors import SafetensorError

        try:
            weights = safetensors.torch.load_file(self.weights)
        except (OSError, SafetensorError) as error:
            fail(f"Expected weights (safetensors) at {str(self.weights)!r}. They cannot be read: {error}.")
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            fail(
                f"Expected the weights in {str(self.weights)!r} to fit the network, to start from them. {reason}"
            )


def find_start(path: str | os.PathLike[str]) -> Start:
    """Find first weights, and what is known of them.

    Args:
        path: A run folder, a copy of its `public/`, or a safetensors file.

    Returns:
        The start, with its lineage.

    Raises:
        PdpsgdError: If there is no finished run and no such file, or a run of several models.
    """
    place = Path(path)
    if place.is_file() and "pdpsgd" not in model_metadata(place):
        return Start(place, None, {"name": place.name, "sha256": digest_of(place)})
    weights, description, _ = model_files(place)
    if description.network.models > 1:
        fail(
            f"Expected one model to start from. Got {str(place)!r}, whose answers are averages of "
            f"{description.network.models} models."
        )
    name = place.resolve().name if place.is_dir() else weights.name
    folder = _folder_of(place, weights)
    if folder is None:  # weights alone say by themselves what speaks against them
        alone = {"name": name, "sha256": digest_of(weights)}
        return Start(weights, description, alone, description.not_for_release)
    verdict = folder.read_result().get("verdict") or {}
    earlier = folder.read_settings().get("started_from")
    lineage = {
        "name": name,
        "sha256": digest_of(weights),
        "outcome": verdict.get("outcome"),
        **({} if earlier is None else {"started_from": earlier}),
    }
    unfit = str(verdict.get("text")) if verdict.get("outcome") in (None, NOT_FOR_RELEASE) else None
    return Start(weights, description, lineage, unfit or description.not_for_release)


def _folder_of(place: Path, weights: Path) -> RunFolder | None:
    """Find the run folder that weights lie in; None where they were copied from it."""
    if RunFolder(place).public.is_dir():
        return RunFolder(place)
    around = RunFolder(weights.resolve().parents[1])
    return around if around.finished and around.model.resolve() == weights.resolve() else None


def _how_read(
    preprocessing: Mapping[str, Any], classes: Sequence[str], features: str | None
) -> dict[str, Any]:
    """Name everything on which it depends what a network is given, and what its outputs mean."""
    schema = dict(preprocessing.get("schema") or {})
    columns = schema.get("columns", {})
    return {
        **{key: value for key, value in preprocessing.items() if key != "schema"},
        **{f"column {name!r}": how for name, how in columns.items() if how.get("kind") != "ignored"},
        "classes": list(classes),
        "features": features,
    }


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
