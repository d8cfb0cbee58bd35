"""Looks at the user's own loop, once: do the examples of a batch mix in the model or in the loss?

Nobody hands the engine the loss: it happens in the loop, between the model's outputs and `backward()`. So
while the first batch is under way, every torch function that touches the batch or the outputs is written
down. When `backward()` is called, what was written down is done again for single examples, and the gradients
of the outputs are compared: an example's gradient alone must be its gradient in the batch. The model is
probed by itself when it is first called, with a loss that does not mix. Afterwards nothing is watched any
more.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.probe import check_examples_do_not_mix

EXAMPLES = 4
MOST_CALLS = 2000
TOLERANCE = 2e-3
_SCALING = ("div", "true_divide", "divide", "truediv", "rdiv", "rtruediv", "mul", "multiply", "rmul")


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Any


class _CannotTell(Exception):
    """The loss could not be done again for a single example."""


class LossWatch(TorchFunctionMode):
    """Watches one batch of the user's loop, from when it is handed out until its backward pass."""

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        size: int,
        *,
        owner: object,
        loss_reduction: str = "mean",
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)  # once the run is gone, so is the reason to watch
        self._forget = forget
        self.size = size
        self.loss_reduction = loss_reduction
        self.done = False
        self.concluded = False  # whether there is no need to look at another batch
        self.finding: str | None = None  # why nothing could be told; None once the loss was checked
        self._given = {id(leaf): leaf for leaf in _tensors(batch) if leaf.dim() and leaf.shape[0] == size}
        self._outputs: list[Tensor] = []
        self._calls: list[_Call] = []
        self._known: dict[int, Tensor] = dict(self._given)
        self._inside = 0
        self._probed = False
        self._random_state: Tensor | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            module.register_forward_hook(self._leave_model),
        ]

    def start(self) -> None:
        """Begin to watch."""
        _drop_idle_watches()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *, warn: bool = True) -> None:
        """Stop watching, and warn if the loss could not be checked."""
        if not self.done:
            self._end("backward() was not seen")
        _drop_idle_watches()
        self.concluded |= warn
        if warn and self.finding is not None:
            warnings.warn(
                f"Whether examples mix in the loss could not be checked: {self.finding}. If they do, nothing "
                "is proven. Give make_private the loss as criterion=, or try engine.check().",
                stacklevel=4,
            )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.done or self._inside:
            return function(*args, **kwargs)
        if function is Tensor.backward and args and id(args[0]) in self._known:
            self._check(args[0])
            return function(*args, **kwargs)  # type: ignore[no-untyped-call]
        touched = any(id(leaf) in self._known for leaf in _tensors((args, kwargs)))
        outputs = function(*args, **kwargs)
        if touched:
            self._note(_Call(function, args, kwargs, outputs))
        return outputs

    def _note(self, call: _Call) -> None:
        if len(self._calls) == MOST_CALLS:
            self._end("it takes too many operations")
            return
        self._calls.append(call)
        for leaf in _tensors(call.outputs):
            self._known[id(leaf)] = leaf

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside == 1 and not self._probed and _training(module):
            self._probed = True
            if not (args and kwargs):
                check_examples_do_not_mix(module, _harmless_loss, args or kwargs)

    def _leave_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._inside -= 1
        if self.done or self._inside or not _training(module):
            return
        for leaf in _tensors(outputs):
            if leaf.requires_grad:
                self._outputs.append(leaf)
            self._known[id(leaf)] = leaf
        self._random_state = torch.get_rng_state()

    def _end(self, finding: str | None) -> None:
        self.done, self.finding = True, finding
        for hook in self._hooks:
            hook.remove()
        self._calls.clear()
        self._known.clear()
        self._given.clear()
        self._outputs.clear()

    def _check(self, loss: Tensor) -> None:
        self.concluded = True
        try:
            self._compare(loss)
        except _CannotTell as reason:
            self._end(str(reason))
        except PdpsgdError:
            self._end(None)
            raise
        else:
            self._end(None)

    def _compare(self, loss: Tensor) -> None:
        if not self._outputs:
            raise _CannotTell("the model was not called")
        if any(leaf.dim() == 0 or leaf.shape[0] != self.size for leaf in self._outputs):
            raise _CannotTell("the first dimension of the model's outputs is not the batch")
        if self._random_state is not None and not torch.equal(self._random_state, torch.get_rng_state()):
            raise _CannotTell("it draws random numbers")
        with _paused(self):
            rows = range(min(EXAMPLES, self.size))
            together = _gradients(loss, self._outputs, retain=True)
            self._forget()  # the watched layers heard of it, and the true backward pass is yet to come
            batch = torch.stack([_row(together, index) for index in rows])
            alone = torch.stack([_row(self._alone(index), 0) for index in rows])
        is_mean, is_sum = not _differ(batch * self.size, alone), not _differ(batch, alone)
        if not (is_mean or is_sum):
            fail(
                "Examples mix in the loss of this loop: the gradient that it gives an example's outputs in a "
                "batch is not the one it gives them alone. Every example's loss must depend on that example "
                "only, and the batch's loss be their plain mean or sum: no class weights or ignored targets "
                "normalised over the batch, no contrastive terms, no statistics of the batch."
            )
        # A sum divided by len(batch), a number, is a mean that looks like a sum when it is done again alone.
        divided = is_sum and not is_mean and self._divides_by_size()
        found = ["mean"] if divided else ["mean"] * is_mean + ["sum"] * is_sum
        if self.loss_reduction not in found:
            other = found[0]
            fail(
                f'Expected a loss reduced over the batch as loss_reduction="{self.loss_reduction}". Got one that '
                f"is a {other}, so that gradients would be clipped at a norm that depends on the batch's size. "
                f'Reduce the loss by reduction="{self.loss_reduction}", or say '
                f'make_private(..., loss_reduction="{other}").'
            )

    def _divides_by_size(self) -> bool:
        """Whether something is divided by the batch's size, or multiplied by its inverse, as a number."""
        for call in self._calls:
            if getattr(call.function, "__name__", "").strip("_") in _SCALING:
                for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                    if isinstance(leaf, Tensor) and leaf.dim() == 0 and id(leaf) not in self._known:
                        leaf = leaf.item()
                    if isinstance(leaf, (int, float)) and (
                        leaf == self.size or math.isclose(leaf * self.size, 1.0, rel_tol=1e-6)
                    ):
                        return True
        return False

    def _alone(self, index: int) -> list[Tensor]:
        """The gradients of the outputs of one example, with the loss done again for it alone."""
        values: dict[int, Any] = {key: leaf[index : index + 1] for key, leaf in self._given.items()}
        outputs = [leaf.detach()[index : index + 1].requires_grad_() for leaf in self._outputs]
        values |= {id(leaf): one for leaf, one in zip(self._outputs, outputs, strict=True)}

        def replaced(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in values:
                return values[id(leaf)]
            if leaf.dim() and leaf.shape[0] == self.size > 1:
                raise _CannotTell("it uses tensors of the batch's size that do not come from the batch")
            return leaf

        result = None
        try:
            for call in self._calls:
                args, kwargs = pytree.tree_map(replaced, (call.args, call.kwargs))
                result = call.function(*args, **kwargs)
                before, after = _tensors(call.outputs), _tensors(result)
                values |= {id(old): new for old, new in zip(before, after, strict=False)}
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise _CannotTell("its last operation does not give the loss")
            return _gradients(result.reshape(()), outputs, retain=False)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise _CannotTell(f"it cannot be done for a single example ({type(error).__name__})") from error


def _drop_idle_watches() -> None:
    """Take watches that have ended off the top of torch's stack; one below another has to wait for it."""
    while True:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if not isinstance(top, LossWatch) or not (top.done or top.owner() is None):
            return
        top.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _harmless_loss(outputs: Any) -> Tensor:
    """A mean over examples in which every output of an example counts, and nothing of the others."""
    total = torch.zeros(())
    for leaf in _tensors(outputs):
        if leaf.requires_grad:
            flat = leaf.flatten(1) if leaf.dim() > 1 else leaf.reshape(-1, 1)
            total = total + (flat * torch.arange(1, flat.shape[1] + 1).to(flat).cos()).sum(1).mean()
    return total


@contextmanager
def _paused(watch: LossWatch) -> Iterator[None]:
    """Do not watch what the check itself does, nor let it change the random state."""
    watch._inside += 1
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        watch._inside -= 1


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _gradients(loss: Tensor, outputs: list[Tensor], *, retain: bool) -> list[Tensor]:
    found = torch.autograd.grad(loss, outputs, retain_graph=retain, allow_unused=True)
    return [
        torch.zeros_like(leaf) if part is None else part for leaf, part in zip(outputs, found, strict=True)
    ]


def _row(gradients: list[Tensor], index: int) -> Tensor:
    return torch.cat([part[index].reshape(-1).double() for part in gradients])


def _differ(one: Tensor, other: Tensor) -> bool:
    sizes = torch.maximum(one.norm(dim=1), other.norm(dim=1))
    return not bool(((one - other).norm(dim=1) <= TOLERANCE * (sizes + 1e-3 * sizes.max())).all())
