"""Features of public benchmarks, computed once and kept in the user's cache folder, with a word about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from safetensors.torch import load_file, save_file
from torch import Tensor

from pdpsgd._cache import FEATURES, cache_folder, cache_limit, make_room, size_text


def kept_features(name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return features from the cache, or compute them and keep them there if they are within its limit.

    Args:
        name: What they are of, and which they are.
        compute: Computes them.

    Returns:
        Tensors by name.
    """
    folder = cache_folder()
    file = None if folder is None else folder / FEATURES / f"{name}.safetensors"
    if file is not None and file.exists():
        os.utime(file)  # used just now: others go first when room is needed
        return load_file(file)
    made = compute()
    size = sum(tensor.numel() * tensor.element_size() for tensor in made.values())
    if file is None or size > cache_limit():
        return made
    removed = make_room(size)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        save_file(made, unfinished)
        unfinished.replace(file)  # never half-written
    finally:
        unfinished.unlink(missing_ok=True)
    gone = f" {len(removed)} files made room for it." if removed else ""
    print(
        f"Kept: {file} ({size_text(size)}), for the next time.{gone} `pdpsgd data cache --clear` removes it.",
        file=sys.stderr,
    )
    return made
