"""PyTorch's private APIs: behind one adapter, and still what it was written for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pdpsgd.gradients
from pdpsgd.gradients import _torch as adapter


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def backward_passes_have_numbers_of_their_own() -> bool:
    seen = []
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        product = weight * 2
        product.register_hook(lambda gradient: seen.append(adapter.backward_pass()))
        (product * 3).sum().backward()
    return adapter.backward_pass() == -1 and len(set(seen)) == 2 and min(seen) >= 0


def hooks_see_gradients() -> bool:
    """Also beside hooks of others, and of what is changed in place afterwards; not of what it is changed to."""
    seen: list[tuple[str, float]] = []

    def see(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: seen.append((name, float(gradient)))

    product = torch.ones(1, requires_grad=True) * 2
    adapter.on_gradient(product, see("ours"))
    handle = product.register_hook(see("theirs"))
    removed = product.register_hook(see("nobody's"))
    removed.remove()
    (product * 3).sum().backward()
    handle.remove()
    changed = torch.ones(1, requires_grad=True) * 2
    adapter.on_gradient(changed, see("before"))
    changed.mul_(5)
    changed.register_hook(see("after"))
    changed.sum().backward()
    beside = torch.ones(1, requires_grad=True) * 2
    beside.register_hook(see("first"))
    adapter.on_gradient(beside, see("second"))
    beside.sum().backward()
    return seen == [("ours", 3), ("theirs", 3), ("after", 1), ("before", 5), ("first", 1), ("second", 1)]


def changes_in_place_are_counted() -> bool:
    tensor = torch.zeros(2)
    before = adapter.version_of(tensor)
    tensor.add_(1)
    with torch.inference_mode():
        uncounted = adapter.version_of(torch.zeros(2))
    return adapter.version_of(tensor) == before + 1 and uncounted == -1


def modes_and_transforms_are_seen() -> bool:
    found = []

    def look(value: torch.Tensor) -> torch.Tensor:
        found.append(adapter.is_eager())
        return value

    nothing = torch.zeros(2)
    torch.func.vmap(look)(nothing)
    with torch.autograd.forward_ad.dual_level():
        look(nothing)
    with Counting():
        look(nothing)
    with torch.overrides.TorchFunctionMode():
        look(nothing)
    with torch.device("cpu"):
        on_device = adapter.is_eager()
    return adapter.is_eager() and on_device and found == [False] * 4


def dispatch_modes_can_be_switched_off() -> bool:
    with Counting() as mode:
        with adapter.without_dispatch_modes():
            torch.zeros(2).add(1)
            inside = mode.calls
        torch.zeros(2).add(1)
    with adapter.without_dispatch_modes():  # nothing to switch off
        torch.zeros(2)
    return inside == 0 and mode.calls > 0


def precision_is_full_for_a_while() -> bool:
    factors = torch.randn(300, 300)
    exact = factors @ factors
    with torch.autocast("cpu", torch.bfloat16):
        with adapter.full_precision():
            inside = factors @ factors
        outside = (factors @ factors).dtype
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with adapter.full_precision():
            products = factors @ factors
            precisions = (
                torch.backends.mkldnn.matmul.fp32_precision,
                torch.backends.cuda.matmul.fp32_precision,
            )
        again = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    return (
        inside.dtype == torch.float32
        and outside == torch.bfloat16
        and torch.equal(products, exact)
        and precisions == ("ieee", "ieee")
        and again == "medium"
    )


def hooks_are_seen() -> bool:
    found = [adapter.has_hooks(nn.ReLU())]
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        module = nn.ReLU()
        getattr(module, f"register_{register}")(lambda *_: None)
        found.append(adapter.has_hooks(module))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    found.append(adapter.has_hooks(nn.ReLU()))
    handle.remove()
    return found == [False, *[True] * 5]


def hooks_can_be_left_out() -> bool:
    seen = []
    module = nn.Sequential(nn.ReLU())
    module[0].register_forward_hook(lambda *_, **__: seen.append(1), with_kwargs=True)
    module[0].register_forward_pre_hook(lambda *_: seen.append(2))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(3))
    with adapter.without_hooks(module):
        module(torch.zeros(1))
    inside = list(seen)
    module(torch.zeros(1))
    handle.remove()
    return inside == [] and sorted(seen) == [1, 2, 3, 3]


def convolutions_take_another_weight() -> bool:
    module, images, weight = nn.Conv2d(2, 3, 3, padding=1), torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    wanted = nn.functional.conv2d(images, weight, None, padding=1)
    return torch.equal(adapter.apply_convolution(module, images, weight, None), wanted)


def transposed_convolutions_take_another_weight() -> bool:
    module, weight = nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), torch.randn(2, 3, 3, 3)
    images = torch.randn(1, 2, 5, 5)
    wanted = nn.functional.conv_transpose2d(images, weight, None, 2, output_padding=1)
    resized = adapter.apply_transposed_convolution(module, images, weight, None, (11, 12))
    return torch.equal(adapter.apply_transposed_convolution(module, images, weight, None), wanted) and (
        resized.shape[2:] == (11, 12)
    )


def replaced_convolutions_are_seen() -> bool:
    module, replaced = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
    replaced._conv_forward = lambda *_: torch.zeros(1)  # type: ignore[method-assign]
    return adapter.runs_own_convolution(module) and not adapter.runs_own_convolution(replaced)


def padding_is_for_the_last_dimension_first() -> bool:
    same = nn.Conv2d(1, 1, (2, 3), padding="same")
    return adapter.padding_amounts(nn.Conv2d(1, 1, 3, padding=(1, 2))) == [2, 2, 1, 1] and (
        adapter.padding_amounts(same) == [1, 1, 0, 1]
    )


def instance_norms_check_their_input() -> bool:
    with pytest.raises(ValueError):
        adapter.check_instance_norm_input(nn.InstanceNorm2d(3), torch.zeros(1, 2))
    dimensions = adapter.check_instance_norm_input(nn.InstanceNorm2d(3), torch.zeros(1, 3, 4, 4))
    return dimensions == 4


def attention_says_how_it_projects() -> bool:
    return adapter.projects_at_once(nn.MultiheadAttention(4, 2)) and not adapter.projects_at_once(
        nn.MultiheadAttention(4, 2, kdim=3)
    )


def normalizations_have_their_bases() -> bool:
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d)
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm2d)
    return all(issubclass(kind, adapter.BATCH_NORMS) for kind in batch) and all(
        issubclass(kind, adapter.INSTANCE_NORMS) for kind in instance
    )


def spectral_norms_iterate_in_training_mode() -> bool:
    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    (norm,) = (part for part in module.modules() if isinstance(part, adapter.SpectralNorm))
    before = [vector.clone() for vector in norm.buffers()]
    module.eval()(torch.zeros(1, 6))
    stayed = all(map(torch.equal, norm.buffers(), before))
    module.train()(torch.zeros(1, 6))
    return stayed and not any(map(torch.equal, norm.buffers(), before))


def trees_are_flattened_and_built_again() -> bool:
    tree = {"a": [torch.zeros(1), 2], "b": (None,)}
    leaves, structure = adapter.pytree.tree_flatten(tree)
    doubled = adapter.pytree.tree_map_only(int, lambda number: 2 * number, tree)
    return (
        len(leaves) == len(adapter.pytree.tree_leaves(tree)) == 3
        and adapter.pytree.tree_unflatten(leaves, structure) == tree
        and doubled["a"][1] == 4
    )


PRIVATE_APIS: dict[str, Callable[[], bool]] = {
    "torch._C._current_graph_task_id": backward_passes_have_numbers_of_their_own,
    "Tensor._backward_hooks, Node._register_hook_dict": hooks_see_gradients,
    "Tensor._version": changes_in_place_are_counted,
    "torch._C mode stacks, forward_ad._current_level, DeviceContext": modes_and_transforms_are_seen,
    "torch.utils._python_dispatch._disable_current_modes": dispatch_modes_can_be_switched_off,
    "torch.backends.mkldnn.matmul.fp32_precision, torch._C._get_fp32_precision_getter": precision_is_full_for_a_while,
    "Module._forward_hooks and the like": hooks_are_seen,
    "_global_forward_hooks and the like": hooks_can_be_left_out,
    "Conv2d._conv_forward": convolutions_take_another_weight,
    "ConvTranspose2d._output_padding": transposed_convolutions_take_another_weight,
    "Conv2d._conv_forward as a method": replaced_convolutions_are_seen,
    "Conv2d._reversed_padding_repeated_twice": padding_is_for_the_last_dimension_first,
    "InstanceNorm2d._check_input_dim, _get_no_batch_dim": instance_norms_check_their_input,
    "MultiheadAttention._qkv_same_embed_dim": attention_says_how_it_projects,
    "_BatchNorm, _InstanceNorm": normalizations_have_their_bases,
    "torch.nn.utils.parametrizations._SpectralNorm": spectral_norms_iterate_in_training_mode,
    "torch.utils._pytree": trees_are_flattened_and_built_again,
}


@pytest.mark.parametrize("api", PRIVATE_APIS)
def test_a_private_api_is_what_the_adapter_was_written_for(api: str) -> None:
    changed = (
        f"PyTorch {torch.__version__} changed {api}: gradients/_torch.py was written for {adapter.WRITTEN_FOR}. "
        "Adapt it there, and raise WRITTEN_FOR."
    )
    try:
        as_before = PRIVATE_APIS[api]()
    except (AttributeError, TypeError, RuntimeError, AssertionError) as error:
        pytest.fail(f"{changed} ({error!r})")
    assert as_before, changed


def test_no_other_module_uses_a_private_name_of_pytorch() -> None:
    folder = Path(inspect.getfile(pdpsgd.gradients)).parent
    found = [
        f"{path.relative_to(folder)}:{node.lineno}"
        for path in folder.rglob("*.py")
        if path.name != "_torch.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_private(node)
    ]
    assert found == []


def _is_private(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").split(".")
        return module[0] == "torch" and any(
            name.startswith("_") for name in (*module, *(alias.name for alias in node.names))
        )
    if isinstance(node, ast.Import):
        return any("._" in alias.name for alias in node.names if alias.name.startswith("torch"))
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
        return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    return False
