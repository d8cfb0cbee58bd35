"""Modules that cannot be trained privately, by name, each with its remedy."""

from __future__ import annotations

from torch import nn

from pdpsgd.errors import fail
from pdpsgd.gradients._torch import BATCH_NORMS, INSTANCE_NORMS

_TIME_FIRST = (nn.MultiheadAttention, nn.RNNBase)


def check_module(name: str, module: nn.Module) -> None:
    """Refuse a module that mixes examples, keeps statistics of them, or has the batch elsewhere than first."""
    place = f"{name or 'the model'} ({type(module).__name__})"
    if isinstance(module, INSTANCE_NORMS):
        if module.track_running_stats:
            fail(
                f"{place} keeps running statistics of the examples, which nothing protects. "
                "Use track_running_stats=False."
            )
    elif isinstance(module, BATCH_NORMS):
        fail(
            f"{place} mixes the examples of a batch, so that no example has a gradient of its own. "
            f"Replace it, for example by nn.GroupNorm(num_groups, {module.num_features})."
        )
    if isinstance(module, _TIME_FIRST) and not module.batch_first:
        fail(f"{place} expects the batch in its second dimension. Build it with batch_first=True.")
    tables = (nn.Embedding, nn.EmbeddingBag)
    if isinstance(module, tables) and module.weight.requires_grad and module.scale_grad_by_freq:
        fail(f"{place} scales gradients by how often a token occurs in the batch, which mixes examples. "
             "Use scale_grad_by_freq=False.")  # fmt: skip
    if isinstance(module, tables) and module.max_norm is not None:
        fail(f"{place} rescales, in its forward, the rows the batch happens to use, also where it is frozen, "
             "which nothing protects. Use max_norm=None.")  # fmt: skip
    if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        fail(f"{place} has no shape yet. Run one batch through the model before making it private.")
