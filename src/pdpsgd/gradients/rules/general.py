"""The general rule (vmap): any module, with a virtual copy of its parameters for each example."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.gradients._torch import pytree
from pdpsgd.gradients.per_example import Gradient, Materialized, detached
from pdpsgd.gradients.recorder import Site


def general_rule(
    site: Site, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run the module's `forward` on each example with that example's own (virtual) copy of the parameters.

    The gradients of the copies are the per-example gradients, for any computation inside the module.
    Vectorized by torch.func.vmap where the module allows it, else a loop.
    """
    if any(_is_packed(leaf) for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_packed)):
        refuse_packed(site, module)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    batch = site.recorder.batch_size
    if batch is None:
        batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if batch is None:
        fail(f"{site.name} ({type(module).__name__}) is called without a tensor that has a batch dimension.")
    # Recurrent modules keep the batch of their states second, also with batch_first.
    state_dim = 1 if isinstance(module, nn.RNNBase) else 0
    dims = _batch_dims(site, leaves, batch, state_dim)
    shell = _Shell(forward, module)
    copies = {
        f"module.{name}": _copies(site, parameter, batch)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }

    def one_example(parameters: dict[str, Tensor], *inputs: Any) -> Any:
        alone = [leaf if dim is None else leaf.unsqueeze(dim) for leaf, dim in zip(inputs, dims, strict=True)]
        inner_args, inner_kwargs = pytree.tree_unflatten(alone, structure)
        return functional_call(shell, parameters, inner_args, inner_kwargs)

    recorder = site.recorder
    recorder.paused = True
    try:
        if batch == 0:
            return _of_nobody(site, shell, args, kwargs)
        if isinstance(module, nn.RNNBase):
            return _in_a_loop(one_example, copies, leaves, dims, batch, state_dim, site)
        try:
            # Fused attention has no gradient of its mask under vmap, and takes a learned bias for one.
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), _padding_of(module):
                warnings.filterwarnings("ignore", message="There is a performance drop")
                outputs = _vectorized(one_example, (0, *dims))(copies, *leaves)
        except PdpsgdError:
            raise
        except (
            RuntimeError,
            ValueError,
        ):  # something vmap has no rule for, such as data-dependent control flow
            return _in_a_loop(one_example, copies, leaves, dims, batch, state_dim, site)
        return pytree.tree_map_only(Tensor, lambda output: _without_single(site, output), outputs)
    finally:
        recorder.paused = False


class _FixedPadding(TorchFunctionMode):
    """Keeps the gradient from rows of padding tokens, which vmap would give to them as to others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        padding = (kwargs or {}).get("padding_idx", args[2] if len(args) > 2 else None)
        if func is not nn.functional.embedding or padding is None:
            return found
        weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
        return torch.where((args[0] == padding % len(weight))[..., None], found.detach(), found)


def _padding_of(module: nn.Module) -> AbstractContextManager[Any]:
    """Return what holds padding fixed, where the module has an embedding with padding."""
    padded = any(
        isinstance(child, nn.Embedding) and child.padding_idx is not None for child in module.modules()
    )
    return _FixedPadding() if padded else nullcontext()


def _of_nobody(site: Site, shell: _Shell, args: Any, kwargs: Any) -> Any:
    """Run the module on an empty batch: the outputs are part of the graph, and nobody has a gradient."""
    fixed = {name: parameter.detach() for name, parameter in shell.named_parameters()}
    outputs = functional_call(shell, fixed, args, kwargs)
    return pytree.tree_map_only(Tensor, lambda output: site.record(output, output, lambda _: ()), outputs)


def _batch_dims(site: Site, leaves: list[Any], batch: int, state_dim: int) -> list[int | None]:
    """Return the dimension of each leaf that is the batch; None for what all examples share."""
    call = site.count_call()
    dims: list[int | None] = []
    for index, leaf in enumerate(leaves):
        dim = state_dim if index > 0 else 0
        has_rows = isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == batch
        follows = site.follows_batch(call, index, dim)
        if follows and not has_rows:
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
            fail(
                f"Expected dimension {dim} of argument {index} of {site.name} to be the batch of {batch} examples, as "
                f"at other batch sizes. Got {shape}."
            )
        dims.append(dim if has_rows and follows is not False else None)
    return dims


def _vectorized(one_example: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """Return vmap of a function that may give other things than tensors, too: those of the last call."""
    others: list[Any] = []
    structures: list[Any] = []

    def tensors_of_one(*inputs: Any) -> list[Tensor]:
        found, structure = pytree.tree_flatten(one_example(*inputs))
        others[:] = found
        structures[:] = [structure]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def of_all(*inputs: Any) -> Any:
        tensors = iter(vmap(tensors_of_one, in_dims=in_dims, randomness="different")(*inputs))
        found = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in others]
        return pytree.tree_unflatten(found, structures[0])

    return of_all


def refuse_packed(site: Site, module: nn.Module) -> NoReturn:
    """Refuse packed sequences."""
    fail(
        f"{site.name} ({type(module).__name__}) is given a PackedSequence, in which the examples of a batch are "
        "interleaved. Give it padded sequences, and take each one's output at its own last step (with gather)."
    )


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


class _Shell(nn.Module):
    """Lets functional_call reach a module's forward without running its hooks a second time."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _copies(site: Site, parameter: nn.Parameter, batch: int) -> Tensor:
    def gradients(output_gradient: Tensor) -> Gradient:
        yield parameter, Materialized(output_gradient, parameter.shape)

    value = detached(parameter).expand(batch, *parameter.shape)
    return site.record(value, value, gradients)


def _without_single(site: Site, output: Tensor) -> Tensor:
    if output.dim() < 2 or output.shape[1] != 1:
        fail(
            f"{site.name} gives an output whose first dimension is not the batch: for one example alone its shape "
            f"is {tuple(output.shape[1:])}, where (1, ...) is expected."
        )
    return output.squeeze(1)


def _in_a_loop(
    one_example: Callable[..., Any],
    copies: dict[str, Tensor],
    leaves: list[Any],
    dims: list[int | None],
    batch: int,
    state_dim: int,
    site: Site,
) -> Any:
    results = []
    # Once for all: an index per example would have autograd add a whole batch of gradients for each.
    parts = {name: copy.unbind(0) for name, copy in copies.items()}
    for example in range(batch):
        parameters = {name: rows[example] for name, rows in parts.items()}
        inputs = [
            leaf if dim is None else leaf.select(dim, example) for leaf, dim in zip(leaves, dims, strict=True)
        ]
        results.append(one_example(parameters, *inputs))
    flat = [pytree.tree_flatten(result) for result in results]
    if any(len(leaves) != len(flat[0][0]) for leaves, _ in flat):
        fail(
            f"Expected {site.name} to give outputs of one form for all examples. Got {results[0]!r:.200} and others."
        )
    joined = [
        torch.cat(parts, state_dim if index > 0 else 0) if isinstance(parts[0], Tensor) else parts[0]
        for index, parts in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
    ]
    return pytree.tree_unflatten(joined, flat[0][1])
