"""How records become inputs of a network, as a value that is kept with the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets.files import OneOf, Optional, Range, check_shape
from pdpsgd.data.schema import Schema
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("table", "images", "arrays")
"""Records that models are trained on: rows of a table, image files, and arrays of numbers."""


@dataclass(frozen=True)
class Pixels:
    """How pixels become inputs, channel by channel: (pixel / largest - mean) / std."""

    largest: int = 255
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def to_inputs(self, pixels: Tensor) -> Tensor:
        """Return the inputs of a batch of images (people, channels, height, width)."""
        import torch

        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        return (pixels / self.largest - mean) / std


@dataclass(frozen=True)
class Preprocessing:
    """What is done to a record before the network sees it; a function of that record alone."""

    kind: str = "arrays"
    schema: Schema | None = None
    pixels: Pixels | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for the file of a model."""
        made: dict[str, Any] = {"kind": self.kind}
        if self.schema is not None:
            made["schema"] = self.schema.to_dict()
        if self.pixels is not None:
            made["pixels"] = {
                "largest": self.pixels.largest,
                "mean": list(self.pixels.mean),
                "std": list(self.pixels.std),
            }
        return made

    @classmethod
    def from_dict(cls, content: dict[str, Any], *, place: str) -> Preprocessing:
        """Read it from plain data.

        Args:
            content: What `to_dict` gave.
            place: Where it stands, for errors.

        Returns:
            The preprocessing.

        Raises:
            PdpsgdError: If something is missing, or of another kind.
        """
        check_shape(place, content, _SHAPE)
        schema, pixels = content.get("schema"), content.get("pixels")
        if content["kind"] == "table" and schema is None:
            fail(f"Expected the schema of a table in {place}. Got none.")
        return cls(
            kind=content["kind"],
            schema=None if schema is None else Schema.from_dict(schema, source=f"{place}: schema"),
            pixels=None
            if pixels is None
            else Pixels(pixels["largest"], tuple(pixels["mean"]), tuple(pixels["std"])),
        )


_SHAPE = {
    "kind": OneOf(KINDS),
    "pixels": Optional(
        {"largest": Range(1, whole=True), "mean": [Range(-1e6, 1e6)], "std": [Range(1e-6, 1e6)]}
    ),
}
