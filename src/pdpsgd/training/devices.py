"""The device that a run trains on, by name."""

from __future__ import annotations

import torch
from torch import nn

from pdpsgd.errors import fail

ACCEPTED = "cpu, cuda, cuda:N, or auto (a GPU if there is one, else the CPU)"


def device_of(name: str) -> torch.device:
    """Return the device of this name, if this machine has it and sums can be taken there.

    Args:
        name: "cpu", "cuda", "cuda:N", or "auto". "mps" is refused: the sums of clipped gradients are taken in float64,
            which Apple's GPUs do not have.

    Raises:
        PdpsgdError: No such device, none here, or one without float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        fail(f"Expected device to be {ACCEPTED}. Got {name!r}.")
    if device.type == "mps":
        fail(
            "Expected a device that has float64, in which clipped gradients are added up. Got mps, which has not: "
            "use cpu."
        )
    if device.type not in ("cpu", "cuda"):
        fail(f"Expected device to be {ACCEPTED}. Got {name!r}.")
    there = torch.cuda.device_count()
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < there):
        fail(f"Expected a device that this machine has. Got {name!r}, with {there} GPUs that torch can use.")
    return device


def move(model: nn.Module, name: str | None) -> None:
    """Move the model, in place, to the device of this name; None leaves it where it is."""
    if name is not None:
        model.to(device_of(name))
