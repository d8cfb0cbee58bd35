"""Digests of data, model and optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from pdpsgd.engine.batches import reseed, seeded
from pdpsgd.errors import fail

# What is digested by what it holds; anything else is a dataset, digested item by item.
_VALUES = (Tensor, np.ndarray, np.generic, Mapping, list, tuple, str, bytes, bool, int, float, type(None))


def fingerprint_data(data: Any, *, key: bytes = b"", samples: int = 64) -> str:
    """Digest the data that a run is on, so that it is not resumed on other data.

    Everything is digested: tensors and arrays (alone, in sequences and mappings, or in a `TensorDataset`), and
    every item of any other map-style dataset, read under a fixed seed so that random augmentation repeats.
    Items that still differ when read twice (`samples` of them are tried) cannot be told from other data; of these
    only length and kind count.

    The digest of private data lets anyone check a guess of them. With the run's `key` only those who have
    it can.
    """
    digest = hashlib.blake2b(digest_size=32, key=key, person=b"pdpsgd data")
    whole = data.tensors if is_plain_tensor_dataset(data) else data
    if not isinstance(whole, _VALUES) or not _digest_value(digest, whole):
        _digest_dataset(digest, data, samples)
    return digest.hexdigest()


def items_repeat(data: Any, *, samples: int = 64) -> bool:
    """Tell whether data can be told from others: not if its items differ when they are read twice."""
    whole = data.tensors if is_plain_tensor_dataset(data) else data
    if isinstance(whole, _VALUES) and _digest_value(hashlib.blake2b(), whole):
        return True
    places = _some_places(len(data), samples)
    return _digest_items(data, places) == _digest_items(data, places)


def fingerprint_value(value: Any) -> str:
    """Digest a value that a module wants to have saved."""
    digest = hashlib.blake2b(digest_size=16)
    _digest_value(digest, value)
    return digest.hexdigest()


def is_plain_tensor_dataset(data: Any) -> bool:
    """Tell whether a dataset's items are the rows of its tensors: a subclass may give others."""
    return type(data) is TensorDataset and all(type(part) is Tensor for part in data.tensors)


def _digest_value(digest: hashlib.blake2b, value: Any) -> bool:
    """Digest kind, shape and content, unmistakably; False where something in it is of no known kind."""
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        return all(_digest_value(digest, part) for item in value.items() for part in item)
    if isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)};".encode())
        return all(_digest_value(digest, part) for part in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
        return True
    if hasattr(value, "untyped_storage"):
        digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return True
    if hasattr(value, "__array_interface__"):  # numpy's arrays and numbers, and images
        array = np.ascontiguousarray(value)
        if array.dtype == object:
            return _digest_value(digest, array.tolist())
        digest.update(f"{array.dtype} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        return True
    if hasattr(value, "__dict__") and not isinstance(value, Dataset) and not callable(value):
        digest.update(f"object {type(value).__name__};".encode())
        return _digest_value(digest, vars(value))
    return False


def _digest_dataset(digest: hashlib.blake2b, dataset: Any, samples: int) -> None:
    try:
        length = len(dataset)
    except TypeError:
        fail(f"Expected tensors, arrays, or a dataset with a length and items. Got {type(dataset).__name__}.")
    digest.update(f"dataset {type(dataset).__name__} {length};".encode())
    places = _some_places(length, samples)
    first, again = (_digest_items(dataset, places) for _ in range(2))
    if first == again:
        digest.update(first if len(places) == length else _digest_items(dataset, range(length)))


def _some_places(length: int, samples: int) -> list[int]:
    found: list[int] = np.unique(
        np.linspace(0, max(length - 1, 0), min(samples, length)).astype(int)
    ).tolist()
    return found


def _digest_items(dataset: Any, places: Iterable[int]) -> bytes:
    digest = hashlib.blake2b()
    with seeded(0):
        for place in places:
            reseed(0)
            _digest_value(digest, dataset[place])
    return digest.digest()


def digest_of_module(module: nn.Module) -> str:
    """Digest the module's parameters and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_model(module: nn.Module) -> str:
    """Digest the model's structure: its modules, and its parameters' names, shapes and types."""
    lines = [f"{name}: {type(part).__name__}" for name, part in module.named_modules()]
    lines += [
        f"{name}: {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters()
    ]
    lines += [f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's kind and settings, without what schedules change."""
    changing = ("params", "lr", "initial_lr")
    groups = [
        {key: repr(value) for key, value in group.items() if key not in changing}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__qualname__,
        "options": {key: repr(value) for key, value in optimizer.defaults.items()},
        "options of groups": groups,
    }
