"""Checkpoints: one file, no pickle, written whole or not at all.

A checkpoint is an ordinary safetensors file; what is not a tensor is JSON in its metadata, with a checksum
over all of it. It holds the run's secret key, so only its owner may read it, and `erase_key` takes the key
out when the run ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from pdpsgd.budgets.files import Each, check_shape, entries, parse_json
from pdpsgd.errors import PdpsgdError, fail, shown
from pdpsgd.sampling.source import KEY_BYTES, name_of_key

if TYPE_CHECKING:
    import torch

JSON = Any
VERSION = 1
FORMAT = "pdpsgd checkpoint"


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """What was saved: tensors, state, and the run's secret key unless it was erased."""

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, JSON]
    key: bytes | None

    def __repr__(self) -> str:
        key = "erased" if self.key is None else "kept"
        return f"Checkpoint({len(self.tensors)} tensors, state {sorted(self.state)}, key {key})"


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, JSON],
    key: bytes | None,
) -> None:
    """Write a checkpoint, readable by its owner only; whatever happens, `path` is whole, old or new.

    The new file is completed beside the old one, forced to the disk, and only then takes its name. Where
    that fails (a full disk, an unwritable folder) the old file stays as it was, and the error says so.
    """
    path = Path(path)
    content = _encode(tensors, state, key)
    try:
        _replace(path, content)
    except OSError as error:
        kept = "The checkpoint saved before is untouched." if path.exists() else "There was none before."
        reason = f"{error.strerror} ({error.filename or path})"
        raise PdpsgdError(
            f"Expected to write a checkpoint ({len(content):,} bytes) to {str(path)!r}. Got: {reason}. {kept}"
        ) from error


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint; refuses a file that is damaged, cut off, of another version, or none at all."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise PdpsgdError(f"Expected a checkpoint at {str(path)!r}. Got: {error.strerror}.") from error
    return _decode(content, place=str(path))


def erase_key(path: str | os.PathLike[str], *, only: str | None = None) -> None:
    """Rewrite the checkpoint without its key: the run has ended, and nobody is to repeat its noise.

    The place on the disk where the key stood is overwritten as far as the file system allows. One that
    copies on write, and most flash storage, may keep it until the space is used again: encrypt the disk
    where that matters. On a full disk the key is overwritten where it stands.

    Args:
        path: The checkpoint.
        only: The name of the key that is to be erased (`name_of_key`): a checkpoint of another run, which took the
            file's name, is left alone.
    """
    checkpoint = load(path)
    if checkpoint.key is None or (only is not None and name_of_key(checkpoint.key) != only):
        return
    try:
        save(path, checkpoint.tensors, checkpoint.state, None)
    except PdpsgdError:
        _erase_in_place(Path(path), checkpoint.key)


class HasState(Protocol):
    """An optimizer, a scheduler, or anything else that gives and takes its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that has to be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from what was saved."""
        ...


def pack_optimizer(optimizer: HasState, *, prefix: str = "optimizer") -> tuple[dict[str, torch.Tensor], JSON]:
    """Turn the state of an optimizer or a scheduler into tensors and JSON, exactly.

    Numbers (also infinite ones and NaN), None, strings, tensors, and lists, tuples and dicts of these come
    back as they were, with their types. Anything else is refused by its place: a run cannot go on from what
    was not saved.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _to_json(optimizer.state_dict(), prefix, tensors)


def unpack_optimizer(optimizer: HasState, tensors: Mapping[str, torch.Tensor], packed: JSON) -> None:
    """Put what `pack_optimizer` made back into an optimizer or scheduler of the same kind."""
    try:
        optimizer.load_state_dict(_from_json(packed, tensors))
    except PdpsgdError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        kind = type(optimizer).__name__
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise PdpsgdError(
            f"Expected a saved state that fits {kind}. Got one that does not: {reason}."
        ) from error


# --- the file ----------------------------------------------------------------------------------------------

_NO_CHECKSUM = "0" * 64


def _encode(tensors: Mapping[str, torch.Tensor], state: Mapping[str, JSON], key: bytes | None) -> bytes:
    import safetensors.torch

    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "checksum": _NO_CHECKSUM,
        "state": json.dumps(_to_json(dict(state), "state"), allow_nan=False),
    }
    if key is not None:
        metadata["key"] = key.hex()
    content = safetensors.torch.save(plain, metadata)
    header, body = _split(content)
    return _with_checksum(header, _NO_CHECKSUM, _checksum(header, body)) + body


def _decode(content: bytes, *, place: str) -> Checkpoint:
    import safetensors
    import safetensors.torch

    header, body = _split(content)
    metadata = _metadata(header, place)
    version, checksum = metadata["version"], metadata["checksum"]
    if metadata["format"] != FORMAT:
        fail(f"Expected format {FORMAT!r} at {place!r}. Got {shown(metadata['format'])}.")
    if version != str(VERSION):
        fail(f"Expected a checkpoint of version {VERSION} at {place!r}. Got version {version[:40]}.")
    if _checksum(_with_checksum(header, checksum, _NO_CHECKSUM), body) != checksum:
        fail(
            f"Expected an undamaged checkpoint at {place!r}. Got one whose checksum does not fit: "
            "it was changed or cut off."
        )
    try:
        tensors = safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        fail(f"Expected tensors in the checkpoint {place!r}. Got something else: {error}.")
    state = parse_json(metadata.get("state", ""), f"the state of the checkpoint {place!r}")
    return Checkpoint(tensors=tensors, state=_from_json(state, {}), key=_key(metadata.get("key"), place))


def _metadata(header: bytes, place: str) -> dict[str, str]:
    try:
        metadata = json.loads(header[8:])["__metadata__"]
        check_shape("metadata", metadata, Each(str))
        check_shape("metadata", metadata, {"format": str, "version": str, "checksum": str})
    except (ValueError, KeyError, TypeError, RecursionError):
        fail(f"Expected a checkpoint of pdpsgd at {place!r}. Got another file, or one with a damaged start.")
    found: dict[str, str] = metadata
    return found


def _key(text: str | None, place: str) -> bytes | None:
    if text is None or text.isspace():  # blanks, where it was erased in place
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        fail(f"Expected a key of {KEY_BYTES} bytes in the checkpoint {place!r}. Got another one.")
    return key


def _erase_in_place(path: Path, key: bytes) -> None:
    """Put blanks where the key stands, which takes no room on the disk; the file stays whole."""
    header, body = _split(path.read_bytes())
    checksum = json.loads(header[8:])["__metadata__"]["checksum"]
    blank = _with_checksum(header.replace(key.hex().encode(), b" " * (2 * len(key))), checksum, _NO_CHECKSUM)
    with open(path, "r+b") as file:
        file.write(_with_checksum(blank, _NO_CHECKSUM, _checksum(blank, body)))
        file.flush()
        os.fsync(file.fileno())


def _split(content: bytes) -> tuple[bytes, memoryview]:
    """Header (its length in 8 bytes, then JSON) and body of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[:end], memoryview(content)[end:]


def _with_checksum(header: bytes, before: str, after: str) -> bytes:
    # The name and its quotes cannot stand inside a string of the header, where quotes are escaped.
    return header.replace(f'"checksum":"{before}"'.encode(), f'"checksum":"{after}"'.encode())


def _checksum(header: bytes, body: memoryview) -> str:
    digest = hashlib.sha256(header)
    digest.update(body)
    return digest.hexdigest()


def _replace(path: Path, content: bytes) -> None:
    for abandoned in path.parent.glob(f".{path.name}.*.partial"):
        # A run that was killed while saving left it, key and all.
        abandoned.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.ExitStack() as stack:
            old = _open_to_overwrite(path, stack)
            os.replace(partial, path)
            # Not before the new name is on the disk: until then a power failure brings the old file back.
            if _force_to_disk(path.parent) and old is not None:
                _overwrite_key(old)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _force_to_disk(folder: Path) -> bool:
    """Tell whether the names in the folder are known to be on the disk; not every system can tell."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        os.fsync(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open_to_overwrite(path: Path, stack: contextlib.ExitStack) -> BinaryIO | None:
    if os.name != "posix":  # elsewhere an open file cannot be replaced
        return None
    try:
        return stack.enter_context(open(path, "r+b"))
    except OSError:
        return None


def _overwrite_key(old: BinaryIO) -> None:
    """Overwrite the header, where the key is, of a file that lost its last name."""
    status = os.fstat(old.fileno())
    if status.st_nlink == 0:
        with contextlib.suppress(OSError):
            length = min(8 + int.from_bytes(old.read(8), "little"), status.st_size)
            old.seek(0)
            old.write(bytes(length))
            old.flush()
            os.fsync(old.fileno())


# --- what JSON lacks ---------------------------------------------------------------------------------------

# JSON has no tensors, no tuples, no infinities, and only strings as keys. A dict of one of these keys
# stands for them.
_TAGS = _TENSOR, _TUPLE, _FLOAT, _DICT, _COUNTER = "$tensor", "$tuple", "$float", "$dict", "$counter"


def _to_json(value: Any, place: str, tensors: dict[str, torch.Tensor] | None = None) -> JSON:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in (float, np.float64):
        return float(value) if np.isfinite(value) else {_FLOAT: repr(float(value))}
    if kind is list:
        return [_to_json(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
    if kind is tuple:
        return {_TUPLE: _to_json(list(value), place, tensors)}
    if isinstance(value, dict):
        if kind is not Counter and all(type(name) is str and not name.startswith("$") for name in value):
            return {name: _to_json(item, f"{place}.{name}", tensors) for name, item in value.items()}
        pairs = [
            [_to_json(name, place), _to_json(item, f"{place}.{name}", tensors)]
            for name, item in value.items()
        ]
        return {_COUNTER if kind is Counter else _DICT: pairs}
    if tensors is not None and hasattr(value, "untyped_storage"):
        tensors[place] = value
        return {_TENSOR: place}
    fail(
        f"Expected {place} to be a number, string, None, tensor, list, tuple or dict, which can be saved. "
        f"Got {kind.__name__}."
    )


def _from_json(value: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in _TAGS:
        ((tag, content),) = value.items()
        try:
            return _from_tag(tag, content, tensors)
        except PdpsgdError:
            raise
        except (KeyError, TypeError, ValueError):
            fail(f"Expected what {tag} stands for in a checkpoint. Got {shown(content)}.")
    return {name: _from_json(item, tensors) for name, item in value.items()}


def _from_tag(tag: str, content: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    if tag == _TENSOR:
        return tensors[content]
    if tag == _FLOAT:
        return float(content)
    if tag == _TUPLE:
        return tuple(_from_json(entries(tag, content), tensors))
    pairs = {_from_json(name, tensors): _from_json(item, tensors) for name, item in content}
    return Counter(pairs) if tag == _COUNTER else pairs
