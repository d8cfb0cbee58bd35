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
    elif isinstance(module, BATCH_NORMS) and not is_constant_batch_norm(module):
        fail(
            f"{place} mixes the examples of a batch, so that no example has a gradient of its own. "
            f"Replace it, for example by nn.GroupNorm(num_groups, {module.num_features}); or, where its statistics are "
            "public (a pretrained network), freeze it: .requires_grad_(False) and .eval(), also after model.train()."
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


def is_constant_batch_norm(module: nn.Module) -> bool:
    """Whether this is a batch normalization that treats examples one by one: frozen, by statistics of before."""
    if not isinstance(module, BATCH_NORMS) or isinstance(module, INSTANCE_NORMS):
        return False
    trains = module.training or any(parameter.requires_grad for parameter in module.parameters())
    return not trains and module.running_mean is not None and module.running_var is not None


def train_mode(model: nn.Module) -> None:
    """Put a model into training mode, but for batch normalizations that are constant: those stay so."""
    constant = [child for child in model.modules() if is_constant_batch_norm(child)]
    model.train()
    for child in constant:
        child.eval()
